"""docs/torch.md names what the source uses of torch beside its public names, under the mode that reaches it first."""

import pytest

from tests.torch_names import MODES, on_page, reached, uses


def test_the_page_has_each_private_name_of_torch_and_no_other() -> None:
    tables = list(on_page().values())
    names = {use.name for use in uses()}
    assert names ^ set().union(*tables) == set(), "in the source or on the page only"
    assert sum(map(len, tables)) == len(names), "in two tables"


@pytest.mark.nightly
def test_the_page_tells_which_mode_reaches_a_name_first() -> None:
    found, before = [], set[str]()
    for mode in MODES:
        names = reached(mode)
        found.append(names - before)
        before |= names
    assert list(on_page().values()) == [*found, {use.name for use in uses()} - before]
