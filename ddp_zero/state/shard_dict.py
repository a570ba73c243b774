"""A rank's part of the state, for sharded checkpoints: by index for this library's own, by name for others."""

import copy
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import _JoinConfig

from ddp_zero.backward.machine import Phase
from ddp_zero.local.inner import fresh_state, rehearse_load
from ddp_zero.local.live_model import LiveModel, by_group, clean
from ddp_zero.local.masters import with_masters
from ddp_zero.state.restrict import restrict_state_dict
from ddp_zero.state.whole_dict import SCALE_KEY, ConsolidatesState, is_index


class ShowsOwnState(ConsolidatesState):
    """An optimizer that gives and takes this rank's part of its state. Nothing here communicates."""

    _join_config: _JoinConfig

    def sharded_state_dict(self, model: nn.Module | None = None, *, init_missing: bool = False) -> dict[str, Any]:
        """This rank's part of the state, by fully qualified name, for direct use of `torch.distributed.checkpoint`.

        Ranks have different keys, which `torch.distributed.checkpoint.save` joins. Never communicates.
        `ddp_zero.checkpoint` does all of it, and loads without unpickling.

        Args:
            model: whose names to use; may be left out if the optimizer was built from named parameters.
            init_missing: add zeros for states that do not exist yet, as before the first step, so that
                `torch.distributed.checkpoint.load` has tensors to read into.

        Returns:
            ``{"state": {name: state}, "param_groups": [...]}``; tensors are the optimizer's own, masters included.

        Raises:
            ValueError: if a parameter has no name.
        """
        names = self._qualified_names(model)
        found = self._owned_state()
        states: dict[str, Any] = {names[index]: dict(state) for index, state in found.items()}
        whole: Mapping[Any, Any] = self.optim.state
        states.update({key: value for key, value in whole.items() if isinstance(key, str)})
        if init_missing:
            for index in filter(self._is_trainable, self._sharded.binding.owned()):
                if self._sharded.stepped[index] not in self.optim.state:
                    fresh = fresh_state(self.optim, self._sharded.stepped[index])
                    states[names[index]] = {**fresh, **states.get(names[index], {})}
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": params}
            for group, params in zip(self.param_groups, by_group(names, self.param_groups), strict=True)
        ]
        scale = self._decision.loss_scale
        dynamic = {SCALE_KEY: scale.state_dict()} if scale is not None and scale.is_dynamic else {}
        return {"state": states, "param_groups": groups, **dynamic}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Load what `sharded_state_dict` returned, for this rank's parameters at least. Never communicates.

        Args:
            state_dict: as read by `torch.distributed.checkpoint.load`; it is copied.
            model: as for ``sharded_state_dict``; load its parameters before.

        Raises:
            ValueError: if it does not fit, naming the parameter; nothing is changed then.
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
        self.load_state_dict({**state_dict, "state": states, "param_groups": groups})
        self._sharded.order.is_at_birth = False  # other ranks may have loaded states

    def _is_trainable(self, index: int) -> bool:
        return self._sharded.table.params[index].requires_grad

    def _qualified_names(self, model: nn.Module | None) -> list[str]:
        table = self._sharded.table
        if model is not None:
            return LiveModel(model).names_of(table)
        given = [name for group in self.param_groups for name in group.get("param_names", [])]
        if len(given) != len(table):
            raise ValueError(
                f"Expected a name for each of {len(table)} parameters, got {len(given)}. Give the model, or build the "
                "optimizer from model.named_parameters()."
            )
        is_wrapped = all(name.startswith("module.") for name in given)
        return [clean(name.removeprefix("module.") if is_wrapped else name) for name in given]

    # By index, for `ddp_zero.checkpoint`

    def _check_between_steps(self) -> None:
        """Check that no backward pass is under way and that no step is pending.

        Raises:
            RuntimeError: if one is, with the remedy.
        """
        if self._join_config.enable:
            raise RuntimeError(
                "Expected to be outside Join, got a save inside it: ranks that have joined would not take part. Save "
                "after the Join context."
            )
        self._sharded.check_masters()
        hook = self._hook
        if hook is None or hook.machine.phase in (Phase.REST, Phase.STEPPED):
            return
        found = "gradients that wait for it" if hook.is_waiting else "a backward pass under way"
        raise RuntimeError(
            f"Expected to be between two steps, after opt.step(), got {found} ({hook.machine.where}). Call opt.step() "
            "before saving."
        )

    def _owned_state(self) -> dict[int, dict[Any, Any]]:
        """The states of what this rank owns, by parameter index, with masters, in the unsharded order. Not copied."""
        sharded = self._sharded
        sharded.stepped.follow_model()
        sharded.order.note_new(self.optim.state, sharded.stepped.index_of)
        by_index = with_masters(self.optim.state, sharded.stepped)
        return {index: by_index[index] for index in sorted(filter(is_index, by_index), key=self._birth_of)}

    def _check_fits(self, state_dict: dict[str, Any]) -> None:
        """Check that `_load_owned` would accept a state dict, whose tensors may be without memory.

        Raises:
            ValueError: if not, naming the group or the parameter and why; TypeError for a loss scale that is no number.
        """
        scale = self._decision.loss_scale
        if scale is not None and scale.is_dynamic and SCALE_KEY in state_dict:
            copy.copy(scale).load_state_dict(state_dict[SCALE_KEY])
        sharded = self._sharded
        local, *_ = restrict_state_dict(state_dict, self.param_groups, sharded.table, self.optim, sharded.stepped)
        rehearse_load(self.optim, local)

    def _load_owned(self, state_dict: dict[str, Any], order: Sequence[int]) -> None:
        """As `load_state_dict`, but states are taken over without a copy, and masters are not checked.

        Args:
            state_dict: may leave out the states of parameters that this rank does not own.
            order: the parameters that have a state on any rank, as the unsharded optimizer would have them.
        """
        sharded = self._sharded
        local, _, masters = restrict_state_dict(
            state_dict, self.param_groups, sharded.table, self.optim, sharded.stepped
        )
        self._take_over(state_dict, local, order, masters)
