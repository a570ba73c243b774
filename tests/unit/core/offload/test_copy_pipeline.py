"""Buckets on their way to the host and back, with a device stand-in that copies late."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from ddp_zero.core.offload.copy_pipeline import CopyPipeline, Load, Transfer, merge_copies, transfer_for
from ddp_zero.core.offload.placement import OnHost
from tests import internals
from tests.multiproc.two_memories import StrictTransfer, taken_for_a_device


def load(index: int, numel: int = 3, has_value: bool = True) -> Load:
    value = torch.full((numel,), float(index)) if has_value else None
    return Load(index, torch.full((numel,), index + 0.5), value, torch.zeros(numel))


def arrive(pipeline: CopyPipeline, bucket: int, loads: list[Load], targets: dict[int, Tensor]) -> list[int]:
    """Buckets that are stepped: each tensor becomes value minus gradient, and is shown."""
    stepped = []
    for due, source in pipeline.arrive(bucket, lambda: loads) if bucket >= 0 else pipeline.drain():
        stepped.append(due)
        for one in LOADS[due]:
            grad = source.gradient(one.index)
            assert grad is not None
            one.stepped.sub_(grad)
        if LOADS[due]:
            pipeline.show([(targets[one.index], one.stepped) for one in LOADS[due]])
        assert source.gradient(99) is None
    return stepped


LOADS: dict[int, list[Load]] = {}


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_gradients_and_values_arrive_and_what_is_stepped_comes_back(buffers: int) -> None:
    pipeline = CopyPipeline(StrictTransfer(), buffers)
    targets = {index: torch.zeros(3) for index in range(12)}
    stepped = []
    for step in range(2):
        LOADS.clear()
        LOADS.update({bucket: [load(2 * bucket), load(2 * bucket + 1)] for bucket in range(6)})
        for bucket in range(6):
            stepped += arrive(pipeline, bucket, LOADS[bucket], targets)
        stepped += arrive(pipeline, -1, [], targets)
        assert all(torch.equal(target, torch.full((3,), -0.5)) for target in targets.values()), step
    assert stepped == [*range(6), *range(6)]
    assert pipeline.nbytes == buffers * 48


def test_a_bucket_of_which_this_rank_owns_nothing_takes_its_turn() -> None:
    pipeline = CopyPipeline(StrictTransfer(), 3)
    LOADS.clear()
    LOADS.update({0: [load(0)], 1: [], 2: [load(1, has_value=False)]})
    targets = {index: torch.zeros(3) for index in range(2)}
    stepped = [one for bucket in range(3) for one in arrive(pipeline, bucket, LOADS[bucket], targets)]
    assert stepped + arrive(pipeline, -1, [], targets) == [0, 1, 2]
    assert targets[1].tolist() == [-1.5] * 3


def test_low_precision_is_rounded_on_the_host() -> None:
    transfer = StrictTransfer()
    pipeline = CopyPipeline(transfer, 2)
    master, target = torch.tensor([1.001, 2.003, 3.005]), torch.zeros(3, dtype=torch.bfloat16)
    one = Load(0, torch.ones(3, dtype=torch.bfloat16), None, master)
    for _, source in chain(pipeline.arrive(0, lambda: [one]), pipeline.drain()):
        grad = source.gradient(0)
        assert grad is not None
        assert grad.dtype is torch.bfloat16
        pipeline.show([(target, master)])
    assert torch.equal(target, master.bfloat16())


def test_an_error_forgets_what_is_on_the_way_and_the_buffers_serve_again() -> None:
    transfer = StrictTransfer()
    pipeline = CopyPipeline(transfer, 3)
    for bucket in range(2):
        for _ in pipeline.arrive(bucket, lambda: [load(0)]):
            pipeline.show([(torch.zeros(3), torch.ones(3))])
    pipeline.abandon()
    assert list(pipeline.drain()) == []
    assert transfer.busy == []
    assert not pipeline.is_stepping


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
    residence = OnHost(3)
    internals.add_pipeline(residence, other, CopyPipeline(StrictTransfer(), 3))
    assert not residence.is_away(cpu)
    assert list(residence.arrive(0, other, "source 0", lambda: [load(0)])) == []
    assert [(bucket, type(source).__name__) for bucket, source in residence.arrive(1, cpu, "source 1", list)] == [
        (0, "Arrived"),
        (1, "str"),
    ]
    assert list(residence.drain()) == []


def test_buffers_grow_to_what_is_needed() -> None:
    with taken_for_a_device():
        residence = OnHost(2)
        device = torch.device("cpu")
        for bucket, numel in enumerate((3, 30, 300, 3)):
            for _ in residence.arrive(bucket, device, None, lambda numel=numel: [load(0, numel)]):  # type: ignore[misc]
                pass
        assert [bucket for bucket, _ in residence.drain()] == [3]
        nbytes = 2 * 30 * 4 + 2 * 300 * 4
        assert residence.describe() == [
            f"offload: state and step on the host, {nbytes:,} bytes in 2 pinned buffers a device"
        ]
