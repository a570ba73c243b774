"""Public methods and attributes of the inner class, such as ``train()`` and ``eval()`` of schedule-free optimizers.

A method of the inner optimizer acts on this rank's shard. So a call is a collective: every rank makes it, with the
options of the exposed groups, and if it has written to parameters on any rank, all are sent as after a step.
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
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.local.memory import digest
from ddp_zero.core.local.parts import run_of
from ddp_zero.core.plan.ownership import home, is_cut
from ddp_zero.core.step.sharded_step import ShardedStep

_SAFE = (Phase.REST, Phase.WAITING)


def attribute_of_inner(optimizer: Any, name: str) -> Any:
    """A public attribute of the inner optimizer; its methods become collectives.

    Raises:
        AttributeError: if the inner optimizer has none of this name, or does not exist yet.
    """
    inner = vars(optimizer).get("optim")
    if name.startswith("_") or inner is None or not hasattr(inner, name):
        of_inner = "" if inner is None or name.startswith("_") else f", nor has {type(inner).__name__}"
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {name!r}{of_inner}")
    value = getattr(inner, name)
    if not (inspect.ismethod(value) and isinstance(value.__self__, Optimizer)):
        return value

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = _call_inner(vars(optimizer)["_engine"], value, args, kwargs)
        return optimizer if result is optimizer.optim else result

    return call


def _call_inner(engine: Engine, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the inner optimizer on every rank. A collective.

    Raises:
        RuntimeError: inside Join; between a backward pass that has stepped and ``opt.step()``; or if it failed on
            another rank. Writes up to then are the same on all ranks.
    """
    name = method.__name__
    if engine.joins:
        raise RuntimeError(
            f"opt.{name}() is not supported inside Join: ranks that have joined would not take part. Call it after the "
            "Join context. [ZERO-310]"
        )
    sharded, inner = engine.sharded, engine.sharded.inner
    doing = f"{type(inner).__name__}.{name}()"
    with Agreement(sharded.everyone, doing):
        _check_between_steps(engine.hook, name)
        sharded.left.complete()
        sharded.stepped.masters.follow_model()
        sharded.check_ready()
    sharded.refresh()
    sharded.stepped.follow_memory()
    sharded.stepped.follow_values()
    outcome: Future[Any] = Future()
    with sharded.change():
        before = _marks(sharded)
        sharded.snapshot = None
        sharded.local_step.mirror_to_inner()
        try:
            outcome.set_result(method(*args, **kwargs))
        except Exception as error:
            outcome.set_exception(error)
        sharded.local_step.mirror_to_exposed()
        sharded.order.after_step(inner.state, sharded.stepped.index_of)  # behind the states of earlier steps
        written = [index for index, mark in _marks(sharded).items() if mark != before[index]]
        _share_written(sharded, written, has_state=any(inner.state.values()))
    with Agreement(sharded.everyone, doing):
        return outcome.result()


def _check_between_steps(hook: OverlapHook | None, name: str) -> None:
    is_over = hook is not None and hook.machine.phase is Phase.STEPPED and not hook.machine.user_calls_step
    if hook is not None and hook.machine.phase not in _SAFE and not is_over:
        raise RuntimeError(
            f"opt.{name}() must be called between two steps, got phase {hook.machine.phase.name} "
            f"({hook.machine.where}): a plain loop would call it before the update that backward has made already. "
            "Call opt.step() first, or opt.reset() after an interrupted backward pass. [ZERO-309]"
        )


def _share_written(sharded: ShardedStep, written: list[int], has_state: bool) -> None:
    """Send parameters to all ranks if any rank has written to its own. A collective."""
    stepped, params = sharded.stepped, sharded.table.params
    stepped.write_back(written)
    travel = {param for bucket in sharded.plan.buckets for one in bucket.segments for param in one.params}
    mine = [any(index in travel for index in written), any(index not in travel for index in written), has_state]
    every = sharded.everyone.all_gather_ints([int(flag) for flag in mine])
    in_plan, outside, any_state = (any(flags) for flags in zip(*every, strict=True))
    sharded.order.is_at_birth &= not any_state
    if in_plan:
        _sync(sharded)
    if outside:
        for index in sorted(set(range(len(params))) - travel):
            _send(sharded, index)
    if in_plan or outside:
        whole = {index for index in sharded.binding.owned() if stepped.part(index) is None}
        increment_version([param for index, param in enumerate(params) if index not in whole])
        stepped.masters.note_versions()


def _sync(sharded: ShardedStep) -> None:
    sync = sharded.binding.sync
    try:
        for bucket in sharded.plan.buckets:
            sync.start(bucket)
        sharded.end_syncs()
    except BaseException:
        sync.abandon()
        raise


@torch.no_grad()
def _send(sharded: ShardedStep, index: int) -> None:
    """Send a frozen parameter, which is in no bucket of the plan."""
    value, pieces = sharded.table.params[index].detach(), sharded.binding.pieces[index]
    if is_cut(pieces):
        for piece in pieces:
            sharded.comm.send_to_all(run_of(value)[piece.start : piece.stop], piece.owner)
        return
    staged = value.contiguous()
    sharded.comm.send_to_all(staged, home(pieces))
    if staged.data_ptr() != value.data_ptr():
        value.copy_(staged)


@torch.no_grad()
def _marks(sharded: ShardedStep) -> dict[int, int]:
    """A digest of each owned parameter or its master, by index; different values collide with probability 2^-64.

    Versions are not enough: writes through ``.data`` do not change them.
    """
    marks = {index: digest(sharded.stepped[index].detach()) for index in sharded.binding.owned()}
    return {index: int(mark) for index, mark in marks.items()}
