"""Step time and memory by number of ranks, as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.scale.schedule import Forecast
from benchmarks.scale.wire import Transport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
Steps = Mapping[float, Mapping[Transport, Mapping[str, Mapping[int, Forecast]]]]


def draw(path: Path, steps: Steps, memory: Mapping[str, Mapping[int, float]]) -> None:
    """A row per transport with a column per link, and memory below."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = {name: colormaps["tab20"](index) for index, name in enumerate(memory)}
    columns = max(2, len(steps))
    figure = Figure(figsize=(5.5 * columns, 13), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(Transport) + 1, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for column, (gbit, by_transport) in enumerate(steps.items()):
        for row, (transport, of_modes) in enumerate(by_transport.items()):
            for name, by_ranks in of_modes.items():
                seconds = [step.seconds for step in by_ranks.values()]
                plot(grid[row][column], name, list(by_ranks), seconds, colors[name])
            grid[row][column].set(title=f"{gbit:g} Gbit/s, {transport.value}", ylabel="s per step (predicted)")
            grid[row][column].set_yscale("log")
    left, right = grid[-1][:2]
    for name, bytes_by_ranks in memory.items():
        mebibytes = [nbytes / MIB for nbytes in bytes_by_ranks.values()]
        plot(left, name, list(bytes_by_ranks), mebibytes, colors[name])
    left.set(title="memory of the rank that needs most", ylabel="MiB (by formula)", ylim=0)
    right.legend(*left.get_legend_handles_labels(), loc="center left")
    figure.savefig(path, dpi=70)


def plot(axes: "Axes", name: str, ranks: list[int], values: list[float], color: tuple[float, ...]) -> None:
    """A line by number of ranks: solid for our modes, dashed for all other modes, dotted for the ideal."""
    line = ":" if name.startswith("(") else "-" if name.startswith("ddp_zero") else "--"
    axes.axis("on")
    axes.plot(ranks, values, linestyle=line, marker=".", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)
