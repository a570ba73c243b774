"""What an optimizer says of itself on real ranks: its numbers, records of the end of a job, who has diverged."""

import csv
import os
import re
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_zero
from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.__main__ import main
from ddp_zero.core.comm.recorder import RECENT_SPANS
from ddp_zero.core.step.runner import StepRunner
from ddp_zero.tools.monitor import Monitor
from ddp_zero.tools.postmortem.blame import blame
from ddp_zero.tools.postmortem.command import report
from ddp_zero.tools.postmortem.records import read_folder
from tests import internals
from tests.multiproc.cases import (
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
    optimizer_case,
    step_on,
)
from tests.multiproc.harness import Cases, Setup, kill_this_process, run_ranks_to_end

case = Cases(group_timeout=30)


def _small_buckets(stage: int, **options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    caps: Any = [0.0005]
    model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True, bucket_cap_mb_list=caps)
    return model, shard_optimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2, **options)


def _train(model: nn.Module, opt: ZeroRedundancyOptimizer, rank: int, steps: int) -> None:
    for inputs, targets in batches(rank, steps):
        step_on(opt, loss_of(model, inputs, targets))


@case(2, 3)
def _numbers_of_a_step_equal_those_counted(setup: Setup) -> None:
    modes: list[tuple[int, bool, dict[str, Any]]] = [(1, False, {}), (1, True, {}), (2, True, {})]
    for stage, overlap, options in [*modes, (2, True, {"max_grad_norm": 0.5})]:
        model, opt = _small_buckets(stage, overlap=overlap, **options)
        comm = internals.communicator_of(opt)
        _train(model, opt, setup.rank, 4)
        sent, began = comm.trace.totals["sent"], time.perf_counter_ns()
        _train(model, opt, setup.rank, 1)
        took, numbers = (time.perf_counter_ns() - began) * 1e-9, opt.stats()
        assert comm.trace.totals["sent"] - sent == numbers["sent_bytes"] > 0
        assert comm.trace.totals["sent"] == numbers["total_sent_bytes"]
        moved = torch.tensor([int(numbers["sent_bytes"]), int(numbers["received_bytes"])])
        dist.all_reduce(moved)
        nbytes = sum(param.nbytes for param in model.parameters())
        assert moved.tolist() == [stage * (setup.world_size - 1) * nbytes] * 2, "what all send is what all receive"
        record = opt.last_step
        assert record is not None
        assert numbers["step"] == record.number == 5
        assert numbers["skipped_steps"] == 0
        assert numbers["buckets"] == len(internals.plan_of(opt).buckets) > (1 if overlap else 0)
        assert numbers["state_bytes"] > 0
        assert numbers["parameter_bytes"] == nbytes
        assert 0 < numbers["local_step_s"] < took
        assert 0 < numbers["exposed_communication_s"] < took
        assert (numbers["grad_norm"] > 0) == bool(options)
        assert (numbers["buffer_bytes"] > 0) == (stage == 2)
        assert numbers["peak_gradient_bytes"] >= (nbytes if stage == 1 else 1)
        events = sum(event.begun > began for event in RECENT_SPANS.events())
        assert events <= 8 + 6 * numbers["buckets"], "a handful of events per bucket"
        assert all(isinstance(number, int | float) for number in numbers.values())
        assert list(numbers) == list(opt.stats())


@case(2, 3)
def _skipped_steps_count(setup: Setup) -> None:
    model, opt = _small_buckets(2, nonfinite="skip")
    _train(model, opt, setup.rank, 2)
    inputs, targets = next(batches(setup.rank, 1))
    loss = loss_of(model, inputs, targets)
    (loss * (float("nan") if setup.rank == 1 else 1.0)).backward()
    opt.step()
    record = opt.last_step
    assert record is not None
    assert (record.stepped, record.number) == (False, 3)
    assert [opt.stats()[name] for name in ("step", "skipped_steps")] == [3, 1]


