import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.check import check, compare
from benchmarks.scale.modes import MODES, Shards, Sizes, built_in, ddp_layout, ideal, measured_shape, plan_job
from benchmarks.scale.schedule import Job, Lanes, Phases, forecast
from benchmarks.scale.wire import GOODPUT, Cut, Direct, Link, Transport, all_reduce, broadcasts, reduction, ring, sync

MEGABYTE = 10**6
UNIT = Link(gbit=8e-3 / GOODPUT, latency=0.0, message=0.0)  # a megabyte per second
FAST = Link(gbit=1e9, latency=0.0, message=0.0)
PHASES = Phases(forward=3.0, backward=6.0, adamw=12.0)
ONE, TWO = "ddp_zero stage 1, ", "ddp_zero stage 2, "


def job_of(*buckets: list[int], phases: Phases = PHASES) -> Job:
    """Buckets by megabytes per rank; the same when stepping after backward."""
    cuts = tuple(Cut.of([MEGABYTE * part for part in parts]) for parts in buckets)
    whole = Cut.of([MEGABYTE * sum(parts) for parts in zip(*buckets, strict=True)])
    evenly = tuple(Cut.evenly(cut.total, whole.ranks) for cut in cuts)
    return Job(whole.ranks, phases, cuts, evenly, cuts, whole)


def seconds(mode: str, job: Job, link: Link = UNIT, transport: Transport = Transport.GLOO) -> float:
    return forecast(MODES[mode].step, job, link, transport).seconds


# Schedules by hand: 3 buckets of 2 + 2 MB at 2 ranks, at 1 MB/s. Forward takes 1 s per bucket, backward 2, the sharded
# step 2, an all-reduce 4, a reduction or a sync 2.

THREE = job_of([2, 2], [2, 2], [2, 2])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("DDP + fused AdamW", 3 + 2 + 12 + 12),  # the link is busy from the first bucket on
        ("torch ZeroRedundancyOptimizer, bucket views", 3 + 2 + 12 + 6 + 12),  # two broadcasts of 6 MB in turn
        ("FSDP2, no reshard after forward", 3 * (2 + 1) + 3 * (2 + 4) + 6),  # everything blocks
        (TWO + "elements", 3 + 3 * (2 + 2) + 2),  # as interleaved: the parts are equal here anyway
        (TWO + "elements, sync in forward", 3 * (2 + 2) + 3 * 2 + 1),
        (ONE + "standalone", 3 + 2 + 12 + 3 * 2 + 2),  # syncs 0 and 1 behind steps 1 and 2
        (ONE + "overlapped", 3 + 2 + 12 + 3 * 2),  # the syncs queue behind the all-reduces
        (ONE + "interleaved", 3 + 2 + 12 + 3 * 2),  # the link has no gap to fill
        (ONE + "interleaved, sync in forward", 2 + 12 + 2 + 3 * 2 + 1),  # forward of bucket 0 behind its sync
        (TWO + "interleaved", 3 + 3 * (2 + 2) + 2),  # reductions behind backward, syncs behind steps
        (TWO + "last bucket", 3 + 6 + 3 * 2 + 2),  # the last reduction behind the first step
        (TWO + "after backward", 3 + 6 + 3 * 2 + 2),
        (TWO + "sync in forward", 3 * (2 + 2) + 3 * 2 + 1),  # syncs behind the last step, forward behind them
    ],
)
def test_the_schedule_of_three_buckets_at_two_ranks_is_the_one_by_hand(mode: str, expected: float) -> None:
    assert seconds(mode, THREE) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", Transport)
