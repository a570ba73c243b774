"""The picture of one step: a row for forward and backward, and one for each bucket."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_zero.tools.timeline.iteration import WAITS, Iteration

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
_HEIGHTS = {"reduce": 0.78, "sync": 0.78, "local_step": 0.78, "wait_reduce": 0.4, "wait_sync": 0.4}


def draw(step: Iteration, path: Path, title: str = "") -> None:
    """Draw a step.

    Args:
        step: what to draw.
        path: the file to write; its ending says in which format.
        title: above the picture.
    """
    buckets = step.buckets
    figure = Figure(figsize=(11, 2.4 + 0.32 * (len(buckets) + 1)), layout="constrained")
    axes = figure.subplots()
    for one in step.exposed:
        axes.axvspan(one.begin - step.begin, one.end - step.begin, color="#c0392b", alpha=0.10, linewidth=0)
    for one in step.compute:
        axes.barh(0, one.end - one.begin, left=one.begin - step.begin, height=0.78, color=_COLOURS[one.what])
    row_of = {bucket: row for row, bucket in enumerate(buckets, start=1)}
    for bar in sorted(step.bars, key=lambda bar: bar.what in WAITS):  # waits on top of what is in flight
        width = max(bar.end - bar.begin, (step.end - step.begin) * 1e-3)
        left = bar.begin - step.begin
        axes.barh(row_of[bar.bucket], width, left=left, height=_HEIGHTS[bar.what], color=_COLOURS[bar.what])
    axes.set_yticks(range(len(buckets) + 1), ["compute", *(f"bucket {bucket}" for bucket in buckets)])
    axes.invert_yaxis()
    axes.set_xlim(0, step.end - step.begin)
    axes.set_xlabel("milliseconds since the beginning of the step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    shown = {one.what for one in (*step.compute, *step.bars)}
    handles = [Patch(color=colour, label=_NAMES.get(what, what)) for what, colour in _COLOURS.items() if what in shown]
    handles.append(Patch(color="#c0392b", alpha=0.15, label="exposed: nothing but waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    axes.set_title(f"{title}\n{step.summary()}" if title else step.summary(), fontsize=11, loc="left")
    figure.savefig(path, dpi=130)
