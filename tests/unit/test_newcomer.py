"""A newcomer finds each of ten answers within a minute and two pages, by links that lead there."""

import re
from pathlib import Path

import pytest

from tests import newcomer
from tests.newcomer import HOME, README, REPOSITORY, Step, Way

WAYS = [pytest.param(way, id=f"{way.task}, from {front}") for front in (README, HOME) for way in newcomer.ways(front)]


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_a_minute_and_two_pages_away(way: Way) -> None:
    assert way.seconds <= newcomer.MOST_SECONDS
    assert way.opened <= newcomer.MOST_PAGES


@pytest.mark.parametrize("way", WAYS)
def test_each_link_leads_to_the_page_with_the_answer(way: Way) -> None:
    front, answer = way.steps
    text = (REPOSITORY / front.page).read_text()
    targets = re.findall(rf"\[{re.escape(front.until)}\]\(([^)#]+)", text)
    found = {((REPOSITORY / front.page).parent / target).resolve() for target in targets}
    assert (REPOSITORY / answer.page).resolve() in found


def test_the_page_of_status_has_this_table() -> None:
    """To a few seconds: small edits of a page need no new table."""
    found, expected = [row.split("|") for row in _rows(newcomer.STATUS.read_text())], newcomer.table().split("\n")[2:]
    assert len(found) == len(expected) == len(newcomer.ANSWERS)
    for cells, row in zip(found, expected, strict=True):
        assert cells[:4] == row.split("|")[:4], "python -m tests.newcomer --write"
        for told, counted in zip(cells[4:6], row.split("|")[4:6], strict=True):
            assert abs(int(told) - int(counted)) <= 5, "python -m tests.newcomer --write"


def _rows(page: str) -> list[str]:
    return page[page.index("<!-- newcomer -->") : page.index("<!-- end of newcomer -->")].strip().split("\n")[3:]


PAGE = """# Title

Five\x20

![not seen](x.svg)

| first | second |
| --- | --- |
| row | [elsewhere](y.md) |
| that row | [there](z.md) |

## Passed over

Long text of a different section with the [link](w.md).

## Lead

<!-- not seen -->
```python
answer = 1
```
"""


def test_reading_counts_the_text_on_the_way_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "REPOSITORY", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    before = len("Title") + len("Five") + len("first") + len("row")
    assert newcomer.characters_read(Step("page.md", "", "there", True)) == before + len("that row") + len("there")
    passed = len("that row") + len("Passed over") + len("Lead")
    assert newcomer.characters_read(Step("page.md", "Lead", "answer = 1")) == before + passed + len("answer = 1")
    with pytest.raises(ValueError, match="Expected the text 'nowhere'"):
        newcomer.characters_read(Step("page.md", "", "nowhere"))
