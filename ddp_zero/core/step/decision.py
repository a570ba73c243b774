"""Decides, once all gradients have arrived, whether a step is taken and by which factors it multiplies gradients.

1. `Decision.inspect`: each rank reads the gradients of its shard: their norms if anything is clipped, else only
   whether they are finite. One small collective gives all ranks the same numbers.
2. Several optimizers that are parts of one model join their numbers.
3. `Decision.carry_out`: all ranks skip, raise or step alike, by the same numbers. The step multiplies gradients by the
   factors that were found; a skip changes nothing.

Only if a gradient was not finite do ranks send more: the parameter, and the rank that its gradient came from.

If there is nothing to decide, no gradient is read and nothing is sent. If gradients are clipped but steps never skipped
(``nonfinite="step"``), nothing waits for the device.

A norm is the norm of per-parameter norms, as in torch: one sum of squares per rank would send less and have other last
bits. Gradients are scaled on copies: in place, a rank would scale only its own, and stage 1 would have two kinds.
"""

import math
import sys
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from ddp_zero.core.local.inner import suboptimizers_of
from ddp_zero.core.local.parameters import (
    GradientFactors,
    GradientSource,
    ParameterTable,
    ScaledGradients,
)
from ddp_zero.core.plan.ownership import home
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.clipping import (
    COMMON,
    GROUP_LIMIT,
    WHOLE,
    GradientStats,
    NonfiniteGradient,
    NormGatherer,
    RestOfModel,
    TwoPhase,
    coefficient_of,
    norm_of,
    norms_of,
    total_norm,
)
from ddp_zero.core.step.record import Number, StepRecord, StepRegime
from ddp_zero.core.step.runner import StepRunner
from ddp_zero.loss_scale import LossScale
from ddp_zero.options import StepOptions, check_max_grad_norm

Limits = dict[int, tuple[float, tuple[int, ...]]]
"""Limits of norms, each with the groups that it bounds, by `COMMON` or the index of a group with its own."""

_MAX_SUMS = 4096  # of buckets, for loops that never step


@dataclass(frozen=True)
class AmpState:
    """The attributes that `torch.amp.GradScaler` sets on an optimizer which divides and skips by itself."""

    scale: Tensor | None  # the divisor that gradients still need; None if they have been divided
    found_nonfinite: Tensor  # above 0 if a gradient is not finite, on this rank or, if ``is_agreed``, on any
    is_agreed: bool = False  # whether ranks have exchanged ``found_nonfinite``
    divided_by: float | None = None  # for the record

    @classmethod
    def of(cls, optimizer: object) -> "AmpState | None":
        """The state that a `GradScaler` has set on the optimizer before ``step()``, or None."""
        attributes = vars(optimizer)  # not by getattr, which would find attributes of the inner optimizer
        found_inf = attributes.get("found_inf")
        return (
            None
            if found_inf is None
            else cls(attributes.get("grad_scale"), torch.as_tensor(found_inf, dtype=torch.float32))
        )

    @property
    def inverse(self) -> Tensor:
        """One over the scale, rounded as `GradScaler` does."""
        assert self.scale is not None, "asked only for gradients that are scaled"
        return self.scale.double().reciprocal().float()

    @torch.no_grad()
    def unscale(self, grads: Iterable[Tensor]) -> None:
        """After the step: divide gradients by the scale in place, by the kernel of `GradScaler.unscale_`."""
        if self.scale is None:
            return
        grads_of_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            grads_of_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), members in grads_of_kind.items():
            found_inf = torch.zeros(1, device=device)
            inverse = self.inverse.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(members, found_inf, inverse)


# Torch hands an optimizer a copy of a scaler's findings, as ``found_inf``, but not the scaler (torch 2.13.0).
# `engine.probes` tests two assumptions: the scaler is a caller's ``self``, and its ``_per_optimizer_states`` has them.

