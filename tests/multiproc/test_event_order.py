"""What the hook does, in which order; the same on every rank whatever is slow, with the same numbers."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from ddp_zero.core.backward import scratch_buffers
from ddp_zero.core.backward.scratch_buffers import BucketMemory, Buffer
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.parameter_sync import BucketSync, ParameterSync
from ddp_zero.core.comm.reduction import DirectReduceScatter
from ddp_zero.core.step.runner import StepRunner
from tests.multiproc.cases import assert_identical, at_stage, batches, build_overlapped_twins, optimizer_case
from tests.multiproc.harness import Setup, run_ranks

Event = tuple[Any, ...]


def _bucket_of(reduction: DirectReduceScatter, *_: object) -> int:
    return reduction.bucket


@contextmanager
def recorded(log: list[Event], pause: Callable[[str], None]) -> Iterator[None]:
    """Log reductions, steps, syncs and messages as they are issued, pausing before each."""

    def logged(name: str, original: Any, detail: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            pause(name)
            log.append((name, detail(*args, **kwargs)))
            return original(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(
            dist.ProcessGroup,
            "allreduce",
            logged("reduce", dist.ProcessGroup.allreduce, lambda _, t, *__: t[0].numel()),
        ),
        mock.patch.object(DirectReduceScatter, "post", logged("reduce", DirectReduceScatter.post, _bucket_of)),
        mock.patch.object(DirectReduceScatter, "wait", logged("sum", DirectReduceScatter.wait, _bucket_of)),
        mock.patch.object(
            StepRunner, "step_bucket", logged("step", StepRunner.step_bucket, lambda _, own, *__: own.bucket.index)
        ),
        mock.patch.object(BucketSync, "start", logged("sync", BucketSync.start, lambda one, *_: one.bucket.index)),
        mock.patch.object(ParameterSync, "end_step", logged("finish", ParameterSync.end_step, lambda *_: None)),
        mock.patch.object(
            dist.ProcessGroup,
            "send",
            logged("send", dist.ProcessGroup.send, lambda _, tensors, peer, tag: (peer, tensors[0].numel())),
        ),
        mock.patch.object(
            Communicator, "send_tree", logged("move", Communicator.send_tree, lambda *args, **_: args[-1])
        ),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _train(
    setup: Setup, interleaved: bool, steps: int, pause: Callable[[str], None], stage: int = 1
) -> tuple[list[list[Event]], Any]:
    """The events of each step, and the parameters at the end."""
    with at_stage(stage):
        twins = build_overlapped_twins(optimizer_case("SGD momentum"), interleaved=interleaved, bucket_cap_mb=0.0003)
    events, log = list[list[Event]](), list[Event]()
    with recorded(log, pause):  # before the first pass, whose programs hold what they call
        for inputs, targets in batches(setup.rank, steps):
            nn.functional.mse_loss(twins.model(inputs), targets).backward()
            log.append(("backward done", None))
            twins.opt.step()
            events.append([*log])
            twins.opt.zero_grad()
            log.clear()
    return events, [param.detach().clone() for param in twins.model.parameters()]


def _where_owned(events: list[Event], owned: set[Event]) -> list[Event]:
    return [event for event in events if event[0] != "step" or event in owned]


def _literal_orders(setup: Setup) -> set[Event]:
    owned: set[Event] = set()
    for interleaved in (False, True):
        events, _ = _train(setup, interleaved, 3, lambda _: None)
        visible = [[event[:2] for event in log if event[0] not in ("send", "move")] for log in events]
        done = ("backward done", None)
        finish = ("finish", None)
        sizes = [108, 544, 93, 248]
        reduces = [("reduce", size) for size in sizes]
        steps = [[("step", i), ("sync", i)] for i in range(4)]
        deferred = [*reduces, *steps[0], *steps[1], *steps[2], *steps[3], finish, done]
        first, second, third, last = reduces
        overlapped = [first, second, *steps[0], third, *steps[1], last, *steps[2], *steps[3], finish, done]
        waits = [("reduce", 993), done, *steps[0], *steps[1], *steps[2], *steps[3], finish]  # the first step
        owned = {event for event in visible[0] if event[0] == "step"}
        assert visible[0] == _where_owned(waits, owned), visible[0]
        expected = _where_owned(overlapped if interleaved else deferred, owned)
        assert visible[1] == visible[2] == expected, visible[1]
        assert not any(event[0] == "move" for log in events for event in log), "owners never change"
    return owned


def test_event_order_is_the_literal_one() -> None:
    assert set.union(*run_ranks(_literal_orders, 2)) == {("step", place) for place in range(4)}


def _waited_for_first(scratch: Buffer, receives: Buffer | None, received_at: int, _: bool) -> BucketMemory:
    return BucketMemory(scratch, receives, received_at, starts_early=False)


def _literal_orders_of_stage_2(setup: Setup) -> set[Event]:
    owned: set[Event] = set()
    for interleaved, is_early in product((False, True), repeat=2):
        with nullcontext() if is_early else mock.patch.object(scratch_buffers, "BucketMemory", _waited_for_first):
            events, _ = _train(setup, interleaved, 3, lambda _: None, stage=2)
        visible = [[event for event in log if event[0] not in ("send", "move")] for log in events]
        done, finish = ("backward done", None), ("finish", None)
        reduces, sums, steps, syncs = ([(name, i) for i in range(4)] for name in ("reduce", "sum", "step", "sync"))
        stepped = [event for i in range(4) for event in (steps[i], syncs[i])]
        # a bucket is sent, and the bucket before is summed; then the latter is stepped
        pairs = [(reduces[i], sums[i - 1]) if is_early else (sums[i - 1], reduces[i]) for i in (1, 2, 3)]
        waits = [reduces[0], *chain(*pairs), sums[3], done, *stepped, finish]  # the first step
        owned = {event for event in visible[0] if event[0] == "step"}
        assert visible[0] == _where_owned(waits, owned), visible[0]
        expected = [reduces[0]]
        for i in (1, 2, 3):
            expected += [*pairs[i - 1], *([steps[i - 1], syncs[i - 1]] if interleaved else [])]
        if interleaved:
            expected += [sums[3], steps[3], syncs[3]]
        else:
            expected += [*stepped[:6], sums[3], *stepped[6:]]
        assert visible[1] == visible[2] == _where_owned([*expected, finish, done], owned), visible[1]
    return owned


def test_event_order_of_stage_2_is_the_literal_one() -> None:
    assert set.union(*run_ranks(_literal_orders_of_stage_2, 2)) == {("step", place) for place in range(4)}


SCHEDULES, MANY_SCHEDULES = 20, 200
"""In all four modes together, and in each in the nightly tier."""


def _under_random_delays(setup: Setup, interleaved: bool, stage: int, schedules: int) -> int:
    expected_events, expected_params = _train(setup, interleaved, 2, lambda _: None, stage)
    assert any(event[0] == "send" for event in expected_events[1])
    for schedule in range(schedules):
        generator = random.Random(1000 * schedule + setup.rank)
        slow = random.Random(schedule).sample(["reduce", "sum", "step", "sync", "finish"], k=2)

        def pause(name: str, generator: random.Random = generator, slow: list[str] = slow) -> None:
            if name in slow and generator.random() < 0.5:
                time.sleep(generator.random() * 0.01)

        events, params = _train(setup, interleaved, 2, pause, stage)
        assert events == expected_events, f"schedule {schedule}"
        assert_identical(expected_params, params, f"schedule {schedule}")
    return schedules


def _assert_order(interleaved: bool, stage: int, schedules: int) -> None:
    done = run_ranks(_under_random_delays, 3, interleaved, stage, schedules, timeout=240)
    assert done == [schedules] * 3


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_delays_change_neither_order_nor_numbers(interleaved: bool, stage: int) -> None:
    _assert_order(interleaved, stage, SCHEDULES // 4)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_many_delays_change_neither_order_nor_numbers(interleaved: bool, stage: int) -> None:
    _assert_order(interleaved, stage, MANY_SCHEDULES)
