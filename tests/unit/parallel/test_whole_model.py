"""What ranks state, what does not fit together, and who writes what."""

from typing import Any

import pytest

from ddp_zero.parallel.names import rename_all
from ddp_zero.parallel.whole_model import Entry, Layout, RankValues
from ddp_zero.values.chunks import Chunk


def entry(shape: tuple[int, ...] = (4,), chunk: Chunk | None = None, home: str = "ranks [0, 1]", **rest: Any) -> Entry:
    return Entry(shape, "float32", Chunk.whole(shape) if chunk is None else chunk, home, **rest)


def laid_out(*statements: RankValues) -> Layout:
    return Layout([RankValues.of_text(one.as_text()) for one in statements], "rank {}".format)


def half(number: int, **rest: Any) -> Entry:
    return entry(chunk=Chunk((2 * number,), (2,)), **rest)


def test_of_ranks_with_the_same_elements_the_one_with_the_state_writes() -> None:
    layout = laid_out(
        RankValues({"w": half(0), "b": entry(writers=0)}),
        RankValues({"w": half(0, writers=1), "b": entry()}),
        RankValues({"w": half(1, writers=2), "b": entry(writers=2)}),
        RankValues({"w": half(1), "b": entry()}),
    )
    assert [layout.written_by(rank) for rank in range(4)] == [{"b"}, {"w"}, {"w"}, set()]


def test_a_state_is_written_by_the_ranks_of_its_first_group_alone() -> None:
    """Groups may have cut their states at different elements."""
    layout = laid_out(*(RankValues({"w": entry(writers=first)}) for first in (0, 1, 0, 1)))
    assert [layout.written_by(rank) for rank in range(4)] == [{"w"}, set(), {"w"}, set()]


def test_values_without_state_are_spread_over_ranks_and_buffers_are_written_by_the_first() -> None:
    values = {"a": entry(weight=9), "b": entry(weight=1), "seen": entry(weight=5)}
    layout = laid_out(RankValues(values, buffers=["seen"]), RankValues(values, buffers=["seen"]))
    assert layout.written_by(0) | layout.written_by(1) == set(values)
    assert "seen" in layout.written_by(0)
    assert layout.written_by(1) == {"b"}


def test_the_first_rank_with_the_state_of_a_whole_writes_it() -> None:
    """Also one whose part has no elements, and one of several where the parameter is replicated once more."""
    empty = entry(chunk=Chunk((4,), (0,)), writers=2, has_whole_state=True)
    layout = laid_out(
        RankValues({"w": half(0, writers=0)}),
        RankValues({"w": half(1, writers=1)}),
        RankValues({"w": empty}),
        RankValues({"w": empty}),
    )
    assert [layout.whole_states_of(rank) for rank in range(4)] == [set(), set(), {"w"}, set()]


def test_only_elsewhere_lists_the_names_of_other_ranks_alone() -> None:
    layout = laid_out(RankValues({"a": entry(), "b": entry()}, ["x"]), RankValues({"a": entry(), "c": entry()}))
    assert layout.only_elsewhere(0) == {"c"}
    assert layout.only_elsewhere(1) == {"b", "x"}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (entry(), entry(home="ranks [2]"), "'w' on rank 0 and rank 1, with different values: one belongs to"),
        (entry(), entry((5,)), r"one shape and dtype, got shape \[4\] of float32 and shape \[5\] of float32 on rank 0"),
        (entry(sample="a"), entry(sample="b"), "'w' is in no parameter group and has different values on rank 0 and"),
        (half(0), half(0), r"make up shape \[4\] of float32, got 2 of 4 elements: \[0:2\] on rank 0"),
        (half(0), entry(), r"got elements \[0:2\] and \[0:4\], which overlap: \[0:2\] on rank 0; \[0:4\] on rank 1"),
    ],
)
def test_entries_that_contradict_each_other_are_refused_with_their_names(
    first: Entry, second: Entry, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        laid_out(RankValues({"w": first}), RankValues({"w": second}))


def test_names_by_a_function_must_be_names_and_differ() -> None:
    assert rename_all(["a", "b"], str.upper, "names=", "it") == {"a": "A", "b": "B"}
    with pytest.raises(TypeError, match="Expected names= to return a name for 'a', got None"):
        rename_all(["a"], lambda name: None, "names=", "it")  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"got several parameters of it under \['x'\]"):
        rename_all(["a", "b"], lambda name: "x", "names=", "it")