ScalerFindings = dict[torch.device, Tensor]
"""The flags that a scaler keeps for an optimizer until ``update()``, by device; above 0: a gradient is not finite."""


def calling_scaler(optimizer: object) -> tuple[GradScaler, ScalerFindings] | None:
    """The scaler in whose ``step(optimizer)`` this is called, and its findings; None if no scaler calls."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        caller_self = frame.f_locals.get("self")
        if isinstance(caller_self, GradScaler) and any(value is optimizer for value in frame.f_locals.values()):
            return caller_self, caller_self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return None


def unscale_once(scaler: GradScaler, optimizer: Any) -> ScalerFindings:
    """Call ``scaler.unscale_(optimizer)``, unless the loop has done so; returns the scaler's findings."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    found: ScalerFindings = state["found_inf_per_device"]
    return found


class NonfiniteProbe:
    """Records, without waiting for the device, which rank's own gradients were not finite before they were averaged.

    It keeps one sum per bucket and backward pass since the last step; a sum is not finite if any gradient in it is not.
    """

    def __init__(self) -> None:
        self.is_on = False  # whether a step will need the sums; otherwise `screen` is not called
        self._sums: deque[tuple[list[Tensor], Tensor]] = deque(maxlen=_MAX_SUMS)

    def screen(self, params: list[Tensor], buffer: Tensor) -> None:
        """Note the sum of a bucket that is about to be averaged."""
        if buffer.layout is torch.strided:
            self._sums.append((params, buffer.sum(dtype=torch.promote_types(buffer.dtype, torch.float32))))

    def flags(self, param: Tensor) -> list[int]:
        """For each backward pass since the last step: 1 if the parameter's bucket was not finite on this rank.

        A sum of finite gradients may overflow, so the flags hold only for parameters whose average was not finite.
        """
        sums = [total for params, total in self._sums if any(param is member for member in params)]
        return [int(not torch.isfinite(total)) for total in sums]

    def clear(self) -> None:
        self._sums.clear()


def find_nonfinite_rank(flags_of_rank: Sequence[Sequence[int]]) -> int | None:
    """The rank that the last non-finite gradient came from, or None; ``flags_of_rank`` has a flag per backward pass.

    If gradients add up in ``param.grad``, every rank has a non-finite gradient in all passes after the first such pass,
    so the search goes back to that pass. Earlier passes may have been dropped, which is not reported.
    """
    rank = None
    for flags in reversed(list(zip(*flags_of_rank, strict=True))):
        if any(flags):
            rank = flags.index(1)
        if rank is not None and not all(flags):
            break
    return rank


