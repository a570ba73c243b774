"""A rank's part of the state, for sharded checkpoints: by index for this library's own, by name for others."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_zero.core.local.inner import fresh_state, rehearse_load
from ddp_zero.core.local.live_model import LiveModel, by_group, clean
from ddp_zero.core.local.parameters import with_masters
from ddp_zero.core.plan.ownership import home
from ddp_zero.core.state.gather import gather_cut
from ddp_zero.core.state.whole_dict import WholeDict, is_index
from ddp_zero.core.step.sharded_step import ShardedStep


class ShardDict:
    """This rank's part of the state, given and taken. Nothing here communicates.

    Args:
        sharded: the step.
        whole: the whole state dict.
    """

    def __init__(self, sharded: ShardedStep, whole: WholeDict) -> None:
        self._sharded = sharded
        self._whole = whole

    # By name

    def pack(self, model: nn.Module | LiveModel | None, init_missing: bool) -> dict[str, Any]:
        """See `ZeroRedundancyOptimizer.sharded_state_dict`."""
        sharded = self._sharded
        self._check_whole()
        names = self._qualified_names(model)
        states: dict[str, Any] = {names[index]: dict(state) for index, state in self.owned_state().items()}
        whole: Mapping[Any, Any] = sharded.inner_state
        states.update({key: value for key, value in whole.items() if isinstance(key, str)})
        if init_missing:
            for index in filter(self._is_trainable, sharded.binding.owned()):
                if sharded.stepped[index] not in sharded.inner_state:
                    fresh = fresh_state(sharded.inner, sharded.stepped[index])
                    states[names[index]] = {**fresh, **states.get(names[index], {})}
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": params}
            for group, params in zip(sharded.param_groups, by_group(names, sharded.param_groups), strict=True)
        ]
        return {"state": states, "param_groups": groups, **self._whole.scale_entry()}

    def by_index(self, state_dict: Mapping[str, Any], model: nn.Module | LiveModel | None) -> dict[str, Any]:
        """A state dict that refers to parameters by index, from one that refers to them by name.

        Raises:
            ValueError: if it has other parameters, naming the first that differs.
        """
        names = self._qualified_names(model)
        saved = [name for group in state_dict["param_groups"] for name in group["params"]]
        if saved != names:
            ours, theirs = next(pair for pair in zip_longest(names, saved) if pair[0] != pair[1])
            raise ValueError(
                f"Expected parameter {ours!r}, got {theirs!r}. Load what sharded_state_dict() gave for the same "
                "parameters in the same order; ddp_zero.checkpoint.load() finds them by name."
            )
        index_of = {name: index for index, name in enumerate(names)}
        groups = [
            {**group, "params": [index_of[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        states = {index_of.get(name, name): state for name, state in state_dict["state"].items()}
        return {**state_dict, "state": states, "param_groups": groups}

    def loaded(self) -> None:
        """After a load: other ranks may have loaded states of their own."""
        self._sharded.order.is_at_birth = False

    def _check_whole(self) -> None:
        """Check that no state is a part of a parameter's, which other tools could not name.

        Raises:
            NotImplementedError: naming a parameter that is cut.
        """
        parts = self._sharded.binding.owned_parts()
        for index, part in parts.items():
            raise NotImplementedError(
                f"Expected whole parameters in sharded_state_dict(), got elements {part.start} to {part.stop} of "
                f"{self._sharded.table.label(index)} (partition='elements'). Use ddp_zero.checkpoint, or "
                "consolidate_state_dict()."
            )

    def _is_trainable(self, index: int) -> bool:
        return self._sharded.table.params[index].requires_grad

    def _qualified_names(self, model: nn.Module | LiveModel | None) -> list[str]:
        table = self._sharded.table
        if model is not None:
            live = model if isinstance(model, LiveModel) else LiveModel(model)
            return live.names_of(table)
        given = [name for group in self._sharded.param_groups for name in group.get("param_names", [])]
        if len(given) != len(table):
            raise ValueError(
                f"Expected a name for each of {len(table)} parameters, got {len(given)}. Give the model, or build the "
                "optimizer from model.named_parameters()."
            )
        is_wrapped = all(name.startswith("module.") for name in given)
        return [clean(name.removeprefix("module.") if is_wrapped else name) for name in given]

    # By index, for `ddp_zero.checkpoint`

    def owned_state(self) -> dict[int, dict[Any, Any]]:
        """The states of what this rank owns, by parameter index, with masters, in the unsharded order. Not copied."""
        sharded = self._sharded
        sharded.check_memory_order()
        sharded.stepped.follow_model()
        sharded.order.note_new(sharded.inner_state, sharded.stepped.index_of)
        by_index = with_masters(sharded.inner_state, sharded.stepped)
        return {index: by_index[index] for index in sorted(filter(is_index, by_index), key=self._whole.birth_of)}

    def saved_state(self) -> dict[int, dict[Any, Any]]:
        """As `owned_state`, but whole parameters only: those of which this rank owns the first element.

        A collective if any is cut.
        """
        sharded = self._sharded
        binding, found = sharded.binding, self.owned_state()
        whole = gather_cut(sharded.comm, sharded.table, binding.pieces, found)
        mine = (index for index in found if home(binding.pieces[index]) == sharded.comm.group_rank)
        return {index: whole.get(index, found[index]) for index in mine}

    def check_fits(self, state_dict: dict[str, Any]) -> None:
        """Check that `load_owned` would accept a state dict, whose tensors may be without memory.

        Raises:
            ValueError: if not, naming the group or the parameter and why; TypeError for a loss scale that is no number.
        """
        self._whole.check_scale(state_dict)
        local, *_ = self._whole.restrict(state_dict)
        rehearse_load(self._sharded.inner, local)

    def load_owned(self, optimizer: Optimizer, state_dict: dict[str, Any], order: Sequence[int]) -> None:
        """As ``load_state_dict``, but states are taken over without a copy, and masters are not checked.

        Args:
            optimizer: the exposed one, for its hooks.
            state_dict: may leave out the states of parameters that this rank does not own.
            order: the parameters that have a state on any rank, as the unsharded optimizer would have them.
        """
        local, _, masters = self._whole.restrict(state_dict)
        self._whole.take_over(optimizer, state_dict, local, order, masters)
