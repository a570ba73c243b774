"""The gradient half of `ZeroRedundancyOptimizer`: accumulating, clipping and reading gradients, on any rank."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.algorithms.join import _JoinConfig
from torch.optim import Optimizer

from ddp_zero.backward.averaged import NO_BUCKET, NO_PASS, check_averaged
from ddp_zero.backward.forward_passes import ForwardPasses
from ddp_zero.backward.hook import OverlapHook
from ddp_zero.backward.machine import Phase
from ddp_zero.backward.reducer import models_over
from ddp_zero.stage2.bucket import ReduceOptions
from ddp_zero.stage2.visible import gather_gradient
from ddp_zero.step.clipping import clip_gradients
from ddp_zero.step.decision import Decision
from ddp_zero.step.sharded_step import ShardedStep

CHANGED = "the loop changes gradients, options or parameters between backward and opt.step()"


class ReachesGradients(Optimizer):
    """An optimizer whose gradients may be spread over ranks."""

    _sharded: ShardedStep
    _overlaps: bool
    _reduction: ReduceOptions | None
    _hook: OverlapHook | None
    _passes: ForwardPasses
    _decision: Decision
    _waits_because: str | None
    _join_config: _JoinConfig

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context backward passes only average gradients; the step is left to a later one.

        In stage 2 a rank keeps only the sums of what it owns; ``ddp.no_sync()`` keeps gradients of full size but sends
        nothing meanwhile. Without overlap no backward pass steps, in this context or outside.

        Stage 2 averages each pass on its own and adds up the averages, those of fp16 and bf16 in fp32. Stage 1 averages
        what ``param.grad`` holds, in its dtype, as DDP does without ``no_sync()``; with ``accumulate_in_fp32`` it adds
        up averages as stage 2 does. Last bits differ from ``ddp.no_sync()``, which adds up each rank's own gradients
        and averages once; that also works here, and matches DDP bit for bit.

        Raises:
            RuntimeError: under Join, since a rank that has joined would take a step.
        """
        if self._join_config.enable:
            raise RuntimeError(
                "Expected no opt.accumulate() under Join, got one: a rank that has joined would take a step. Use "
                "ddp.no_sync()."
            )
        if not self._takes_hook:
            yield
            return
        hook = self._overlap()
        before, hook.accumulates = hook.accumulates, True
        try:
            yield
        finally:
            hook.accumulates = before

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, between backward and step. A collective in stage 2.

        With overlap it must be called from the first step on; then all steps wait for ``opt.step()``. Norms of fp16
        and bf16 gradients are fp32; norms of scaled gradients are those of the unscaled ones.

        Args:
            max_norm: the largest norm.
            norm_type: order of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise if the norm is not finite; if False, clip by it, as torch does.
            parameters: some of the optimizer's parameters, the same on every rank, such as a group's, whose norms
                add up in this order; None: all, in the order documented for ``max_grad_norm``.

        Returns:
            The norm of all gradients before clipping, a scalar, the same on every rank.

        Raises:
            ValueError: for a parameter that is not in the optimizer.
            RuntimeError: if gradients were used by a step inside backward or not averaged; see ``error_if_nonfinite``.
        """
        if self._join_config.enable and self._reduction is not None:
            raise RuntimeError(
                "Expected no opt.clip_grad_norm_() under Join with stage=2, got one: ranks that have joined would not "
                "take part. Build the optimizer with max_grad_norm=, which they follow."
            )
        table = self._sharded.table
        parameters = [parameters] if isinstance(parameters, Tensor) else parameters
        params = None if parameters is None else list(parameters)
        if any(param not in table.index_of for param in params or ()):
            raise ValueError("Expected parameters of this optimizer, got one that is in none of its groups.")
        self._let_gradients_wait()
        norm_type = float(norm_type)

        def check(total: Tensor) -> None:
            """Refuse to clip by a norm that is not finite, if ``error_if_nonfinite``."""
            if error_if_nonfinite and not torch.isfinite(total):
                raise RuntimeError(
                    f"Expected a finite norm of order {norm_type} of all gradients, got {total.item()} "
                    f"({self._sharded.comm.name(self._sharded.comm.group_rank)}). Pass error_if_nonfinite=False to "
                    "clip by it all the same."
                )

        total, coefficient, norms = clip_gradients(
            self._sharded,
            self._sharded.norm_order if params is None else [table.index_of[param] for param in params],
            float(max_norm),
            norm_type,
            is_partitioned=self._reduction is not None,
            inverse_scale=self._decision.inverse_scale,
            check=check,
        )
        self._decision.clipped = total, coefficient
        self._decision.norms_before_clip = norms
        return total

    def full_grad(self, param: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter, on every rank. A collective in stage 2.

        Args:
            param: one of the optimizer's parameters, the same on every rank.

        Returns:
            A new tensor in the parameter's shape and dtype; None if the parameter has no gradient.

        Raises:
            ValueError: if the parameter is not in the optimizer.
            RuntimeError: if the step inside backward has used the gradient up, or if no reduction has averaged it.
        """
        index = self._sharded.table.index_of.get(param)
        if index is None:
            raise ValueError(f"Expected a parameter of this optimizer, got one of shape {list(param.shape)}.")
        self._check_averaged()
        if self._reduction is None:
            return None if param.grad is None else param.grad.detach().clone()
        return gather_gradient(self._sharded, index)

    def _watch_forward(self) -> bool:
        """Find the DDP models over these parameters, unless they are known, and watch their forward passes.

        Returns:
            True if models were found.
        """
        if self._sharded.comm.world_size == 1 or not self._passes.should_search():
            return False
        models = models_over(self._sharded.table.params)
        self._passes.watch(models)
        return bool(models)

    def _why_wait(self) -> str | None:
        """Why backward passes only reduce and ``opt.step()`` takes the step, or None."""
        if not self._overlaps:
            return "overlap_with_ddp=False"
        return self._waits_because or self._decision.why_wait()

    def _let_gradients_wait(self) -> None:
        """Before a change of gradients: check that no step has used them, and make later steps wait.

        Raises:
            RuntimeError: if the step was taken inside backward, or in stage 2 if gradients were not averaged.
        """
        hook = self._hook
        if self._reduction is not None:
            self._check_averaged()
        if hook is None or not self._overlaps:
            return
        if hook.machine.phase is Phase.STEPPED:
            raise RuntimeError(
                "Expected gradients that no step has used, got some after a step inside backward "
                f"({hook.machine.where}). Clip from the first step on, or build the optimizer with max_grad_norm= or "
                "overlap_with_ddp=False."
            )
        if hook.is_waiting:
            self._waits_because = CHANGED

    def _check_averaged(self) -> None:
        """Check that ``param.grad`` is the same on every rank, as it may not be after passes under ``no_sync()``.

        If no reduction is known, ranks compare gradients. A collective only then.

        Raises:
            RuntimeError: on every rank, naming a parameter.
        """
        hook, sharded, passes = self._hook, self._sharded, self._passes
        if self._join_config.enable:
            return
        is_local = passes.last_is_local if self._reduction is None else hook is not None and hook.has_only_local()
        everything = range(len(sharded.table))
        if is_local:
            check_averaged(sharded, everything, NO_PASS)
        elif hook is not None:
            self._check_unreduced(sharded.binding.not_reduced)
        elif passes.reduces_fewer_than(sum(param.requires_grad for param in sharded.table.params)):
            self._check_unreduced(everything)

    def _check_unreduced(self, indices: Sequence[int]) -> None:
        if indices:
            check_averaged(self._sharded, indices, NO_BUCKET)

    @property
    def _takes_hook(self) -> bool:
        return self._overlaps or self._reduction is not None or self._decision.options.accumulate_in_fp32

    def _overlap(self) -> OverlapHook:
        if self._hook is None:
            raise RuntimeError(
                "Expected a DDP communication hook with overlap_with_ddp=True, stage=2 or accumulate_in_fp32=True, got "
                "none. Build one with hook_with_zero_step(None, ddp, opt) and register it with "
                "ddp.register_comm_hook(None, hook)."
            )
        return self._hook
