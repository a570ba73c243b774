"""Operations between iterations, on both sides."""

import contextlib
import copy
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from ddp_zero import ZeroRedundancyOptimizer, checkpoint
from tests.fuzz.actions import act, evaluate
from tests.fuzz.case import Case, Do
from tests.fuzz.compare import check_equal, check_models, check_options
from tests.fuzz.iteration import step_both, train
from tests.fuzz.net import Blown, build_net
from tests.fuzz.ours import Ours, Pair, loss_scale
from tests.fuzz.plain import Plain
from tests.fuzz.sides import Memory, Side, first_ranks, optimizer_options
from tests.fuzz.toys import find_optimizer

Steps = tuple[Callable[[], Any], Callable[[], Any]]
"""What the reference does, and what ours does."""


def steps_of(pair: Pair, op: Any, memory: Memory) -> Steps:
    """What an operation does on each side.

    Args:
        pair: both sides.
        op: the operation.
        memory: the state before it.
    """
    if not isinstance(op, Do):
        return (lambda: train(pair.plain, op, memory)), (lambda: train(pair.ours, op, memory))
    own = _ON_PAIR.get(op.name)
    if own is not None:
        return own(pair, op, memory)
    one = _ON_SIDE[op.name]
    return (lambda: one(pair.plain, op, memory)), (lambda: one(pair.ours, op, memory))


# The same on either side


def _zero_grad(side: Side, op: Do, memory: Memory) -> None:
    side.zero_grad()


def _evaluate(side: Side, op: Do, memory: Memory) -> None:
    evaluate(side, sees_output=True)


def _load_optimizer(side: Side, op: Do, memory: Memory) -> None:
    act(side, ("load_optimizer",), memory)


def _load_model(side: Side, op: Do, memory: Memory) -> None:
    state = {key: value * 0.99 if value.is_floating_point() else value for key, value in memory.model.items()}
    side.net.load_state_dict(state)
    side.has_written()


def _deepcopy_state(side: Side, op: Do, memory: Memory) -> None:
    side.seen.append(("state_dict", copy.deepcopy(side.net.state_dict())))


def _freeze(side: Side, op: Do, memory: Memory) -> None:
    side.zero_grad()
    params = [param for param in side.params if param.requires_grad]
    if len(params) > 1:
        params[op.args[0] % len(params)].requires_grad_(False)


def _unfreeze(side: Side, op: Do, memory: Memory) -> None:
    for position, param in enumerate(side.params):
        param.requires_grad_(position not in side.net.frozen_for_ever)