class OwnedEdits:
    """Tracks gradients that users change on their owners alone, as through the aliases of ``opt.owned_gradients()``.

    An alias has a version counter of its own, so a change through it leaves the counter of ``param.grad`` as it was. In
    stage 1 every other rank keeps the average, so a changed gradient counts on its owners only: norms are gathered from
    owners, each of which takes the norm of its own part. Nothing else may change gradients before the step: DDP would
    average a changed gradient with the unchanged gradients of other ranks.
    """

    def __init__(self) -> None:
        # by parameter, address and version of its gradient when aliases were handed out; empty: none were
        self._noted: dict[Tensor, tuple[int, int]] = {}
        self._edited: set[Tensor] = set()  # parameters whose gradients this rank has changed without aliases

    def note(self, params: Sequence[Tensor]) -> None:
        """Note the gradients as they are: from now on any change that is not made through an alias is an error."""
        grads = [(param, param.grad) for param in params]
        self._noted = {param: (grad.data_ptr(), grad._version) for param, grad in grads if grad is not None}

    @contextmanager
    def editing(self, table: ParameterTable, param: Tensor, *, on_all_ranks: bool) -> Iterator[None]:
        """A context in which the library changes one gradient in place for the user.

        ``on_all_ranks`` is True if every rank makes the same change. Otherwise only the owners of the gradient make
        it. Where aliases were handed out, gradients are noted again afterwards, so that this is no unknown change.
        """
        is_noted = self.check_intact(table)
        yield
        if is_noted:
            self.note(table.params)
        elif on_all_ranks:
            self._edited.discard(param)
        else:
            self._edited.add(param)

    def has_edited(self, param: Tensor) -> bool:
        """True if this rank has changed its elements of a gradient, which other ranks do not know of."""
        return param in self._edited

    def edited_indices(self, table: ParameterTable) -> Collection[int]:
        """The parameters whose gradients count on their owners only."""
        return range(len(table.params)) if self._noted else {table.index_of[param] for param in self._edited}

    def check_not_edited(self, table: ParameterTable, what: str) -> None:
        """RuntimeError, naming the call ``what``, if this rank has changed a gradient without aliases on its own."""
        param = None if self._noted else next(iter(self._edited), None)
        if param is not None:
            raise RuntimeError(
                f"{what} cannot follow safe_set_local_grad(), which has changed the gradient of "
                f"{table.label(table.index_of[param])} on its owners only (stage 1). Clip by max_grad_norm=, read with "
                "safe_get_full_grad(), or set the gradient with safe_set_full_grad() on every rank. [ZERO-713]"
            )

    def forget(self) -> None:
        self._noted = {}
        self._edited.clear()

    def forget_dropped(self) -> None:
        """Before a forward pass: forget gradients that were set to None without the optimizer."""
        self._noted = {param: mark for param, mark in self._noted.items() if param.grad is not None}
        self._edited = {param for param in self._edited if param.grad is not None}

    @property
    def has_aliases(self) -> bool:
        """True if aliases were handed out, through which owners may have changed their gradients."""
        return bool(self._noted)

    def check_intact(self, table: ParameterTable) -> bool:
        """Check that gradients were changed through aliases alone; returns `has_aliases`, the same on every rank.

        Raises RuntimeError naming a gradient that anything else has changed since `note`.
        """
        for param, mark in self._noted.items():
            grad = param.grad
            if grad is not None and (grad.data_ptr(), grad._version) != mark:
                raise RuntimeError(
                    f"The gradient of {table.label(table.index_of[param])} changed between opt.owned_gradients() and "
                    "opt.step(), by a backward pass, GradScaler.unscale_ or code over param.grad. Changes through "
                    "opt.owned_gradients() are on the owner only (stage 1), and would mix with other ranks' "
                    "gradients. Call opt.owned_gradients() after such changes; opt.clip_grad_norm_ and "
                    "opt.clip_grad_value_ also work after it. To drop gradients, call opt.zero_grad(). [ZERO-320]"
                )
        return self.has_aliases


@dataclass
class StepContext:
    """The circumstances in which `Decision` is asked for a step."""

    regime: StepRegime  # for the record
    source: GradientSource  # has the gradients of the step
    deferred_because: str | None = None  # for the record
    waits: bool = False  # whether the step waits for all gradients, so that reading them delays nothing
    amp: AmpState | None = None  # if a `GradScaler` calls the step
    may_have_joined: bool = False  # whether ranks may have run out of inputs


@dataclass(frozen=True)
class Inspection:
    """The result of `Decision.inspect`, before any change."""

    stats: GradientStats  # the same on all of the optimizer's ranks
    context: StepContext
    checks: bool  # whether gradients must be finite
    limits: Limits
    scale: Number  # loss scale, for the record
    inverse: Tensor | float | None  # factor of all gradients: one over the loss scale
    divisor: Tensor | None  # the loss scale, in the place of ``inverse``, for kernels that divide


@dataclass(frozen=True)
class _Verdict:
    """The conclusion of all ranks from an inspection."""

    nonfinite: bool = False  # whether a gradient is not finite, and the step may have to be skipped
    may_be_overflow: bool = False  # whether ``nonfinite`` may be due to an overflow in the sum of finite gradients
    norm: Number = None  # of all gradients
    smallest: Number = None  # the smallest clip coefficient of any group
    coefficients: Mapping[int, Tensor] = field(default_factory=dict)  # clip coefficients by group


