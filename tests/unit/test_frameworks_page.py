"""The table of docs/frameworks.md, whose tests run only where the frameworks are installed."""

import re
from pathlib import Path

import pytest

from tests.frameworks import table

ROOT = Path(__file__).parents[2]
CASES = [pattern for _, _, *patterns in table.ROWS for pattern in patterns if pattern.startswith("tests/")]


def test_the_table_is_the_generated_one() -> None:
    page = table.PAGE.read_text()
    assert page == table.render({}, page)
    assert len(re.findall(r"^\| .*\| (yes|not run) \|$", page, flags=re.MULTILINE)) == len(table.ROWS)


@pytest.mark.parametrize("pattern", sorted(set(CASES)))
def test_every_cell_names_a_case_that_exists(pattern: str) -> None:
    path, _, rest = pattern.partition("::")
    source = (ROOT / path).read_text()
    name = re.escape(re.split(r"\\\[|-2\\\]", rest)[1])
    if "another_number_of_ranks" in pattern:
        stage = pattern.removesuffix(r"\]").partition("sizes[01]-")[2]
        assert stage in source
    else:
        assert re.search(rf"^def _{name}\(", source, flags=re.MULTILINE)


def test_a_cell_says_yes_only_if_all_its_cases_pass() -> None:
    framework, mode, pattern, *_ = table.ROWS[0]
    case = pattern.replace("\\", "")
    page = table.PAGE.read_text()
    for outcome, word in (("passed", table.YES), ("failed", table.NOT_RUN), ("skipped", table.NOT_RUN)):
        written = table.render({case: outcome}, page)
        assert f"| {framework} | {mode} | {word} | {word} | {word} |" in written
        claimed = table.render({case: "passed"}, page)
        assert len(table.unshown(claimed, {case: outcome})) == (0 if outcome == "passed" else 3)
    assert table.unshown(page, {}) == []
