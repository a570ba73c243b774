"""``ddp-zero config``: the effect of each key of a configuration, or the page of all keys."""

import sys
from argparse import Namespace
from collections.abc import Iterable

from ddp_zero.deepspeed.config.config import Config, read
from ddp_zero.deepspeed.config.table import ANY, SECTIONS, ConfigError, Finding, Key, Kind, autos, find, hint

_HEADER = """\
# DeepSpeed's configuration, key by key

The effect of each key of DeepSpeed 0.19 in `ddp_zero.deepspeed.initialize(config=...)`. *Honoured*: the effect here.
*No effect*: why; logged once. *Refused*: an error, with the remedy. *Off*: values at which the key asks for nothing.
`name.*`: the block and all in it. Any other key is an error as well, with the nearest name. `python -m ddp_zero config
check ds_config.json` prints these lines for a file, and `python -m ddp_zero config keys` this page.
"""


def main(options: Namespace) -> int:
    """Run a command; returns its exit code: 1 if a configuration cannot be used."""
    if options.action == "keys" and options.key is None:
        print(render(), end="")
        return 0
    if options.action == "keys":
        return _explain(options.key)
    ranks = options.ranks
    try:
        document = read(options.config)
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


def _explain(name: str) -> int:
    """Print the rows of the keys whose path has this part."""
    rows = [row for keys in SECTIONS.values() for row in keys if name in (*row.path.split("."), row.path, *row.holds)]
    for row in rows:
        print(f"{row.path}  {row.kind.value}  {_meaning(row)}")
    if not rows:
        known = {part for keys in SECTIONS.values() for row in keys for part in (row.path, *row.path.split("."))}
        wrong = f"Expected a key of DeepSpeed's configuration, got {name!r}{hint(name, known)} [ZERO-703]"
        print(f"ddp-zero config: error: {wrong}", file=sys.stderr)
    return 0 if rows else 1


def render() -> str:
    """The page. Keys of a section with one effect share a row."""
    parts = [_HEADER]
    for title, rows in SECTIONS.items():
        keys = dict[str, list[str]]()
        for row in rows:
            if row.text != "A block.":
                keys.setdefault(f"{row.kind.value} | {_meaning(row)}", []).append(_names(row))
        lines = [f"\n## {title}\n", "| key | here | meaning |", "| --- | --- | --- |"]
        lines += [f"| {', '.join(names)} | {effect} |" for effect, names in keys.items()]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _names(row: Key) -> str:
    """A key, the keys that share its row, and the values at which it asks for nothing."""
    notes = []
    if row.holds and row.holds != ANY:
        notes.append("with " + ", ".join(f"`{name}`" for name in row.holds))
    if row.switch and row.kind is not Kind.HONOURED:
        notes.append(f"off without `{row.switch}: true`")
    elif row.off and row.kind is not Kind.HONOURED:
        notes.append(f"off: {_text_of(row.off)}")
    path = f"`{row.path}.*`" if row.holds == ANY else f"`{row.path}`"
    return f"{path} ({'; '.join(notes)})" if notes else path


def _meaning(row: Key) -> str:
    cases = [f" **{_text_of(case.values)}**: {case.kind.value}. {case.text}" for case in row.cases]
    return row.text + "".join(cases)


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
