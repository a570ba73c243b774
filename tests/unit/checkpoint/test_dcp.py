from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ddp_zero.checkpoint.folder import tensor_file_name
from ddp_zero.checkpoint.tensor_file import StoredTensor, write_dcp_metadata, write_tensors
from ddp_zero.values.tree import Tree, flatten, specs_in, unflatten
from tests.unit.checkpoint.saved import TENSORS, save, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

STATES = ["embedding.weight", "norm.weight", "norm.bias"]


def stored(folder: Path, tree: Tree, rank: int = 0) -> Tree:
    """Write the tensors of a tree, and put where they lie in their places."""
    text, tensors = flatten(tree)
    written = write_tensors(folder / tensor_file_name(rank), tensors)
    return unflatten(text, [StoredTensor.of(spec, span) for spec, span in zip(specs_in(text), written, strict=True)])


def keys(folder: Path) -> dict[str, Any]:
    """What the index says is there."""
    found: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return found


def converted(folder: Path, out: Path) -> Any:
    """What torch's own tool makes of a checkpoint."""
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=True)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for inner, its in zip(one, other, strict=True):
            assert_same(inner, its)
    else:
        assert one == other


# A whole checkpoint


def test_the_index_lists_every_value_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, *trained(), extra={"epoch": 3}, step=12)
    options = set(trained()[1].param_groups[0]) | {"params"}
    assert set(keys(folder)) == {
        *(f"model.{name}" for name in [*TENSORS, "head.weight", "_extra_state.epoch", "_extra_state.seen"]),
        *(f"optim.state.{name}.{key}" for name in STATES for key in ("step", "exp_avg", "exp_avg_sq")),
        *(f"optim.param_groups.{group}.{option}" for group in (0, 1) for option in options),
        *("step", "extra.epoch", "rank_extra"),
    }


def test_torch_converts_a_checkpoint_to_a_plain_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"list": [torch.arange(3), 1.5], "tuple": ("x", 2), "deep": [{"a": {"b": torch.ones(2)}}], "none": None}
    folder = save(tmp_path, model, optimizer, extra=extra, rank_extra="mine", step=12)
    plain = converted(folder, tmp_path / "plain.pt")
    assert set(plain) == {"model", "optim", "step", "extra", "rank_extra"}
    assert_same(plain["model"], dict(model.state_dict()))
    assert_same(plain["extra"], extra)
    assert (plain["step"], plain["rank_extra"]) == (12, ["mine"])
    names = [*STATES[1:], STATES[0]]
    assert_same(plain["optim"]["state"], dict(zip(names, optimizer.state.values(), strict=True)))
    for group, live in zip(plain["optim"]["param_groups"], optimizer.param_groups, strict=True):
        assert_same({**group, "params": None}, {**live, "params": None})


# Trees


TREES: dict[str, Tree] = {
    "flat": {"a": torch.arange(3.0), "b": torch.tensor(2), "c": "text"},
    "nested": {"a": {"b": {"c": torch.ones(2), "d": None}}, "e": {}},
    "list without tensors": {"a": [1, [2, {"x": 3}], (4,)]},
    "list with a tensor": {"a": [1, torch.ones(2), {"x": [2, 3]}, [4, 5]]},
    "lists of lists": {"a": [[torch.ones(1)], [torch.zeros(1), [torch.ones(2), 5]]]},
    "empty ones": {"a": {}, "b": [], "c": (), "d": ""},
    "plain values": {"a": [True, 1.5, float("inf"), 1 << 70, "ä"], "b": torch.float16, "c": torch.Size([2])},
    "no elements": {"a": torch.ones(0, 3), "b": torch.ones(2, 0, dtype=torch.bfloat16)},
    "transposed": {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.arange(6.0)[::2]},
    "dtypes": {"a": torch.ones(2, dtype=torch.complex64), "b": torch.ones(2, dtype=torch.uint8), "c": torch.eye(2) > 0},
    "names with dots": {"a.b": torch.ones(1), "a.c": {"d.e": 3}},
}


@pytest.mark.parametrize("name", TREES)
def test_torch_reads_a_tree_as_it_was(name: str, tmp_path: Path) -> None:
    write_dcp_metadata(tmp_path, stored(tmp_path, TREES[name]))
    assert_same(converted(tmp_path, tmp_path / "plain.pt"), TREES[name])


def test_keys_are_paths_joined_by_dots_and_lists_without_tensors_stay_whole(tmp_path: Path) -> None:
    tree = {"a": {"b": [torch.ones(1), {"c": 1}]}, "list": [1, {"d": [2]}], "dict": {"e": {"f": 1}}, "empty": {}}
    write_dcp_metadata(tmp_path, stored(tmp_path, tree))
    assert list(keys(tmp_path)) == ["a.b.0", "a.b.1.c", "list", "dict.e.f", "empty"]


def test_files_of_several_ranks_are_one_tree(tmp_path: Path) -> None:
    tree = {"a": stored(tmp_path, torch.ones(2)), "b": stored(tmp_path, [torch.zeros(3), 1], rank=12)}
    write_dcp_metadata(tmp_path, tree)
    assert_same(converted(tmp_path, tmp_path / "plain.pt"), {"a": torch.ones(2), "b": [torch.zeros(3), 1]})


def test_two_names_of_one_tensor_are_both_read(tmp_path: Path) -> None:
    one = stored(tmp_path, torch.arange(3))
    write_dcp_metadata(tmp_path, {"a": one, "b": {"c": one}})
    assert_same(converted(tmp_path, tmp_path / "plain.pt"), {"a": torch.arange(3), "b": {"c": torch.arange(3)}})


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "a.b"),
        ({"a": {"b.c": 1, "b": {"c": 2}}}, "a.b.c"),
        ({1: "x", "1": "y"}, "1"),
        ({"a": {"": 1}, "a.": 2}, "a."),
    ],
)
def test_two_values_of_the_same_key_are_refused(tree: Tree, key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"differ when joined by dots, got '{key}' twice"):
        write_dcp_metadata(tmp_path, tree)


def test_an_index_is_never_written_twice(tmp_path: Path) -> None:
    write_dcp_metadata(tmp_path, {"a": 1})
    with pytest.raises(FileExistsError):
        write_dcp_metadata(tmp_path, {"a": 2})
    assert converted(tmp_path, tmp_path / "plain.pt") == {"a": 1}
