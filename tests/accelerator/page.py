"""The table of docs/accelerators.md: what each mode sends and waits for in a step, written and checked by tests."""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tests.accelerator.modes import Mode, Report

PAGE = Path(__file__).parent.parent.parent / "docs" / "accelerators.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
_HEADER = """\
| modes | collectives and messages of a step, with their elements | host synchronisations of a step |
| --- | --- | --- |
"""
_ANSWERS = (
    "core/state/device_reads.py",
    "core/state/frames.py",
    "core/step/state_changes.py",
)  # the last: an answer waits for the step before it


def cells_of(report: Report) -> str:
    """The cells of a row: what the first of two ranks has shown in its last step."""
    sent = "; ".join(f"{kind} {_sizes(numel for _, numel in same)}" for kind, same in groupby(report.messages, _kind))
    asks = any(line.startswith(_ANSWERS) for _, line in report.syncs)  # from a thread that answers, at any time
    waits = Counter((what, line.rsplit(":", 1)[0]) for what, line in report.syncs if not line.startswith(_ANSWERS))
    found = [f"{count} x {what} ({file})" for (what, file), count in sorted(waits.items())]
    waited = ", ".join([*found, *(["those of `state_dict()`"] if asks else [])])
    return f"{sent} | {waited or 'none'} |"


def _kind(message: tuple[str, int]) -> str:
    return message[0]


def _sizes(numels: Iterable[int]) -> str:
    runs = [(numel, len(list(same))) for numel, same in groupby(numels)]
    return ", ".join(f"{count} x {numel}" if count > 1 else f"{numel}" for numel, count in runs)


def has_row(mode: Mode, report: Report) -> bool:
    """True if the page has a row of a mode with these cells."""
    rows = [line.removeprefix("| ").partition(" | ") for line in PAGE.read_text().splitlines()]
    return any(mode.name in names.split("; ") and cells == cells_of(report) for names, _, cells in rows)


def write(reports: Iterable[tuple[Mode, Report]]) -> None:
    """Replace the table; modes with the same cells share a row."""
    modes = dict[str, list[str]]()
    for mode, report in reports:
        modes.setdefault(cells_of(report), []).append(mode.name)
    rows = "".join(f"| {'; '.join(names)} | {cells}\n" for cells, names in modes.items())
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + _HEADER + rows + END + after)
