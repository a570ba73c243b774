"""README's picture, and the tables of README and docs/performance.md that come from raw results on CPUs.

python -m benchmarks.race --rounds 5
python -m benchmarks.race --link 1gbit --rounds 3 --steps 4 --no-memory
python -m benchmarks.memory --steps 2
python -m benchmarks.front
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.race.contestants import REFERENCE, TORCHS
from benchmarks.race.plots import draw_bars
from benchmarks.race.report import MIB, lower_bound, quartiles_of_ratio, row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LOOPBACK, LINKED, MEMORY = "compare-26m-2ranks", "compare-26m-2ranks-1gbit", "memory-2ranks"
TARGET = ROOT / "docs" / "images" / "compared.svg"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
FSDP = "FSDP2, no reshard after forward"
SHOWN = {
    REFERENCE: "DDP",
    TORCHS: "torch's ZeRO",
    FSDP: "FSDP2",
    "ddp_zero stage 1, overlapped": "ddp_zero stage 1",
    "ddp_zero stage 2, interleaved": "ddp_zero stage 2",
}
"""Modes of the race, and their names in the picture; ours are those of the one line."""
PEAKS = (REFERENCE, TORCHS, None, "ddp_zero stage 1, overlapped", "ddp_zero stage 2")
"""The same modes in `benchmarks.memory`."""
LISTED = (
    *(REFERENCE, "DDP + fused AdamW, bucket views", "torch ZeroRedundancyOptimizer", TORCHS, FSDP),
    *("ddp_zero stage 1, standalone", "ddp_zero stage 1, overlapped", "ddp_zero stage 2, interleaved"),
    *("ddp_zero stage 2, sync in forward", "ddp_zero stage 2, wrap", "ddp_zero stage 2, wrap, sync in forward"),
)
"""Modes of the race in docs/performance.md."""

Found = dict[str, Any]
"""Raw results."""


def load(stem: str) -> Found:
    """The raw results of a run."""
    found: Found = json.loads((RESULTS / f"{stem}.json").read_text())
    return found


# Tables


def fact(found: Found, name: str) -> str:
    """The date of a run, its commit, its command or its versions."""
    facts: list[str] = found["facts"]
    return next(text.partition(": ")[2] for text in facts if text.startswith(f"{name}: "))


def source(found: Found) -> str:
    """When a run was made, from which commit, and by which command."""
    return f"{fact(found, 'date')}, commit {fact(found, 'commit')}: `{fact(found, 'command')}`"


def median_ratio(found: Found, mode: str) -> str:
    """The time of a step to DDP's."""
    seconds = (found["modes"][one]["seconds"] for one in (mode, REFERENCE))
    return f"{quartiles_of_ratio(*seconds)[1]:.2f}"


def of_readme() -> str:
    """The figures on CPUs, a column for each mode of the picture."""
    fast, slow, peaks = load(LOOPBACK), load(LINKED), load(MEMORY)
    bound = lower_bound(fast["ranks"], fast["model"]["parameter_bytes"])
    whole = [max(fast["modes"][mode]["peak_bytes"], default=None) for mode in SHOWN]
    larger = [max(rank["from the third step"] for rank in peaks["found"][mode]) if mode else None for mode in PEAKS]
    rows = [
        ["CPU: what, and the command", *(name.removeprefix("ddp_zero ") for name in SHOWN.values())],
        ["---"] * (1 + len(SHOWN)),
        [f"Time per step, 25M parameters, over loopback, {source(fast)}", *(median_ratio(fast, one) for one in SHOWN)],
        [f"... behind links of 1 Gbit/s, {source(slow)}", *(median_ratio(slow, one) for one in SHOWN)],
        [
            "Bytes sent per rank and step in the first run, ratio to the lower bound",
            *(f"{max(fast['modes'][mode]['sent_bytes']) / bound:.2f}" for mode in SHOWN),
        ],
        ["Peak MiB in the first run, from the third step on", *map(in_mib, whole)],
        [f"... 256 MiB of parameters, {source(peaks)}", *map(in_mib, larger)],
    ]
    return lines(rows)


