"""Training around rings: the numbers of DDP with sums in ring order, the bytes of a direct exchange, and failures."""

import copy
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import shard_optimizer
from ddp_zero.core.comm.ring import RingTransfer, RingWorker
from tests import internals
from tests.multiproc.cases import (
    assert_equal_models,
    assert_moved,
    batches,
    build_model,
    sum_in_rank_order,
    train_step,
)
from tests.multiproc.harness import Cases, Setup, kill_this_process, run_ranks_to_end
from tests.multiproc.rings import SumInRingOrder, rings_for_all
from tests.pairwise import Modes, every_other

MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"overlap": False},
    "stage 1, overlapped": {},
    "stage 1, in forward": {"sync": "forward"},
    "stage 2, interleaved": {"stage": 2},
    "stage 2, last bucket": {"stage": 2, "interleaved": False},
    "stage 2, whole buckets": {"stage": 2, "shard_buckets": False},
    "stage 2, after backward": {"stage": 2, "overlap": False},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 0.1},
    "stage 2, in forward": {"stage": 2, "sync": "forward"},
    "stage 2, copied parameters": {"stage": 2, "parameters_as_bucket_view": False},
}
OPTIONS: dict[str, Any] = {"lr": 1e-2}
STEPS = 4  # two with the final buckets of DDP
Pair = tuple[DistributedDataParallel, Any]

case = Cases(timeout=180)


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=True)


def twins(mode: dict[str, Any], build: Any = AdamW) -> tuple[Pair, Pair]:
    """DDP with the plain optimizer, and the sharded optimizer; both sum in the same order."""
    expected, ddp = wrapped(build_model()), wrapped(build_model())
    if mode.get("stage") == 2:
        opt = shard_optimizer(ddp, build, **mode, **OPTIONS)
        expected.register_comm_hook(None, SumInRingOrder(expected, opt).average)
    else:
        opt = shard_optimizer(ddp, build, **mode, **OPTIONS, hook=sum_in_rank_order)
        expected.register_comm_hook(None, sum_in_rank_order)
    return (expected, build(expected.parameters(), **OPTIONS)), (ddp, opt)


@case(2, 3, 4, few=every_other(MODES, 1), every=MODES)
def _every_mode_equals_ddp_with_the_plain_optimizer(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        for build in (AdamW, SGD) if name == "stage 2, interleaved" else (AdamW,):
            plain, (ddp, opt) = twins(mode, build)
            before = copy.deepcopy(ddp.module)
            with rings_for_all() as transfers:
                for step, batch in enumerate(batches(setup.rank, STEPS)):
                    train_step(plain, batch, mode.get("max_grad_norm"))
                    train_step((ddp, opt), batch)
                    opt.finish_sync()
                    assert_equal_models(plain[0].module, ddp.module, f"after step {step}: {name}")
            assert len(transfers) >= (2 if mode.get("stage") == 2 else 1) * STEPS, "nothing went around a ring"
            assert_moved(before, ddp.module)


@case(4)
def _rings_send_as_many_bytes_as_direct_messages(setup: Setup) -> None:
    totals = []
    for context in (rings_for_all, nullcontext):
        _, sharded = twins(MODES["stage 2, interleaved"])
        with context():
            for batch in batches(setup.rank, STEPS):
                train_step(sharded, batch)
        sent = torch.tensor([int(sharded[1].stats()["total_sent_bytes"])])
        dist.all_reduce(sent)
        totals.append(int(sent))
    assert totals[0] == totals[1] > 0


@case(4)
def _small_buckets_go_directly(setup: Setup) -> None:
    with mock.patch.object(RingTransfer, "run", side_effect=AssertionError("a ring")):
        _, sharded = twins(MODES["stage 2, interleaved"])
        for batch in batches(setup.rank, 3):
            train_step(sharded, batch)


@case(3)
def _gradients_of_16_bits_go_directly_and_are_summed_in_fp32(setup: Setup) -> None:
    expected, ddp = wrapped(build_model().bfloat16()), wrapped(build_model().bfloat16())
    expected.register_comm_hook(None, sum_in_rank_order)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=1.0)  # less would be rounded away
    before = copy.deepcopy(ddp.module)
    reference = SGD(expected.parameters(), lr=1.0)
    with rings_for_all() as transfers:
        for inputs, targets in batches(setup.rank, STEPS):
            for pair in ((expected, reference), (ddp, opt)):
                train_step(pair, (inputs.bfloat16(), targets.bfloat16()))
    assert not any(internals.sums(transfer) for transfer in transfers), "sums of bf16 went around a ring"
    assert transfers, "parameters did not"
    assert_equal_models(expected.module, ddp.module, "bf16")
    assert_moved(before, ddp.module)


