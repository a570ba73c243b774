"""The state-dict half of `ZeroRedundancyOptimizer`: the unsharded optimizer's ``state_dict``, from shards."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.backward.hook import OverlapHook
from ddp_zero.comm.communicator import Communicator
from ddp_zero.local.masters import MASTER_KEY, check_masters, with_masters
from ddp_zero.local.tree import as_bytes, flatten
from ddp_zero.plan.partition import GroupRank
from ddp_zero.state.gather import gather_state
from ddp_zero.state.restrict import restrict_state_dict
from ddp_zero.step.decision import Decision, keep_limits
from ddp_zero.step.sharded_step import ShardedStep
from ddp_zero.step.state_order import State

SCALE_KEY = "loss_scale"
"""The key of a dynamic loss scale in a state dict; plain optimizers ignore it."""


class ConsolidatesState(Optimizer):
    """An optimizer whose state is spread over ranks and consolidated on request.

    Attributes:
        optim: the local optimizer, over this rank's parameters.
    """

    optim: Optimizer
    _comm: Communicator
    _sharded: ShardedStep
    _decision: Decision
    _hook: OverlapHook | None
    _build: Callable[[list[dict[str, Any]], Mapping[Tensor, Tensor]], Optimizer]
    _is_packing = False

    @property  # type: ignore[override]
    def state(self) -> State:
        """Per-parameter state of what this rank owns, keyed by parameter: that of the local optimizer.

        With master weights, which are in ``master_weights``, a new dict at each access.
        """
        if self._is_packing:
            return self._whole_state()
        if hasattr(self, "_sharded") and self._sharded.stepped.has_masters:
            params, index_of = self._sharded.table.params, self._sharded.stepped.index_of
            items = self.optim.state.items()
            return {params[index_of(key)] if isinstance(key, Tensor) else key: value for key, value in items}
        return self.optim.state

    @state.setter
    def state(self, state: State) -> None:
        if hasattr(self, "optim"):  # Optimizer.__init__ sets an empty one before there is a local optimizer
            self.optim.state = state  # type: ignore[assignment]

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, whose `state_dict` then returns it until the next step. A collective.

        Args:
            to: rank in the group that receives. It holds the whole state afterwards, on the devices where the unsharded
                optimizer would; the other ranks send one parameter's state at a time. After one call for each rank, all
                hold it, as `torch.distributed.checkpoint.state_dict` expects.

        Raises:
            ValueError: if ``to`` is not a rank of the group or differs between ranks.
            TypeError: if a state cannot travel without pickle, naming the parameter; RuntimeError on other ranks.
        """
        sharded = self._sharded
        sharded.local_step.mirror_to_inner()
        sharded.stepped.follow_model()
        gathered = gather_state(
            self._comm,
            sharded.table,
            sharded.binding.owners,
            self.optim.state,
            sharded.order,
            sharded.stepped,
            GroupRank(to),
        )
        if gathered is not None:
            sharded.snapshot = gathered  # one that this rank received before is still current

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state dict, on a rank to which it was consolidated. Never communicates.

        With one rank, and before the first step, no consolidation is needed: every rank knows the whole state.

        Raises:
            RuntimeError: if the state as it is now was not consolidated to this rank.
        """
        sharded = self._sharded
        if sharded.snapshot is None and self._comm.world_size > 1 and not sharded.order.is_at_birth:
            raise self._not_consolidated("the state after the last step")
        self._is_packing = True
        try:
            packed = super().state_dict()
        finally:
            self._is_packing = False
        scale = self._decision.loss_scale
        return packed if scale is None or not scale.is_dynamic else {**packed, SCALE_KEY: scale.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the unsharded optimizer's state dict, of which this rank keeps what it owns. Never communicates.

        Args:
            state_dict: from the plain optimizer, from torch's ZeroRedundancyOptimizer or from this one, at any number
                of ranks. Every rank loads the same. It is not modified, and later steps do not change its tensors.

        Raises:
            ValueError: if it does not fit, naming the group or the parameter and why. Nothing is changed then.
            RuntimeError: between a backward pass that has stepped and ``opt.step()``.
        """
        if self._hook is not None:
            self._hook.check_before_step("opt.load_state_dict()")
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        sharded = self._sharded
        local, indices, masters = restrict_state_dict(
            state_dict, self.param_groups, sharded.table, self.optim, sharded.stepped
        )
        check_masters(sharded.table, masters)
        local["state"] = copy.deepcopy(local["state"])
        self._take_over(state_dict, local, indices, masters)

    def _take_over(
        self, state_dict: dict[str, Any], local: dict[str, Any], indices: Sequence[int], masters: dict[int, Tensor]
    ) -> None:
        scale = self._decision.loss_scale
        if scale is not None and scale.is_dynamic and SCALE_KEY in state_dict:
            scale.load_state_dict(state_dict[SCALE_KEY])
        self.optim.load_state_dict(local)
        sharded = self._sharded
        sharded.stepped.refresh(masters)
        keep_limits(self.optim.param_groups, self.param_groups)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if "param_names" in saved:
                group["param_names"] = list(saved["param_names"])
        sharded.loaded(indices)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _whole_state(self) -> State:
        sharded = self._sharded
        if sharded.snapshot is not None:
            return sharded.snapshot
        if self._comm.world_size > 1:
            return self._state_at_birth()
        sharded.stepped.follow_model()
        sharded.order.note_new(self.optim.state, sharded.stepped.index_of)
        if not sharded.stepped.has_masters:
            return sharded.order.sorted(self.optim.state)
        params = sharded.table.params
        by_index = with_masters(self.optim.state, sharded.stepped)
        born = sorted(filter(is_index, by_index), key=self._birth_of)
        others = {key: value for key, value in by_index.items() if not is_index(key)}
        return {**others, **{params[index]: by_index[index] for index in born}}

    def _state_at_birth(self) -> State:
        """The state before the first step: what construction creates for all parameters, and masters of the model.

        Found by building the optimizer once more, over all parameters; most classes create nothing.
        """
        sharded = self._sharded
        sharded.stepped.follow_model()
        sharded.check_masters()
        params = sharded.table.params
        stepped = {param: sharded.stepped.as_on_owner(index) for index, param in enumerate(params)}
        made = self._build(self.param_groups, stepped).state
        if made and not sharded.order.is_as_built:  # only owners know which states exist now
            raise self._not_consolidated("the state after load_state_dict or add_param_group")
        whole = {}
        for param, stand_in in stepped.items():
            master = {} if stand_in is param else {MASTER_KEY: stand_in.detach()}
            if state := {**made.get(stand_in, {}), **master}:
                whole[param] = state
        present = with_masters(self.optim.state, sharded.stepped)
        for index in sharded.binding.owned():
            if not _are_equal(whole.get(params[index], {}), present.get(index, {})):
                raise self._not_consolidated(f"the state of {sharded.table.label(index)}, which was there at once,")
        return {**{key: value for key, value in present.items() if not is_index(key)}, **whole}

    def _not_consolidated(self, what: str) -> RuntimeError:
        rank = self._comm.group_rank
        return RuntimeError(
            f"Expected {what} to be consolidated on rank {rank}, got only its own shard. Call "
            f"consolidate_state_dict(to={rank}) on all ranks first; a step, load_state_dict or add_param_group makes "
            "it stale."
        )

    def _birth_of(self, index: int) -> tuple[int, int]:
        return self._sharded.order.of(self._sharded.stepped[index], index)


def _are_equal(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two states hold the same, bit for bit."""
    (text, tensors), (other_text, others) = flatten(dict(one)), flatten(dict(other))
    return text == other_text and all(map(torch.equal, map(as_bytes, tensors), map(as_bytes, others)))


def is_index(key: object) -> bool:
    """Whether a key of a state is a parameter's index."""
    return isinstance(key, int)
