"""Values of which ranks have written parts: rows of any state, put together from files, and forged rows refused."""

import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddp_zero.checkpoint.rows import Row, SavedCheckpoint, rows_of
from ddp_zero.checkpoint.tensor_file import StoredTensor, as_written, pieces, read, read_into, verify, write_tensors
from ddp_zero.values.chunks import Chunk
from ddp_zero.values.parts import run_of
from ddp_zero.values.tree import TensorSpec
from tests.unit.checkpoint.saved import forge, rank_0, rank_1

CPU = torch.device("cpu")
WHOLE = torch.arange(24.0).view(4, 6)
CHUNKS = [Chunk((0, 0), (1, 6)), Chunk((1, 0), (3, 2)), Chunk((1, 2), (1, 4)), Chunk((2, 2), (2, 4))]


# Rows of a state


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_flat_run_splits_into_at_most_2d_minus_1_boxes_in_memory_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=3))), whole.numel()]
    every = []
    for start, stop in pairwise(bounds):
        chunks = list(Chunk.of_run(shape, start, stop)) if start < stop or not whole.numel() else []
        assert [int(one) for chunk in chunks for one in whole[chunk.slices].flatten()] == list(range(start, stop))
        assert len(chunks) <= max(1, 2 * len(shape) - 1)
        every += chunks
    assert Chunk.fault(shape, every) is None, "all runs tile the tensor"


@pytest.mark.parametrize("held", [WHOLE, WHOLE.t(), torch.arange(120.0).view(2, 3, 4, 5).permute(0, 3, 1, 2)])
def test_rows_of_parts_are_boxes_of_value_and_state_in_any_order_of_memory(held: Tensor) -> None:
    run, middle, found = run_of(held), held.numel() // 2 - 1, []
    for part in (slice(0, 7), slice(7, middle), slice(middle, held.numel())):
        state = {"exp_avg": -run[part], "step": 3, "n": torch.ones(())}
        rows = rows_of("w", held, state, tuple(held.shape), None, part)
        assert [one for one in rows if one.shape is None] == [Row("w", "step", 3), Row("w", "n", state["n"])]
        found += [one for one in rows if one.shape is not None]
    for key, sign in ((None, 1), ("exp_avg", -1)):
        whole = torch.full(held.shape, float("nan"))
        for one in (one for one in found if one.key == key):
            assert (one.name, one.shape, one.stride) == ("w", tuple(held.shape), held.stride())
            whole[Chunk(one.offsets, tuple(one.value.shape)).slices] = one.value
        assert torch.equal(whole, sign * held)


def test_rows_of_a_chunk_have_the_shape_of_the_whole_and_the_chunks_place() -> None:
    held, norm = torch.ones(2, 3), torch.ones(2, 2)
    rows = rows_of("w", held, {"exp_avg": torch.zeros(2, 3), "norm": norm}, (4, 3), Chunk((2, 0), (2, 3)))
    assert [(*one[:2], *one[3:]) for one in rows[:2]] == [("w", key, (4, 3), None, (2, 0)) for key in (None, "exp_avg")]
    assert rows[2:] == [Row("w", "norm", norm)]


def test_rows_of_a_whole_parameter_are_its_values() -> None:
    held = torch.ones(2, 3)
    state: dict[Any, Any] = {"exp_avg": torch.zeros(2, 3), "step": 3}
    for chunk in (None, Chunk((0, 0), (2, 3))):
        rows = rows_of("w", held, state, (2, 3), chunk)
        assert rows == [Row("w", key, value) for key, value in [(None, held), *state.items()]]


# Reading


def stored(folder: Path, whole: Tensor = WHOLE) -> StoredTensor:
    """The tensor in four unequal parts, of two files."""
    found: list[Any] = []
    for rank in range(2):
        mine = CHUNKS[rank::2]
        spans = write_tensors(folder / f"__{rank}_0.distcp", [whole[chunk.slices] for chunk in mine])
        found += zip(mine, spans, strict=True)
    return StoredTensor(TensorSpec((4, 6), whole.stride(), torch.float32, "cpu"), tuple(found))