def _prehook(side: Side, op: Do, memory: Memory) -> None:
    def slow_down(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * op.args[0]

    side.optimizer.register_step_pre_hook(slow_down)


def _add_param_group(side: Side, op: Do, memory: Memory) -> None:
    params = side.held_out()
    if not params:
        return
    members: list[Any] = params if side.case.optim.named else [param for _, param in params]
    options = {"lr": side.optimizer.param_groups[0]["lr"] * 0.5}
    for _, param in params:
        param.grad = None
    side.optimizer.add_param_group({"params": members, **options})


def _exception(side: Side, op: Do, memory: Memory) -> None:
    where, way = op.args
    side.zero_grad()
    side.net.blows = where
    try:
        with contextlib.suppress(Blown):
            side.backward("last", 0, True, 1.0)
            raise RuntimeError("the model did not raise")
    finally:
        side.net.blows = None
        side.seen.clear()
    if way == "reset" and isinstance(side, Ours):
        side.optimizer.reset()
    if way in ("wrap_again", "drop"):
        side.wrap_again(is_new=way == "drop")
        side.load(memory)


def _schedule_free_eval(side: Side, op: Do, memory: Memory) -> None:
    side.optimizer.eval()
    side.seen.append(("averages", [param.detach().clone() for param in side.params]))
    evaluate(side, sees_output=True)
    side.optimizer.train()


def _deepcopy(side: Side, op: Do, memory: Memory) -> None:
    side.copy_all()


def _memory_format(side: Side, op: Do, memory: Memory) -> None:
    side.zero_grad()
    side.net.to(memory_format=torch.channels_last if op.args[0] % 2 else torch.contiguous_format)  # type: ignore[call-overload]
    # with a hook plain DDP mixes up gradients after such a change; its views of buckets keep the old strides, in which
    # norms add up otherwise than in stage 2, whose gradients follow
    if isinstance(side, Plain) and (side.has_hook or side.case.takes_norms_of_sums):
        buffers = [buffer.clone() for buffer in side.net.buffers()]
        frozen = [param for param in side.params if not param.requires_grad]
        _unfreeze(side, op, memory)  # DDP reduces only parameters that require gradients when it is built
        side.wrap_again(is_new=False)
        for param in frozen:
            param.requires_grad_(False)
        for buffer, before in zip(side.net.buffers(), buffers, strict=True):
            buffer.copy_(before)  # a new DDP model has those of rank 0


def _join(side: Side, op: Do, memory: Memory) -> None:
    _join_unused(side, replace(op, args=tuple(((),) * count for count in op.args)), memory)


def _join_unused(side: Side, op: Do, memory: Memory) -> None:
    """For each rank what each of its passes leaves out."""
    second, leads = side.second, side.case.optim.second is not None and side.case.optim.second.leads
    steps = [second, side.optimizer] if leads else [side.optimizer, second]
    with Join([side.ddp, *(one for one in steps if isinstance(one, ZeroRedundancyOptimizer))]):
        for number, parts in enumerate(op.args[side.place.rank]):
            side.zero_grad()
            side.net.left_out = parts
            side.backward("last", number, True, 1.0)
            step_both(side)
    side.seen.clear()
    if isinstance(side, Plain):
        side.is_stale = len(op.args[side.place.rank]) < max(map(len, op.args))


_ON_SIDE: dict[str, Callable[[Side, Do, Memory], None]] = {
    "zero_grad": _zero_grad,
    "eval": _evaluate,
    "load_optimizer": _load_optimizer,
    "load_model": _load_model,
    "deepcopy_state": _deepcopy_state,
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "prehook": _prehook,
    "add_param_group": _add_param_group,
    "exception": _exception,
    "schedule_free_eval": _schedule_free_eval,
    "deepcopy": _deepcopy,
    "memory_format": _memory_format,
    "join": _join,
    "join_unused": _join_unused,
}


# Different on the two sides


def _nothing() -> None:
    pass


def _remember(pair: Pair, op: Do, memory: Memory) -> Steps:
    return (lambda: pair.remember("remembered")), _nothing


def _restore(pair: Pair, op: Do, memory: Memory) -> Steps:
    remembered = pair.memories.get("remembered", memory)
    return (lambda: pair.plain.load(remembered)), (lambda: pair.ours.load(remembered))


def _checkpoint_save(pair: Pair, op: Do, memory: Memory) -> Steps:
    ours = pair.ours

    def save() -> None:
        checkpoint.save(_folder(ours), ours.ddp, ours.optimizer, background=bool(op.args[0] % 2)).wait()

    return (lambda: pair.remember("saved")), save


def _checkpoint_load(pair: Pair, op: Do, memory: Memory) -> Steps:
    saved, ours = pair.memories["saved"], pair.ours

    def load_plain() -> None:
        pair.plain.load(saved)
        pair.plain.zero_grad()
        for buffer in pair.plain.net.buffers():
            dist.broadcast(buffer, 0)  # a checkpoint has those of rank 0

    def load() -> None:
        checkpoint.load(_folder(ours), ours.ddp, ours.optimizer)
        ours.load_second(saved)
        ours.zero_grad()  # a load drops those of its own optimizer

    return load_plain, load


def _fork(pair: Pair, op: Do, memory: Memory) -> Steps:
    def fork() -> None:
        gc.collect()  # a child that collects an earlier case's process group waits in its destructor for threads
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)

    return _nothing, fork


def _restart(pair: Pair, op: Do, memory: Memory) -> Steps:
    """A new optimizer, which may divide parameters otherwise, goes on from a checkpoint."""
    plain, ours = pair.plain, pair.ours

    def again() -> None:
        masters = [master.detach().clone() for master in plain.masters.values()]
        plain.wrap_again(is_new=True)
        plain.load(memory)
        with torch.no_grad():
            for master, before in zip(plain.masters.values(), masters, strict=True):
                master.copy_(before)
        for buffer in plain.net.buffers():
            dist.broadcast(buffer, 0)  # a checkpoint has those of rank 0

    def from_checkpoint() -> None:
        folder = _folder(ours).with_suffix(".restart")  # not where later loads expect what was saved before
        checkpoint.save(folder, ours.ddp, ours.optimizer)
        mode = replace(ours.case.mode, partition=op.args[0])
        ours.case = replace(ours.case, mode=mode)
        if op.args[1] < dist.get_world_size():
            folder = _through_fewer_ranks(ours, folder, op.args[1])
        ours.wrap_again(is_new=True)
        checkpoint.load(folder, ours.ddp, ours.optimizer)
        ours.load_second(memory)

    return again, from_checkpoint


