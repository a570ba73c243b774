"""``ddp-zero explain CODE``: prints the section on an error's code, from the page that the wheel contains."""

import re
import sys
from argparse import Namespace
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
PLACES = PACKAGE / "troubleshooting.md", PACKAGE.parent / "docs" / "troubleshooting.md"
"""The page in a wheel, and in a clone of the repository."""


def main(options: Namespace) -> int:
    """Print a section; returns 0, or 1 for a code that does not exist."""
    code = options.code.strip("[]").upper().removeprefix("ZERO-")
    found = section(code)
    if found is None:
        wrong = f"there is no code ZERO-{code}; codes have three digits, as ZERO-203. [ZERO-905]"
        print(f"ddp-zero explain: error: {wrong}", file=sys.stderr)
        return 1
    print(found)
    return 0


def section(number: str) -> str | None:
    """The section on a code, by its three digits, without the links of the page; None if there is none."""
    text = next(place for place in PLACES if place.exists()).read_text()
    found = re.search(rf"^### ZERO-{re.escape(number)}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    plain = re.sub(r"<!-- .*? -->\n|^```\w*\n", "", found[1], flags=re.MULTILINE)
    return f"ZERO-{number}: " + re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).strip()
