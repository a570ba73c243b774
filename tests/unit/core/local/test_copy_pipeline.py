"""Buckets on their way to the host and back, with a device stand-in that copies late."""

import weakref

import pytest
import torch

from ddp_zero.core.local.copy_pipeline import CopyPipeline, StepInputs, Transfer, merge_copies, transfer_for
from ddp_zero.core.local.placement import HostOffload
from tests import internals
from tests.multiproc.two_memories import StrictTransfer


def load() -> StepInputs:
    return StepInputs(0, torch.full((3,), 0.5), torch.zeros(3), torch.zeros(3))


def test_abandon_drops_copies_in_flight_and_frees_all_buffers() -> None:
    transfer = StrictTransfer()
    pipeline = CopyPipeline(transfer, 3)
    for bucket in range(2):
        for _ in pipeline.submit(bucket, lambda: [load()]):
            pipeline.copy_back([(torch.zeros(3), torch.ones(3))])
    pipeline.abandon()
    assert list(pipeline.drain()) == []
    assert transfer.busy == []
    assert not pipeline.is_stepping


def test_a_gradient_can_go_once_it_is_copied_before_its_bucket_is_stepped() -> None:
    pipeline = CopyPipeline(StrictTransfer(), 3)
    given = load()
    held = weakref.ref(given.gradient)
    coming = [given]
    del given
    assert list(pipeline.submit(0, lambda: [coming.pop()])) == []
    assert held() is None
    ((bucket, source),) = pipeline.drain()
    gradient = source.gradient(0)
    assert bucket == 0
    assert gradient is not None
    assert gradient.tolist() == [0.5] * 3


def test_the_stand_in_notices_a_read_before_the_wait_and_a_write_before_the_device_is_done() -> None:
    transfer = StrictTransfer()
    buffer = transfer.buffer(12).view(torch.float32)
    copies = transfer.to_host([(buffer, torch.ones(3))])
    assert buffer.isnan().all()
    copies()
    assert buffer.tolist() == [1.0] * 3
    back = transfer.to_device([(torch.zeros(3), buffer)])
    with pytest.raises(AssertionError, match="from which the device may still read"):
        transfer.to_host([(buffer, torch.ones(3))])
    buffer.zero_()
    with pytest.raises(AssertionError, match="written while the device reads"):
        back()


def test_copies_of_neighbours_are_one() -> None:
    device, memory = torch.arange(20.0), torch.zeros(20)
    pairs = [(memory[0:4], device[2:6]), (memory[4:6], device[6:8]), (memory[8:9], device[8:9])]
    pieces = merge_copies([*pairs, (memory[9:15].view(2, 3), device[9:15].view(2, 3))])
    assert [target.numel() for target, _ in pieces] == [6, 7]
    for target, source in pieces:
        target.copy_(source)
    assert memory.tolist() == [2, 3, 4, 5, 6, 7, 0, 0, 8, 9, 10, 11, 12, 13, 14, 0, 0, 0, 0, 0]
    apart = merge_copies([(memory[:4].view(2, 2).t(), device[:4].view(2, 2)), (memory[4:6], torch.ones(2))])
    assert len(apart) == 2, "transposed, and of another storage"


def test_only_accelerators_need_copies() -> None:
    assert transfer_for(torch.device("cpu")) is None
    assert isinstance(transfer_for(torch.device("cuda", 0)), Transfer)


def test_a_bucket_on_the_cpu_comes_after_those_on_the_way_and_is_stepped_where_it_is() -> None:
    cpu, other = torch.device("cpu"), torch.device("cuda", 7)
    placement = HostOffload(3)
    internals.add_pipeline(placement, other, CopyPipeline(StrictTransfer(), 3))
    assert not placement.is_offloaded(cpu)
    assert list(placement.submit(0, other, "source 0", lambda: [load()])) == []
    assert [(bucket, type(source).__name__) for bucket, source in placement.submit(1, cpu, "source 1", list)] == [
        (0, "HostGradients"),
        (1, "str"),
    ]
    assert list(placement.drain()) == []