@pytest.mark.parametrize("whole", [WHOLE, WHOLE.view(6, 4).t()])
def test_a_tensor_stored_in_pieces_is_read_whole_and_by_boxes_into_any_memory(tmp_path: Path, whole: Tensor) -> None:
    cut = stored(tmp_path, whole)
    found = read(tmp_path, cut, CPU)
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()
    flat = torch.frombuffer(bytearray(b"".join(map(bytes, pieces(tmp_path, cut)))), dtype=torch.float32)
    assert torch.equal(flat, whole.reshape(-1))
    for target in (torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(4, 6).double(), torch.zeros(8, 6)[::2]):
        read_into(tmp_path, cut, target)
        assert torch.equal(target, whole.to(target.dtype))
    for rows in [(0, 4), (1, 3), (2, 4), (0, 1)]:
        for columns in [(0, 6), (1, 5), (2, 6), (5, 6)]:
            chunk = Chunk((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
            part = cut.within(chunk)
            assert torch.equal(read(tmp_path, part, CPU), whole[chunk.slices])
            inner = Chunk((0, 0), (1, 1))
            assert torch.equal(read(tmp_path, part.within(inner), CPU), whole[chunk.slices][:1, :1])


def test_a_slice_reads_only_the_chunks_that_it_overlaps(tmp_path: Path) -> None:
    cut = stored(tmp_path)
    assert as_written([cut.within(CHUNKS[2])])[0] in as_written([cut])
    assert len(cut.within(CHUNKS[2]).chunks) == 1


def test_a_value_of_one_rank_is_as_it_was(tmp_path: Path) -> None:
    one = StoredTensor.of(TensorSpec((4, 6), None, torch.float32, "cpu"), *write_tensors(tmp_path / "a", [WHOLE]))
    assert one.within(Chunk.whole((4, 6))) is one
    assert torch.equal(read(tmp_path, one.within(Chunk((1, 2), (2, 3))), CPU), WHOLE[1:3, 2:5])


@pytest.mark.parametrize("is_crc", [True, False])
def test_a_damaged_part_is_named_unless_checksums_were_compared_before(tmp_path: Path, is_crc: bool) -> None:
    cut = stored(tmp_path)
    if is_crc:
        crcs = [f"{zlib.crc32(WHOLE[chunk.slices].numpy().tobytes()):08x}" for chunk, _ in cut.chunks]
        spans = [(chunk, replace(span, checksum=crc)) for (chunk, span), crc in zip(cut.chunks, crcs, strict=True)]
        cut = replace(cut, chunks=tuple(spans))
    verify(tmp_path, [cut])
    victim = cut.chunks[2][1]
    file = tmp_path / victim.file
    raw = bytearray(file.read_bytes())
    raw[victim.offset] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"damaged bytes in .*{file.name}\. There is 'w' of the model\."):
        verify(tmp_path, [cut], {victim: "'w' of the model"})
    with pytest.raises(ValueError, match="damaged bytes"):
        read(tmp_path, cut, CPU)
    assert (read(tmp_path, cut, CPU, checks=False) != WHOLE).sum() == 1


def test_two_tensors_of_different_sizes_at_one_place_are_refused(tmp_path: Path) -> None:
    (span,) = write_tensors(tmp_path / "__0_0.distcp", [WHOLE])
    one, half = (StoredTensor.of(TensorSpec(shape, None, torch.float32, "cpu"), span) for shape in ((4, 6), (2, 6)))
    verify(tmp_path, [one, one])
    with pytest.raises(ValueError, match=r"Expected shape \[2, 6\] of float32 to fit its checksum"):
        verify(tmp_path, [one, half])
    with pytest.raises(ValueError, match=r"Expected shape \[2, 6\] of float32 to fit its checksum"):
        verify(tmp_path, [half, one])


# Rows of several ranks


def cut_row(key: Any, tensor: Any, first: Any, shape: Any = (4, 3), stride: Any = None) -> tuple[Any, ...]:
    """A row of some rows of ``w``."""
    return "w", key, tensor, shape, stride, (first, 0)


def parts(*changed: Any, births: Any = None) -> tuple[Any, Any]:
    """Two ranks that hold the rows of ``w``, and its state; ``changed`` is another row, or state, of the second."""
    first = rank_0(
        rows=[cut_row(None, torch.zeros(2, 3), 0), cut_row("exp_avg", torch.zeros(2, 3), 0)],
        model={"b": torch.zeros(3)},
        state={"b": {"step": torch.zeros(())}, "w": {"n": 3}},
    )
    rows = {"value": cut_row(None, torch.zeros(2, 3), 2), "avg": cut_row("exp_avg", torch.zeros(2, 3), 2)}
    given = {**rows, "state": {"w": {"n": 3}}, "model": {}, **dict(changed)}
    wholes = {"state": given.pop("state"), "model": given.pop("model")}
    others = [one for one in given.values() if one]
    return first, rank_1(births={"w": (0, 0)} if births is None else births, rows=others, **wholes)


def test_parts_of_two_ranks_are_joined_to_one_value_and_state(tmp_path: Path) -> None:
    saved = SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts()))
    for one in (saved.model["w"], saved.state["w"]["exp_avg"]):
        assert one.spec.shape == (4, 3)
        assert [chunk for chunk, _ in one.chunks] == [Chunk((0, 0), (2, 3)), Chunk((2, 0), (2, 3))]
        assert [span.file for _, span in one.chunks] == ["__0_0.distcp", "__1_0.distcp"]
    assert saved.state["w"]["n"] == 3
    assert list(saved.state) == ["w", "b"]
    assert saved.model["tied"] is saved.model["w"]


