"""The optimizer's state as dictionaries: the unsharded optimizer's whole one, each rank's owned part, and loading both.

A *state dict* has the unsharded optimizer's format: ``{"state": {id: state}, "param_groups": [{..., "params":
[id]}]}``, with parameter indices as ids. A *sharded state dict* holds the states that one rank owns, by parameter name.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.local.inner import ParamGroup, check_epsilon, fresh_state, rehearse_load, suboptimizer_for
from ddp_zero.core.local.instances import Instance, state_for
from ddp_zero.core.local.memory import return_freed_memory
from ddp_zero.core.local.parameters import MASTER_KEY, ParameterTable, StepTargets, check_masters, with_masters
from ddp_zero.core.local.placement import move_tensors, placement_for, tensors_in
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.state.gather import OnDemandGather, gather_state
from ddp_zero.core.step.clipping import GROUP_LIMIT
from ddp_zero.core.step.decision import Decision
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.state_order import Birth, State
from ddp_zero.options import Offload
from ddp_zero.values.live_model import LiveModel, by_group, clean
from ddp_zero.values.parts import narrow_state, state_of_part
from ddp_zero.values.shapes import Part
from ddp_zero.values.tree import as_bytes, flatten, specs_in, unflatten

SCALE_KEY = "loss_scale"
"""Key of a dynamic loss scale in a state dict; plain optimizers ignore it."""

BuildInner = Callable[[list[dict[str, Any]], Mapping[Tensor, Tensor]], Optimizer]

_Mark = tuple[Any, int | None]
_LOADING = "load_state_dict"
_AS_SAVED = (
    "Build the optimizer from the model and the groups of the run that saved it; groups that it added come from "
    "opt.add_param_group()."
)
_OF_ANOTHER_MODEL = (
    f"It is of a different model, or its parameters were given in a different order, and was not loaded. {_AS_SAVED}"
)


@dataclass(frozen=True)
class _Prepared:
    """A state dict of the unsharded optimizer that fits this one, and the part of it that this rank loads."""

    state_dict: dict[str, Any]  # all of it, after the pre-load hooks
    local: dict[str, Any]  # the part that this rank holds; not copied
    indices: Sequence[int]  # parameters that have a state, in the order of the unsharded optimizer
    masters: dict[int, Tensor]  # master weights by index


class _ByParameter(MutableMapping[Any, Any]):
    """A live view of local optimizers' states, keyed by parameters in place of the tensors that they step.

    Args:
        shards: the shards that have the states, asked for at each use.
        stepped_for: the parameter of a shard for one that the user holds.
    """

    def __init__(
        self, shards: Callable[[], Sequence[Shard]], stepped_for: Callable[[Tensor], Tensor] = lambda param: param
    ) -> None:
        self._shards = shards
        self._stepped_for = stepped_for

    def _find(self, key: Any) -> tuple[Shard, int | None]:
        """The shard of a parameter, and its index; for another key the shard that has it, or the first."""
        shards = self._shards()
        if isinstance(key, Tensor):
            param = self._stepped_for(key)
            for shard in shards:
                if param in shard.table.index_of:
                    return shard, shard.table.index_of[param]
        return next((shard for shard in shards if key in shard.inner_state), shards[0]), None

    def _place(self, key: Any) -> tuple[State, Any]:
        """The inner optimizer's state that has the entry of a key, and the entry's key there."""
        shard, index = self._find(key)
        return shard.inner_state, key if index is None else shard.targets[index]

    def __contains__(self, key: Any) -> bool:
        state, stepped = self._place(key)
        return stepped in state

    def __getitem__(self, key: Any) -> Any:
        """A state; of a parameter without any, an empty one, as from torch's, kept where this rank steps it."""
        shard, index = self._find(key)
        state, stepped = self._place(key)
        if stepped in state:  # a look-up in a defaultdict would add the key
            return state[stepped]
        if index is None:
            raise KeyError(key)
        return state.setdefault(stepped, {}) if _steps(shard, index) else {}

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        state, stepped = self._place(key)
        return state.pop(stepped, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
            return default
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        shard, index = self._find(key)
        if index is not None:
            self._write(shard, index, value)
        elif isinstance(key, Tensor):
            raise ValueError(
                f"Expected a parameter of this optimizer as the key of a state, got a tensor of shape "
                f"{list(key.shape)} that is not. Pass an object from opt.param_groups. [ZERO-119]"
            )
        else:
            shard.inner_state[key] = value

    def _write(self, shard: Shard, index: int, value: Any) -> None:
        """Set a parameter's state, given in the shape of the whole: this rank keeps the elements that it owns."""
        table = shard.table
        stepped = shard.targets[index]
        part = shard.targets.part(index)
        kind = type(suboptimizer_for(shard.inner, shard.param_groups[table.groups[index]]))
        check_state(value, table, index, kind, part, "Give it in the shape of the whole, on every rank.")
        shard.order.has_initial_state = False  # also for a parameter that a different rank steps
        if not _steps(shard, index):
            return
        param = table.params[index]
        local_value = value if stepped is param else state_for(state_of_part(value, param, part), param, stepped)
        is_same = all(local_value[key] is value[key] for key in value)
        shard.inner_state[stepped] = value if is_same else local_value  # so that what `setdefault` returns is the state

    def __delitem__(self, key: Any) -> None:
        state, stepped = self._place(key)
        del state[stepped]

    def __iter__(self) -> Iterator[Any]:
        for shard in self._shards():
            for key in shard.inner_state:
                if isinstance(key, Tensor):
                    yield shard.table.params[shard.targets.index_of(key)]
                elif self._find(key)[0] is shard:  # several may have one
                    yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds the states, not the optimizer
        return dict, (dict(self),)


def _steps(shard: Shard, index: int) -> bool:
    """True if this rank steps a parameter, or the elements of it that this rank owns."""
    whole = shard.table.wholes.get(index)
    return shard.binding.owns(index) and (whole is None or whole.steps_here)


class StateDicts:
    """Gives and takes the state of a sharded optimizer; ``build`` builds the inner optimizer over given groups."""

    def __init__(self, shard: Shard, decision: Decision, build: BuildInner) -> None:
        self._gathered: State | None = None  # the state of all ranks, while a state dict is built from it
        self._gathered_from: list[_Mark] = []  # of this rank's state, when the shard's snapshot was gathered
        self._on_demand: OnDemandGather | None = None
        self._shard = shard
        self._decision = decision
        self._build = build

    def serve_other_ranks(self) -> None:
        """Serve this rank's states, so that any rank can build the state dict alone. A collective."""
        if self._shard.comm.world_size > 1:
            self._on_demand = OnDemandGather(self._shard, self)

    # The whole state dict

    def state(self) -> State:
        """See `ZeroRedundancyOptimizer.state`."""
        if self._gathered is not None:
            return self._gathered
        shard = self._shard
        return shard.inner_state if shard.targets.are_parameters else _ByParameter(lambda: [shard])

    @staticmethod
    def state_of(shards: Callable[[], Sequence[Shard]], stepped_for: Callable[[Tensor], Tensor]) -> State:
        """See `ParallelOptimizer.state`; of these shards, by the parameters for which they have their own."""
        return _ByParameter(shards, stepped_for)

    @staticmethod
    def replace_state(current: State, state: Mapping[Any, Any]) -> None:
        """Replace all states by these, keyed by parameter, in the same dict, which a mixed optimizer's parts share."""
        new, before = dict(state), dict(current)
        current.clear()
        try:
            current.update(new)
        except BaseException:
            current.clear()
            current.update(before)
            raise

    def consolidate(self, to: int) -> None:
        """See `ZeroRedundancyOptimizer.consolidate_state_dict`."""
        shard = self._shard
        shard.check_memory_order()
        shard.local_step.mirror_to_inner()
        gathered = gather_state(shard, GroupRank(to))
        if gathered is not None:
            shard.snapshot = gathered  # on other ranks, the snapshot of an earlier call is still current
            self._gathered_from = _marks(shard.inner_state)

    def state_dict(self, build: Callable[[], dict[str, Any]], others_may_step: Callable[[], bool]) -> dict[str, Any]:
        """See `ZeroRedundancyOptimizer.state_dict`; ``build`` makes it from the exposed groups and `state`."""
        self._gathered = self._whole_state(others_may_step)
        try:
            packed = build()
        finally:
            self._gathered = None
        return {**packed, **self._scale_entry()}

    def _whole_state(self, others_may_step: Callable[[], bool]) -> State:
        """The states of all parameters, in the unsharded order: the snapshot, the initial state, or asked of all ranks.

        RuntimeError for a copy of an optimizer, which cannot ask.
        """
        shard = self._shard
        if shard.snapshot is not None:
            marks = _marks(shard.inner_state)
            gathered_marks = self._gathered_from
            if len(marks) == len(gathered_marks) and all(map(_is_unchanged, marks, gathered_marks)):
                return shard.snapshot
            shard.snapshot = None
        shard.check_memory_order()
        if shard.comm.world_size > 1:
            initial = self._initial_state() if shard.order.has_initial_state else None
            if initial is not None:
                return initial
            if self._on_demand is not None:
                return self._on_demand.gather(others_may_step())
            rank = shard.everyone.group_rank
            raise RuntimeError(
                f"This is a copy of an optimizer, which holds only its own shard on rank {rank} and cannot ask other "
                f"ranks. Call consolidate_state_dict(to={rank}) on all ranks first; a step, load_state_dict or "
                "add_param_group makes it stale. [ZERO-602]"
            )
        owned = self.owned_state()
        params = shard.table.params
        if shard.targets.are_parameters:
            return shard.order.sort(shard.inner_state)
        shared_state = {key: value for key, value in shard.inner_state.items() if not isinstance(key, Tensor)}
        return {**shared_state, **{params[index]: state for index, state in owned.items()}}

    def _initial_state(self) -> State | None:
        """The state before the first step, by parameter: states created at construction, and masters from the model.

        It is found by building the optimizer once more, over all parameters; most classes create no state. Returns None
        if only owners know the present states: parameters were added, a state dict was loaded, or a user has written
        to a state.
        """
        shard = self._shard
        shard.masters.follow_model()
        shard.check_masters()
        params = shard.table.params
        targets = {param: shard.targets.target_on_owner(index) for index, param in enumerate(params)}
        built_state = self._build(shard.param_groups, targets).state
        if built_state and not shard.order.is_as_constructed:
            return None
        initial = {}
        for param, target in targets.items():
            state = dict(built_state.get(target, {}))
            if target is not param:
                state[MASTER_KEY] = target.detach()
            if state:
                initial[param] = state
        present = with_masters(shard.inner_state, shard.targets)
        if not self._has_only(initial, present):
            return None
        shared_state = {key: value for key, value in present.items() if not isinstance(key, int)}
        return {**shared_state, **initial}

    def _has_only(self, initial: State, present: Mapping[Any, Any]) -> bool:
        """True if the states ``present``, by index, are just this rank's parts of ``initial``, by parameter."""
        shard = self._shard
        written = {index for index, state in present.items() if isinstance(index, int) and state}  # also of other ranks
        for index in {*shard.binding.owned(), *written}:
            param = shard.table.params[index]
            expected = narrow_state(initial.get(param, {}), param, None, shard.targets.part(index))
            if not _are_equal(expected, present.get(index, {})):
                return False
        return True

    def births_of(self, indices: Iterable[int]) -> dict[int, Birth]:
        """The births of states, comparable between ranks: their order in the unsharded optimizer."""
        return self._shard.order.births_of(self._shard.targets.of(indices))

    def _scale_entry(self) -> dict[str, Any]:
        scale = self._decision.loss_scale
        return {} if scale is None or not scale.is_dynamic else {SCALE_KEY: scale.state_dict()}

    def adopt(self, instance: Instance) -> None:
        """Take this rank's shard of the state from an instance that has the same state on every rank. A collective.

        Where this rank steps whole parameters themselves, tensors are shared with the instance, not copied.
        """
        shard = self._shard
        table, stepped, indices_with_state = shard.table, shard.targets, []
        with Agreement(shard.everyone, "taking over the optimizer's state"), shard.changing_state():
            for key, state in instance.state.items():
                if not isinstance(key, Tensor):
                    shard.inner_state[key] = copy.deepcopy(state)
                elif key in table.index_of:
                    index = table.index_of[key]
                    indices_with_state.append(index)
                    if shard.binding.owns(index):
                        local_state = state_of_part(state, table.params[index], stepped.part(index))
                        steps_param_itself = stepped[index] is key
                        shard.inner_state[stepped[index]] = (
                            local_state if steps_param_itself else state_for(local_state, key, stepped[index])
                        )
            shard.follow_load(indices_with_state)

    # Loading a whole state dict

    def load_state_dict(
        self,
        optimizer: Optimizer,
        state_dict: dict[str, Any] | None,
        check: Callable[[], None],
        *,
        may_communicate: bool,
    ) -> None:
        """Load a state dict from every rank, or from one rank that sends it to its peers. A collective.

        Either all ranks load or none. A single sender checks the whole state dict and sends its structure; each peer
        checks the structure, drops its old state, and receives the states of its owned parameters, one at a time.
        ``optimizer`` is exposed to users, and has their hooks; ``check`` raises if a load is not allowed now;
        ``may_communicate`` is False under Join.
        """
        comm = self._shard.everyone
        if comm.world_size == 1 or not may_communicate:
            check()
            if state_dict is None:
                raise ValueError(
                    "load_state_dict got None on every rank. Give a state dict on one rank at least; under Join every "
                    "rank gives one. [ZERO-605]"
                )
            self._load_copy(optimizer, self._prepare(optimizer, state_dict))
            return
        senders = self._agree_on_senders(state_dict, check)
        if len(senders) == comm.world_size:
            assert state_dict is not None, "given"
            with Agreement(comm, _LOADING):
                prepared = self._prepare(optimizer, state_dict)
            self._load_copy(optimizer, prepared)
            return
        if state_dict is not None:
            self._send_to_peers(optimizer, state_dict)
        else:
            self._receive_and_load(optimizer, GroupRank(senders[0]))
        self._check_received_masters()

    def _agree_on_senders(self, state_dict: dict[str, Any] | None, check: Callable[[], None]) -> list[int]:
        """The ranks that were given a state dict: all of them, or exactly one; ValueError if not. A collective."""
        comm = self._shard.everyone
        with Agreement(comm, _LOADING):
            check()
            if state_dict is not None and not isinstance(state_dict, Mapping):
                raise TypeError(f"Expected a state dict or None, got {type(state_dict).__name__}. [ZERO-605]")
        flags = [flag for (flag,) in comm.all_gather_ints([int(state_dict is not None)])]
        senders = [rank for rank, flag in enumerate(flags) if flag]
        if len(senders) not in (1, comm.world_size):
            raise ValueError(
                "load_state_dict needs a state dict on every rank, or on exactly one rank and None on the rest; ranks "
                f"{senders} of {comm.world_size} gave a state dict. [ZERO-605]"
            )
        return senders

    def _prepare(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> _Prepared:
        """Run the pre-load hooks, and check that the state dict fits; ValueError if not. Changes no state."""
        state_dict = state_dict.copy()
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(optimizer, state_dict) or state_dict
        prepared = self._restrict(state_dict)
        check_masters(self._shard.table, prepared.masters)
        return prepared

    def _restrict(self, state_dict: dict[str, Any]) -> _Prepared:
        """Cut this rank's part from a state dict; ValueError if it does not fit. Tensors are not copied."""
        shard = self._shard
        groups, table = shard.param_groups, shard.table
        return _Prepared(state_dict, *restrict_state_dict(state_dict, groups, table, shard.inner, shard.targets))

    def _load_copy(self, optimizer: Optimizer, prepared: _Prepared) -> None:
        """Load a prepared state dict, and leave its tensors to the caller."""
        local = {**prepared.local, "state": copy.deepcopy(prepared.local["state"])}
        self._load(optimizer, replace(prepared, local=local))

    def _load(self, optimizer: Optimizer, prepared: _Prepared) -> None:
        """Load a prepared state dict, whose tensors become the optimizer's."""
        scale, shard = self._decision.loss_scale, self._shard
        if scale is not None and scale.is_dynamic and SCALE_KEY in prepared.state_dict:
            scale.load_state_dict(prepared.state_dict[SCALE_KEY])
        with shard.changing_state():
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]  # users' dicts keep their values
            shard.inner.load_state_dict(prepared.local)
            shard.masters.refresh(prepared.masters)
            saved_groups = prepared.state_dict["param_groups"]
            for loaded, group, saved in zip(shard.inner.param_groups, shard.param_groups, saved_groups, strict=True):
                if GROUP_LIMIT in group:  # clipped as before, unless the state dict has a limit of its own
                    loaded.setdefault(GROUP_LIMIT, group[GROUP_LIMIT])
                if "param_names" in saved:
                    group["param_names"] = list(saved["param_names"])
            shard.follow_load(prepared.indices)
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)

    def _check_scale(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the dynamic loss scale of a state dict, if any, can be loaded; TypeError or ValueError if not."""
        scale = self._decision.loss_scale
        if scale is not None and scale.is_dynamic and SCALE_KEY in state_dict:
            copy.copy(scale).load_state_dict(state_dict[SCALE_KEY])

    # `_send_to_peers` and `_receive_and_load` run the same agreements and messages in the same order: a further
    # agreement on one side would pair with a message of the other and hang both.

    def _send_to_peers(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Check a state dict, send its structure and each peer's states, and load this rank's. A collective."""
        shard, comm = self._shard, self._shard.everyone
        with Agreement(comm, _LOADING):
            prepared = self._prepare(optimizer, state_dict)
            self._check_scale(prepared.state_dict)
            text, _ = flatten(dict(prepared.state_dict))
        comm.all_gather_text(text)
        with Agreement(comm, _LOADING):
            pass
        holdings = self._gather_holdings()
        states = prepared.state_dict["state"]
        index_of = _index_of_id(prepared.state_dict)
        rest = {key: value for key, value in states.items() if key not in index_of}
        # one peer after the other, blocking: a peer holds one state at a time, and this rank never copies all of them
        for peer in comm.peers():
            comm.send_tree({**prepared.state_dict, "state": rest}, peer)
            for saved_id, state in states.items():
                index = index_of.get(saved_id, -1)
                if index in holdings[peer]:
                    comm.send_tree(state_of_part(state, shard.table.params[index], holdings[peer][index]), peer)
        self._load_copy(optimizer, prepared)

    def _receive_and_load(self, optimizer: Optimizer, sender: GroupRank) -> None:
        """Receive the structure of a state dict and this rank's states from the sender, and load them. A collective."""
        shard, comm = self._shard, self._shard.everyone
        device = shard.table.accelerator()
        with Agreement(comm, _LOADING):
            pass
        text = comm.all_gather_text("")[sender]
        with Agreement(comm, _LOADING):
            specs = specs_in(text)
            meta = [torch.empty_strided(s.shape, s.stride or (), dtype=s.dtype, device="meta") for s in specs]
            structure = unflatten(text, meta)
            expected = self._restrict(structure)
            rehearse_load(shard.inner, expected.local)
        holdings = self._gather_holdings()[comm.group_rank]
        index_of = _index_of_id(structure)
        targets = shard.targets
        with shard.changing_state():
            shard.drop_state()
            received = comm.receive_tree(sender, device)
            for saved_id in structure["state"]:
                if index_of.get(saved_id, -1) in holdings:
                    state = comm.receive_tree(sender, device)
                    master = targets.masters.get(index_of[saved_id])
                    if master is not None and MASTER_KEY in state:  # copied into the live master, which takes its place
                        with torch.no_grad():
                            state[MASTER_KEY] = master.detach().copy_(state[MASTER_KEY])
                    received["state"][saved_id] = state
            self._load(optimizer, replace(self._restrict(received), indices=expected.indices))

    def _gather_holdings(self) -> list[Mapping[int, Part]]:
        """For each rank: the parameters whose state that rank holds, by index, and which part of each. A collective."""
        shard = self._shard
        shard_ranks = shard.everyone.all_gather_ints([shard.comm.group_rank])
        return [shard.binding.owned_parts(GroupRank(rank)) for (rank,) in shard_ranks]

    def _check_received_masters(self) -> None:
        """Check that masters round to the model of each rank: the sender could check only its own. A collective.

        Raises ValueError naming the first master that does not, RuntimeError on other ranks; the load is done by then.
        """
        shard, comm = self._shard, self._shard.everyone
        with Agreement(comm, _LOADING):
            if diverged := shard.masters.find_diverged():
                raise ValueError(
                    f"Expected {shard.table.label(diverged[0])} to be its master weight rounded, got a different "
                    f"value on {comm.name(comm.group_rank)}. Load the model on every rank before the optimizer, or "
                    "call opt.refresh_master_weights() to continue from the models as they are. [ZERO-606]"
                )

    # This rank's part by name; never communicates

    def sharded_state_dict(self, model: nn.Module | LiveModel | None, init_missing: bool) -> dict[str, Any]:
        """See `ZeroRedundancyOptimizer.sharded_state_dict`; NotImplementedError for a cut parameter."""
        shard = self._shard
        shard.binding.check_owns_whole("sharded_state_dict()")
        names = self._qualified_names(model)
        states: dict[str, Any] = {names[index]: dict(state) for index, state in self.owned_state().items()}
        inner_state: Mapping[Any, Any] = shard.inner_state
        states.update({key: value for key, value in inner_state.items() if isinstance(key, str)})
        if init_missing:
            self._add_fresh_states(states, names)
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": params}
            for group, params in zip(shard.param_groups, by_group(names, shard.param_groups), strict=True)
        ]
        return {"state": states, "param_groups": groups, **self._scale_entry()}

    def _add_fresh_states(self, states: dict[str, Any], names: Sequence[str]) -> None:
        """Add the state that the first step would create, for each owned parameter that has none."""
        shard = self._shard
        for index in filter(partial(_steps, shard), shard.binding.owned()):
            target = shard.targets[index]
            if shard.table.params[index].requires_grad and not shard.inner_state.get(target):
                whole = shard.table.wholes.get(index)
                fresh = fresh_state(shard.inner, target, None if whole is None else whole.shape)
                states[names[index]] = {**fresh, **states.get(names[index], {})}

    def load_sharded_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any], model: nn.Module | LiveModel | None
    ) -> None:
        """See `ZeroRedundancyOptimizer.load_sharded_state_dict`."""
        self.load_by_index(optimizer, self.by_index(state_dict, model))

    def load_by_index(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a sharded state dict that refers to parameters by index."""
        self._load_copy(optimizer, self._prepare(optimizer, state_dict))
        self._shard.order.has_initial_state = False  # other ranks may have loaded states of their own

    def by_index(self, state_dict: Mapping[str, Any], model: nn.Module | LiveModel | None) -> dict[str, Any]:
        """Convert a state dict with names to parameter indices; ValueError naming the first difference."""
        names = self._qualified_names(model)
        saved = [name for group in state_dict["param_groups"] for name in group["params"]]
        if saved != names:
            expected, got = next(pair for pair in zip_longest(names, saved) if pair[0] != pair[1])
            raise ValueError(
                f"Expected parameter {expected!r}, got {got!r}. Load what sharded_state_dict() gave for the same "
                "parameters in the same order; ddp_zero.checkpoint.load() finds them by name. [ZERO-604]"
            )
        index_of = {name: index for index, name in enumerate(names)}
        groups = [
            {**group, "params": [index_of[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        states = {index_of.get(name, name): state for name, state in state_dict["state"].items()}
        return {**state_dict, "state": states, "param_groups": groups}

    def _qualified_names(self, model: nn.Module | LiveModel | None) -> list[str]:
        """The names of all parameters in the model, or as the user gave them; ValueError without either."""
        table = self._shard.table
        if model is not None:
            return table.names_in(model if isinstance(model, LiveModel) else LiveModel(model))
        user_names = [name for group in self._shard.param_groups for name in group.get("param_names", [])]
        if len(user_names) != len(table):
            raise ValueError(
                f"Expected a name for each of {len(table)} parameters, got {len(user_names)}. Give the model, or build "
                "the optimizer from model.named_parameters(). [ZERO-604]"
            )
        is_wrapped = all(name.startswith("module.") for name in user_names)
        return [clean(name.removeprefix("module.") if is_wrapped else name) for name in user_names]

    # This rank's part by index, for `ddp_zero.checkpoint`

    def owned_state(self) -> dict[int, dict[Any, Any]]:
        """The states that this rank owns, by parameter index, with masters, in the unsharded order. Not copied."""
        shard = self._shard
        shard.check_memory_order()
        shard.masters.follow_model()
        shard.order.note_new(shard.inner_state, shard.targets.index_of)
        by_index = with_masters(shard.inner_state, shard.targets)
        births = self.births_of(filter(by_index.__contains__, shard.binding.owned()))  # users may write to others
        return {index: by_index[index] for index in sorted(births, key=births.__getitem__)}

    def loss_scale_state(self) -> dict[str, float] | None:
        """The state of a dynamic loss scale, or None."""
        return self._scale_entry().get(SCALE_KEY)

    def check_fits(self, state_dict: dict[str, Any]) -> None:
        """Check that `load_owned` would accept a state dict, possibly of meta tensors; ValueError if not."""
        self._check_scale(state_dict)
        rehearse_load(self._shard.inner, self._restrict(state_dict).local)

    def load_owned(self, optimizer: Optimizer, state_dict: dict[str, Any], order: Sequence[int]) -> None:
        """Load a state dict whose tensors become the optimizer's; masters are not checked.

        The state dict may omit the states of parameters that this rank does not own; ``order`` lists those that have a
        state on any rank, in the order of the unsharded optimizer.
        """
        self._load(optimizer, replace(self._restrict(state_dict), indices=order))

    # Between phases of a program

    def offload(self, to: Offload | str) -> None:
        """See `ZeroRedundancyOptimizer.offload_state`."""
        shard, targets = self._shard, self._shard.targets
        if Offload.of(to) is None:
            raise TypeError("Expected 'cpu' or a ddp_zero.Offload in opt.offload_state(), got None. [ZERO-103]")
        if targets.are_moved_away or type(targets.placement) is not type(placement_for(None)):
            how = "an earlier opt.offload_state()" if targets.are_moved_away else "offload= of the optimizer"
            name = shard.comm.name(shard.comm.group_rank)
            raise RuntimeError(
                f"Expected state beside the parameters, got state that {how} has moved away ({name}). Leave this call "
                "out: opt.reload_state() brings back the state that opt.offload_state() has moved. [ZERO-609]"
            )
        shard.pending_syncs.complete()
        targets.masters.follow_model()
        nbytes = sum(tensor.nbytes for tensor in _movable(shard))
        _move(shard, placement_for(to).place)
        return_freed_memory(nbytes)
        targets.are_moved_away = True

    def reload(self) -> None:
        """See `ZeroRedundancyOptimizer.reload_state`."""
        shard = self._shard
        if not shard.targets.are_moved_away:
            raise RuntimeError(
                "opt.reload_state() needs an opt.offload_state() before it. Leave it out: the state is here. [ZERO-609]"
            )
        _move(shard, lambda tensor, device: tensor.to(device, copy=True))
        shard.changes.note_work(shard.binding.accelerators)  # for a thread that reads the copies
        shard.targets.are_moved_away = False


def _marks(state: State) -> list[_Mark]:
    """Every key and value of a state, with the versions of tensors: any write to the state changes some mark."""
    marks: list[_Mark] = []
    for key, value_or_state in state.items():
        values = value_or_state.values() if isinstance(value_or_state, Mapping) else [value_or_state]
        marks += [(key, None), *((value, value._version if isinstance(value, Tensor) else None) for value in values)]
    return marks


def _is_unchanged(mark: _Mark, before: _Mark) -> bool:
    return mark[0] is before[0] and mark[1] == before[1]


def _are_equal(state: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    (text, tensors), (other_text, other_tensors) = flatten(dict(state)), flatten(dict(other))
    return text == other_text and all(map(torch.equal, map(as_bytes, tensors), map(as_bytes, other_tensors)))


def _index_of_id(state_dict: Mapping[str, Any]) -> dict[Any, int]:
    ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    return {saved_id: index for index, saved_id in enumerate(ids)}


# This rank's part of a whole state dict


def restrict_state_dict(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[ParamGroup],
    table: ParameterTable,
    inner: Optimizer,
    targets: StepTargets,
) -> tuple[dict[str, Any], list[int], dict[int, Tensor]]:
    """Cut from a whole state dict the part that this rank's inner optimizer loads; ValueError if it does not fit.

    States of parameters that this rank does not own may be missing. ``param_groups`` are the exposed groups, ``table``
    their parameters and ``targets`` their stepped tensors. Returns the inner optimizer's state dict, the indices of all
    parameters that have a state, in the order found, and all masters. Tensors are not copied.
    """
    _check_groups(state_dict, param_groups)
    saved_groups = state_dict["param_groups"]
    check_epsilon(inner, saved_groups, table, targets)
    index_of_id = _index_of_id(state_dict)
    local_id = {param: i for i, param in enumerate(param for group in inner.param_groups for param in group["params"])}

    local_state: dict[Any, Any] = {}
    masters: dict[int, Tensor] = {}
    for saved_id, value in state_dict["state"].items():
        if isinstance(saved_id, str) and saved_id not in index_of_id:
            local_state[saved_id] = value
            continue
        if saved_id not in index_of_id:
            raise ValueError(
                f"Expected state for parameters 0 to {len(index_of_id) - 1}, got state for {saved_id!r}. {_AS_SAVED} "
                "[ZERO-604]"
            )
        index = index_of_id[saved_id]
        part = targets.part(index)
        check_state(value, table, index, type(inner), part)
        if MASTER_KEY in value:
            masters[index] = _check_master(value, table, index, targets)
            value = {key: item for key, item in value.items() if key != MASTER_KEY}
        if targets[index] in local_id and (value or index not in masters):
            local_state[local_id[targets[index]]] = state_of_part(value, table.params[index], part)

    owned = {table.params[index] for index in range(len(table)) if targets[index] in local_id}
    copied = copy.deepcopy([dict(group) for group in saved_groups])  # together: groups may share a tensor, such as lr
    restore_shared_tensors(copied, param_groups)
    local_groups = [
        _localise_group(saved, exposed, inner_group, local_id, owned)
        for saved, exposed, inner_group in zip(copied, param_groups, inner.param_groups, strict=True)
    ]
    indices = [index_of_id[saved_id] for saved_id in state_dict["state"] if saved_id in index_of_id]
    return {"state": local_state, "param_groups": local_groups}, indices, masters


def _check_master(value: Mapping[str, Any], table: ParameterTable, index: int, targets: StepTargets) -> Tensor:
    """The master in a saved state; ValueError if it is no fp32 tensor, or this optimizer keeps none."""
    master = value[MASTER_KEY]
    if not targets.masters.needs_master(index):
        raise ValueError(
            f"The state dict has {MASTER_KEY!r} for {table.label(index)}, which this optimizer steps in "
            f"{table.params[index].dtype}. Build the optimizer with master_weights=True over a model in low precision, "
            f"or leave {MASTER_KEY!r} out of the state to lose it. [ZERO-607]"
        )
    if not isinstance(master, Tensor) or master.dtype != torch.float32:
        kind = master.dtype if isinstance(master, Tensor) else type(master).__name__
        raise ValueError(
            f"Expected {MASTER_KEY!r} of {table.label(index)} to be an fp32 tensor, got {kind}. Leave it out of "
            "the state to go on from the rounded parameter. [ZERO-607]"
        )
    return master


def _localise_group(
    saved: Mapping[str, Any],
    exposed: ParamGroup,
    inner_group: ParamGroup,
    local_id: Mapping[Tensor, int],
    owned: Collection[Tensor],
) -> ParamGroup:
    """A saved group, with the indices and names of the parameters that this rank owns in place of all."""
    per_parameter = {"params": [local_id[param] for param in inner_group["params"]]}
    if "param_names" in saved:
        names = zip(exposed["params"], saved["param_names"], strict=True)
        per_parameter["param_names"] = [name for param, name in names if param in owned]
    return {**saved, **per_parameter}


def restore_shared_tensors(loaded: Sequence[ParamGroup], exposed: Sequence[ParamGroup]) -> None:
    """Let loaded groups share the tensors that exposed groups share now, where the loaded copies are equal."""
    shared: dict[int, Tensor] = {}  # the first loaded copy, by id of the exposed tensor
    for group, exposed_group in zip(loaded, exposed, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor) and isinstance(exposed_group.get(key), Tensor) and not value.is_meta:
                first = shared.setdefault(id(exposed_group[key]), value)
                if first.dtype == value.dtype and torch.equal(first, value):
                    group[key] = first


def _check_groups(state_dict: Mapping[str, Any], param_groups: Sequence[ParamGroup]) -> None:
    """ValueError unless a state dict has as many groups, parameters and names as the exposed groups."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"Expected an optimizer's state dict with 'state' and 'param_groups', got no {key!r}. Pass the result "
                "of opt.state_dict(), not of the model's, nor a dict around both. [ZERO-604]"
            )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(param_groups):
        raise ValueError(
            f"Expected a state dict with {len(param_groups)} parameter groups, got {len(saved_groups)}. {_AS_SAVED} "
            "[ZERO-604]"
        )
    for position, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        where = f"in group {position} of the state dict"
        if "params" not in saved:
            raise ValueError(
                f"Expected a list of parameter ids {where}, got no 'params'. Pass the result of opt.state_dict() with "
                "all of its keys. [ZERO-604]"
            )
        count = len(saved["params"])
        names = saved.get("param_names", saved["params"])
        expected = len(group["params"])
        if len(names) != count:
            raise ValueError(
                f"Expected a name for each of {count} parameters {where}, got {len(names)}. Leave 'param_names' out of "
                "it, or mend the list. [ZERO-604]"
            )
        if count != expected:
            raise ValueError(f"Expected {expected} parameters {where}, got {count}. {_AS_SAVED} [ZERO-604]")