class Writer:
    """As that of `torch.utils.tensorboard`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.flushed = len(self.scalars)


@case(2)
def _numbers_are_unchanged_while_everything_is_recorded(setup: Setup) -> None:
    writer = Writer()
    ddp_zero.record_to(setup.folder / "records")
    try:
        for stage in (1, 2):
            with at_stage(stage):
                for twins in (
                    build_overlapped_twins(optimizer_case("AdamW fused"), interleaved=True, bucket_cap_mb=0.0003),
                    build_twins(optimizer_case("toy LAMB")),
                ):
                    monitor = Monitor(twins.opt, every=1, writer=writer)
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                        twins.train(setup, 3, after_step=partial(_read, twins.opt))
                    twins.opt.check_agreement()
                    twins.assert_moved()
                    monitor.close()
                    twins.train(setup, 1)
        written = [at for name, _, at in writer.scalars if name == "ddp_zero/step_s"]
        assert written == ([1, 2, 3] * 4 if setup.rank == 0 else [])
        assert not list((setup.folder / "records").glob("*")), "nothing has failed"
    finally:
        ddp_zero.record_to(None)


def _read(opt: ZeroRedundancyOptimizer, step: int) -> None:
    assert opt.stats()["step"] == step + 1


@case(2)
def _a_monitor_writes_every_few_steps_on_rank_0(setup: Setup) -> None:
    for overlap in (True, False):
        model, opt = _small_buckets(2, overlap=overlap)
        writer, file = Writer(), setup.folder / f"overlap-{overlap}.csv"
        monitor = Monitor(opt, every=2, csv=file, writer=writer)
        _train(model, opt, setup.rank, 5)
        assert not writer.flushed
        monitor.close()
        _train(model, opt, setup.rank, 1)
        dist.barrier()
        assert writer.flushed == len(writer.scalars), "and nothing since"
        with file.open() as lines:
            rows = [{name: float(number) for name, number in row.items()} for row in csv.DictReader(lines)]
        assert [row["step"] for row in rows] == [2, 4]
        total = rows[1]["total_local_step_s"] - rows[0]["total_local_step_s"]
        assert rows[1]["mean_local_step_s"] == pytest.approx(total / 2)
        sent = [(number, at) for name, number, at in writer.scalars if name == "ddp_zero/total_sent_bytes"]
        assert sent == ([(row["total_sent_bytes"], row["step"]) for row in rows] if setup.rank == 0 else [])


@case(2, 3)
def _a_rank_with_other_parameters_is_named(setup: Setup) -> None:
    model, opt = _small_buckets(1)
    _train(model, opt, setup.rank, 2)
    opt.check_agreement()
    changed = dict(model.named_parameters())
    with torch.no_grad():
        if setup.rank == 1:
            changed["module.3.weight"][2, 3].mul_(1 + 2**-20)
    with pytest.raises(RuntimeError, match=r"got 1 of 10 that differ .*3\.weight.* on rank 1 \(global rank 1\)"):
        opt.check_agreement()
    with torch.no_grad():
        if setup.rank == 1:
            changed["module.0.weight"][[0, 1]] = changed["module.0.weight"][[1, 0]].clone()
    with pytest.raises(RuntimeError, match=r"got 2 of 10 .*0\.weight.* on rank 1 .*; .*3\.weight.* on rank 1 "):
        opt.check_agreement()


test_insight = case.each()


# The end of a job


def _until_a_rank_is_gone(setup: Setup, folder: str, how: str) -> str:
    """Train until rank 1 is killed or stopped in the fourth step; returns what the records say near the time-out."""
    ddp_zero.record_to(folder)
    process = Path(folder) / f"process-{setup.rank}"
    process.write_text(str(os.getpid()))
    model, opt = _small_buckets(2)
    _train(model, opt, setup.rank, 3)
    found: list[str] = []
    if how == "stopped":
        watch = threading.Thread(target=_wait_for_record, args=(Path(folder), setup.rank, found))
        watch.start()
    with pytest.MonkeyPatch.context() as patch:
        if setup.rank == 1:
            step, calls = StepRunner.step_bucket, [0]

            def gone(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == 2 and how == "killed":
                    kill_this_process()
                if calls[0] == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return step(*args, **kwargs)

            patch.setattr(StepRunner, "step_bucket", gone)
            internals.recompile(opt)
        with pytest.raises(RuntimeError, match=r"rank 1 \(global rank 1\)"):
            _train(model, opt, setup.rank, 1)
    if how == "stopped":
        watch.join()
        if setup.rank == 0:
            time.sleep(1)  # the other rank raises at about the same time
            os.kill(int((Path(folder) / "process-1").read_text()), signal.SIGKILL)
    return "".join(found)


def _wait_for_record(folder: Path, rank: int, found: list[str]) -> None:
    """What the first record of this rank says."""
    while True:
        records = (
            [record for record in read_folder(folder) if record.rank == rank] if any(folder.glob("a*.json")) else []
        )
        if records:
            found.append(report(records))
            return
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_records_name_the_rank_that_was_lost(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    time_out = 60.0 if how == "killed" else 10.0
    outcomes = run_ranks_to_end(_until_a_rank_is_gone, 3, str(tmp_path), how, timeout=100, group_timeout=time_out)
    assert [outcome.killed for outcome in outcomes] == [False, True, False], outcomes
    assert [outcome.error for outcome in outcomes] == [None, None, None], outcomes
    for outcome in outcomes:
        if how == "stopped" and outcome.result is not None:
            assert re.search(r"written for no event for [789]\.\d s of a time-out of 10\.0 s", outcome.result), (
                "before it"
            )
            assert "Everyone waited for rank 1" in outcome.result
    records = read_folder(tmp_path)
    assert [record.rank for record in records] == [0, 2]
    verdict = blame(records)
    assert list(verdict.culprits) == [1]
    assert {wait.step for wait in verdict.waits.values()} == {4}
    assert main(["postmortem", str(tmp_path), "--events", "3"]) == 0
    text = capsys.readouterr().out
    print(text)
    assert "2 of 3 ranks have left a record" in text
    assert "Everyone waited for rank 1: it has left no record: it was killed or stopped" in text
    # What rank 1 sent just before it was lost may have reached one of the others and not the other.
    waits = Counter((wait.phase, wait.bucket, wait.message) for wait in verdict.waits.values())
    (first, count), *_ = waits.most_common()
    assert f"What {count} of 2 other ranks with a record waited for: step 4, {first[0]} of bucket {first[1]}, " in text
    last_sent = {f"the {what} of bucket {bucket}" for what in ("reduction", "sync") for bucket in (0, 1, 2)}
    assert {message for _, _, message in waits} <= last_sent, text
