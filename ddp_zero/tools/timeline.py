"""``ddp-zero timeline trace.json``: draw one step of a trace of `torch.profiler`.

The picture has a row for forward and backward, and one for each bucket, and shows hidden and exposed communication.
"""

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_LABEL = re.compile(r"ddp_zero::(\w+)(?: \(bucket (\d+)\))?$")
_BACKWARD = "autograd::engine::evaluate_function"
_FORWARD = "DistributedDataParallel.forward"
_COMPUTE = ("forward", "backward")
_WAITS = ("wait_reduce", "wait_sync", "wait_errors", "share_errors")
_MOST_APART = 0.02  # fraction of a step: ranges of backward with smaller gaps are merged


# From a trace to ranges


@dataclass(frozen=True)
class Range:
    """A stretch of time."""

    what: str  # ``forward``, ``backward``, or a label of this library such as ``wait_reduce``
    begin: float  # begin in milliseconds
    end: float  # end in milliseconds
    bucket: int = -1  # index of the bucket, or -1


def read_trace(path: str | os.PathLike[str]) -> list[Range]:
    """Ranges of forward, backward and this library in a trace, by begin; ValueError if there are none."""
    file = Path(path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        events = json.loads(raw)["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a trace that torch.profiler has exported in {file}, got {type(error).__name__}: {error}. "
            "[ZERO-908]"
        ) from error
    return ranges_of(events, str(file))


def ranges_of(events: Iterable[dict[str, Any]], source: str) -> list[Range]:
    """Ranges among the events of a trace in Chrome's format (times in microseconds), on the host.

    Raises ValueError naming ``source`` if there are no labels of this library.
    """
    found = []
    for event in events:
        if event.get("ph") != "X" or str(event.get("cat", "")).startswith("gpu"):
            continue
        name, begin, length = str(event.get("name", "")), float(event["ts"]) / 1e3, float(event.get("dur", 0)) / 1e3
        label = _LABEL.match(name)
        if label:
            found.append(Range(label[1], begin, begin + length, int(label[2] or -1)))
        elif name.startswith(_BACKWARD):
            found.append(Range("backward", begin, begin + length))
        elif name == _FORWARD:
            found.append(Range("forward", begin, begin + length))
    if not any(one.what in ("local_step", "sync", "reduce") for one in found):
        raise ValueError(
            f"No labels of ddp_zero in {source}. Profile whole training steps with "
            "torch.profiler.profile(activities=[ProfilerActivity.CPU]). [ZERO-908]"
        )
    return sorted(found, key=lambda one: (one.begin, -one.end))


# From ranges to the bars of a step


@dataclass(frozen=True)
class Iteration:
    """One training step."""

    compute: Sequence[Range]  # forward and backward, without this library's time inside them
    # for each bucket: ``reduce`` and ``sync`` while in flight, at most, ``local_step``, and waits
    bars: Sequence[Range]
    exposed: Sequence[Range]  # waits of the training loop for other ranks, without overlaps
    begin: float  # begin in the trace, in milliseconds
    end: float  # end in the trace, in milliseconds

    @property
    def buckets(self) -> list[int]:
        """Indices of the buckets that have bars."""
        return sorted({bar.bucket for bar in self.bars if bar.bucket >= 0})

    def exposed_ms(self) -> float:
        """Milliseconds in which the training loop waits for other ranks."""
        return sum(one.end - one.begin for one in self.exposed)

    def in_flight_ms(self) -> float:
        """Milliseconds with messages in flight."""
        flights = [bar for bar in self.bars if bar.what in ("reduce", "sync")]
        return sum(one.end - one.begin for one in union(flights, "in flight"))

    def summary(self) -> str:
        """A summary in one line."""
        took, exposed = self.end - self.begin, self.exposed_ms()
        return (
            f"step of {took:.1f} ms, {len(self.buckets)} buckets; communication for {self.in_flight_ms():.1f} "
            f"ms, of which exposed {exposed:.1f} ms ({exposed / took:.0%} of the step)"
        )


def iterations_in(ranges: Sequence[Range]) -> list[Iteration]:
    """The steps of a trace, in order, from its ranges by begin.

    A step begins with its forward pass, or its backward pass if the trace has no forward, and ends with this library's
    last label before the next step.
    """
    found = []
    for begin, end in pairwise([*_starts(ranges), float("inf")]):
        within = [one for one in ranges if begin <= one.begin < end]
        labels = [one for one in within if one.what not in _COMPUTE]
        if any(one.what == "local_step" for one in labels):
            late = [one for one in ranges if one.begin >= end and one.what == "wait_sync"]
            found.append(_iteration(within, labels, late))
    return found


def _starts(ranges: Sequence[Range]) -> list[float]:
    """Begins of steps: the first forward pass, or else backward, after the labels of the previous step."""
    starts, has_stepped = [], True
    first = "forward" if any(one.what == "forward" for one in ranges) else "backward"
    for one in ranges:
        if one.what == first and has_stepped:
            starts.append(one.begin)
            has_stepped = False
        has_stepped |= one.what in ("local_step", "sync")
    return starts or [min(one.begin for one in ranges)]


def _iteration(within: Sequence[Range], labels: Sequence[Range], late: Sequence[Range]) -> Iteration:
    bars: list[Range] = []
    for posted, awaited in (("reduce", "wait_reduce"), ("sync", "wait_sync")):
        waits = [one for one in labels if one.what == awaited]
        waits += late if awaited == "wait_sync" else []
        for one in labels:
            if one.what == posted:
                wait = next((wait for wait in waits if wait.bucket == one.bucket and wait.begin >= one.begin), one)
                bars.append(Range(posted, one.begin, max(one.end, wait.end), one.bucket))
    bars += [one for one in labels if one.bucket >= 0 and one.what in ("local_step", *_WAITS)]
    exposed = union([one for one in labels if one.what in _WAITS], "exposed")
    begin = min(one.begin for one in within)
    end = max(one.end for one in within if one.what != "forward")
    busy = union([one for one in labels if one.what != "step"], "busy")
    compute: list[Range] = []
    for what in _COMPUTE:
        parts = union([one for one in within if one.what == what], what, apart=_MOST_APART * (end - begin))
        compute += minus(parts, busy)
    return Iteration(compute, bars, exposed, begin, max([end, *(bar.end for bar in bars)]))


def union(ranges: Iterable[Range], what: str, apart: float = 0.0) -> list[Range]:
    """The time covered by ranges, without overlaps; ranges with a gap of at most ``apart`` are merged."""
    found: list[Range] = []
    for one in sorted(ranges, key=lambda one: one.begin):
        if found and one.begin <= found[-1].end + apart:
            found[-1] = Range(what, found[-1].begin, max(found[-1].end, one.end))
        else:
            found.append(Range(what, one.begin, one.end))
    return found


def minus(ranges: Iterable[Range], taken: Sequence[Range]) -> list[Range]:
    """Ranges without the time of ``taken``, which is ordered and free of overlaps."""
    found = []
    for one in ranges:
        begin = one.begin
        for other in taken:
            if other.end <= begin or other.begin >= one.end:
                continue
            if other.begin > begin:
                found.append(Range(one.what, begin, other.begin))
            begin = max(begin, other.end)
        if begin < one.end:
            found.append(Range(one.what, begin, one.end))
    return found


# The picture

_COLOURS = {
    "forward": "#9aa5b1",
    "backward": "#52606d",
    "reduce": "#8fb8de",
    "wait_reduce": "#1f5a94",
    "local_step": "#3f8f5f",
    "sync": "#f2c48d",
    "wait_sync": "#c25e0c",
}
_NAMES = {
    "reduce": "reduce in flight (at most)",
    "wait_reduce": "waiting for a reduction",
    "local_step": "step",
    "sync": "sync in flight (at most)",
    "wait_sync": "waiting for a sync",
}
_EXPOSED = "#c0392b"


def draw(step: Iteration, path: Path, title: str = "") -> None:
    """Draw a step into a file, whose suffix determines the format. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    buckets, length = step.buckets, step.end - step.begin
    figure = Figure(figsize=(11, 2.4 + 0.32 * (len(buckets) + 1)), layout="constrained")
    axes = figure.subplots()
    for one in step.exposed:
        axes.axvspan(one.begin - step.begin, one.end - step.begin, color=_EXPOSED, alpha=0.10, linewidth=0)
    for one in step.compute:
        axes.barh(0, one.end - one.begin, left=one.begin - step.begin, height=0.78, color=_COLOURS[one.what])
    row_of = {bucket: row for row, bucket in enumerate(buckets, start=1)}
    for bar in sorted(step.bars, key=lambda bar: bar.what in _WAITS):  # waits on top of messages in flight
        width = max(bar.end - bar.begin, length * 1e-3)
        height = 0.4 if bar.what in _WAITS else 0.78
        axes.barh(row_of[bar.bucket], width, left=bar.begin - step.begin, height=height, color=_COLOURS[bar.what])
    axes.set_yticks(range(len(buckets) + 1), ["compute", *(f"bucket {bucket}" for bucket in buckets)])
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel("milliseconds since the beginning of the step")
    axes.spines[["top", "right"]].set_visible(False)
    shown = {one.what for one in (*step.compute, *step.bars)}
    handles = [Patch(color=colour, label=_NAMES.get(what, what)) for what, colour in _COLOURS.items() if what in shown]
    handles.append(Patch(color=_EXPOSED, alpha=0.15, label="exposed: nothing but waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    axes.set_title(f"{title}\n{step.summary()}" if title else step.summary(), fontsize=11, loc="left")
    figure.savefig(path, dpi=130)


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``ddp-zero timeline``."""
    description = "Draw one step of a trace of torch.profiler."
    parser = argparse.ArgumentParser(prog="ddp-zero timeline", description=description)
    parser.add_argument("trace", help="trace by export_chrome_trace of torch.profiler, .json or .json.gz")
    parser.add_argument("-o", "--output", help="a .png, .svg or .pdf; by default the trace's name with .png")
    parser.add_argument("--step", type=int, default=-1, help="index of the step, from 0; -1 (default): the last")
    parser.add_argument("--title", default="", help="put above the picture")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture, and print its numbers. Returns the exit status."""
    given = build_parser().parse_args(arguments)
    path = Path(given.output or given.trace.removesuffix(".gz").removesuffix(".json") + ".png")
    try:
        steps = iterations_in(read_trace(given.trace))
        if not -len(steps) <= given.step < len(steps):
            raise ValueError(
                f"Expected a step from 0 to {len(steps) - 1}, or -1 for the last, got {given.step}. [ZERO-908]"
            )
        step = steps[given.step]
        draw(step, path, given.title)
    except ImportError as error:
        print(f"Expected matplotlib, got {error}. Run pip install 'ddp_zero[plot]'.", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {step.summary()}")
    return 0
