"""Parameters of which ranks have written pieces: put together from files in any order of memory, and forged ones."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.folder import JoinedTensor, StoredTensor, as_written, within
from ddp_zero.checkpoint.tensor_file import pieces, read, read_into, verify, write_tensors
from ddp_zero.core.local.parts import run_of
from ddp_zero.core.local.tree import TensorSpec, memory_of
from ddp_zero.core.plan.boxes import Box
from tests.unit.checkpoint.saved import forge, rank_0, rank_1

CPU = torch.device("cpu")
WHOLE = torch.arange(24.0).view(4, 6).t()  # its memory is not in logical order


def stored(folder: Path, whole: Tensor = WHOLE) -> JoinedTensor:
    """The tensor in three unequal pieces, of two files."""
    run, found = run_of(whole), []
    for rank, bounds in enumerate([[(0, 5), (20, 24)], [(5, 20)]]):
        spans = write_tensors(folder / f"__{rank}_0.distcp", [run[begin:end] for begin, end in bounds])
        for (begin, end), span in zip(bounds, spans, strict=True):
            spec = TensorSpec((end - begin,), None, torch.float32, "cpu")
            found.append((begin, StoredTensor(spec, span)))
    ordered = [one for _, one in sorted(found, key=lambda one: one[0])]
    return JoinedTensor.of(tuple(whole.shape), whole.stride(), ordered)


@pytest.mark.parametrize("whole", [WHOLE, WHOLE.contiguous()])
def test_pieces_are_read_into_any_order_of_memory(tmp_path: Path, whole: Tensor) -> None:
    joined = stored(tmp_path, whole)
    found = read(tmp_path, joined, CPU)
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()
    for target in (torch.full((6, 4), -1.0), torch.full((4, 6), -1.0).t(), torch.full((6, 4), -1.0).double()):
        read_into(tmp_path, joined, target)
        assert torch.equal(target, whole.to(target.dtype))
    flat = torch.frombuffer(bytearray(b"".join(map(bytes, pieces(tmp_path, joined)))), dtype=torch.float32)
    assert torch.equal(flat, whole.reshape(-1))
    for box in (Box((1, 2), (3, 2)), Box((5, 3), (1, 1))):
        assert torch.equal(read(tmp_path, within(joined, box), CPU), whole[box.slices])
        assert set(as_written([within(joined, box)])) == set(as_written([joined])), "read at whole pieces"


@pytest.mark.parametrize("is_crc", [True, False])
def test_a_damaged_piece_is_found_unless_checksums_were_compared_before(tmp_path: Path, is_crc: bool) -> None:
    joined = stored(tmp_path)
    if is_crc:
        crcs = [f"{zlib.crc32(memory_of(run_of(WHOLE)[a:b])):08x}" for a, b in ((0, 5), (5, 20), (20, 24))]
        known = [
            replace(piece, span=replace(piece.span, checksum=crc))
            for piece, crc in zip(joined.pieces, crcs, strict=True)
        ]
        joined = JoinedTensor.of((6, 4), WHOLE.stride(), known)
    verify(tmp_path, [joined])
    victim = joined.pieces[1]
    file = tmp_path / victim.span.file
    raw = bytearray(file.read_bytes())
    raw[victim.span.offset] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"damaged bytes in .*{file.name}\. There is 'w' of the model\."):
        verify(tmp_path, [joined], {victim: "'w' of the model"})
    with pytest.raises(ValueError, match="damaged bytes"):
        read(tmp_path, joined, CPU)
    assert (read(tmp_path, joined, CPU, checks=False) != WHOLE).sum() == 1


def parts(**changed: Any) -> tuple[Any, Any]:
    """Two ranks with a piece each of ``w``, of shape (4, 3), and of its state."""
    first = rank_0(
        model={"w": torch.zeros(5), "b": torch.zeros(3)},
        state={"b": {"step": torch.zeros(())}, "w": {"exp_avg": torch.zeros(5), "n": 3}},
        pieces={"w": ((4, 3), (1, 4), 0)},
    )
    second = rank_1(
        model={"w": torch.zeros(7)},
        state={"w": {"exp_avg": torch.zeros(7), "n": 3}},
        births=[(0, 0, "w")],
        pieces={"w": ((4, 3), (1, 4), 5)},
    )
    return first, {**second, **changed}


def test_pieces_become_one_value_and_one_state(tmp_path: Path) -> None:
    saved = SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts()))
    for one in (saved.model["w"], saved.state["w"]["exp_avg"]):
        assert (one.spec.shape, one.spec.stride) == ((4, 3), (1, 4))
        assert [piece.spec.shape for piece in one.pieces] == [(5,), (7,)]
        assert [piece.span.file for piece in one.pieces] == ["__0_0.distcp", "__1_0.distcp"]
    assert saved.state["w"]["n"] == 3
    assert list(saved.state) == ["w", "b"]
    assert saved.model["tied"] is saved.model["w"]
    assert dict(saved.summary())["model"] == "2 tensors; elements: 15 of float32"


def state(**values: Any) -> dict[str, Any]:
    return {"w": {"exp_avg": torch.zeros(7), "n": 3, **values}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pieces": {"w": ((4, 3), (1, 4), 6)}}, r"pieces of 'w' from end to end of its 12 elements, got gaps"),
        ({"pieces": {"w": ((4, 3), (1, 4), 0)}}, r"pieces of 'w' from end to end"),
        ({"model": {"w": torch.zeros(6)}, "state": {}}, r"pieces of 'w' from end to end"),
        ({"pieces": {"w": ((4, 3), (3, 1), 5)}}, r"one shape and dtype of 'w', got several from ranks \[0, 1\]"),
        ({"pieces": {"w": ((3, 4), (1, 4), 5)}}, r"one shape and dtype of 'w'"),
        ({"model": {"w": torch.zeros(7).half()}, "state": {}}, r"one shape and dtype of 'w'"),
        ({"pieces": {}}, r"one shape and dtype of 'w', got several from ranks \[0\]"),
        ({"state": {}, "births": []}, r"the same kinds of state of 'w' from ranks \[0, 1\]"),
        ({"state": {"w": {"exp_avg": torch.zeros(7)}}}, r"the same kinds of state of 'w'"),
        ({"state": state(n=4)}, r"Ranks 0 and 1 have saved different values of the state 'n' of 'w'"),
        ({"state": state(exp_avg=torch.zeros(6))}, r"different values of the state 'exp_avg' of 'w'"),
        ({"model": {"w": torch.zeros(7, 1)}}, r"expected a 1-D tensor for every piece"),
        ({"model": {"w": 3}}, r"expected a 1-D tensor for every piece"),
        ({"pieces": {"w": ((4, 3), (1, 4))}}, r"expected a shape, strides and a place"),
        ({"pieces": {"w": ((4, 3), (1,), 5)}}, r"expected as many strides as dimensions"),
        ({"pieces": {"w": ((4, 3), (1, 4), -5)}}, r"expected as many strides as dimensions"),
        ({"pieces": {"w": ((4, 3), (1, 4.0), 5)}}, r"expected a shape and strides"),
        ({"pieces": {"w": ((1 << 40, 1 << 40), (1 << 40, 1), 5)}}, r"one shape and dtype of 'w'"),
        ({"pieces": [5]}, r"expected pieces by parameter name"),
        ({"cuts": {"w": ((4, 3), (0, 0))}}, r"ZERO-622"),
    ],
)
def test_forged_pieces_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts(**changed)))


@pytest.mark.parametrize("stride", [(1, 1), (4, 3), (0, 1)])
def test_strides_with_gaps_or_overlaps_are_refused(tmp_path: Path, stride: tuple[int, int]) -> None:
    first, second = parts()
    for part, begin in ((first, 0), (second, 5)):
        part["pieces"] = {"w": ((4, 3), stride, begin)}
    with pytest.raises(ValueError, match="strides without gaps"):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", first, second))
