"""Chunks of a tensor: what they share, and whether they make up the whole."""

import pytest

from ddp_zero.values.chunks import Chunk


def chunk(*runs: tuple[int, int]) -> Chunk:
    return Chunk(tuple(start for start, _ in runs), tuple(stop - start for start, stop in runs))


def test_overlap_is_the_common_box_or_none() -> None:
    assert chunk((0, 4), (2, 6)).overlap(chunk((3, 9), (0, 3))) == chunk((3, 4), (2, 3))
    assert chunk((0, 4), (2, 6)).overlap(chunk((4, 5), (2, 6))) is None
    assert chunk((0, 0)).overlap(chunk((0, 3))) is None
    assert Chunk.whole(()).overlap(Chunk.whole(())) == Chunk.whole(())


def test_seen_from_subtracts_an_origin_and_moved_by_adds_it() -> None:
    box = chunk((3, 5), (2, 4))
    assert box.seen_from((3, 1)) == chunk((0, 2), (1, 3))
    assert box.seen_from((3, 1)).moved_by((3, 1)) == box


def test_a_chunk_has_slices_and_is_described_by_them() -> None:
    box = chunk((3, 5), (2, 4))
    assert box.slices == (slice(3, 5), slice(2, 4))
    assert box.describe() == "[3:5, 2:4]"


def test_chunks_that_make_up_the_tensor_have_no_fault() -> None:
    assert Chunk.fault((4, 6), [chunk((0, 4), (0, 2)), chunk((0, 4), (2, 6))]) is None
    assert Chunk.fault((4, 6), [chunk((0, 1), (0, 6)), chunk((1, 4), (0, 5)), chunk((1, 4), (5, 6))]) is None
    assert Chunk.fault((), [Chunk.whole(())]) is None
    assert Chunk.fault((0, 3), [Chunk.whole((0, 3))]) is None
    assert Chunk.fault((3,), [chunk((0, 3)), chunk((3, 3))]) is None, "a part without elements"


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([chunk((0, 2), (0, 6))], "12 of 24 elements"),
        ([chunk((0, 3), (0, 6)), chunk((2, 4), (0, 6))], "elements [0:3, 0:6] and [2:4, 0:6], which overlap"),
        ([chunk((0, 4), (0, 6)), chunk((4, 5), (0, 6))], "elements [4:5, 0:6], which it does not have"),
        ([chunk((0, 24))], "elements [0:24], which it does not have"),
    ],
)
def test_chunks_that_do_not_make_up_the_tensor_have_a_fault_with_their_elements(chunks: list[Chunk], said: str) -> None:
    assert Chunk.fault((4, 6), chunks) == said
