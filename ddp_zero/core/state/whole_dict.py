"""The unsharded optimizer's ``state_dict``, from shards, and back."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.parameters import MASTER_KEY, check_masters, with_masters
from ddp_zero.core.local.parts import narrowed
from ddp_zero.core.local.tree import as_bytes, flatten
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.state.gather import gather_state
from ddp_zero.core.state.on_demand import OnDemand
from ddp_zero.core.state.shard_of_whole import restrict_state_dict
from ddp_zero.core.step.clipping import keep_limits
from ddp_zero.core.step.decision import Decision
from ddp_zero.core.step.sharded_step import ShardedStep
from ddp_zero.core.step.state_order import State

SCALE_KEY = "loss_scale"
"""The key of a dynamic loss scale in a state dict; plain optimizers ignore it."""

BuildInner = Callable[[list[dict[str, Any]], Mapping[Tensor, Tensor]], Optimizer]


@dataclass(frozen=True)
class Prepared:
    """A whole state dict that fits.

    Attributes:
        state_dict: the whole one, as the hooks before a load have left it.
        local: what this rank holds of it; not copied.
        indices: the parameters that have a state, as the unsharded optimizer would have them.
        masters: by index.
    """

    state_dict: dict[str, Any]
    local: dict[str, Any]
    indices: list[int]
    masters: dict[int, Tensor]


class WholeDict:
    """The unsharded optimizer's state dict: gathered, shown and loaded.

    Args:
        sharded: the step.
        decision: holds the loss scale.
        build: builds the inner optimizer over given groups.
    """

    def __init__(self, sharded: ShardedStep, decision: Decision, build: BuildInner) -> None:
        self._shown: State | None = None  # while a state dict is built: that of all ranks
        self._on_demand: OnDemand | None = None
        self._sharded = sharded
        self._decision = decision
        self._build = build

    def answer_others(self) -> None:
        """Let any rank build the state dict without the others. A collective, if there are others."""
        if self._sharded.comm.world_size > 1:
            self._on_demand = OnDemand(self._sharded)
            self._on_demand.stay_after(self)

    def state(self) -> State:
        """See `ZeroRedundancyOptimizer.state`."""
        if self._shown is not None:
            return self._shown
        sharded = self._sharded
        if sharded.stepped.are_parameters:
            return sharded.inner_state
        params, index_of = sharded.table.params, sharded.stepped.index_of
        items = sharded.inner_state.items()
        return {params[index_of(key)] if isinstance(key, Tensor) else key: value for key, value in items}

    def gather(self, to: int) -> None:
        """See `ZeroRedundancyOptimizer.consolidate_state_dict`."""
        sharded = self._sharded
        sharded.check_memory_order()
        sharded.local_step.mirror_to_inner()
        sharded.stepped.follow_model()
        gathered = gather_state(
            sharded.ranks,
            sharded.table,
            sharded.binding.pieces,
            sharded.inner_state,
            sharded.order,
            sharded.stepped,
            GroupRank(to),
        )
        if gathered is not None:
            sharded.snapshot = gathered  # one that this rank received before is still current

    def pack(self, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `ZeroRedundancyOptimizer.state_dict`.

        Args:
            build: makes a state dict of the exposed groups and of `state`.
        """
        self._shown = self._whole_state()
        try:
            packed = build()
        finally:
            self._shown = None
        return {**packed, **self.scale_entry()}

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load on this rank alone what the other ranks load as well.

        Args:
            optimizer: the exposed one, for its hooks.
            state_dict: as documented in `ZeroRedundancyOptimizer.load_state_dict`.
        """
        self.take(optimizer, self.prepare(optimizer, state_dict))

    def prepare(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> "Prepared":
        """Run the hooks before a load, and check that the state dict fits. Changes nothing.

        Raises:
            ValueError: if it does not, naming the group or the parameter and why.
        """
        state_dict = state_dict.copy()
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(optimizer, state_dict) or state_dict
        prepared = Prepared(state_dict, *self.restrict(state_dict))
        check_masters(self._sharded.table, prepared.masters)
        return prepared

    def take(self, optimizer: Optimizer, prepared: "Prepared") -> None:
        """Load a copy of what was prepared."""
        local = {**prepared.local, "state": copy.deepcopy(prepared.local["state"])}
        self.take_over(optimizer, prepared.state_dict, local, prepared.indices, prepared.masters)

    def restrict(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[int], dict[int, Tensor]]:
        """What a whole state dict holds for this rank; see `restrict_state_dict`."""
        sharded = self._sharded
        return restrict_state_dict(state_dict, sharded.param_groups, sharded.table, sharded.inner, sharded.stepped)

    def take_over(
        self,
        optimizer: Optimizer,
        state_dict: dict[str, Any],
        local: dict[str, Any],
        indices: Sequence[int],
        masters: dict[int, Tensor],
    ) -> None:
        """Load what this rank holds of a state dict, without copying its tensors.

        Args:
            optimizer: the exposed one, for its hooks.
            state_dict: the whole one.
            local: that of the inner optimizer.
            indices: the parameters that have a state on any rank, as the unsharded optimizer would have them.
            masters: by index.
        """
        scale = self._decision.loss_scale
        if scale is not None and scale.is_dynamic and SCALE_KEY in state_dict:
            scale.load_state_dict(state_dict[SCALE_KEY])
        sharded = self._sharded
        with sharded.change():
            sharded.inner.load_state_dict(local)
            sharded.stepped.refresh(masters)
            keep_limits(sharded.inner.param_groups, sharded.param_groups)
            for group, saved in zip(sharded.param_groups, state_dict["param_groups"], strict=True):
                if "param_names" in saved:
                    group["param_names"] = list(saved["param_names"])
            sharded.loaded(indices)
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)

    def scale_entry(self) -> dict[str, Any]:
        """The entry of a dynamic loss scale in a state dict; empty without one."""
        scale = self._decision.loss_scale
        return {} if scale is None or not scale.is_dynamic else {SCALE_KEY: scale.state_dict()}

    def check_scale(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict's loss scale, if it is dynamic, could be loaded.

        Raises:
            TypeError: for one that is no number; ValueError for one out of range.
        """
        scale = self._decision.loss_scale
        if scale is not None and scale.is_dynamic and SCALE_KEY in state_dict:
            copy.copy(scale).load_state_dict(state_dict[SCALE_KEY])

    def birth_of(self, index: int) -> tuple[int, int]:
        """The key by which the unsharded optimizer orders a parameter's state."""
        return self._sharded.order.of(self._sharded.stepped[index], index)

    def _whole_state(self) -> State:
        sharded = self._sharded
        if sharded.snapshot is not None:
            return sharded.snapshot
        sharded.check_memory_order()
        if sharded.comm.world_size > 1:
            known = self._state_at_birth() if sharded.order.is_at_birth else None
            return self._state_on_demand() if known is None else known
        sharded.stepped.follow_model()
        sharded.order.note_new(sharded.inner_state, sharded.stepped.index_of)
        if not sharded.stepped.has_masters:
            return sharded.order.sorted(sharded.inner_state)
        params = sharded.table.params
        by_index = with_masters(sharded.inner_state, sharded.stepped)
        born = sorted(filter(is_index, by_index), key=self.birth_of)
        others = {key: value for key, value in by_index.items() if not is_index(key)}
        return {**others, **{params[index]: by_index[index] for index in born}}

    def _state_at_birth(self) -> State | None:
        """The state before the first step: what construction creates for all parameters, and masters of the model.

        Found by building the optimizer once more, over all parameters; most classes create nothing. None if only
        owners know which states exist now: parameters were added, a state dict was loaded, a user has written some.
        """
        sharded = self._sharded
        sharded.stepped.follow_model()
        sharded.check_masters()
        params = sharded.table.params
        stepped = {param: sharded.stepped.as_on_owner(index) for index, param in enumerate(params)}
        made = self._build(sharded.param_groups, stepped).state
        if made and not sharded.order.is_as_built:
            return None
        whole = {}
        for param, stand_in in stepped.items():
            master = {} if stand_in is param else {MASTER_KEY: stand_in.detach()}
            if state := {**made.get(stand_in, {}), **master}:
                whole[param] = state
        present = with_masters(sharded.inner_state, sharded.stepped)
        for index in sharded.binding.owned():
            expected, part = whole.get(params[index], {}), sharded.stepped.part(index)
            expected = expected if part is None else narrowed(expected, params[index], None, part)
            if not _are_equal(expected, present.get(index, {})):
                return None
        return {**{key: value for key, value in present.items() if not is_index(key)}, **whole}

    def _state_on_demand(self) -> State:
        if self._on_demand is not None:
            return self._on_demand.gather()
        rank = self._sharded.everyone.group_rank
        raise RuntimeError(
            f"Expected the state of a copy of an optimizer, for which other ranks cannot be asked, to be consolidated "
            f"on rank {rank}, got only its own shard. Call consolidate_state_dict(to={rank}) on all ranks first; a "
            "step, load_state_dict or add_param_group makes it stale."
        )


def _are_equal(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two states hold the same, bit for bit."""
    (text, tensors), (other_text, others) = flatten(dict(one)), flatten(dict(other))
    return text == other_text and all(map(torch.equal, map(as_bytes, tensors), map(as_bytes, others)))


def is_index(key: object) -> bool:
    """Whether a key of a state is a parameter's index."""
    return isinstance(key, int)
