"""Forwards public methods and attributes of the inner class, such as ``train()`` of schedule-free optimizers.

A method of the inner optimizer acts on this rank's shard. So a call is a collective: every rank makes it, with the
options of the exposed groups. If it has written to parameters on any rank, all parameters are sent as after a step.
"""

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ddp_zero.core.backward.hook import OverlapHook
from ddp_zero.core.backward.overlap_machine import Phase
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.recorder import run_acts
from ddp_zero.core.engine.attachment import Attachment
from ddp_zero.core.local.memory import digest
from ddp_zero.core.local.parameters import PublishedGradients
from ddp_zero.core.step.rank_shard import Shard

_SAFE = (Phase.REST, Phase.WAITING)


def attribute_of_inner(optimizer: Any, name: str) -> Any:
    """A public attribute of the inner optimizer, whose methods become collectives; AttributeError without one."""
    inner = vars(optimizer).get("optim")
    if name.startswith("_") or inner is None or not hasattr(inner, name):
        of_inner = "" if inner is None or name.startswith("_") else f", nor has {type(inner).__name__}"
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {name!r}{of_inner}")
    value = getattr(inner, name)
    if not (inspect.ismethod(value) and isinstance(value.__self__, Optimizer)):
        return value

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = _call_inner(vars(optimizer)["_attachment"], value, args, kwargs)
        return optimizer if result is optimizer.optim else result

    return call


def _call_inner(
    attachment: Attachment, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of the inner optimizer on every rank. A collective.

    Raises RuntimeError inside Join, between a backward pass that has stepped and ``opt.step()``, or if the method has
    failed on another rank. What the method wrote before its error is sent all the same.
    """
    name = method.__name__
    if attachment.in_join:
        raise RuntimeError(
            f"opt.{name}() is not supported inside Join: ranks that have joined would not take part. Call it after the "
            "Join context. [ZERO-310]"
        )
    shard, inner = attachment.shard, attachment.shard.inner
    doing = f"{type(inner).__name__}.{name}()"
    with Agreement(shard.everyone, doing):
        _check_between_steps(attachment.hook, name)
        shard.pending_syncs.complete()
        shard.masters.follow_model()
        shard.check_ready()
    shard.refresh()
    shard.targets.follow_memory()
    shard.targets.follow_values()
    outcome: Future[Any] = Future()
    with shard.changing_state():
        before = _marks(shard)
        shard.snapshot = None
        shard.local_step.mirror_to_inner()
        try:
            outcome.set_result(method(*args, **kwargs))
        except Exception as error:
            outcome.set_exception(error)
        shard.local_step.mirror_to_exposed()
        shard.order.after_step(inner.state, shard.targets.index_of)  # new states come after those of earlier steps
        written = [index for index, mark in _marks(shard).items() if mark != before[index]]
        _share_written(shard, written, has_state=any(inner.state.values()))
    with Agreement(shard.everyone, doing):
        return outcome.result()


def _check_between_steps(hook: OverlapHook | None, name: str) -> None:
    is_over = hook is not None and hook.machine.phase is Phase.STEPPED and not hook.machine.user_calls_step
    if hook is not None and hook.machine.phase not in _SAFE and not is_over:
        raise RuntimeError(
            f"opt.{name}() must be called between two steps, got phase {hook.machine.phase.name} "
            f"({hook.machine.where}): a plain loop would call it before the update that backward has made already. "
            "Call opt.step() first, or opt.reset() after an interrupted backward pass. [ZERO-309]"
        )


def _share_written(shard: Shard, written: list[int], has_state: bool) -> None:
    """Send parameters to all ranks if any rank has written to its own. A collective."""
    stepped, params = shard.targets, shard.table.params
    stepped.write_back(written)
    travel = {param for bucket in shard.plan.buckets for segment in bucket.segments for param in segment.params}
    mine = [any(index in travel for index in written), any(index not in travel for index in written), has_state]
    every = shard.everyone.all_gather_ints([int(flag) for flag in mine])
    in_plan, outside, any_state = (any(flags) for flags in zip(*every, strict=True))
    shard.order.has_initial_state &= not any_state
    if in_plan:
        sync = shard.binding.sync
        try:
            for bucket in shard.plan.buckets:
                run_acts(sync.acts(bucket.index), PublishedGradients(params))
            shard.end_syncs()
        except BaseException:
            sync.abandon()
            raise
    if outside:  # frozen parameters, which are in no bucket of the plan
        for index in sorted(set(range(len(params))) - travel):
            shard.broadcast_from_owner(index, params[index].detach())
    if in_plan or outside:
        increment_version([params[index] for index in shard.binding.owned_by_others()])
        stepped.masters.note_versions()


@torch.no_grad()
def _marks(shard: Shard) -> dict[int, int]:
    """A digest of each owned parameter or its master, by index; different values collide with probability 2^-64.

    Versions are not enough: writes through ``.data`` do not change them.
    """
    marks = {index: digest(shard.targets[index].detach()) for index in shard.binding.owned()}
    return {index: int(mark) for index, mark in marks.items()}
