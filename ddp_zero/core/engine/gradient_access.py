"""Gradients between backward and the step: what they are, and the user's access to them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ddp_zero.core.backward.gradients import owned_alias
from ddp_zero.core.backward.overlap_machine import Phase
from ddp_zero.core.backward.visible_gradients import gather_gradient, is_unknown
from ddp_zero.core.ddp.unaveraged import check_equal, check_finalized, check_reduced
from ddp_zero.core.engine.attachment import CHANGED, Attachment
from ddp_zero.core.step.clipping import TwoPhase, clip_gradients
from ddp_zero.core.step.decision import Decision
from ddp_zero.values.placeholders import AbsentGradient, not_awaiting_params, on_this_rank


class GradientAccess:
    """Accumulates, clips, reads and changes an optimizer's gradients for users; checks that they are averages.

    Attributes:
        assume_averaged: whether a caller averages all gradients before each step.
        may_have_absent: whether an interrupted pass or an earlier optimizer may have left placeholders without a value.
    """

    def __init__(self, attachment: Attachment, decision: Decision) -> None:
        self._attachment, self._shard, self._decision = attachment, attachment.shard, decision
        self._owned_edits = decision.owned_edits
        self._are_on_owners = attachment.stage == 2  # whether each gradient is on its owners alone
        self.may_have_absent, self.assume_averaged = True, False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        if self._attachment.in_join:
            raise RuntimeError(
                "Join does not support opt.accumulate(): a rank that has joined would take a step. Use ddp.no_sync(). "
                "[ZERO-310]"
            )
        hook = self._attachment.required_hook()
        if hook is None:
            yield
            return
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
        if self._attachment.in_join and self._are_on_owners:
            raise RuntimeError(
                "Join does not support opt.clip_grad_norm_() with stage=2: ranks that have joined would not take part. "
                "Build the optimizer with max_grad_norm=, which they follow. [ZERO-310]"
            )
        shard, decision = self._shard, self._decision
        comm = shard.comm
        chosen = self._indices_of(parameters)
        self.defer_steps()
        self._sync_exact_sums()
        edits = self._owned_edits
        edits.check_not_edited(shard.table, "opt.clip_grad_norm_()")
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
        if self._attachment.in_join and self._are_on_owners:
            raise RuntimeError(
                "Join does not support opt.clip_grad_value_() with stage=2: gradients that this rank holds for ranks "
                "that have joined would not be clipped. [ZERO-310]"
            )
        shard, chosen = self._shard, self._indices_of(parameters)
        self.defer_steps()
        grads: list[Tensor] = []
        hook = self._attachment.hook
        sums = None if hook is None else hook.gradients.whole_gradients or hook.gradients
        for index in range(len(shard.table.params)) if chosen is None else chosen:
            grad = shard.table.params[index].grad
            held = None if grad is None else on_this_rank(grad)
            if held is None:
                continue
            exact = None if sums is None else sums.in_accumulation_dtype(index)
            # through ``data``, which counts no version: see `OwnedEdits`
            grads += [held.data] if exact is None else [held.data, exact]
        limit = float(clip_value)
        scale = self._decision.inverse_scale
        if scale is None:
            for clipped in grads:
                clipped.clamp_(-limit, limit)
            return
        limit /= scale
        for scaled in grads:  # an overflow has to show in the step, which lowers the scale
            scaled.copy_(torch.where(scaled.isfinite(), scaled.clamp(-limit, limit), scaled))

    def owned_gradients(self) -> Mapping[Tensor, Tensor]:
        if self._attachment.in_join:
            raise RuntimeError(
                "Join does not support opt.owned_gradients(): gradients that this rank holds for ranks that have "
                "joined are not among them. [ZERO-310]"
            )
        shard = self._shard
        self.defer_steps()
        if not self._are_on_owners:
            self.check_averaged()
        hook = self._attachment.hook
        editable = partial(owned_alias, shard) if hook is None else hook.gradients.editable
        found = {shard.table.params[index]: editable(index) for index in shard.binding.owned()}
        if not self._are_on_owners and shard.comm.world_size > 1:
            self._owned_edits.note(shard.table.params)
        return MappingProxyType({param: grad for param, grad in found.items() if grad is not None})

    def full_grad(self, param: Tensor) -> Tensor | None:
        shard = self._shard
        index = shard.table.index_of.get(param)
        if index is None:
            shape = list(param.shape)
            raise ValueError(
                f"The parameter of shape {shape} is not a parameter of this optimizer. Pass an object from "
                "opt.param_groups. [ZERO-119]"
            )
        edits = self._owned_edits
        edits.check_not_edited(shard.table, "opt.full_grad()")
        self.check_averaged()
        self._sync_exact_sums()
        if self._are_on_owners or edits.has_aliases:
            return gather_gradient(shard, index)
        return None if param.grad is None else param.grad.detach().clone()

    def gather_grad(self, param: Tensor) -> Tensor | None:
        """As `full_grad`, also after `edit_own_part`. A collective in every stage."""
        shard, edits = self._shard, self._owned_edits
        flags = shard.comm.all_gather_ints([int(edits.has_edited(param))])
        if not any(flag for (flag,) in flags):
            return self.full_grad(param)
        self.check_averaged()
        return gather_gradient(shard, shard.table.index_of[param])

    @torch.no_grad()
    def edit_gradient(self, param: Tensor, value: Tensor) -> None:
        """Set a whole gradient to a value that is the same on every rank."""
        self.defer_steps()
        shard, grad = self._shard, param.grad
        held = None if grad is None else on_this_rank(grad)
        with self._owned_edits.editing(shard.table, param, on_all_ranks=True):
            if held is not None:
                held.copy_(value if held is grad else shard.targets.owned_elements(shard.table.index_of[param], value))

    @torch.no_grad()
    def edit_own_part(self, param: Tensor, value: Tensor) -> None:
        """Set this rank's part of a gradient. The other owners of a parameter that is cut set their own parts."""
        self.defer_steps()
        shard = self._shard
        index = shard.table.index_of[param]
        knows_all = self._are_on_owners or shard.comm.world_size == 1
        with self._owned_edits.editing(shard.table, param, on_all_ranks=knows_all):
            shard.targets.lay_out_gradient(index)
            held = shard.targets.owned_gradient(index)
            assert held is not None, "checked by the caller"
            held.copy_(value)

    # Their state

    def defer_steps(self) -> None:
        """Before gradients are changed: make later steps wait; RuntimeError if a step has used them, or no averages."""
        attachment, hook = self._attachment, self._attachment.hook
        if self._are_on_owners:
            self.check_averaged()
        if hook is None or not attachment.overlaps:
            return
        if hook.machine.phase is Phase.STEPPED:
            raise RuntimeError(
                "A step inside backward has used up the gradients, so they cannot be clipped or changed now "
                f"({hook.machine.where}). Clip from the first step on, or build the optimizer with max_grad_norm= or "
                "overlap_with_ddp=False. To go on now, call opt.step(), opt.zero_grad() and opt.reset(), and clip in "
                "every iteration from then on. [ZERO-304]"
            )
        if hook.machine.is_waiting:
            attachment.waits_because = attachment.waits_because or CHANGED

    def check_averaged(self, step: int | None = None) -> None:
        """Check that gradients are averages, for a step if it is given: see `check_reduced`, `check_equal`."""
        shard, hook, passes = self._shard, self._attachment.hook, self._attachment.passes
        if self._attachment.in_join or self._owned_edits.check_intact(shard.table):
            return
        check_finalized(shard, passes)
        if self._are_on_owners:
            is_local, marks = (False, {}) if hook is None else hook.gradients.left_local()
            # whether no gradient was reduced since the last step, but a backward pass has left local ones
            is_local = is_local and hook is not None and not hook.machine.is_waiting
            check_reduced(shard, passes, is_local=is_local, marks=dict(marks))
        elif not self.assume_averaged and shard.everyone.world_size > 1:
            check_equal(shard, passes, step=step, edited=self._owned_edits.edited_indices(shard.table))

    def check_none_absent(self) -> None:
        """RuntimeError if ``may_have_absent``, and a gradient is a placeholder without a value."""
        if not self.may_have_absent:
            return
        table, comm = self._shard.table, self._shard.comm
        with not_awaiting_params():
            grads = [param.grad for param in table.params]
            wrong = next((index for index, grad in enumerate(grads) if is_unknown(grad)), None)
        if wrong is not None:
            raise RuntimeError(
                "Expected gradients of earlier passes, or none, got an absent one: of "
                f"{table.label(wrong)} ({comm.name(comm.group_rank)}). An interrupted "
                "backward pass or an earlier optimizer has sent it to its owner, and the next pass would add to it. "
                "Call opt.zero_grad(). [ZERO-308]"
            )
        self.may_have_absent = False

    def are_all_zeros(self) -> bool:
        """True if all gradients are zeros set without a pass: torch.distributed.checkpoint steps so to create state."""
        with not_awaiting_params():
            grads = [param.grad for param in self._shard.table.params if param.grad is not None]
            return not self._attachment.passes.has_seen and not any(
                not grad.zeroed if isinstance(grad, AbsentGradient) else bool(grad.any()) for grad in grads
            )

    def forget(self) -> None:
        """Follow a user who has dropped or zeroed all gradients."""
        attachment = self._attachment
        self._decision.forget()
        self.may_have_absent = False
        if attachment.passes.has_seen:
            attachment.passes.forget()
        if attachment.hook is not None:
            attachment.hook.drop_carried()

    # Helpers

    def _indices_of(self, parameters: Tensor | Iterable[Tensor] | None) -> list[int] | None:
        """Indices of some parameters, None for all; ValueError for a parameter that is not in the optimizer."""
        if parameters is None:
            return None
        shard = self._shard
        index_of = shard.table.index_of
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(param not in index_of for param in params):
            raise ValueError(
                "A parameter is in no group of this optimizer. Pass parameters of this optimizer only. [ZERO-119]"
            )
        return [index_of[param] for param in params]

    def _sync_exact_sums(self) -> None:
        """Copy exact sums that the user has changed to ``param.grad``."""
        if (hook := self._attachment.hook) is not None:
            for index in self._shard.binding.owned():
                hook.gradients.in_accumulation_dtype(index)
