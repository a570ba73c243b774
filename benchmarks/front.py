"""README's picture: memory and step time of DDP, torch's ZeRO, FSDP2 and both stages, from raw results of the race.

python -m benchmarks.race --rounds 5
python -m benchmarks.race --link 1gbit --rounds 3 --steps 4 --no-memory
python -m benchmarks.front
"""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.race.contestants import REFERENCE
from benchmarks.race.plots import draw_bars
from benchmarks.race.report import MIB, quartiles_of_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
LOOPBACK, LINKED = RESULTS / "compare-26m-2ranks.json", RESULTS / "compare-26m-2ranks-1gbit.json"
TARGET = Path(__file__).parents[1] / "docs" / "images" / "compared.svg"
SHOWN = {
    REFERENCE: "DDP",
    "torch ZeroRedundancyOptimizer, bucket views": "torch's ZeRO",
    "FSDP2, no reshard after forward": "FSDP2",
    "ddp_zero stage 1, overlapped": "ddp_zero stage 1",
    "ddp_zero stage 2, interleaved": "ddp_zero stage 2",
}
"""Modes of the race, and their names in the picture."""


def draw(loopback: dict[str, Any], linked: dict[str, Any], path: Path) -> None:
    """Draw peak memory and the time of a step without and with a slow link, one bar per mode.

    Raises:
        KeyError: a file of results lacks a mode of the picture.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ddp_zero"  # the same file for the same numbers
    figure = Figure(figsize=(5.2, 5.4), layout="constrained")  # narrow: to be read on a phone as well
    FigureCanvasSVG(figure)
    memory, fast, slow = figure.subplots(3, 1)
    peaks = [max(loopback["modes"][mode]["peak_bytes"]) / MIB for mode in SHOWN]
    draw_bars(memory, list(SHOWN.values()), peaks, "%.0f")
    memory.set_title("peak MiB per rank", fontsize="medium")
    _draw_ratios(fast, loopback, "inside one machine")
    _draw_ratios(slow, linked, f"behind links of {linked['link']['gbit']:g} Gbit/s")
    figure.supxlabel(_caption(loopback, linked), fontsize="small", color="dimgray")
    figure.savefig(path, metadata={"Date": None})


def _draw_ratios(axes: "Axes", found: dict[str, Any], where: str) -> None:
    base = found["modes"][REFERENCE]["seconds"]
    medians = [quartiles_of_ratio(found["modes"][mode]["seconds"], base)[1] for mode in SHOWN]
    draw_bars(axes, list(SHOWN.values()), medians, "%.2f")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(f"time of a step {where}\n(DDP = 1, {1000 * statistics.median(base):.0f} ms)", fontsize="medium")


def _caption(loopback: dict[str, Any], linked: dict[str, Any]) -> str:
    facts = [dict(fact.split(": ", 1) for fact in found["facts"]) for found in (loopback, linked)]
    dates = " and ".join(dict.fromkeys(fact["date"] for fact in facts))
    millions = loopback["model"]["parameters"] / 1e6
    return f"{millions:.0f}M parameters, {loopback['ranks']} Gloo ranks on CPUs, {facts[0]['versions']}, {dates}"


def main() -> None:
    """Draw from the committed results."""
    draw(json.loads(LOOPBACK.read_text()), json.loads(LINKED.read_text()), TARGET)
    print(TARGET.relative_to(Path.cwd()) if TARGET.is_relative_to(Path.cwd()) else TARGET)


if __name__ == "__main__":
    main()
