"""``ddp-zero explain CODE``: prints the section on an error's code, from the page that the wheel contains."""

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
PLACES = PACKAGE / "troubleshooting.md", PACKAGE.parent / "docs" / "troubleshooting.md"
"""The page in a wheel, and in a clone of the repository."""


def build_parser() -> ArgumentParser:
    """The command line of ``ddp-zero explain``."""
    parser = ArgumentParser(prog="ddp-zero explain", description="Explain the code at the end of an error.")
    parser.add_argument("code", help="such as ZERO-203, or 203")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a section; returns 0, or 1 for a code that does not exist."""
    code = build_parser().parse_args(arguments).code.strip("[]").upper().removeprefix("ZERO-")
    found = section(code)
    print(found if found is not None else f"There is no code ZERO-{code}. Codes have three digits, as ZERO-203.")
    return 0 if found is not None else 1


def section(number: str) -> str | None:
    """The section on a code, by its three digits, without the links of the page; None if there is none."""
    text = next(place for place in PLACES if place.exists()).read_text()
    found = re.search(rf"^### (ZERO-{re.escape(number)}: .*?)(?=^<a id|^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    plain = re.sub(r"<!-- .*? -->\n|^```\w*\n", "", found[1], flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).replace("**", "").strip()
