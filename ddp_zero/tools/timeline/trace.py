"""Traces of `torch.profiler` as they are on disk, reduced to what a picture needs."""

import gzip
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LABEL = re.compile(r"ddp_zero::(\w+)(?: \(bucket (\d+)\))?$")
_BACKWARD = "autograd::engine::evaluate_function"
_FORWARD = "DistributedDataParallel.forward"


@dataclass(frozen=True)
class Range:
    """A stretch of time.

    Attributes:
        what: ``forward``, ``backward``, or a label of this library such as ``wait_reduce``.
        begin, end: milliseconds.
        bucket: of which bucket, or -1.
    """

    what: str
    begin: float
    end: float
    bucket: int = -1


def read_trace(path: str | os.PathLike[str]) -> list[Range]:
    """What a trace says about forward, backward and this library, by time of beginning.

    Raises:
        ValueError: if it is no trace, or there is nothing of this library in it.
    """
    file = Path(path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        events = json.loads(raw)["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a trace that torch.profiler has exported in {file}, got {type(error).__name__}: {error}."
        ) from error
    return ranges_of(events, str(file))


def ranges_of(events: Iterable[dict[str, Any]], source: str) -> list[Range]:
    """The ranges among the events of a trace, on the host.

    Args:
        events: in Chrome's format; times in microseconds.
        source: for messages.

    Raises:
        ValueError: if there is nothing of this library.
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
            f"Expected labels of ddp_zero in {source}, got none. Profile whole training steps with "
            "torch.profiler.profile(activities=[ProfilerActivity.CPU])."
        )
    return sorted(found, key=lambda one: (one.begin, -one.end))
