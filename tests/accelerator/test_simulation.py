"""The simulated accelerator sees what it is for, and lets pass what is right."""

import copy
import math
import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import all_gather_native, reduce_scatter_native
from tests.accelerator import simulation
from tests.multiproc.harness import Cases, Setup, run_ranks_to_end

pytestmark = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))

BACKEND = "cpu:gloo,sim:simccl"


def _around(setup: Setup, body: Callable[[Setup, Any], None]) -> None:
    warnings.filterwarnings("ignore", "No backend of type 0 found")
    os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
    extension = simulation.load(4)
    extension.set_device(setup.rank)
    body(setup, extension)
    extension.synchronize(-1)


case = Cases(_around, device=simulation.NAME)


def _current(device: int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


@case(1)
def _a_read_that_nothing_orders_is_a_race(setup: Setup, sim: Any) -> None:
    values, other = torch.zeros(100, device="sim"), torch.Stream("sim")
    other.wait_stream(_current())
    values.fill_(1)
    with other:
        values[:50].sum()
    (race,) = sim.races()
    assert "read by aten::sum" in race
    assert "write by aten::fill_" in race
    assert race.count(" at test_simulation.py:") == 2, "both places"
    sim.clear_reports()
    other.wait_stream(_current())
    with other:
        values.sum()
    assert sim.races() == []


@case(1)
def _disjoint_bytes_are_no_race(setup: Setup, sim: Any) -> None:
    values, other = torch.zeros(100, device="sim"), torch.Stream("sim")
    other.wait_stream(_current())
    values[:50].fill_(1)
    with other:
        values[50:].fill_(2)
    assert sim.races() == []
    with other:
        values[49:51].fill_(3)
    assert len(sim.races()) == 1


@case(1)
def _devices_have_streams_and_memory_of_their_own(setup: Setup, sim: Any) -> None:
    values = torch.ones(5000, device="sim:1")
    values.mul_(2)
    event = torch.Event("sim:1")
    event.record()  # on the current stream of the current device, which is another one
    other = torch.Stream("sim:1")
    other.wait_event(event)
    with other:
        assert torch.accelerator.current_device_index() == 1
        values.sum()
    assert torch.accelerator.current_device_index() == 0
    assert len(sim.races()) == 1, "the event was not behind the product"
    with pytest.raises(RuntimeError, match="Expected a stream of the event's device 0, got one of device 1"):
        _current(1).record_event(event)
    place = values.data_ptr()
    del values
    assert torch.empty(5000, device="sim:0").data_ptr() != place
    assert torch.empty(5000, device="sim:1").data_ptr() == place, "freed memory is handed out again, on its device"


@case(1)
def _use_of_another_device_than_that_of_training_is_a_fault(setup: Setup, sim: Any) -> None:
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    sim.clear_reports()
    torch.equal(there, here)
    assert any("device 1 uses memory of device 0: aten::equal" in fault for fault in sim.faults()), sim.faults()
    sim.clear_reports()
    there.copy_(here)  # may go from one to another
    assert sim.faults() == []
    event = torch.Event("sim:1")
    _current(1).record_event(event)
    sim.train_on(1)
    strays: dict[str, Callable[[], Any]] = {
        "allocation": lambda: torch.empty(3, device="sim"),
        "event": torch.Event("sim:1").record,
        "wait": event.wait,
        "record_stream": lambda: there.record_stream(_current(0)),
        "aten::fill_": lambda: here.fill_(1),
    }
    for expected, work in strays.items():
        sim.clear_reports()
        work()
        assert f"works on device 0, not on 1: {expected} at test_simulation.py" in " ".join(sim.faults()), expected
    sim.clear_reports()
    seen = list[int]()
    weight = torch.ones(3, device="sim:1", requires_grad=True)
    weight.register_hook(lambda grad: seen.append(torch.accelerator.current_device_index()))
    (weight * 2).sum().backward()
    assert seen == [1], "backward runs its hooks with the gradient's device as the current one"
    assert sim.faults() == []
    sim.train_on(-1)


def _freed_in_use(keeps: bool) -> None:
    """Memory of the current stream, freed while another one reads it, and asked for again."""
    other, values = torch.Stream("sim"), torch.ones(5000, device="sim")
    other.wait_stream(_current())
    with other:
        total = values * 2
    if keeps:
        values.record_stream(other)
    del values
    torch.full((5000,), 7.0, device="sim")
    _current().wait_stream(other)
    assert total[0].item() == 2.0


@case(1)
def _memory_that_is_handed_out_too_early_is_a_race(setup: Setup, sim: Any) -> None:
    _freed_in_use(keeps=False)
    assert any("hands out memory that aten::mul" in race for race in sim.races())
    sim.clear_reports()
    _freed_in_use(keeps=True)
    assert sim.races() == []


@case(1)
def _late_work_makes_a_race_a_wrong_number(setup: Setup, sim: Any) -> None:
    for waits in (False, True):
        sim.configure(4, True, simulation.LIBRARY)
        values, other = torch.zeros(1000, device="sim"), torch.Stream("sim")
        torch.accelerator.synchronize()
        values.fill_(1)
        if waits:
            other.wait_stream(_current())
        with other:
            found = values.sum()
        with other:
            assert found.item() == (1000.0 if waits else 0.0)
    assert len(sim.races()) == 1


@case(1)
def _pinned_copies_come_late(setup: Setup, sim: Any) -> None:
    sim.configure(4, True, simulation.LIBRARY)
    values = torch.arange(3.0, device="sim")
    target = torch.full((3,), -1.0).pin_memory()
    target.copy_(values, non_blocking=True)
    done = _current().record_event()
    assert target.tolist() == [-1.0, -1.0, -1.0]
    done.synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0]
    source = torch.ones(3).pin_memory()
    copied = source.to("sim", non_blocking=True)
    source.fill_(5)  # before the copy has read it
    assert copied.tolist() == [5.0, 5.0, 5.0]