HALF = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("value", cut_row(None, HALF, 1)), "'w' to make up one value, got .* which overlap"),
        (("value", cut_row(None, HALF, 3)), "which it does not have"),
        (("value", cut_row(None, HALF, -2)), "which it does not have"),
        (("value", None), r"got 6 of 12 elements, from ranks \[0\]"),
        (("avg", None), "the state 'exp_avg' of 'w' to make up one value, got 6 of 12 elements"),
        (("value", cut_row(None, HALF, 2, (6, 3))), "several shapes or dtypes"),
        (("value", cut_row(None, HALF, 2, (4, 3), (1, 4))), "several shapes or dtypes"),
        (("value", cut_row(None, HALF.double(), 2)), "several shapes or dtypes"),
        (("value", cut_row(None, 3, 2)), "besides tensors of parts"),
        (("model", {"w": 3}), "besides tensors of parts"),
        (("model", {"w": torch.zeros(4, 3)}), "besides tensors of parts"),
        (("value", ("w", None, torch.zeros(2), (4, 3), None, (2, 0))), "numbers of dimensions"),
        (("value", ("w", None, HALF, (4, 3), None, (2,))), "numbers of dimensions"),
        (("value", ("w", None, HALF, (4, 3), (2, 0))), "numbers of dimensions|several shapes"),
        (("value", ("w", None, HALF, ("4", 3), None, (2, 0))), "damaged rows"),
        (("value", ("w", None, HALF, (4, 3), None, (2.0, 0))), "damaged rows"),
        (("value", (3, None, HALF, (4, 3), None, (2, 0))), "damaged rows"),
        (("value", (3, 3)), "Expected a part of a checkpoint"),
        (("state", {"w": {"n": 4}}), "the state 'n' of 'w' to make up one value, got different values, from ranks"),
        (("state", {"z": {"n": 4}}), "one without the order in which it was created"),
        (("avg", cut_row("exp_avg", torch.zeros(3, 3), 1)), "which overlap"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changed: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts(changed)))
    assert "[ZERO-624]" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        *(((4, 3), stride) for stride in [(1, 1), (4, 3), (0, 1), (1,), (1 << 70, 1), (-1, 4)]),
        *((shape, None) for shape in [(1 << 40, 1 << 40), (-4, 3), (1 << 70, 3)]),
    ],
)
def test_shapes_and_strides_that_cannot_be_are_refused(tmp_path: Path, shape: Any, stride: Any) -> None:
    first, second = parts()
    for one in (first, second):
        one["rows"] = [old if len(old) == 3 else (*old[:3], shape, stride, old[5]) for old in one["rows"]]
    with pytest.raises(ValueError, match="ZERO-624"):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", first, second))


def test_a_state_of_one_rank_is_read_beside_masters_of_parts(tmp_path: Path) -> None:
    of_whole = {"momentum": torch.zeros(4, 3), "left": torch.zeros(4, 4), "n": 3}
    halves = [[cut_row(key, torch.zeros(2, 3), begin) for key in (None, "master_weight")] for begin in (0, 2)]
    b = {"b": {"step": torch.zeros(())}}
    first = rank_0(rows=halves[0], model={"b": torch.zeros(3)}, state=b, births={"b": (0, 1)})
    second = rank_1(rows=halves[1], model={}, state={"w": of_whole}, births={"w": (4, 0)})
    saved = SavedCheckpoint.open(forge(tmp_path / "step-00000003", first, second))
    state = saved.state["w"]
    assert (state["momentum"].spec.shape, state["left"].spec.shape, state["n"]) == ((4, 3), (4, 4), 3)
    assert len(state["master_weight"].chunks) == 2
    assert state["master_weight"].spec.shape == (4, 3)
    assert list(saved.state) == ["b", "w"], "it was born on the rank that steps the whole"
