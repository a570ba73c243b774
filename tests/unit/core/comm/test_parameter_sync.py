"""Syncs of one rank, whose peer is a list of values; what travels is tested with the storages and over the wire."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_zero.core.comm.parameter_sync import ParameterSync
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.recorder import run_acts
from ddp_zero.core.comm.tracing import Trace
from ddp_zero.core.local.parameters import PublishedGradients
from ddp_zero.core.local.storage import ViewStorage
from tests.unit.core.local.plans import label, make_plan


class Arriving:
    """An exchange that is there when it is waited for, with zeros."""

    def __init__(self, comm: "OneRank", segments: Sequence[Tensor]) -> None:
        self._comm = comm
        self._segments = segments

    def wait(self, what: str) -> None:
        self._comm.waited.append(int(what.rsplit(" ", 1)[1]))
        for segment in self._segments[1:]:
            segment.data.view(torch.uint8).zero_()


class OneRank:
    """Rank 0 of 2, as a `Communicator`, which gathers through copies of so many bytes."""

    group_rank, world_size, is_alone = 0, 2, False

    def __init__(self, copied: int) -> None:
        self.round, self.copied = 0, copied
        self.trace = Trace()
        self.sent: list[int] = []
        self.waited: list[int] = []
        self.has_left_rings = False

    def has_direct_messages(self, device: torch.device) -> bool:
        return False

    def name(self, group_rank: int) -> str:
        return f"rank {group_rank} (global rank {group_rank})"

    def abandon_ring_transfers(self) -> None:
        self.has_left_rings = True

    def staging_nbytes(self, segments: Sequence[Tensor]) -> int:
        return self.copied

    def prepare_all_gather(self, segments: Sequence[Tensor], subject: tuple[int, ...]) -> Callable[[], Arriving]:
        def start() -> Arriving:
            self.sent.append(subject[1])
            return Arriving(self, segments)

        return start


class Stepped:
    """Four parameters in four buckets, of which rank 0 owns the first and the third."""

    def __init__(self, copied: int = 0, may_outlast: bool = True) -> None:
        self.params = [nn.Parameter(torch.ones(4)) for _ in range(8)]
        self.plan = make_plan(self.params, 2, cap=32)
        assert len(self.plan.buckets) == 4
        self.comm = OneRank(copied)
        comm: Any = self.comm
        storage = ViewStorage(self.plan, self.params, label)
        buckets = self.plan.buckets[:: -1 if may_outlast else 1]
        self.sync = ParameterSync(Ranks.alone(comm), storage, self.params, 0, buckets, may_outlast=may_outlast)

    def send(self) -> None:
        for bucket in self.plan.buckets:
            run_acts(self.sync.acts(bucket.index), PublishedGradients(self.params))

    def step(self) -> None:
        self.send()
        self.sync.end_step()

    def received(self, bucket: int) -> nn.Parameter:
        return self.params[self.plan.buckets[bucket].segments[1].params[0]]


def test_a_version_counts_up_at_the_step_and_when_values_come_if_there_was_a_gradient() -> None:
    stepped = Stepped()
    stepped.received(0).grad = torch.ones(4)
    with_gradient, without = stepped.received(0), stepped.received(1)
    before = with_gradient._version, without._version
    stepped.step()
    assert with_gradient._version > before[0]
    with_gradient.grad = None
    stepped.sync.pending_syncs.complete()
    assert (with_gradient._version, without._version) == (before[0] + 2, before[1])


def test_abandon_leaves_pending_syncs_of_an_earlier_step_to_complete() -> None:
    stepped = Stepped()
    stepped.step()
    stepped.sync.abandon()
    assert stepped.comm.has_left_rings, "what was started may never end"
    assert stepped.received(1).sum() == 0
    stepped.sync.pending_syncs.complete()
    assert sorted(stepped.comm.waited) == [0, 1, 2, 3]


def test_a_bucket_with_a_parameter_whose_uses_cannot_be_noticed_is_waited_for_at_once() -> None:
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    stepped = Stepped()
    stepped.received(2).__class__ = Own
    stepped.step()
    assert stepped.comm.waited == [2]
    assert type(stepped.received(2)) is Own
    stepped.sync.pending_syncs.complete()


def test_at_most_two_buckets_are_copied_at_once() -> None:
    for copied, received in ((0, []), (16, [0, 1])):  # bucket 2 waits for bucket 0, bucket 3 for bucket 1
        stepped = Stepped(copied, may_outlast=False)
        stepped.send()
        assert (stepped.comm.sent, stepped.comm.waited) == ([0, 1, 2, 3], received)
    later = Stepped(16)
    later.send()
    assert later.comm.waited == [], "a sync that may outlast the step waits for no other"
