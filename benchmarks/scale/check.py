"""Errors of the predictions against measurements of `benchmarks.race` over shaped links."""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scale.modes import MODES, Sizes, measured_shape, plan_job
from benchmarks.scale.schedule import Phases, forecast
from benchmarks.scale.wire import Link, Transport


@dataclass(frozen=True)
class Comparison:
    """A mode of a result, measured and predicted: seconds, bytes sent per rank on average, most bytes of memory."""

    result: str
    mode: str
    measured: float
    predicted: float
    measured_bytes: float
    predicted_bytes: float
    measured_memory: float | None
    predicted_memory: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def compare(found: dict[str, Any], result: str, link: Link) -> list[Comparison]:
    """Predict each mode of a result from its own phases and its link's rate."""
    model, ranks = found["model"], found["ranks"]
    shape = measured_shape(model["name"], model["tensors"], model["bucket_bytes"])
    job, shards = plan_job(shape, ranks, Phases(**found["phases"]))
    shaped = replace(link, gbit=found["link"]["gbit"])
    sizes = Sizes(ranks, sum(shape.sizes), shards, shape.largest_bucket)
    comparisons = []
    for name, measured in found["modes"].items():
        if name in MODES:
            step = forecast(MODES[name].step, job, shaped, Transport.GLOO)
            seconds, sent = statistics.median(measured["seconds"]), statistics.mean(measured["sent_bytes"])
            peak, memory = max(measured["peak_bytes"], default=None), MODES[name].memory(sizes)
            comparisons.append(Comparison(result, name, seconds, step.seconds, sent, step.sent, peak, memory))
    return comparisons


def check(folder: Path, link: Link) -> str:
    """A table of every shaped result in a folder; ``link`` is used but for its rate."""
    comparisons: list[Comparison] = []
    left_out: list[str] = []
    for path in sorted(folder.glob("compare-*.json")):
        found = json.loads(path.read_text())
        if found["link"] is None:
            left_out.append(f"{path.name}: the link is not shaped, so computing and communicating share the cores")
            continue
        if found.get("nodes", 1) > 1:
            left_out.append(f"{path.name}: ranks of a node share its link, which the model does not have")
            continue
        comparisons += compare(found, path.stem, link)
        unknown = [name for name in found["modes"] if name not in MODES]
        left_out += [f"{path.name}: no prediction for {', '.join(unknown)}"] if unknown else []
    notes = "\n".join(f"- {note}" for note in left_out)
    if not comparisons:
        return f"Nothing to check against: no compare-*.json over a shaped link in {folder.name}/.\n{notes}".rstrip()
    return "\n\n".join(filter(None, [table(comparisons), summary(comparisons), notes]))


def table(comparisons: list[Comparison]) -> str:
    """Markdown: one row per mode of each result."""
    head = ("result", "mode", "ms measured", "predicted", "error", "MB sent", "predicted", "peak MB", "by formula")
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for one in comparisons:
        cells = (
            one.result,
            one.mode,
            f"{1000 * one.measured:.0f}",
            f"{1000 * one.predicted:.0f}",
            f"{one.error:+.1%}",
            f"{one.measured_bytes / 1e6:.1f}",
            f"{one.predicted_bytes / 1e6:.1f}",
            "-" if one.measured_memory is None else f"{one.measured_memory / 1e6:.0f}",
            f"{one.predicted_memory / 1e6:.0f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def summary(comparisons: list[Comparison]) -> str:
    """The largest and the median error, sign left out."""
    worst = max(comparisons, key=lambda one: abs(one.error))
    median = statistics.median(abs(one.error) for one in comparisons)
    return (
        f"{len(comparisons)} comparisons; median error {median:.1%}, largest {worst.error:+.1%} ({worst.mode}, "
        f"{worst.result}). Measured are medians; predictions leave out what the CPU spends on sending and summing. "
        "Formulas leave out activations."
    )
