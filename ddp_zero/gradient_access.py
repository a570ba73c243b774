"""What users do with gradients between backward and the step, on any rank: accumulate, clip and read them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ddp_zero.engine import Engine
from ddp_zero.stage2.visible import gather_gradient
from ddp_zero.step.clipping import clip_gradients


@contextmanager
def accumulating(engine: Engine) -> Iterator[None]:
    """See `ZeroRedundancyOptimizer.accumulate`."""
    if engine.joins:
        raise RuntimeError(
            "Expected no opt.accumulate() under Join, got one: a rank that has joined would take a step. Use "
            "ddp.no_sync()."
        )
    if not engine.takes_hook:
        yield
        return
    hook = engine.needed_hook()
    before, hook.accumulates = hook.accumulates, True
    try:
        yield
    finally:
        hook.accumulates = before


def clip_grad_norm(
    engine: Engine,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    parameters: Tensor | Iterable[Tensor] | None,
) -> Tensor:
    """See `ZeroRedundancyOptimizer.clip_grad_norm_`."""
    if engine.joins and engine.is_partitioned:
        raise RuntimeError(
            "Expected no opt.clip_grad_norm_() under Join with stage=2, got one: ranks that have joined would not "
            "take part. Build the optimizer with max_grad_norm=, which they follow."
        )
    sharded, decision = engine.sharded, engine.decision
    index_of, comm = sharded.table.index_of, sharded.comm
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    params = None if parameters is None else list(parameters)
    if any(param not in index_of for param in params or ()):
        raise ValueError("Expected parameters of this optimizer, got one that is in none of its groups.")
    engine.let_gradients_wait()

    def check(total: Tensor) -> None:
        """Refuse to clip by a norm that is not finite, if ``error_if_nonfinite``."""
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"Expected a finite norm of order {float(norm_type)} of all gradients, got {total.item()} "
                f"({comm.name(comm.group_rank)}). Pass error_if_nonfinite=False to clip by it all the same."
            )

    total, coefficient, decision.norms_before_clip = clip_gradients(
        sharded,
        sharded.table.norm_order if params is None else [index_of[param] for param in params],
        float(max_norm),
        float(norm_type),
        is_partitioned=engine.is_partitioned,
        rounds=decision.rounds_norms,
        inverse_scale=decision.inverse_scale,
        beyond=decision.beyond,
        check=check,
    )
    decision.clipped = total, coefficient
    return total


def full_grad(engine: Engine, param: Tensor) -> Tensor | None:
    """See `ZeroRedundancyOptimizer.full_grad`."""
    index = engine.sharded.table.index_of.get(param)
    if index is None:
        raise ValueError(f"Expected a parameter of this optimizer, got one of shape {list(param.shape)}.")
    engine.check_averaged()
    if engine.is_partitioned:
        return gather_gradient(engine.sharded, index)
    return None if param.grad is None else param.grad.detach().clone()