@case(1)
def _models_train_and_evaluate_with_convolutions_and_batch_norm(setup: Setup, sim: Any) -> None:
    norm, convolution = torch.nn.BatchNorm1d(3), torch.nn.Conv1d(3, 2, 2)
    models = [torch.nn.Sequential(norm, convolution), copy.deepcopy(torch.nn.Sequential(norm, convolution)).to("sim")]
    values = torch.arange(24.0).view(2, 3, 4)
    for is_training in (True, False):
        outputs = [model.train(is_training)(values.to(next(model.parameters()))) for model in models]
        for output in outputs:
            output.square().sum().backward()
        found = [
            (output, model[0].running_var, *(param.grad for param in model.parameters()))
            for output, model in zip(outputs, models, strict=True)
        ]
        assert all(torch.equal(one, other.cpu()) for one, other in zip(*found, strict=True))


@case(1)
def _host_synchronisations_are_counted_with_their_line(setup: Setup, sim: Any) -> None:
    values = torch.ones(3, device="sim")
    sim.clear_reports()
    values.sum().item()
    values.tolist()
    bool(values.any())
    torch.equal(values, values)
    values.cpu()
    values.nonzero()
    torch.zeros(3).to("sim")
    torch.empty(3).copy_(values, non_blocking=True)  # to memory that is not pinned
    found = [what for what, _ in sim.host_syncs()]
    assert found == [
        *("item", "blocking copy to the host", "item", "torch.equal", "blocking copy to the host", "aten::nonzero"),
        *("blocking copy to the device", "blocking copy to the host"),
    ], found
    assert {line for _, line in sim.host_syncs()} == {""}
    sim.clear_reports()
    Communicator(dist.new_group([0], backend="sim:simccl")).all_gather_ints([3])
    assert {line.split(":")[0] for _, line in sim.host_syncs()} == {"core/comm/groups.py"}


