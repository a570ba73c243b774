"""The table of docs/accelerators.md: what each mode sends and waits for in a step, written and checked by tests."""

from collections import Counter
from itertools import groupby
from pathlib import Path

from tests.accelerator.modes import Mode, Report

PAGE = Path(__file__).parent.parent.parent / "docs" / "accelerators.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
_HEADER = """\
| mode | collectives and messages of a step, with their elements | host synchronisations of a step |
| --- | --- | --- |
"""
_ANSWERS = (
    "core/state/connections.py",
    "core/step/rank_shard.py",
)  # the latter: an answer waits for the step before it


def row(mode: Mode, report: Report) -> str:
    """What the first of two ranks has shown in its last step."""
    runs = [(kind, numel, len(list(same))) for (kind, numel), same in groupby(report.messages)]
    sent = ", ".join(f"{count} x {kind} {numel}" if count > 1 else f"{kind} {numel}" for kind, numel, count in runs)
    asks = any(line.startswith(_ANSWERS) for _, line in report.syncs)  # from a thread that answers, at any time
    waits = Counter((what, line.rsplit(":", 1)[0]) for what, line in report.syncs if not line.startswith(_ANSWERS))
    found = [f"{count} x {what} ({file})" for (what, file), count in sorted(waits.items())]
    waited = ", ".join([*found, *(["those of `state_dict()`"] if asks else [])])
    return f"| {mode.name} | {sent} | {waited or 'none'} |\n"


def write(rows: list[str]) -> None:
    """Replace the table."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + _HEADER + "".join(rows) + END + after)