def in_mib(size: float | None) -> str:
    """Without a fraction; a dash where nothing was measured."""
    return "-" if size is None else f"{size / MIB:.0f}"


def lines(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def of_race(stem: str, *columns: tuple[str, int]) -> str:
    """Modes of a race, with some cells of its table."""
    found = load(stem)
    table = [["mode", *(name for name, _ in columns)], ["---"] * (1 + len(columns))]
    table += [[mode.removeprefix("ddp_zero "), *(row(mode, found)[at] for _, at in columns)] for mode in LISTED]
    return f"*{source(found)}, medians (quartiles) ([table](../benchmarks/results/{stem}.md)).*\n\n{lines(table)}"


def of_memory() -> str:
    """All modes of `benchmarks.memory`, beside the estimate as it was then."""
    written = (RESULTS / f"{MEMORY}.md").read_text()
    table = written[written.index("| ") :].replace("| ddp_zero ", "| ").strip()
    return f"*{source(load(MEMORY))}, MiB ([table](../benchmarks/results/{MEMORY}.md)).*\n\n{table}"


def blocks() -> dict[Path, dict[str, str]]:
    """By page and name: what stands between its marks."""
    ratio = ("ratio to DDP + fused AdamW", 2)
    return {
        README: {"cpu": of_readme()},
        PERFORMANCE: {
            "loopback": of_race(
                LOOPBACK, ratio, ("to torch's, bucket views", 3), ("bytes sent, ratio to the bound", 5), ("peak MiB", 6)
            ),
            "1gbit": of_race(LINKED, ratio, ("bytes sent, ratio to the bound", 5)),
            "memory": of_memory(),
        },
    }


def written(page: Path, text: str) -> str:
    """The page with its tables as the raw results have them.

    Raises:
        ValueError: the marks of a table are not there.
    """
    for name, block in blocks()[page].items():
        begin, end = f"<!-- figures: {name} -->\n", "\n<!-- end of figures -->"
        before, found, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not found or not has_end:
            raise ValueError(f"Expected {begin!r} and {end!r} in {page.name}, got a page without them.")
        text = before + begin + block + end + after
    return text


# The picture


def draw(loopback: Found, linked: Found, path: Path) -> None:
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
    peak, fast, slow = figure.subplots(3, 1)
    peaks = [max(loopback["modes"][mode]["peak_bytes"]) / MIB for mode in SHOWN]
    draw_bars(peak, list(SHOWN.values()), peaks, "%.0f")
    peak.set_title("peak MiB per rank", fontsize="medium")
    _draw_ratios(fast, loopback, "inside one machine")
    _draw_ratios(slow, linked, f"behind links of {linked['link']['gbit']:g} Gbit/s")
    figure.supxlabel(_caption(loopback, linked), fontsize="small", color="dimgray")
    figure.savefig(path, metadata={"Date": None})


def _draw_ratios(axes: "Axes", found: Found, where: str) -> None:
    base = found["modes"][REFERENCE]["seconds"]
    medians = [quartiles_of_ratio(found["modes"][mode]["seconds"], base)[1] for mode in SHOWN]
    draw_bars(axes, list(SHOWN.values()), medians, "%.2f")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(f"time of a step {where}\n(DDP = 1, {1000 * statistics.median(base):.0f} ms)", fontsize="medium")


def _caption(loopback: Found, linked: Found) -> str:
    dates = " and ".join(dict.fromkeys(fact(found, "date") for found in (loopback, linked)))
    millions = loopback["model"]["parameters"] / 1e6
    return f"{millions:.0f}M parameters, {loopback['ranks']} Gloo ranks on CPUs, {fact(loopback, 'versions')}, {dates}"


def main() -> None:
    """Draw and write from the committed results."""
    draw(load(LOOPBACK), load(LINKED), TARGET)
    for page in blocks():
        page.write_text(written(page, page.read_text()))
    print(*(path.relative_to(ROOT) for path in (TARGET, *blocks())))


if __name__ == "__main__":
    main()
