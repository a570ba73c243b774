"""The results of `compare`, as a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.race.contestants import REFERENCE
from benchmarks.race.report import MIB, Found, lower_bound, quartiles_of_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "ddp_zero"


def draw(path: Path, found: Found) -> None:
    """Step time, bytes sent and peak memory of every mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    modes = found["modes"]
    has_memory = any(mode["peak_bytes"] for mode in modes.values())
    figure = Figure(figsize=(15 if has_memory else 11, 1.5 + 0.35 * len(modes)), layout="constrained")
    FigureCanvasAgg(figure)
    time, wire, *memory = figure.subplots(1, 2 + has_memory, sharey=True)
    draw_time(time, found)
    bound = lower_bound(found["ranks"], found["model"]["parameter_bytes"])
    draw_bars(wire, list(modes), [max(mode["sent_bytes"]) / bound for mode in modes.values()], "%.2f")
    wire.set(title="bytes sent per rank and step,\nratio to the lower bound")
    for axes in memory:
        draw_memory(axes, found)
    model, link = found["model"], f", {found['link']['gbit']:g} Gbit/s" if found["link"] else ""
    figure.suptitle(f"{model['name']}, {model['parameters']:,} parameters, {found['ranks']} ranks{link}")
    figure.savefig(path)


def draw_time(axes: "Axes", found: Found) -> None:
    """Ratio to the reference, median and quartiles."""
    modes = found["modes"]
    base = modes[REFERENCE]["seconds"]
    quartiles = [quartiles_of_ratio(mode["seconds"], base) for mode in modes.values()]
    medians = [middle for _, middle, _ in quartiles]
    draw_bars(axes, list(modes), medians, "%.2f")
    errors = [[middle - low for low, middle, _ in quartiles], [high - middle for _, middle, high in quartiles]]
    axes.errorbar(medians, range(len(modes)), xerr=errors, fmt="none", ecolor="black", capsize=2)
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(title=f"time of a step, ratio to {REFERENCE}\n({1000 * statistics.median(base):.0f} ms); quartiles")


def draw_memory(axes: "Axes", found: Found) -> None:
    """Peaks, and marks where the formula has them."""
    modes = found["modes"]
    draw_bars(axes, list(modes), [max(mode["peak_bytes"]) / MIB for mode in modes.values()], "%.0f")
    known = {place: max(mode["formula_bytes"]) for place, mode in enumerate(modes.values()) if mode["formula_bytes"]}
    axes.plot([value / MIB for value in known.values()], list(known), "|", color="black", markersize=12)
    axes.set(title="peak MiB per rank from the third step;\n| by formula")


def draw_bars(axes: "Axes", names: Sequence[str], values: Sequence[float], form: str) -> None:
    """One bar per mode, first on top, with its number."""
    colors = ["skyblue" if name.startswith(OURS) else "silver" for name in names]
    bars = axes.barh(range(len(names)), values, color=colors)
    axes.bar_label(bars, fmt=form, label_type="center", fontsize="small")  # clear of the marks at their ends
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.15)