def test_with_one_rank_or_a_link_without_end_a_step_is_what_it_computes(mode: str, transport: Transport) -> None:
    assert seconds(mode, job_of([2], [3]), UNIT, transport) == pytest.approx(3 + 6 + 12)
    shared = 12.0 if mode.startswith("DDP") else 6.0
    assert seconds(mode, job_of([2, 2], [1, 1]), FAST, transport) == pytest.approx(3 + 6 + shared, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_every_step_is_like_the_one_before_after_a_few(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [THREE, plan_job(built_in("26m"), 16, Phases(0.17, 0.33, 0.04))[0]]
    links = [UNIT, Link(10.0, 1e-4, 1e-4)]
    few = [seconds(mode, job, link) for job in jobs for link in links]
    monkeypatch.setattr("benchmarks.scale.schedule.STEPS", 12)
    assert [seconds(mode, job, link) for job in jobs for link in links] == pytest.approx(few)


def test_waiting_in_forward_gains_where_the_link_is_what_is_waited_for() -> None:
    job = job_of([2, 2], [2, 2], [2, 2], phases=Phases(3.0, 0.3, 0.3))
    assert seconds(TWO + "interleaved", job) - seconds(TWO + "sync in forward", job) > 1.0


def test_a_rank_that_owns_a_whole_bucket_sends_it_to_each_of_the_others() -> None:
    lanes = Lanes(4, UNIT, Transport.GLOO)
    lanes.start("sync", 0, sync(Cut.of([MEGABYTE, 0, 0, 0]), Transport.GLOO))
    lanes.start("sync", 1, sync(Cut.of([0, MEGABYTE, 0, 0]), Transport.GLOO))
    lanes.wait("sync", 1)
    assert lanes.clock.tolist() == pytest.approx([3.0, 3.0, 3.0, 3.0])  # at the same time: they are two links
    around = Lanes(4, UNIT, Transport.RING)
    around.start("sync", 0, sync(Cut.of([MEGABYTE, 0, 0, 0]), Transport.RING))
    around.wait("sync", 0)
    assert around.clock.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_rounds_and_messages_cost_what_the_link_says() -> None:
    link = Link(UNIT.gbit, latency=0.5, message=0.25)
    lanes = Lanes(3, link, Transport.GLOO)
    lanes.start("sync", 0, sync(Cut.of([MEGABYTE, MEGABYTE, MEGABYTE]), Transport.GLOO))
    lanes.wait("sync", 0)
    assert lanes.clock.tolist() == pytest.approx([2 + 2 * 0.25 + 0.5] * 3)
    assert all_reduce(3 * MEGABYTE, 3).seconds(link) == pytest.approx(4 + 4 * (0.5 + 0.25))
    large = sync(Cut.of([9 << 20, 0, 0]), Transport.GLOO)
    assert isinstance(large, Direct)
    assert (large.sends.tolist(), large.receives.tolist()) == ([6, 0, 0], [0, 3, 3])  # chunks of 4 MiB


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_volumes_are_those_of_the_lower_bound(ranks: int) -> None:
    cut = Cut.of([(1 + rank) * MEGABYTE for rank in range(ranks)])
    half = (ranks - 1) / ranks * cut.total
    for transport in Transport:
        assert sync(cut, transport).sent == pytest.approx(half)
        assert reduction(cut, transport).sent == pytest.approx(half)
        assert broadcasts(cut, transport).sent == pytest.approx(half)
    assert ring(Cut.evenly(cut.total, ranks)).busiest == pytest.approx(half)
    assert all_reduce(cut.total, ranks).sent == pytest.approx(2 * half)


@pytest.mark.parametrize("transport", Transport)
def test_stage_2_sends_as_much_as_ddp_and_stage_1_half_as_much_again(transport: Transport) -> None:
    job, _ = plan_job(built_in("26m"), 8, PHASES)
    sent = {name: forecast(mode.step, job, UNIT, transport).sent for name, mode in MODES.items()}
    bound = 2 * 7 / 8 * 101_535_744
    for name, nbytes in sent.items():
        is_half_more = name.startswith(ONE[:-2]) or name.startswith("torch") or "FSDP" in name
        if "FSDP" in name and transport is Transport.RING:
            is_half_more = False
        assert nbytes == pytest.approx(1.5 * bound if is_half_more else bound), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("ranks", [2, 8, 200])
def test_more_bandwidth_and_less_latency_are_never_slower(mode: str, transport: Transport, ranks: int) -> None:
    job, _ = plan_job(built_in("26m"), ranks, Phases(0.17, 0.33, 0.04))
    link = Link(gbit=0.5, latency=1e-4, message=1e-4)
    times = [seconds(mode, job, replace(link, gbit=gbit), transport) for gbit in (0.5, 1, 3, 10, 100, 1000)]
    assert all(slow >= fast - 1e-9 for slow, fast in pairwise(times))
    assert times[0] > times[-1] > 0.5
    assert seconds(mode, job, replace(link, latency=0.0, message=0.0), transport) < times[0]


# Models and memory


def test_built_in_models_have_their_bytes_and_ddps_buckets() -> None:
    shape = built_in("26m")
    assert (len(shape.sizes), sum(shape.sizes)) == (100, 4 * 25_383_936)
    assert ddp_layout([2**20, 2**20, 25 << 20, 1]) == ((0,), (1, 2), (3,))
    assert [tensor for bucket in shape.layout for tensor in bucket] == list(range(100))


def test_a_measured_model_has_the_buckets_that_were_measured() -> None:
    shape = built_in("26m")
    own = [sum(shape.sizes[tensor] for tensor in bucket) for bucket in shape.layout]
    assert measured_shape("26m", 100, own) == shape
    half = sum(shape.sizes) // 2
    recut = measured_shape("26m", 100, [half, sum(shape.sizes) - half])
    assert [tensor for bucket in recut.layout for tensor in bucket] == list(range(100))
    assert sum(shape.sizes[tensor] for tensor in recut.layout[0]) == pytest.approx(half, rel=0.05)
    guessed = measured_shape("another", 5, [100, 31])
    assert guessed.is_guessed
    assert [sum(guessed.sizes[tensor] for tensor in bucket) for bucket in guessed.layout] == [100, 31]


def test_memory_is_that_of_the_formulas() -> None:
    sizes = Sizes(ranks=4, params=1000, shards=Shards(overlapped=300, cut=250, standalone=260), bucket=50)
    memory = {name: mode.memory(sizes) for name, mode in MODES.items()}
    assert memory["DDP + fused AdamW"] == 4000
    assert memory["torch ZeroRedundancyOptimizer, bucket views"] == memory[ONE + "standalone"] == 2000 + 520
    assert memory["FSDP2, no reshard after forward"] == 1000 + 4 * 250 + 100
    assert memory[ONE + "interleaved"] == memory[ONE + "overlapped"] == 2000 + 600
    assert memory[TWO + "interleaved"] == memory[TWO + "sync in forward"] == 1000 + 600 + 150
    assert memory[TWO + "last bucket"] == memory[TWO + "after backward"] == 1000 + 600 + 150 + 300
    assert memory[TWO + "elements"] == memory[TWO + "elements, sync in forward"] == ideal(sizes) == 1000 + 500 + 150


def test_shares_shrink_until_the_largest_tensor_is_all_that_a_rank_owns() -> None:
    shape = built_in("26m")
    owned = [plan_job(shape, ranks, PHASES)[1].overlapped for ranks in (2, 8, 32, 100, 128, 1024)]
    assert owned == sorted(owned, reverse=True)
    assert owned[-1] == owned[-3] == max(shape.sizes)
    assert owned[0] == pytest.approx(sum(shape.sizes) / 2, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 8, 128, 1024])
def test_shares_of_cut_parameters_keep_shrinking(ranks: int) -> None:
    shape = built_in("26m")
    job, shards = plan_job(shape, ranks, PHASES)
    even, grain = sum(shape.sizes) / ranks, 4 * 64
    assert shards.cut == pytest.approx(even, abs=len(job.cut) * grain)
    for bucket, cut in zip(shape.layout, job.cut, strict=True):
        nbytes = sum(shape.sizes[tensor] for tensor in bucket)
        assert cut.total == nbytes, "every element has one owner"
        assert float((cut.segments - nbytes / ranks).abs().max()) <= grain, "a part is even but for a grain"


def test_behind_a_slow_link_cut_parameters_step_as_fast_as_ddp_around_rings() -> None:
    job, _ = plan_job(built_in("26m"), 64, Phases(0.17, 0.33, 0.04))
    link = Link(gbit=1.0, latency=65e-6, message=65e-6)
    times = {name: seconds(name, job, link) for name in MODES}
    assert times[TWO + "elements"] < times[TWO + "interleaved"]
    assert times[TWO + "elements, sync in forward"] < times["DDP + fused AdamW"]


def test_4096_ranks_take_a_second_or_so() -> None:
    started = time.thread_time()  # not wall time: the cores may be shared
    job, _ = plan_job(built_in("87m"), 4096, Phases(0.6, 1.2, 0.14))
    assert 0 < seconds(TWO + "interleaved", job) < float("inf")
    assert time.thread_time() - started < 5


# The check


def a_result(link: dict[str, float] | None) -> dict[str, Any]:
    shape = built_in("26m")
    return {
        "facts": [],
        "model": {
            "name": "26m",
            "parameters": 25_383_936,
            "parameter_bytes": sum(shape.sizes),
            "tensors": 100,
            "bucket_bytes": [sum(shape.sizes[tensor] for tensor in bucket) for bucket in shape.layout],
        },
        "ranks": 2,
        "link": link,
        "phases": {"forward": 0.17, "backward": 0.33, "adamw": 0.04},
        "modes": {
            "DDP + fused AdamW": {
                "seconds": [2.0, 1.0, 9.0],
                "sent_bytes": [100_000_000, 102_000_000],
                "peak_bytes": [4, 5 * MEGABYTE],
            },
            "unheard of": {"seconds": [1.0], "sent_bytes": [1]},
        },
    }


def test_a_check_compares_medians_with_predictions_from_the_same_result(tmp_path: Path) -> None:
    found = a_result({"gbit": 1.0})
    link = Link(gbit=7.0, latency=0.0, message=0.0)
    [comparison] = compare(found, "compare-26m", link)
    assert comparison.measured == 2.0
    rate = 1e9 / 8 * GOODPUT
    begins = 0.17 + 0.33 * (4_200_448 + 29_421_568) / 101_535_744  # the second bucket is full; no gaps from here on
    assert comparison.predicted == pytest.approx(begins + (101_535_744 - 4_200_448) / rate + 0.04)
    assert (comparison.measured_bytes, comparison.predicted_bytes) == (101_000_000, 101_535_744)
    assert comparison.error == pytest.approx(comparison.predicted / 2 - 1)
    (tmp_path / "compare-26m-2ranks-1gbit.json").write_text(json.dumps(found))
    (tmp_path / "compare-26m-2ranks.json").write_text(json.dumps(a_result(None)))
    (tmp_path / "compare-26m-4ranks-2nodes-1gbit.json").write_text(json.dumps({**found, "nodes": 2}))
    text = check(tmp_path, link)
    assert "| compare-26m-2ranks-1gbit | DDP + fused AdamW | 2000 | 1133 | -43.3% | 101.0 | 101.5 | 5 | 406 |" in text
    assert "1 comparisons; median error 43.3%, largest -43.3% (DDP + fused AdamW, compare-26m-2ranks-1gbit)" in text
    assert "compare-26m-2ranks.json: the link is not shaped" in text
    assert "compare-26m-2ranks-1gbit.json: no prediction for unheard of" in text
    assert "compare-26m-4ranks-2nodes-1gbit.json: ranks of a node share its link" in text


def test_a_check_of_a_result_without_memory_leaves_its_cells_empty(tmp_path: Path) -> None:
    found = a_result({"gbit": 1.0})
    found["modes"]["DDP + fused AdamW"]["peak_bytes"] = []
    (tmp_path / "compare-26m-2ranks-1gbit.json").write_text(json.dumps(found))
    assert "| 101.0 | 101.5 | - | 406 |" in check(tmp_path, UNIT)


def test_a_check_without_results_says_so(tmp_path: Path) -> None:
    assert check(tmp_path, UNIT).startswith("Nothing to check against")