@case(3)
def _sums_in_rings_under_join_keep_ranks_equal(setup: Setup) -> None:
    """A rank that has joined takes part in every ring."""
    _, (ddp, opt) = twins(MODES["stage 2, interleaved"])
    before = copy.deepcopy(ddp.module)
    with rings_for_all() as transfers, Join([ddp, opt]):
        for batch in batches(setup.rank, 3 + setup.rank):
            train_step((ddp, opt), batch)
    assert len(transfers) > 5
    assert_moved(before, ddp.module)
    parts: list[Any] = [None] * setup.world_size
    dist.all_gather_object(parts, [param.detach() for param in ddp.module.parameters()])
    for part in parts[1:]:
        assert all(torch.equal(one, other) for one, other in zip(parts[0], part, strict=True)), "ranks differ"


@case(3)
def _transfers_that_never_end_do_not_keep_later_ones_waiting(setup: Setup) -> None:
    plain, (ddp, opt) = twins(MODES["stage 2, last bucket"])
    before = copy.deepcopy(ddp.module)
    with rings_for_all():
        for step, batch in enumerate(batches(setup.rank, STEPS)):
            train_step(plain, batch)
            train_step((ddp, opt), batch)
            if step == 1:
                if setup.rank == 1:  # the others never start it
                    comm = internals.communicator_of(opt)
                    comm.start_all_gather([torch.zeros(8) for _ in range(3)], (9, 9))
                opt.reset()
    assert_equal_models(plain[0].module, ddp.module, "after a new start")
    assert_moved(before, ddp.module)


test_rings = case.each()


def _one_rank_dies(setup: Setup) -> None:
    _, sharded = twins(MODES["stage 2, interleaved"])
    with rings_for_all():
        *first, last = batches(setup.rank, STEPS)
        for batch in first:
            train_step(sharded, batch)
        if setup.rank == 2:
            kill_this_process()
        with pytest.raises(RuntimeError, match="or through it another rank of the ring, to take part in"):
            train_step(sharded, last)


@pytest.mark.nightly
def test_a_rank_that_dies_is_noticed_by_all_others_within_the_time_out() -> None:
    outcomes = run_ranks_to_end(_one_rank_dies, 4, timeout=180, group_timeout=10)
    for rank, outcome in enumerate(outcomes):
        if rank == 2:
            assert outcome.killed
        else:
            assert outcome.error is None, outcome.error


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_zero import shard_optimizer
from ddp_zero.core.comm import communicator
communicator.RING_RANKS, communicator.RING_BYTES = 2, 0
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=path, rank=rank, world_size=3)
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), gradient_as_bucket_view=True)
opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, sync="forward", lr=0.1)
for _ in range(4):
    step_on(opt, ddp(torch.ones(2, 64)).sum())
print("done", flush=True)
if rank == 0:
    print(sum(float(param.detach().sum()) for param in ddp.parameters()), flush=True)
"""


@pytest.mark.nightly
def test_a_process_that_ends_after_its_last_step_has_sent_what_the_others_need(tmp_path: Path) -> None:
    url = (tmp_path / "rendezvous").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        texts = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out.splitlines()[0] for out, _ in texts] == ["done"] * 3, texts
    assert [rank.returncode for rank in ranks] == [0] * 3, texts


def test_the_threads_of_a_worker_end_with_it() -> None:
    before = set(threading.enumerate())
    worker = RingWorker()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del worker
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a broken link")])
def test_an_error_in_the_ring_thread_is_raised_at_this_wait_and_all_later_ones(error: Exception) -> None:
    class Broken(RingTransfer):
        def run(self) -> None:
            raise error

    neighbours = mock.Mock(before=lambda: "rank 1", limit=timedelta(minutes=1))
    worker = RingWorker()
    for kind in (Broken, Broken, RingTransfer):  # the third follows the first
        transfer = worker.start(kind(neighbours, mock.Mock(), []))
        with pytest.raises(RuntimeError, match=f"Expected rank 1, or .* to take part in a test, got: .*{error}"):
            transfer.wait("a test")
