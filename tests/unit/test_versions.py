"""The table of docs/status.md whose tests run only by `python -m tests.versions`."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import features
from tests.versions import CORE, Row, render, rows_of

ROOT = Path(__file__).parents[2]
ROW = Row("2.9.1+cu128", "3.12.1", 20, 0, 3, "2026-01-02")


def test_rows_are_added_in_order_and_replaced() -> None:
    page = render("before\n", [ROW, replace(ROW, torch="2.10.0"), replace(ROW, torch="2.8.0", failed=1)])
    assert [row.torch for row in rows_of(page)] == ["2.8.0", "2.9.1+cu128", "2.10.0"]
    assert [row.works for row in rows_of(page)] == [False, True, True]
    again = render(page, [replace(ROW, on="2026-02-03"), replace(ROW, python="3.10.1")])
    assert [(row.python, row.on) for row in rows_of(again)][1:3] == [("3.10.1", ROW.on), ("3.12.1", "2026-02-03")]
    assert len(rows_of(again)) == 4
    assert again.startswith("before\n")
    assert render(f"{again}\n## Another\n\ntext\n", []) == f"{again}\n## Another\n\ntext\n"
    assert not replace(ROW, passed=0).works


def test_writing_the_status_page_keeps_the_rows_of_versions() -> None:
    page = features.STATUS.read_text()
    assert features.render({}, page) == page == render(page, [])


@pytest.mark.parametrize("case", CORE)
def test_the_core_names_tests_that_exist(case: str) -> None:
    path, _, rest = case.partition("::")
    source = (ROOT / path).read_text()
    name, _, which = rest.partition("[")
    assert f"def {name}(" in source or f"{name} = " in source
    if which and f"{name} = case.each()" in source:
        loops = (ROOT / "tests/multiproc/overlap_loops.py").read_text()  # which two of them run
        body = which.rpartition("-")[0]
        assert f"def _{body}(" in source or f"def {body}(" in loops