def _through_fewer_ranks(ours: Ours, folder: Path, size: int) -> Path:
    """Load on the first ranks alone and save there; returns where."""
    group, there = first_ranks(size), folder.with_suffix(".between")
    if dist.get_rank() < size:
        fewer, case = copy.copy(ours), ours.case
        fewer.net = build_net(case)
        groups, one = fewer.groups(list(fewer.net.named_parameters())), find_optimizer(case.optim.name)
        own: dict[str, Any] = {"master_weights": case.mode.masters, "loss_scale": loss_scale(case.mode.loss_scale)}
        optimizer = ZeroRedundancyOptimizer(groups, one.build, process_group=group, **own, **optimizer_options(case))
        checkpoint.load(folder, fewer.net, optimizer)
        checkpoint.save(there, fewer.net, optimizer)
    dist.barrier()
    return there


def _folder(side: Side) -> Path:
    return Path(side.place.folder) / f"case {side.case.seed}"


def _consolidate(pair: Pair, op: Do, memory: Memory) -> Steps:
    ours, plain = pair.ours, pair.plain

    def consolidate() -> None:
        to = op.args[0] % dist.get_world_size()
        ours.optimizer.consolidate_state_dict(to=to)
        if dist.get_rank() == to and not plain.is_stale:
            check_state(plain.optimizer, ours.optimizer, _loads_from_disk(plain.case))

    return _nothing, consolidate


def check_state(one: Any, other: Any, drops_empty: bool = False) -> None:
    """See that a consolidated state dict is the plain optimizer's; without empty states, of which disks hold none.

    Raises:
        Difference: if not.
    """
    expected, actual = one.state_dict(), other.state_dict()
    held = [
        {key: state for key, state in side["state"].items() if state or not drops_empty} for side in (expected, actual)
    ]
    check_equal(held[0], held[1], "state")
    check_options(one, other)
    indices = [[group["params"] for group in one["param_groups"]] for one in (expected, actual)]
    check_equal(indices[0], indices[1], "indices of the groups")


def _state_dict_before_the_first_step(pair: Pair, op: Do, memory: Memory) -> Steps:
    return _nothing, (lambda: check_state(pair.plain.optimizer, pair.ours.optimizer))


def _owned(pair: Pair, op: Do, memory: Memory) -> Steps:
    def look() -> None:
        assert pair.ours.optimizer.explain()
        assert repr(pair.ours.optimizer)

    return _nothing, look


def _finish(pair: Pair, op: Do, memory: Memory) -> Steps:
    def look() -> None:
        check_models(pair.plain.net, pair.ours.net)
        check_equal(pair.plain.average, pair.ours.average, "the average over time")
        if pair.plain.case.mode.masters:
            return
        optimizers = [(pair.plain.optimizer, pair.ours.optimizer), (pair.plain.second, pair.ours.second)]
        for one, other in optimizers:
            if isinstance(other, ZeroRedundancyOptimizer):
                for rank in range(dist.get_world_size()):
                    other.consolidate_state_dict(to=rank)
            if one is not None and not pair.plain.is_stale:
                check_state(one, other, _loads_from_disk(pair.plain.case))

    return _nothing, look


def _loads_from_disk(case: Case) -> bool:
    return any(isinstance(op, Do) and op.name in ("checkpoint_load", "restart") for op in case.program)


_ON_PAIR: dict[str, Callable[[Pair, Do, Memory], Steps]] = {
    "remember": _remember,
    "restore": _restore,
    "checkpoint_save": _checkpoint_save,
    "checkpoint_load": _checkpoint_load,
    "fork": _fork,
    "restart": _restart,
    "consolidate": _consolidate,
    "state_dict_before_the_first_step": _state_dict_before_the_first_step,
    "owned": _owned,
    "finish": _finish,
}

OPERATIONS = {*_ON_SIDE, *_ON_PAIR}
"""Names of all that is done between iterations."""