_NO_STATS, _STEP = GradientStats(), _Verdict()  # where nothing is to be decided


class Decision:
    """Decides whether and with which factors an optimizer steps, and takes or skips the step."""

    def __init__(self, runner: StepRunner, options: StepOptions) -> None:
        self.options = options
        self.loss_scale = None if options.loss_scale is None else LossScale(options.loss_scale)
        self.watch = NonfiniteProbe()
        # norm and coefficient of an explicit clip since the last step, for the record, and the norms before that clip,
        # by parameter: clipping by a norm that is not finite makes every gradient non-finite, so only these norms still
        # tell which gradient was
        self.clipped: tuple[Number, Number] = (None, None)
        self.norms_before_clip: Mapping[int, Tensor] = {}
        self.norms = NormGatherer(runner.shard)
        self.rest_of_model = RestOfModel()  # parameters of other optimizers, which the decision concerns as well
        self.owned_edits = OwnedEdits()
        # whether norms of low-precision gradients are in their dtype, which has the bits of
        # `torch.nn.utils.clip_grad_norm_`; False: in fp32, more exactly
        self.clips_as_torch = False
        self._runner = runner
        self._shard = shard = runner.shard
        self._options_wait = options.why_wait()
        # whether ``max_grad_norm`` of a group is this library's option, not one of the inner optimizer
        self._honours_groups = all(GROUP_LIMIT not in part.defaults for part in suboptimizers_of(shard.inner))
        self.watch.is_on = self.why_wait() is not None and options.nonfinite != "step"

    def why_wait(self) -> str | None:
        """Why a step needs all gradients before it starts, or None if it does not."""
        if self._honours_groups:
            for group in self._shard.param_groups:
                if group.get(GROUP_LIMIT) is not None:
                    return "max_grad_norm of a parameter group needs the norm of its gradients"
        return self._options_wait

    def forget(self) -> None:
        self.clipped = (None, None)
        self.norms_before_clip = {}
        self.owned_edits.forget()
        self.watch.clear()

    def take(self, context: StepContext, **kwargs: Any) -> TwoPhase[Any]:
        """Inspect, and take or skip the step."""
        inspection = self.inspect(context)
        stats = inspection.stats
        if inspection.checks or inspection.limits:
            stats = yield stats
        return self.carry_out(inspection, stats, **kwargs)

    def inspect(self, context: StepContext) -> Inspection:
        """Read the gradients of this optimizer. A collective if there is anything to decide."""
        shard, amp = self._shard, context.amp
        checks, limits = self._checks_finite(context), self._limits()
        scale: Number = None if self.loss_scale is None else self.loss_scale.value
        inverse: Tensor | float | None = self.inverse_scale
        divisor = None
        if amp is not None:
            scale = amp.divided_by if amp.scale is None else amp.scale
        if amp is not None and amp.scale is not None:
            # torch's fused kernels divide by the scale; a loop that clips has called `unscale_`, which multiplies
            divisor, inverse = (None, amp.inverse) if limits else (amp.scale, None)
        self.watch.is_on |= checks
        stats = _NO_STATS
        if checks or limits:
            with shard.trace.label("decide"):
                stats = self._stats_of(context, limits, inverse)
        return Inspection(stats, context, checks, limits, scale, inverse, divisor)

    def carry_out(self, inspection: Inspection, stats: GradientStats, **kwargs: Any) -> Any:
        """Take or skip the step, by an inspection and the stats of the whole model.

        Raises RuntimeError on every rank if gradients are not finite with ``nonfinite="raise"``, or at the smallest
        loss scale.
        """
        shard, context, verdict = self._shard, inspection.context, _STEP
        if inspection.checks or inspection.limits:
            with shard.trace.label("decide"):
                verdict = self._verdict(inspection, stats)
                if inspection.checks and verdict.nonfinite:
                    found = self.rest_of_model.find_nonfinite(stats)
                    if found is not None or not verdict.may_be_overflow:
                        self._skip_step(inspection, verdict.norm, found)
                        return None
        source = context.source
        factors = GradientFactors(inspection.inverse, verdict.coefficients, shard.table.groups, inspection.divisor)
        if factors:
            source = ScaledGradients(shard.targets, source, factors)
        result = self._runner.run(source, **kwargs)
        if self.loss_scale is not None:
            self.loss_scale.after_step(has_overflowed=False)
        norm, coefficient = self.clipped if verdict.norm is None else (verdict.norm, verdict.smallest)
        self._runner.record_step(
            StepRecord(
                stepped=True,
                regime=context.regime,
                deferred_because=context.deferred_because,
                norm=norm,
                coefficient=coefficient,
                scale=inspection.scale,
            )
        )
        self.forget()
        return result

    @property
    def inverse_scale(self) -> float | None:
        """One over the built-in loss scale, rounded to fp32; None without one."""
        if self.loss_scale is None:
            return None
        return torch.tensor(1.0 / self.loss_scale.value, dtype=torch.float32).item()

    @property
    def rounds_norms(self) -> bool:
        """True if norms are in the dtype of gradients: as ``clips_as_torch``, unless steps are in fp32 or scaled."""
        return self.clips_as_torch and self.loss_scale is None and not self._shard.masters

    # Inspecting

    def _checks_finite(self, context: StepContext) -> bool:
        if context.amp is not None:
            return True
        nonfinite = self.options.nonfinite
        return nonfinite != "step" and (nonfinite is not None or context.waits or self.why_wait() is not None)

    def _stats_of(self, context: StepContext, limits: Limits, inverse: Tensor | float | None) -> GradientStats:
        """Read the owned gradients: their norms if any ``limits`` exist, else whether they are finite. A collective."""
        shard, source, amp = self._shard, context.source, context.amp
        indices = shard.binding.owned()
        grads = source.gradients(indices)
        has_gradient = map(is_not, grads, repeat(None))
        owned: dict[int, Any] = dict(compress(zip(indices, grads, strict=True), has_gradient))
        norms: dict[int, Tensor] = {}
        flag: Tensor | float = 0.0
        if limits:
            norms = self._norms(owned, source, inverse)
        elif amp is None:
            flag = suspect_nonfinite(_require(shard.targets.gradient(index, source)) for index in owned)
        if amp is not None:
            flag = amp.found_nonfinite.clamp(max=1.0)
        find = partial(self._find_nonfinite, source)
        if not limits:
            max_flag = float(flag) if amp is not None and amp.is_agreed else self.max_over_ranks(flag)
            return GradientStats(flag=max_flag, find=find)
        norms_of_all, flags = self.norms.gather(
            norms, self.options.norm_type, flag, context.may_have_joined, rounds=self.rounds_norms
        )
        counted = self.rest_of_model.counted(norms_of_all)
        if len(counted) < len(norms_of_all):  # norms that do not count must be finite all the same
            uncounted = [norm for index, norm in norms_of_all.items() if index not in counted]
            flags = flags + (1.0 - torch.isfinite(torch.stack([norm.double() for norm in uncounted])).all().double())
        return GradientStats(self._totals(limits, counted), self.options.norm_type, flags, find)

    def _verdict(self, inspection: Inspection, stats: GradientStats) -> _Verdict:
        """Conclude from the stats of the whole model whether gradients are finite, and the clip coefficients."""
        limits, amp = inspection.limits, inspection.context.amp
        if not limits:
            return _Verdict(bool(stats.flag), may_be_overflow=amp is None)
        norm = stats.totals[WHOLE]
        coefficients = dict[int, Tensor]()
        assert norm is not None, "the norm of no gradients is 0"
        for key, (limit, members) in limits.items():
            if (total := stats.totals[key]) is not None:
                coefficients.update(dict.fromkeys(members, coefficient_of(total, limit)))
        if not inspection.checks:
            smallest = torch.stack(list(coefficients.values())).min() if coefficients else None
            return _Verdict(False, False, norm, smallest, coefficients)
        # the one place where the host waits for the device
        numbers = [norm, torch.as_tensor(stats.flag).to(norm.device), *coefficients.values()]
        norm_value, any_flag, *values = torch.stack([number.double() for number in numbers]).tolist()
        clipping = {group: c for (group, c), value in zip(coefficients.items(), values, strict=True) if value != 1.0}
        nonfinite = any_flag > 0 or (amp is None and not math.isfinite(norm_value))
        return _Verdict(nonfinite, False, norm_value, min(values, default=None), clipping)

    def _norms(
        self, owned: Mapping[int, Tensor], source: GradientSource, inverse: Tensor | float | None
    ) -> dict[int, Tensor]:
        """The norm of each owned gradient as the step uses it before clipping; makes at most one copy at a time.

        If every rank has a gradient whole, its first owner takes the norm of the whole: the bits of a single rank.
        """
        shard, norm_type = self._shard, self.options.norm_type
        whole_gradients = source.whole_gradients
        sources = dict.fromkeys(owned, source)
        if whole_gradients is not None:
            edited = self.owned_edits.edited_indices(shard.table)
            pieces = shard.binding.pieces
            sources = {
                index: source if index in edited else whole_gradients
                for index in owned
                if index in edited or home(pieces[index]) == shard.comm.group_rank
            }
        if inverse is None and not shard.masters:
            grads = owned
            if whole_gradients is not None:
                grads = {
                    i: owned[i] if chosen is source else _require(chosen.gradient(i)) for i, chosen in sources.items()
                }
            return norms_of(grads, norm_type, rounds=self.rounds_norms)
        factors = GradientFactors(inverse)
        gradient = shard.targets.gradient
        scaled = ((index, factors.apply(index, _require(gradient(index, chosen)))) for index, chosen in sources.items())
        return {index: norm_of(grad, norm_type, rounds=self.rounds_norms) for index, grad in scaled}

    def max_over_ranks(self, number: Tensor | float) -> float:
        """The largest of a number of each rank. A collective."""
        local = number if isinstance(number, Tensor) else torch.tensor(number, device=self._shard.table.accelerator())
        gathered = self._shard.comm.all_gather_tensor(local.reshape(1).double())
        return float(torch.cat(gathered).max().item())

    # Clipping

    def _limits(self) -> Limits:
        """The limits of norms, with the groups that each bounds; ValueError for an invalid limit of a group."""
        groups, has_group_limits, limit = self._shard.param_groups, self._honours_groups, self.options.max_grad_norm
        common_groups = tuple(
            position for position, group in enumerate(groups) if not has_group_limits or GROUP_LIMIT not in group
        )
        limits: Limits = {} if limit is None or not common_groups else {COMMON: (limit, common_groups)}
        for position, group in enumerate(groups):
            if has_group_limits and group.get(GROUP_LIMIT) is not None:
                check_max_grad_norm(group[GROUP_LIMIT])
                limits[position] = (group[GROUP_LIMIT], (position,))
        return limits

    def limits_by_key(self) -> dict[int, float]:
        """The limits of a step's norms, by `COMMON` or the index of a group with its own; ranks must have the same.

        Raises ValueError for an invalid limit.
        """
        return {key: float(limit) for key, (limit, _) in self._limits().items()}

    def _totals(self, limits: Limits, norms: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """The norm of all gradients, and the norm that each limit bounds."""
        norm_type, group_of = self.options.norm_type, self._shard.table.groups
        totals: dict[int, Tensor | None] = {WHOLE: total_norm(list(norms.values()), norm_type)}
        for key, (_, members) in limits.items():
            order = norms if key == COMMON else sorted(norms)  # a group with its own limit: as torch clips its list
            in_groups = map(members.__contains__, map(group_of.__getitem__, order))
            own_norms = [*compress(map(norms.__getitem__, order), in_groups)]
            totals[key] = total_norm(own_norms, norm_type) if own_norms else None
        return totals

    # Skipping

    def _skip_step(self, inspection: Inspection, norm: Number, found: NonfiniteGradient | None) -> None:
        """Record a skipped step and adapt the loss scale; raises RuntimeError where a step must not be skipped."""
        context = inspection.context
        reason = "the norm of all gradients has overflowed" if found is None else found.description
        minimum = None
        if self.loss_scale is not None:
            minimum = self.loss_scale.value if self.loss_scale.is_at_minimum else None
            self.loss_scale.after_step(has_overflowed=True)
        self._runner.record_step(
            StepRecord(
                stepped=False,
                regime=context.regime,
                reason=reason,
                deferred_because=context.deferred_because,
                nonfinite_parameter=None if found is None else found.parameter,
                nonfinite_rank=None if found is None else found.rank,
                norm=norm,
                scale=inspection.scale,
            )
        )
        self.forget()
        if minimum is not None:
            raise RuntimeError(
                f"Expected finite gradients at the smallest loss scale, {minimum}, got inf or NaN: {reason}. No rank "
                "has stepped. The model diverges, or a smaller minimum is needed: "
                "loss_scale=DynamicLossScale(minimum=...). [ZERO-317]"
            )
        if self.options.nonfinite == "raise" and context.amp is None:
            raise RuntimeError(
                f"Expected finite gradients (nonfinite='raise'), got inf or NaN: {reason}. No rank has stepped. "
                "Call opt.zero_grad() and go on with another batch, which nonfinite='skip' does by itself. [ZERO-317]"
            )

    def _find_nonfinite(self, source: GradientSource) -> NonfiniteGradient | None:
        """Find the first averaged gradient that is not finite, and the rank that it came from. A collective."""
        shard, params = self._shard, self._shard.table.params
        first = next((i for i, norm in self.norms_before_clip.items() if not torch.isfinite(norm)), len(params))
        if first == len(params):
            first = next((i for i in shard.binding.owned() if _is_nonfinite(source.gradient(i))), first)
        first_on_any_rank = min(index for (index,) in shard.comm.all_gather_ints([first]))
        if first_on_any_rank == len(params):
            return None
        flags = self.watch.flags(params[first_on_any_rank])
        everyone = shard.everyone
        passes = min(count for (count,) in everyone.all_gather_ints([len(flags)]))
        rank = find_nonfinite_rank(everyone.all_gather_ints(flags[:passes])) if passes else None
        of_rank = "" if rank is None else f", nor was that of {everyone.name(GroupRank(rank))} before averaging"
        name = shard.table.name(first_on_any_rank)
        return NonfiniteGradient(name, rank, f"the gradient of {name} is not finite{of_rank}")


def suspect_nonfinite(grads: Iterable[Tensor]) -> Tensor | float:
    """1 if the sum of any gradient is not finite, else 0: one fast reading pass, without waiting for the device.

    A sum is not finite if any element is not, but it may also overflow by itself, so the caller must check. If
    gradients are converted, one is held at a time.
    """
    sums = [grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    if not sums:
        return 0.0
    return 1.0 - torch.stack([torch.isfinite(total).to(sums[0].device) for total in sums]).all().double()


def _is_nonfinite(grad: Tensor | None) -> bool:
    return grad is not None and not bool(torch.isfinite(grad).all())


def _require(grad: Tensor | None) -> Tensor:
    assert grad is not None, "only called where there is a gradient"
    return grad
