"""What works today, each with the test that shows it: the rows of docs/status.md.

``pytest --write-status`` writes the second column of that page from the outcomes of the tests that it has run; any run
fails that finds a claim of the page without a test that passes. See `tests/conftest.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests import TIERS

STATUS = Path(__file__).parent.parent / "docs" / "status.md"

VERSIONS = "\n## Versions of torch and of Python\n"
"""Where the part of the page begins that `tests/versions.py` writes."""

YES, NIGHTLY, REFUSED, NOT_RUN = "yes", "yes, nightly", "no: clear error", "not run"
RAISING = ("LBFGS, sparse gradients", "Complex parameters with overlap or stage 2")
"""Features whose tests show an error."""

_ROW = re.compile(r"^\| (.+) \| ([^|]+) \| `([^`]+::[^`]+)` \|$", re.MULTILINE)


class Feature(NamedTuple):
    """A row.

    Attributes:
        what: the feature.
        claim: what the page says of it.
        test: the test that shows it.
    """

    what: str
    claim: str
    test: str

    @property
    def works(self) -> str:
        """The word for it if all cases of its test pass."""
        is_nightly = TIERS.get(self.test.split("/")[1]) == "nightly"
        return REFUSED if self.what in RAISING else NIGHTLY if is_nightly else YES

    def verdict(self, outcomes: Mapping[str, str]) -> str | None:
        """What the outcomes say, by the id of a case; None if no case of its test is known."""
        found = {outcome for case, outcome in outcomes.items() if case.partition("[")[0] == self.test}
        return None if not found else self.works if found == {"passed"} else NOT_RUN


def features_of(page: str) -> list[Feature]:
    """The rows of the page."""
    return [Feature(*row) for row in _ROW.findall(page)]


def unshown(page: str, outcomes: Mapping[str, str]) -> list[str]:
    """Features that the page claims, of which the outcomes say otherwise."""
    return [one.what for one in features_of(page) if one.verdict(outcomes) == NOT_RUN != one.claim]


def render(outcomes: Mapping[str, str], page: str) -> str:
    """The page with the outcomes; rows of which they say nothing stay."""

    def row(found: re.Match[str]) -> str:
        feature = Feature(*found.groups())
        return f"| {feature.what} | {feature.verdict(outcomes) or feature.claim} | `{feature.test}` |"

    return _ROW.sub(row, page)
