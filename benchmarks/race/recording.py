"""``python -m benchmarks.race.recording``: cost of recording events in a step.

The relevant figure is counted: events and notes of a step, times the cost of one on the same machine, over the
processor time of a step, which is independent of other load. Beside it the ratio of steps with recording to steps
without, in turns, which says little on shared cores.
"""

import argparse
import json
import random
import statistics
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.race.contestants import MODES
from benchmarks.race.launch import run_ranks
from benchmarks.race.measuring import WARM_UP, Job, Measured, slowest
from ddp_zero.core.comm import ring
from ddp_zero.core.comm.recorder import RECENT_SPANS, Label, record_wait
from ddp_zero.core.comm.tracing import Trace
from ddp_zero.optimizer import ZeroRedundancyOptimizer

RESULTS = Path(__file__).parents[1] / "results"
RECORDED = ("ddp_zero stage 1, standalone", "ddp_zero stage 1, interleaved", "ddp_zero stage 2, interleaved")
COUNTED_STEPS, CALLS, REPEATS = 4, 20_000, 9
SAMPLED = 64
"""Memory by part is looked at in one of so many steps."""


def measure_recording(job: Job) -> dict[str, Any]:
    """All modes on one rank, in turns."""
    return {"costs": cost_of_each(), "modes": {name: of_mode(name, job) for name in RECORDED}}


def of_mode(name: str, job: Job) -> dict[str, Any]:
    """Events, notes and bytes of a step, and its time with and without recording."""
    measured = Measured(MODES[name], job)
    optimizer = measured.contestant.optimizer
    assert isinstance(optimizer, ZeroRedundancyOptimizer), "one of ours"
    measured.steps(WARM_UP)
    counting = time.perf_counter_ns()
    measured.steps(COUNTED_STEPS)
    counts = counted_since(counting)
    busy = []
    seconds: dict[str, list[float]] = {"recorded": [], "not recorded": []}
    order = random.Random(0)
    for _ in range(job["rounds"]):
        for which in order.sample(list(seconds), k=2):
            with nullcontext() if which == "recorded" else unrecorded():
                began = time.process_time()
                seconds[which].append(slowest(measured.steps(job["steps"])))
                busy.append((time.process_time() - began) / job["steps"])
    return {
        "per_step": {what: count / COUNTED_STEPS for what, count in counts.items()},
        "sample_memory": best(optimizer._stats.note_memory, 50),
        "read": best(optimizer.stats, 50),
        "seconds": seconds,
        "processor_seconds": min(busy),
    }


def cost_of_each() -> dict[str, float]:
    """Seconds that one of each costs, without contention: the least of some repeats."""
    trace = Trace()

    def event() -> None:
        with trace.label("wait_sync", 3):
            pass

    def wait() -> None:
        record_wait("the sync of bucket 3", str)

    def step() -> None:
        trace.step_ended(0, True)

    with trace.label("sync", 3):
        costs = {
            "events": best(event, CALLS),
            "waits": best(wait, CALLS),
            "moves": best(lambda: trace.add_bytes(1, 1), CALLS),
        }
    return {**costs, "steps": best(step, CALLS)}  # outside: a step reads all notes of an event that goes on


def best(call: Callable[[], object], number: int) -> float:
    """Seconds of one call, of this thread's processor time: other programs on the machine do not count."""
    return min(timeit.repeat(call, number=number, repeat=REPEATS, timer=time.thread_time)) / number


def counted_since(began: int) -> dict[str, int]:
    """Events and notes of the steps since a time, as `time.perf_counter_ns`."""
    kinds = Counter(type(entry) for span in RECENT_SPANS.spans if span.log[0] > began for entry in span.log)
    events = sum(event.begun > began for event in RECENT_SPANS.events())
    return {"events": events, "waits": kinds[str], "moves": kinds[tuple], "steps": COUNTED_STEPS}


@contextmanager
def unrecorded() -> Iterator[None]:
    """Without any of it but runs of sequences."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    with (
        mock.patch.object(ring, "record_wait", nothing),
        mock.patch.object(Trace, "add_bytes", nothing),
        mock.patch.object(Trace, "step_ended", nothing),
        mock.patch.object(Label, "__enter__", nothing),
        mock.patch.object(Label, "__exit__", nothing),
    ):
        yield


def seconds_recording(costs: dict[str, float], mode: dict[str, Any]) -> float:
    """Recording's share of a step, counted."""
    counted: float = sum(costs[what] * count for what, count in mode["per_step"].items())
    return counted + float(mode["sample_memory"]) / SAMPLED


def report(found: dict[str, Any], model: str, ranks: int) -> str:
    """A table in Markdown."""
    costs = found["costs"]
    command = " ".join(["python -m benchmarks.race.recording", *sys.argv[1:]])
    in_us = {what: f"{cost * 1e6:.2f} us" for what, cost in costs.items()}
    lines = [
        f"# Recording, model {model}, {ranks} Gloo ranks",
        "",
        f"`{command}`, torch {torch.__version__}. One event costs {in_us['events']}, the note of a wait "
        f"{in_us['waits']}, of messages {in_us['moves']}, the end of a step {in_us['steps']}. Counted: what there is "
        f"of each in a step times its cost, and a look at memory by part in one of {SAMPLED} steps, over the least "
        "processor time of a step (of all threads of a rank). "
        "Ratio: median of steps with recording to without, in turns, with quartiles.",
        "",
        "| mode | events | waits, messages | us of a step | processor ms, fastest step in ms | counted | ratio "
        "| `opt.stats()`, us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, mode in found["modes"].items():
        per_step, seconds = mode["per_step"], mode["seconds"]
        took, busy = seconds_recording(costs, mode), mode["processor_seconds"]
        ratios = [one / other for one, other in zip(seconds["recorded"], seconds["not recorded"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells = (
            name,
            f"{per_step['events']:.0f}",
            f"{per_step['waits']:.0f}, {per_step['moves']:.0f}",
            f"{took * 1e6:.0f}",
            f"{busy * 1e3:.1f}, {min(seconds['recorded']) * 1e3:.1f}",
            f"{took / busy:.3%}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            f"{mode['read'] * 1e6:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the ranks, and write the results of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    given = parser.parse_args()
    started = time.time()
    found = run_ranks({"phase": "recording", **vars(given)}, [[]] * given.ranks, {})[0]
    stem = RESULTS / f"recording-{given.model}-{given.ranks}ranks"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    text = report(found, given.model, given.ranks)
    stem.with_suffix(".md").write_text(text)
    print(f"{text}\n{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
