"""``ddp-zero config``: the effect of each key of a configuration, or the page of all keys."""

import sys
from argparse import Namespace
from collections.abc import Iterable

from ddp_zero.deepspeed.config.config import Config, read
from ddp_zero.deepspeed.config.table import ANY, SECTIONS, ConfigError, Finding, Key, Kind, autos, find

_HEADER = """\
# DeepSpeed's configuration, key by key

The effect of each key of DeepSpeed 0.19 in `ddp_zero.deepspeed.initialize(config=...)`. *Honoured*: the effect here.
*No effect*: why; logged once. *Refused*: an error, with the remedy. A key that is not in this table is an error as
well, with the nearest name. `python -m ddp_zero config check ds_config.json` prints these lines for a file.

This page is written by `python -m ddp_zero config keys`, and a test holds it against the table in the code.
"""


def main(options: Namespace) -> int:
    """Run a command; returns its exit code: 1 if a configuration cannot be used."""
    if options.action == "keys":
        print(render(), end="")
        return 0
    return _check(options.config, options.ranks)


def _check(path: str, ranks: int) -> int:
    try:
        document = read(path)
        print(listing(find(document)))
        left = autos(document)
        if left:
            print(f'\n"auto" is filled in when training begins, so values were not checked: {", ".join(left)}')
        else:
            batch = Config.parse(document, ranks).batch
            print(f"\n{batch.train} samples a step = {batch.micro} * {batch.accumulation} rounds * {ranks} ranks")
    except ConfigError as error:
        print(f"\nddp-zero config: error: {error}", file=sys.stderr)
        return 1
    return 0


def render() -> str:
    """The page."""
    parts = [_HEADER]
    for title, rows in SECTIONS.items():
        lines = [f"\n## {title}\n", "| key | here | meaning |", "| --- | --- | --- |"]
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
        text += f" **{_text_of(case.values)}**: {case.kind.value}. {case.text}"
    if row.switch and row.kind is not Kind.HONOURED:
        text += f" Without `{row.switch}: true` it asks for nothing."
    elif row.off and row.kind is not Kind.HONOURED:
        text += f" {_text_of(row.off)} asks for nothing."
    return f"| {' '.join(names)} | {row.kind.value} | {text} |"


def _text_of(values: Iterable[object]) -> str:
    words = {None: "null", True: "true", False: "false"}
    return ", ".join(words[value] if value is None or isinstance(value, bool) else f"{value}" for value in values)


def listing(findings: Iterable[Finding]) -> str:
    """The effect of each key of a configuration, a line each."""
    rows = [(one.path, f"{one.value!r:.40}", one.kind.value, one.text) for one in findings]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    )
