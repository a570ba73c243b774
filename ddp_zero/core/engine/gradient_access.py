"""The user's access to gradients between backward and the step: accumulating, clipping, reading, changing."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ddp_zero.core.backward.gradients import owned_alias
from ddp_zero.core.backward.visible_gradients import gather_gradient
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.step.clipping import TwoPhase, clip_gradients
from ddp_zero.values.placeholders import on_this_rank


class GradientAccess:
    """Accumulates, clips, reads and changes an optimizer's gradients for users, between backward and the step."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._owned_edits = engine, engine.decision.owned_edits
        self._are_on_owners = engine.is_partitioned  # whether each gradient is on its owners alone

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        if self._engine.joins:
            raise RuntimeError(
                "Join does not support opt.accumulate(): a rank that has joined would take a step. Use ddp.no_sync(). "
                "[ZERO-310]"
            )
        if not self._engine.takes_hook:
            yield
            return
        hook = self._engine.require_hook()
        before, hook.accumulates = hook.accumulates, True
        try:
            yield
        finally:
            hook.accumulates = before

    def clipping(
        self,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        parameters: Tensor | Iterable[Tensor] | None,
    ) -> TwoPhase[Tensor]:
        """`ZeroRedundancyOptimizer.clip_grad_norm_` as a generator, see `TwoPhase`."""
        if self._engine.joins and self._are_on_owners:
            raise RuntimeError(
                "Join does not support opt.clip_grad_norm_() with stage=2: ranks that have joined would not take part. "
                "Build the optimizer with max_grad_norm=, which they follow. [ZERO-310]"
            )
        shard, decision = self._engine.shard, self._engine.decision
        comm, chosen = shard.comm, self._indices_of(parameters)
        self._engine.defer_steps()
        self._sync_exact_sums()
        edits = self._owned_edits
        edits.check_alike(shard.table, "opt.clip_grad_norm_()")
        is_edited = edits.check_intact(shard.table)

        def check(total: Tensor) -> None:
            if error_if_nonfinite and not torch.isfinite(total):
                raise RuntimeError(
                    f"Expected a finite norm of order {float(norm_type)} of all gradients, got {total.item()} "
                    f"({comm.name(comm.group_rank)}). Pass error_if_nonfinite=False to clip by it all the same. "
                    "[ZERO-317]"
                )

        total, coefficient, decision.norms_before_clip = yield from clip_gradients(
            decision.norms,
            shard.table.norm_order if chosen is None else chosen,
            float(max_norm),
            float(norm_type),
            are_on_owners=self._are_on_owners or is_edited,
            rounds=decision.rounds_norms,
            inverse_scale=decision.inverse_scale,
            rest_of_model=decision.rest_of_model,
            check=check,
        )
        decision.clipped = total, coefficient
        if is_edited:
            edits.note(shard.table.params)
        return total

    @torch.no_grad()
    def clip_grad_value(self, clip_value: float, parameters: Tensor | Iterable[Tensor] | None) -> None:
        if self._engine.joins and self._are_on_owners:
            raise RuntimeError(
                "Join does not support opt.clip_grad_value_() with stage=2: gradients that this rank holds for ranks "
                "that have joined would not be clipped. [ZERO-310]"
            )
        shard, chosen = self._engine.shard, self._indices_of(parameters)
        self._engine.defer_steps()
        grads: list[Tensor] = []
        sums = None if self._engine.hook is None else self._engine.hook.gradients.wholes or self._engine.hook.gradients
        for index in range(len(shard.table.params)) if chosen is None else chosen:
            grad = shard.table.params[index].grad
            held = None if grad is None else on_this_rank(grad)
            if held is None:
                continue
            exact = None if sums is None else sums.in_accumulation_dtype(index)
            # through ``data``, which counts no version: see `OwnedEdits`
            grads += [held.data] if exact is None else [held.data, exact]
        limit, scale = float(clip_value), self._engine.decision.inverse_scale
        if scale is None:
            for clipped in grads:
                clipped.clamp_(-limit, limit)
            return
        limit /= scale
        for scaled in grads:  # an overflow has to show in the step, which lowers the scale
            scaled.copy_(torch.where(scaled.isfinite(), scaled.clamp(-limit, limit), scaled))

    def owned_gradients(self) -> Mapping[Tensor, Tensor]:
        if self._engine.joins:
            raise RuntimeError(
                "Join does not support opt.owned_gradients(): gradients that this rank holds for ranks that have "
                "joined are not among them. [ZERO-310]"
            )
        shard = self._engine.shard
        self._engine.defer_steps()
        if not self._are_on_owners:
            self._engine.check_averaged()
        editable = partial(owned_alias, shard) if self._engine.hook is None else self._engine.hook.gradients.editable
        found = {shard.table.params[index]: editable(index) for index in shard.binding.owned()}
        if not self._are_on_owners and shard.comm.world_size > 1:
            self._owned_edits.note(shard.table.params)
        return MappingProxyType({param: grad for param, grad in found.items() if grad is not None})

    def full_grad(self, param: Tensor) -> Tensor | None:
        shard = self._engine.shard
        index = shard.table.index_of.get(param)
        if index is None:
            shape = list(param.shape)
            raise ValueError(
                f"The parameter of shape {shape} is not a parameter of this optimizer. Pass an object from "
                "opt.param_groups. [ZERO-119]"
            )
        edits = self._owned_edits
        edits.check_alike(shard.table, "opt.full_grad()")
        self._engine.check_averaged()
        self._sync_exact_sums()
        if self._are_on_owners or edits.are_made:
            return gather_gradient(shard, index)
        return None if param.grad is None else param.grad.detach().clone()

    def gather_grad(self, param: Tensor) -> Tensor | None:
        """As `full_grad`, also after `edit_own_part`. A collective in every stage."""
        shard, edits = self._engine.shard, self._owned_edits
        flags = shard.comm.all_gather_ints([int(edits.has_part(param))])
        if not any(flag for (flag,) in flags):
            return self.full_grad(param)
        self._engine.check_averaged()
        return gather_gradient(shard, shard.table.index_of[param])

    @torch.no_grad()
    def edit_gradient(self, param: Tensor, value: Tensor) -> None:
        """Set a whole gradient to a value that is the same on every rank."""
        self._engine.defer_steps()
        shard, grad = self._engine.shard, param.grad
        held = None if grad is None else on_this_rank(grad)
        with self._owned_edits.editing(shard.table, param, alike=True):
            if held is not None:
                held.copy_(value if held is grad else shard.targets.own_part(shard.table.index_of[param], value))

    @torch.no_grad()
    def edit_own_part(self, param: Tensor, value: Tensor) -> None:
        """Set this rank's part of a gradient. The other owners of a parameter that is cut set their own parts."""
        self._engine.defer_steps()
        shard = self._engine.shard
        index = shard.table.index_of[param]
        knows_all = self._are_on_owners or shard.comm.world_size == 1
        with self._owned_edits.editing(shard.table, param, alike=knows_all):
            shard.targets.lay_out_gradient(index)
            held = shard.targets.own_gradient(index)
            assert held is not None, "checked by the caller"
            held.copy_(value)

    def _indices_of(self, parameters: Tensor | Iterable[Tensor] | None) -> list[int] | None:
        """Indices of some parameters, None for all; ValueError for a parameter that is not in the optimizer."""
        if parameters is None:
            return None
        shard = self._engine.shard
        index_of = shard.table.index_of
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(param not in index_of for param in params):
            raise ValueError(
                "A parameter is in no group of this optimizer. Pass parameters of this optimizer only. [ZERO-119]"
            )
        return [index_of[param] for param in params]

    def _sync_exact_sums(self) -> None:
        """Copy exact sums that the user has changed to ``param.grad``."""
        if self._engine.hook is not None:
            shard, gradients = self._engine.shard, self._engine.hook.gradients
            for index in shard.binding.owned():
                gradients.in_accumulation_dtype(index)