@case(2, 3)
def _collectives_give_sums_in_rank_order(setup: Setup, sim: Any) -> None:
    group = dist.new_group(list(range(setup.world_size)), backend=BACKEND)
    ranks = range(setup.world_size)
    rows = [torch.rand(6 * setup.world_size, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    mine = rows[setup.rank].to(f"sim:{setup.rank}")
    part, gathered = mine.new_empty(6), torch.empty_like(mine)
    reduce_scatter_native(part, mine, group=group)
    all_gather_native(gathered, part, group=group)
    dist.all_reduce(mine, group=group)
    assert torch.equal(mine.cpu(), total)
    assert torch.equal(gathered.cpu(), total)
    after, before = (setup.rank + 1) % setup.world_size, (setup.rank - 1) % setup.world_size
    received = torch.empty_like(mine)
    ours = dist.P2POp(dist.isend, mine + setup.rank, group=group, group_peer=after)
    theirs = dist.P2POp(dist.irecv, received, group=group, group_peer=before)
    for work in dist.batch_isend_irecv([ours, theirs]):
        work.wait()
    assert torch.equal(received.cpu(), total + before)
    assert sim.races() == []


@case(2)
def _waiting_orders_streams_and_not_the_host(setup: Setup, sim: Any) -> None:
    group = dist.new_group([0, 1], backend=BACKEND)
    values = torch.ones(8, device=f"sim:{setup.rank}")
    sim.clear_reports()
    dist.all_reduce(values, group=group, async_op=True)
    values.sum()
    assert len(sim.races()) == 1, "it was not waited for"
    sim.clear_reports()
    dist.all_reduce(values, group=group, async_op=True).wait()
    values.sum()
    assert (sim.races(), sim.host_syncs()) == ([], [])


@case(2)
def _what_a_backend_does_not_do_is_refused(setup: Setup, sim: Any) -> None:
    group = dist.new_group([0, 1], backend="sim:simccl")
    values = torch.ones(8, 4, device=f"sim:{setup.rank}")
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(values.t(), group=group)
    with pytest.raises(RuntimeError, match="segments of one size"):
        dist.all_gather([values.new_empty(3), values.new_empty(5)], values.view(-1)[:4], group=group)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.send(values, group_dst=setup.rank, group=group)
    dist.all_reduce(values, group=group)
    with pytest.raises(RuntimeError, match="Expected device"):
        dist.all_reduce(torch.ones(3, device=f"sim:{3 - setup.rank}"), group=group)


def _in_a_thread(work: Callable[[], Any]) -> threading.Thread:
    """A thread that trains nothing."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@case(2, 3)
def _a_stream_is_stuck_until_all_ranks_have_called_a_collective(setup: Setup, sim: Any) -> None:
    group = dist.new_group(list(range(setup.world_size)), backend=BACKEND)
    dist.all_reduce(torch.ones(8, device=f"sim:{setup.rank}"), group=group)
    for is_late in (False, True):
        sim.configure(4, is_late, simulation.LIBRARY)
        values, free = torch.ones(8, device=f"sim:{setup.rank}"), torch.Stream(f"sim:{setup.rank}")
        torch.accelerator.synchronize()
        if setup.rank == 0:
            dist.barrier()
            dist.all_reduce(values, group=group)
        else:
            dist.all_reduce(values, group=group, async_op=True).wait()  # of the stream: the host goes on
            behind = values.mul_(2)
            with free:
                assert torch.ones(3, device=values.device).sum().item() == 3  # and so do other streams
            found = list[Tensor]()
            waits = _in_a_thread(partial(_copy, behind, found))
            waits.join(0.3)
            assert waits.is_alive()
            assert not _current().record_event().query()
            (fault,) = (fault for fault in sim.faults() if "has not called" in fault)
            assert "waits at test_simulation.py" in fault
            assert "for all_reduce at test_simulation.py" in fault
            assert "which rank 0" in fault
            dist.barrier()
            waits.join(30)
            assert found[0].tolist() == [2.0 * setup.world_size] * 8
        torch.accelerator.synchronize()
        sim.clear_reports()


def _copy(values: Tensor, found: list[Tensor]) -> None:
    found.append(values.cpu())


def _read(values: Tensor, into: Tensor, own: torch.Stream, after: torch.Event) -> None:
    with own:
        own.wait_event(after)
        into.copy_(values, non_blocking=True)
        own.record_event().synchronize()


@case(2)
def _a_thread_may_read_what_no_stuck_stream_has_written(setup: Setup, sim: Any) -> None:
    group = dist.new_group([0, 1], backend=BACKEND)
    for is_late, is_stuck in ((False, True), (True, True), (True, False)):
        sim.configure(4, is_late, simulation.LIBRARY)
        values, sums = torch.ones(8, device=f"sim:{setup.rank}"), torch.ones(8, device=f"sim:{setup.rank}")
        dist.all_reduce(sums, group=group)
        torch.accelerator.synchronize()
        sim.clear_reports()
        stepped, own, answer = _current().record_event(), torch.Stream(f"sim:{setup.rank}"), torch.empty(8).pin_memory()
        if setup.rank == 0:
            dist.barrier()
            dist.all_reduce(sums, group=group)
            torch.accelerator.synchronize()
            continue
        if is_stuck:
            dist.all_reduce(sums, group=group)
        values.add_(sums)  # the next step
        _in_a_thread(partial(_read, values, answer, own, stepped)).join(30)
        assert answer.tolist() == [1.0] * 8
        assert sim.faults() == []
        assert len(sim.races()) == (0 if is_stuck else 1), sim.races()
        dist.barrier()
        if not is_stuck:
            dist.all_reduce(sums, group=group)
        torch.accelerator.synchronize()


@case(1)
def _threads_beside_training_may_not_wait_for_the_device(setup: Setup, sim: Any) -> None:
    values, group = torch.ones(8, device="sim:0"), dist.new_group([0], backend="sim:simccl")
    own, training, elsewhere = torch.Stream("sim:0"), _current(), torch.Stream("sim:1")
    dist.all_reduce(values, group=group)
    faulty: dict[str, Callable[[], Any]] = {
        "works on another device than training: event": elsewhere.record_event,
        "launches a kernel: aten::mul": lambda: values.mul_(1),
        "allocates on the device": lambda: torch.empty(8, device="sim:0"),
        "allocates pinned memory": lambda: torch.empty(8, pin_memory=True),
        "takes its turn on a stream of training: event": lambda: own.wait_stream(training),
        "takes its turn on a stream of training: aten::item": lambda: values[0].item(),
        "synchronizes a device": torch.accelerator.synchronize,
        "calls a collective: all_reduce": lambda: dist.all_reduce(values, group=group),
    }
    for expected, work in faulty.items():
        sim.clear_reports()
        _in_a_thread(work).join(30)
        assert any(expected in fault for fault in sim.faults()), (expected, sim.faults())
    sim.clear_reports()
    for work in faulty.values():
        work()  # this thread trains
    _in_a_thread(own.synchronize).join(30)
    assert sim.faults() == []


@case(2)
def _messages_by_themselves_are_refused(setup: Setup, sim: Any) -> None:
    group, peer = dist.new_group([0, 1], backend=BACKEND), 1 - setup.rank
    values = torch.ones(8, device=f"sim:{setup.rank}")
    dist.all_reduce(values, group=group)
    for post in (dist.send, dist.isend, dist.recv, dist.irecv):
        with pytest.raises(RuntimeError, match="Expected messages in a group"):
            post(values, group=group, **{"group_dst" if "send" in post.__name__ else "group_src": peer})


@case(3)
def _the_first_call_of_a_group_waits_for_all_ranks(setup: Setup, sim: Any) -> None:
    group = dist.new_group([0, 1, 2], backend=BACKEND, timeout=timedelta(seconds=1))
    if setup.rank < 2:
        post = dist.isend if setup.rank else dist.irecv
        message = dist.P2POp(post, torch.ones(8, device=f"sim:{setup.rank}"), group=group, group_peer=1 - setup.rank)
        with pytest.raises(RuntimeError, match="Expected a first call of rank 2"):
            dist.batch_isend_irecv([message])
    dist.barrier()


@case(1)
def _memory_that_the_device_does_not_count_is_unknown_in_stats(setup: Setup, sim: Any) -> None:
    param = torch.nn.Parameter(torch.ones(8, device="sim"))
    group = dist.new_group([0], backend=BACKEND)
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW, process_group=group)
    param.grad = torch.ones_like(param)
    opt.step()
    numbers = opt.stats()
    assert (numbers["step"], numbers["parameter_bytes"]) == (1, param.nbytes)
    assert math.isnan(numbers["used_bytes"])
    assert math.isnan(numbers["peak_used_bytes"])


@case(1)
def _offload_steps_parameters_of_two_devices(setup: Setup, sim: Any) -> None:
    found = []
    choices: list[dict[str, Any]] = [{}, {"offload": "cpu"}]
    for options in choices:
        params = [torch.nn.Parameter(torch.ones(8, device=f"sim:{index}")) for index in range(2)]
        group = dist.new_group([0], backend=BACKEND)
        opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=group, lr=0.5, **options)
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        found.append([param.tolist() for param in params])
    assert found == [[[0.5] * 8] * 2] * 2


@pytest.fixture
def compiled() -> None:
    simulation.compiled()


test_simulation = pytest.mark.usefixtures("compiled")(case.each())


def _differ(setup: Setup) -> None:
    warnings.filterwarnings("ignore", "No backend of type 0 found")
    os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
    simulation.load(2).set_device(setup.rank)
    group = dist.new_group([0, 1], backend=BACKEND, timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(4 + setup.rank, device=f"sim:{setup.rank}"), group=group)
    torch.accelerator.synchronize()


@pytest.mark.usefixtures("compiled")
def test_ranks_that_issue_different_collectives_fail() -> None:
    outcomes = run_ranks_to_end(_differ, 2, timeout=60)
    assert all("Expected the same collective on all ranks" in str(outcome.error) for outcome in outcomes)
