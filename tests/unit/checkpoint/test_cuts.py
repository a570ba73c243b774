"""Values of which ranks have written parts: put together from files, read in other parts, and forged ones refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.folder import CutTensor, StoredTensor, as_written, within
from ddp_zero.checkpoint.tensor_file import pieces, read, verify, write_tensors
from ddp_zero.core.local.tree import TensorSpec
from ddp_zero.core.plan.boxes import Box
from tests.unit.checkpoint.saved import forge, rank_0, rank_1, without

CPU = torch.device("cpu")
WHOLE = torch.arange(24.0).view(4, 6)


def stored(folder: Path) -> CutTensor:
    """The tensor in four unequal parts, of two files."""
    boxes = [Box((0, 0), (1, 6)), Box((1, 0), (3, 2)), Box((1, 2), (1, 4)), Box((2, 2), (2, 4))]
    parts: list[tuple[Box, StoredTensor]] = []
    for rank in range(2):
        mine = boxes[rank::2]
        spans = write_tensors(folder / f"__{rank}_0.distcp", [WHOLE[box.slices] for box in mine])
        for box, span in zip(mine, spans, strict=True):
            parts.append((box, StoredTensor(TensorSpec(box.sizes, None, torch.float32, "cpu"), span)))
    return CutTensor.of((4, 6), parts)


def test_any_box_is_read_whatever_was_written(tmp_path: Path) -> None:
    cut = stored(tmp_path)
    assert torch.equal(read(tmp_path, cut, CPU), WHOLE)
    flat = torch.frombuffer(bytearray(b"".join(map(bytes, pieces(tmp_path, cut)))), dtype=torch.float32)
    assert torch.equal(flat, WHOLE.view(-1))
    for rows in [(0, 4), (1, 3), (2, 4), (0, 1)]:
        for columns in [(0, 6), (1, 5), (2, 6), (5, 6)]:
            box = Box((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
            part = within(cut, box)
            assert torch.equal(read(tmp_path, part, CPU), WHOLE[box.slices])
            inner = Box((0, 0), (1, 1))
            assert torch.equal(read(tmp_path, within(part, inner), CPU), WHOLE[box.slices][:1, :1])
    assert within(cut, Box((1, 2), (1, 4))) in as_written([cut]), "what was written as such is taken as it is"


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    cut = stored(tmp_path)
    verify(tmp_path, [cut])
    victim = as_written([cut])[2]
    file = tmp_path / victim.span.file
    raw = bytearray(file.read_bytes())
    raw[victim.span.offset] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"damaged bytes in .*{file.name}\. There is 'w' of the model\."):
        verify(tmp_path, [cut], {victim: "'w' of the model"})


def parts(**changed: Any) -> tuple[Any, Any]:
    """Two ranks that hold the rows of ``w``, and its state."""
    first = rank_0(cuts={"w": ((4, 3), (0, 0))})
    second = rank_1(
        model={"w": torch.zeros(2, 3)},
        state={"w": {"exp_avg": torch.zeros(2, 3), "n": 3}},
        births=[(0, 0, "w")],
        cuts={"w": ((4, 3), (2, 0))},
    )
    return first, {**second, **changed}


def test_parts_become_one_value_and_one_state(tmp_path: Path) -> None:
    saved = SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts()))
    assert saved.model["w"].spec.shape == (4, 3)
    assert [one.place for one in saved.model["w"].sources] == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert saved.state["w"]["exp_avg"].spec.shape == (4, 3)
    assert saved.state["w"]["n"] == 3
    assert list(saved.state) == ["w", "b"]
    assert saved.model["tied"] is saved.model["w"]


def state(**values: Any) -> dict[str, Any]:
    return {"w": {"exp_avg": torch.zeros(2, 3), "n": 3, **values}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"cuts": {"w": ((4, 3), (1, 0))}},
            r"parts of 'w' to make up shape \[4, 3\], got .* which overlap, from ranks",
        ),
        ({"cuts": {"w": ((4, 3), (3, 0))}}, "which it does not have"),
        ({"cuts": {"w": ((6, 3), (2, 0))}}, "one shape and dtype of 'w', got several from ranks"),
        ({"cuts": {}}, "one shape and dtype of 'w'"),
        ({"model": {"w": torch.zeros(2, 3, dtype=torch.float64)}}, "one shape and dtype of 'w'"),
        ({"model": {"w": 3}}, "a tensor for every part"),
        ({"cuts": {"w": ((4,), (2,))}}, "as many offsets as dimensions"),
        ({"cuts": {"w": ((4, 3), (-2, 0))}}, "a shape and offsets"),
        ({"cuts": {"w": [4, 3]}}, "a shape and offsets"),
        ({"cuts": {"z": ((4, 3), (2, 0))}}, "a tensor for every part"),
        ({"state": state(n=4)}, "Ranks 0 and 1 have saved different values of the state 'n' of 'w'"),
        ({"state": state(exp_avg=torch.zeros(3))}, "different values of the state 'exp_avg' of 'w'"),
        ({"state": {}, "births": []}, "different values of the state 'exp_avg' of 'w'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", *parts(**changed)))


def stepped_whole(**changed: Any) -> tuple[Any, Any]:
    """Ranks that hold the rows of ``w``, of which the second steps the whole, and keeps its state; masters of rows."""
    first, second = parts(
        state={"w": {"master_weight": torch.zeros(2, 3)}},
        births=[(4, 0, "w")],
        wholes={"w": {"momentum": torch.zeros(4, 3), "left": torch.zeros(4, 4), "n": 3}},
        **changed,
    )
    first["state"]["w"] = {"master_weight": torch.zeros(2, 3)}
    first["births"] = [(9, 0, "w"), (0, 1, "b")]
    return first, second


def test_the_state_of_a_whole_is_one_rank_s_and_masters_are_of_parts(tmp_path: Path) -> None:
    saved = SavedCheckpoint.open(forge(tmp_path / "step-00000003", *stepped_whole()))
    state = saved.state["w"]
    assert {key: getattr(value, "spec", value) for key, value in state.items() if key == "n"} == {"n": 3}
    assert (state["momentum"].spec.shape, state["left"].spec.shape) == ((4, 3), (4, 4))
    assert isinstance(state["master_weight"], CutTensor)
    assert state["master_weight"].spec.shape == (4, 3)
    assert list(saved.state) == ["b", "w"], "it was born on the rank that steps the whole"


@pytest.mark.parametrize("wrong", [3, {"w": 3}, {3: {}}])
def test_states_of_wholes_that_are_none_are_refused(tmp_path: Path, wrong: Any) -> None:
    first, second = stepped_whole()
    with pytest.raises(ValueError, match=r"states of whole parameters by name|a dict as the state of each whole"):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", first, {**second, "wholes": wrong}))


def test_a_state_of_a_whole_from_two_ranks_is_refused(tmp_path: Path) -> None:
    first, second = stepped_whole()
    with pytest.raises(ValueError, match="every name from one rank, got 'w' from two"):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", {**first, "wholes": second["wholes"]}, second))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = parts()
    second = without(without(without(second, "model", "w"), "state", "w"), "cuts", "w")
    with pytest.raises(ValueError, match=r"make up shape \[4, 3\], got 6 of 12 elements, from ranks \[0\]"):
        SavedCheckpoint.open(forge(tmp_path / "step-00000003", first, {**second, "births": []}))


def test_a_value_of_one_rank_is_as_it_was() -> None:
    one = StoredTensor(TensorSpec((2, 3), None, torch.float32, "cpu"), span=None)  # type: ignore[arg-type]
    assert within(one, Box.whole((2, 3))) is one
    part: Any = within(one, Box((1, 0), (1, 3)))
    assert isinstance(part, CutTensor)
    assert part.spec.shape == (1, 3)