def check_state(
    value: Any,
    table: ParameterTable,
    index: int,
    optimizer_class: type[Optimizer],
    part: Part = None,
    remedy: str = _OF_ANOTHER_MODEL,
) -> None:
    """Raise ValueError unless a state is a dict and, for torch's optimizers, its tensors have the parameter's shape.

    Tensors may also have the shape of ``part``, the part of the parameter that this rank owns.
    """
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Expected a dict as the state of {table.label(index)}, got {type(value).__name__}. Pass the result of "
            "opt.state_dict(), or leave that parameter's state out: the next step begins a new one. [ZERO-604]"
        )
    if not optimizer_class.__module__.startswith("torch.optim"):
        return
    if misfit := table.misfit(index, value, part):
        raise ValueError(f"{misfit} {remedy} [ZERO-604]")


def _move(shard: Shard, move: Callable[[Tensor, torch.device], Tensor]) -> None:
    """Move this rank's states and masters; a thread that reads them meanwhile sees the old or the new tensor."""
    targets = shard.targets
    for index in shard.binding.owned():
        device = shard.table.params[index].device
        state: Any = shard.inner_state.get(targets[index])
        move_tensors(state, lambda tensor, device=device: move(tensor, device))  # type: ignore[misc]
        master = targets.masters.get(index)
        if master is not None:
            targets.repoint(master, move(master.detach(), device))


def _movable(shard: Shard) -> list[Tensor]:
    targets = shard.targets
    states = (shard.inner_state.get(targets[index]) for index in shard.binding.owned())
    return [*(tensor for state in states for tensor in tensors_in(state)), *targets.masters.values()]
