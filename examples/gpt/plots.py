"""The picture of a training. This needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpt.report import PEAK_NOTE, Result


def draw(path: Path, result: Result, reference: Result | None) -> None:
    """Draw losses, optimizer state and peak memory into a file."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, state, peak = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    draw_losses(losses, result, reference)
    draw_bars(state, [usage.state / 2**20 for usage in result.usages], "optimizer state per rank (MiB)")
    state.axhline(result.unsharded_state / 2**20, color="black", linestyle="--", label="unsharded")
    state.set_ylim(0, 1.3 * result.unsharded_state / 2**20)
    state.legend(loc="upper right")
    draw_bars(peak, [usage.peak / 2**20 for usage in result.usages], "peak memory per rank (MiB)")
    figure.supxlabel(PEAK_NOTE, fontsize="small")
    figure.savefig(path)


def draw_losses(axes: Axes, result: Result, reference: Result | None) -> None:
    """Draw training and validation loss by step, over a wider and paler line of the reference."""
    steps = range(1, len(result.train_losses) + 1)
    if reference is not None:
        axes.plot(steps, reference.train_losses, color="orange", alpha=0.4, linewidth=4, label="training, DDP + AdamW")
    axes.plot(steps, result.train_losses, color="tab:blue", linewidth=0.8, label=f"training, {result.mode}")
    axes.plot(*zip(*result.validation_losses, strict=True), "o-", color="tab:red", label=f"validation, {result.mode}")
    axes.set(title="loss (nats per byte)", xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_bars(axes: Axes, values: Sequence[float], title: str) -> None:
    """Draw one bar per rank, with its number."""
    ranks = [str(rank) for rank in range(len(values))]
    axes.bar_label(axes.bar(ranks, values, color="tab:blue", width=0.6), fmt="%.2f")
    axes.margins(y=0.15)
    axes.set(title=title, xlabel="rank")
