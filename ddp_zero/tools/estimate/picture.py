"""Estimates as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_GIB = 1 << 30


def draw(
    path: str | Path,
    modes: Sequence[str],
    parts: Sequence[Mapping[str, int]],
    ranks: int,
    over: Mapping[int, Sequence[int]],
) -> None:
    """Bars of parts per mode, and lines of totals over the number of ranks.

    Args:
        path: of the picture.
        modes: their names.
        parts: bytes by part, for each mode.
        ranks: of the bars.
        over: for numbers of ranks the total of each mode; none for a picture without lines.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Expected matplotlib for a plot, got none. Install ddp_zero[plot].") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 2 if over else 1
    height = 1.6 + 0.42 * len(modes)
    figure, axes = pyplot.subplots(1, panels, figsize=(7.2 * panels, height), squeeze=False, layout="constrained")
    bars = axes[0][0]
    left = [0.0] * len(modes)
    keys = list(dict.fromkeys(key for one in parts for key in one))
    for number, part in enumerate(keys):
        widths = [one.get(part, 0) / _GIB for one in parts]
        bars.barh(range(len(modes)), widths, left=left, label=part, color=f"C{number}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        bars.text(total, place, f" {total:.1f}", va="center", fontsize=8)
    bars.set_yticks(range(len(modes)), modes)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.12 * max(left))
    bars.set_xlabel(f"GiB on the rank that needs most, {ranks} ranks")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    if over:
        lines = axes[0][1]
        for place, mode in enumerate(modes):
            lines.plot(list(over), [totals[place] / _GIB for totals in over.values()], marker=".", label=mode)
        lines.set_xscale("log", base=2)
        lines.set_xticks(list(over), list(map(str, over)))
        lines.set_ylim(bottom=0)
        lines.set_xlabel("ranks")
        lines.set_ylabel("GiB")
        lines.legend(fontsize=7)
        lines.grid(alpha=0.3)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
