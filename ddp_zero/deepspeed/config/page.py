"""The table as text: a page of the documentation, and what a command prints for one configuration."""

from collections.abc import Iterable

from ddp_zero.deepspeed.config.keys import ANY, Finding, Key, Kind
from ddp_zero.deepspeed.config.main_keys import BATCH, CHECKPOINTS, LOGGING, OPTIMIZER, PRECISION, REDUCTION
from ddp_zero.deepspeed.config.other_keys import OTHER_KEYS
from ddp_zero.deepspeed.config.zero_keys import ZERO_KEYS

_HEADER = """\
# DeepSpeed's configuration, key by key

What `ddp_zero.deepspeed.initialize(config=...)` does with each key of DeepSpeed 0.19. *Honoured*: what it does here.
*No effect*: why; logged once. *Refused*: an error, with the remedy. A key that is not in this table is an error as
well, with the nearest name. `python -m ddp_zero config check ds_config.json` prints these lines for a file.

This page is written by `python -m ddp_zero config keys`, and a test holds it against the table in the code.
"""

_SECTIONS: dict[str, list[Key]] = {
    "Batch": BATCH,
    "Optimizer and scheduler": OPTIMIZER,
    "Precision": PRECISION,
    "Reduction": REDUCTION,
    "Logging": LOGGING,
    "Checkpoints": CHECKPOINTS,
    "zero_optimization": ZERO_KEYS,
    "Others": OTHER_KEYS,
}


def render() -> str:
    """The page."""
    parts = [_HEADER]
    for title, rows in _SECTIONS.items():
        lines = [f"\n## {title}\n", "| key | here | what that means |", "| --- | --- | --- |"]
        lines += [_row(row) for row in rows if row.text != "A block."]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _row(row: Key) -> str:
    names = [f"`{row.path}`"]
    if row.holds == ANY:
        names.append("and all in it")
    elif row.holds:
        names.append("with " + ", ".join(f"`{name}`" for name in row.holds))
    text = row.text
    for case in row.cases:
        text += f" **{_shown(case.values)}**: {case.kind.value}. {case.text}"
    if row.switch and row.kind is not Kind.HONOURED:
        text += f" Without `{row.switch}: true` it asks for nothing."
    elif row.off and row.kind is not Kind.HONOURED:
        text += f" {_shown(row.off)} asks for nothing."
    return f"| {' '.join(names)} | {row.kind.value} | {text} |"


def _shown(values: Iterable[object]) -> str:
    words = {None: "null", True: "true", False: "false"}
    return ", ".join(words[value] if value is None or isinstance(value, bool) else f"{value}" for value in values)


def listing(findings: Iterable[Finding]) -> str:
    """What becomes of each key of a configuration, a line each."""
    rows = [(one.path, f"{one.value!r:.40}", one.kind.value, one.text) for one in findings]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    )
