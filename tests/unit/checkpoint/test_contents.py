import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_zero.checkpoint.folder import MARKER
from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.checkpoint.tensor_file import StoredTensor, read
from tests.unit.checkpoint.saved import (
    TENSORS,
    forge,
    forge_texts,
    mark,
    paths,
    rank_0,
    rank_1,
    replaced,
    save,
    trained,
    without,
)

CPU = torch.device("cpu")


def value_of(saved: SavedCheckpoint, stored: Any) -> Tensor:
    assert isinstance(stored, StoredTensor)
    return read(saved.folder, stored, CPU)


# What was saved


def test_all_tensors_of_a_model_are_there_under_each_of_their_names(tmp_path: Path) -> None:
    model, _ = trained()
    saved = SavedCheckpoint.open(save(tmp_path, model))
    assert list(saved.model) == ["frozen", "_extra_state", *TENSORS[1:], "head.weight"]
    assert saved.model["head.weight"] is saved.model["embedding.weight"]
    assert saved.model["_extra_state"] == {"epoch": 7, "seen": [1, 2]}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value_of(saved, saved.model[name]), value)


def test_states_and_groups_are_there_by_name(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = SavedCheckpoint.open(save(tmp_path, model, optimizer))
    names = ["norm.weight", "norm.bias", "embedding.weight"]
    assert list(saved.state) == names
    for name, state in zip(names, optimizer.state.values(), strict=True):
        assert list(saved.state[name]) == ["step", "exp_avg", "exp_avg_sq"]
        assert all(torch.equal(value_of(saved, saved.state[name][key]), value) for key, value in state.items())
    groups = saved.shared.param_groups
    assert [group["params"] for group in groups] == [names[:2], names[2:]]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.01]
    assert value_of(saved, groups[1]["lr"]).item() == 0.25
    assert saved.shared.optimizer == "torch.optim.adamw.AdamW"
    assert saved.shared.trainable == [*names[2:], *names[:2], "head.weight"]
    assert saved.shared.aliases == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("key", [None, True, 1.5, ("a", 1)])
def test_a_state_of_another_key_is_refused_by_the_parameters_name(key: Any, tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.state[model.norm.weight][key] = torch.ones(3)
    with pytest.raises(TypeError, match=r"Expected str or int keys in the state of 'norm.weight', got .*ZERO-611"):
        save(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_checkpoint_has_step_extra_and_rank_extra(tmp_path: Path) -> None:
    model, _ = trained()
    extra = {"scheduler": [1, None, 2.5], "table": torch.arange(3)}
    saved = SavedCheckpoint.open(save(tmp_path, model, extra=extra, rank_extra=("rng", torch.arange(2)), step=12))
    assert (saved.step, saved.folder) == (12, tmp_path / "step-00000012")
    assert saved.shared.extra["scheduler"] == [1, None, 2.5]
    assert value_of(saved, saved.shared.extra["table"]).tolist() == [0, 1, 2]
    (mine,) = saved.rank_extras
    assert (mine[0], value_of(saved, mine[1]).tolist()) == ("rng", [0, 1])


# Several ranks


def test_parts_are_joined_and_states_are_in_the_order_of_their_births(tmp_path: Path) -> None:
    late = rank_1(state={"c": {"n": 1}, "d": {}}, births={"c": (0, 2), "d": (1, 0)}, rank_extra="one")
    early = rank_0(births={"b": (5, 0), "w": (0, 1)}, param_groups=[{"params": ["w", "b", "c", "d"]}])
    saved = SavedCheckpoint.open(forge(tmp_path / "forged", early, late))
    assert list(saved.state) == ["w", "c", "d", "b"]
    assert sorted(saved.model) == ["_extra_state", "b", "c", "tied", "w"]
    assert saved.model["c"].span.file == "__1_0.distcp"
    assert saved.rank_extras[1] == "one"
    assert saved.state["c"] == {"n": 1}


def test_groups_buffers_and_aliases_of_different_parts_are_joined(tmp_path: Path) -> None:
    option = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99)}
    groups = [[{**option, "params": ["w"]}, {"lr": 0.25, "params": ["b"]}], [{**option, "params": ["w", "c"]}]]
    first = rank_0(param_groups=groups[0], aliases={"tied": "w", "c": "w"})
    other = {**first["shared"], "param_groups": groups[1], "trainable": ["w", "c"], "buffers": ["seen"], "extra": None}
    saved = SavedCheckpoint.open(forge(tmp_path / "forged", first, rank_1(shared=other)))
    assert [group["params"] for group in saved.shared.param_groups] == [["w", "c"], ["b"]]
    assert (saved.shared.trainable, saved.shared.buffers) == (["w", "b", "c"], ["seen"])
    assert saved.shared.aliases == {"tied": "w"}, "c is a value of its own on rank 1"
    assert saved.shared.extra == first["shared"]["extra"]


def test_the_digest_changes_with_every_field(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"extra": 1}, {"rank_extra": 1}, {"births": {"b": (0, 2), "w": (0, 0)}}]
    saved = [SavedCheckpoint.open(forge(tmp_path / str(at), rank_0(**change))) for at, change in enumerate(changes)]
    assert len({one.digest for one in saved}) == len(changes)
    again = SavedCheckpoint.open(forge(tmp_path / "again", rank_0()))
    assert again.digest == saved[0].digest


def test_an_alias_of_an_alias_is_a_name_too(tmp_path: Path) -> None:
    saved = SavedCheckpoint.open(forge(tmp_path / "forged", rank_0(aliases={"x": "w", "y": "x"})))
    assert saved.model["y"] is saved.model["w"]


# Forged


FORGED: dict[str, list[Any]] = {
    "no parts": [],
    "nothing shared": [rank_0(shared=None)],
    "shared by rank 1 only": [rank_1(), rank_0()],
    "shared by two of three": [rank_0(), rank_1(shared=rank_0()["shared"]), rank_1(model={})],
    "in a group of each rank": [rank_0(), rank_1(shared={**rank_0()["shared"], "param_groups": [{"params": ["w"]}]})],
    "a value from two ranks": [rank_0(), rank_1(model={"w": torch.zeros(3, 2)})],
    "a state from two ranks": [rank_0(), rank_1(state={"w": {"exp_avg": torch.zeros(2, 4)}}, births={"w": (9, 9)})],
    "a birth missing": [rank_0(births={"w": (0, 0)})],
    "all births missing": [rank_0(births={})],
    "a birth of another": [rank_0(births={"b": (0, 1), "x": (0, 0), "w": (0, 2)})],
    "a birth that is a list": [rank_0(births={"b": [0, 1], "w": (0, 0)})],
    "a birth that is short": [rank_0(births={"b": (1,), "w": (0, 0)})],
    "a birth at True": [rank_0(births={"b": (0, True), "w": (0, 0)})],
    "a birth at a float": [rank_0(births={"b": (0, float("nan")), "w": (0, 0)})],
    "a birth by number": [rank_0(births={2: (0, 1), "w": (0, 0)})],
    "a birth of a tensor": [rank_0(births={"b": torch.zeros(2), "w": (0, 0)})],
    "births as a list": [rank_0(births=[(0, 1, "b"), (0, 0, "w")])],
    "an alias to nowhere": [rank_0(aliases={"tied": "x"})],
    "an alias of itself": [rank_0(aliases={"tied": "tied"})],
    "an alias before what it names": [rank_0(aliases={"y": "x", "x": "w"})],
    "an alias that is a name": [rank_0(aliases={"b": "w"})],
    "an alias that is a name of rank 1": [rank_0(aliases={"c": "w"}), rank_1()],
    "an alias of a number": [rank_0(aliases={"tied": 3})],
    "an alias of a list": [rank_0(aliases={"tied": ["w"]})],
    "a number as an alias": [rank_0(aliases={3: "w"})],
    "a parameter twice in a group": [rank_0(param_groups=[{"params": ["w", "b", "w"]}])],
    "a parameter in two groups": [rank_0(param_groups=[{"params": ["w", "b"]}, {"params": ["w"]}])],
    "a group without parameters": [rank_0(param_groups=[{"lr": 1.0}])],
    "a group of numbers": [rank_0(param_groups=[{"params": [0, 1]}])],
    "a group of a tuple": [rank_0(param_groups=[{"params": ("w", "b")}])],
    "a group of a string": [rank_0(param_groups=[{"params": "wb"}])],
    "a group of tensors": [rank_0(param_groups=[{"params": [torch.zeros(1)]}])],
    "a group with a number as an option": [rank_0(param_groups=[{"params": ["w", "b"], 3: 4}])],
    "groups as a dict": [rank_0(param_groups={"params": ["w", "b"]})],
    "groups as a tensor": [rank_0(param_groups=torch.zeros(1))],
    "other state that hides the state": [rank_0(other_state={"state": {}})],
    "other state that hides the groups": [rank_0(other_state={"param_groups": []})],
    "other state by number": [rank_0(other_state={0: {}})],
    "an optimizer that is no name": [rank_0(optimizer=3)],
    "trainable as a string": [rank_0(trainable="wb")],
    "trainable numbers": [rank_0(trainable=[1])],
    "a loss scale that is a number": [rank_0(loss_scale=2.0)],
    "values by number": [rank_0(model={0: torch.zeros(1), "w": torch.zeros(1)})],
    "states by number": [rank_0(state={0: {"n": 1}})],
    "rows that are None": [{**rank_0(), "rows": None}],
    "rows as a tensor": [{**rank_0(), "rows": torch.zeros(1)}],
    "rows as a dict": [{**rank_0(), "rows": {"abc": 1}}],
    "a row of a number": [rank_0(rows=[3])],
    "a row of a word": [rank_0(rows=["abc"])],
    "a row of a list": [rank_0(rows=[["w", None, 1]])],
    "a row of too much": [rank_0(rows=[("w", None, torch.zeros(2, 3), (2, 3), None, (0, 0), 1)])],
    "a row without a name": [rank_0(rows=[(None, None, 1)])],
    "a row without a key": [rank_0(rows=[("w", 1)])],
    "a row of a list of keys": [rank_0(rows=[("b", ["n"], 1)])],
    "a row of a key that is True": [rank_0(rows=[("b", True, 1)])],
    "a row of a shape alone": [rank_0(rows=[("b", "n", 1, (2, 3))])],
    "a row of no shape": [rank_0(rows=[("b", "n", torch.zeros(2, 3), None, None, [0, 0])])],
    "a row of a word as a shape": [rank_0(rows=[("b", "n", torch.zeros(2, 3), "23", None, (0, 0))])],
    "a part that is None": [None],
    "a part that is a list": [[rank_0()]],
    "a part that is a tensor": [torch.zeros(1)],
    "a part that is text": ["shared"],
    "a part that is a size": [torch.Size([1])],
    "a part that is a dtype": [torch.float32],
    "a part by number": [{0: 1}],
    "rank 1 that is empty": [rank_0(), {}],
    "more than a part has": [rank_0(other=1)],
    "more than is shared": [{**rank_0(), "shared": {**rank_0()["shared"], "other": 1}}],
    "shared by number": [{**rank_0(), "shared": {**rank_0()["shared"], 3: 1}}],
    "shared that is a list": [rank_0(shared=["optimizer"])],
    "shared that is a tensor": [rank_0(shared=torch.zeros(1))],
    "methods for fields": [{**rank_0(), "as_tree": 1}],
    "self": [{**rank_0(), "self": 1}],
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_checkpoint_is_refused_naming_where_it_is(name: str, tmp_path: Path) -> None:
    folder = forge(tmp_path / "step-00000003", *FORGED[name])
    for path in (folder, tmp_path):
        with pytest.raises(ValueError, match=str(folder)) as caught:
            SavedCheckpoint.open(path)
        assert type(caught.value) is ValueError


@pytest.mark.parametrize("path", [(key,) for key in rank_0()], ids=str)
def test_a_part_without_one_of_its_fields_is_refused(path: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part-0\.json"):
        SavedCheckpoint.open(forge(tmp_path / "forged", without(rank_0(), *path)))


JUNK: list[Any] = [
    *(None, True, -1, 0, 1 << 80, 1.5, float("nan"), "", "w", "state", torch.float32, torch.Size([2])),
    *([], ["w"], [["w"]], (), (0, 0, "w"), [(0, 0, "w")], {}, {"w": 1}, {"w": {}}, {0: 1}),
    *({"params": ["w"]}, [{"params": ["w"]}]),
]
VALUES = [path for path in paths(rank_0()) if "rank_extra" not in path and "extra" not in path]


def assert_sound(saved: SavedCheckpoint) -> None:
    """What a reader may rely on."""
    assert all(type(name) is str for name in [*saved.model, *saved.state])
    assert all(isinstance(state, dict) for state in saved.state.values())
    shared = saved.shared
    assert all(type(key) is str for group in shared.param_groups for key in group)
    names = [name for group in shared.param_groups for name in group["params"]]
    assert all(type(name) is str for name in [*names, *shared.trainable])
    assert len(set(names)) == len(names)
    assert shared.optimizer is None or type(shared.optimizer) is str
    assert all(saved.model[alias] is saved.model[name] for alias, name in shared.aliases.items())
    assert len(saved.rank_extras) == 1
    saved.as_tree()


def test_a_wrong_type_anywhere_is_refused_or_harmless(tmp_path: Path) -> None:
    refused = 0
    for at, path in enumerate(VALUES):
        for junk in [*JUNK[at % 3 :: 3], torch.zeros(2)]:
            folder = forge(tmp_path / "forged", replaced(rank_0(), path, junk))
            try:
                saved = SavedCheckpoint.open(folder)
            except ValueError:
                refused += 1
            else:
                assert_sound(saved)
    assert refused > len(VALUES) * len(JUNK) // 9


def test_a_marker_of_more_parts_than_there_are_is_refused(tmp_path: Path) -> None:
    folder = forge(tmp_path / "forged", rank_0())
    digest = hashlib.sha256((folder / "part-0.json").read_bytes()).hexdigest()
    assert SavedCheckpoint.open(mark(folder, [digest])).step == 3
    with pytest.raises(ValueError, match=r"No such file.*part-1\.json"):
        SavedCheckpoint.open(mark(folder, [digest, digest]))


def test_a_part_repeated_for_all_ranks_counts_once_and_for_some_is_refused(tmp_path: Path) -> None:
    text, other = ((forge(tmp_path / "forged", part) / "part-0.json").read_text() for part in (rank_0(), rank_1()))
    one, two = (SavedCheckpoint.open(forge_texts(tmp_path / "forged", [text] * count)) for count in (1, 2))
    assert (two.model, two.state, two.shared) == (one.model, one.state, one.shared)
    with pytest.raises(ValueError, match="in the part of rank 0, or in all parts"):
        SavedCheckpoint.open(forge_texts(tmp_path / "forged", [text, text, other]))


def test_a_marker_that_is_damaged_is_refused_though_there_is_an_older_checkpoint(tmp_path: Path) -> None:
    model, _ = trained()
    newer = [save(tmp_path, model, step=step) for step in (1, 2)][1]
    (newer / MARKER).write_text("damaged")
    with pytest.raises(ValueError, match=str(newer / MARKER)):
        SavedCheckpoint.open(tmp_path)


def test_pickled_metadata_in_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path, *trained())
    for name in (".metadata", "__0_1.distcp"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # a pickle that runs something
    (folder / "__0_0.distcp").unlink()
    assert SavedCheckpoint.open(folder).step == 1


def test_a_part_has_place_and_checksum_of_its_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path, trained()[0])
    raw = (folder / "__0_0.distcp").read_bytes()
    rows = json.loads((folder / "part-0.json").read_text())["tensors"]
    saved = SavedCheckpoint.open(folder)
    stored = [one for name, one in saved.model.items() if isinstance(one, StoredTensor) and name != "head.weight"]
    for one, (file, begin, length, offset, digest) in zip(stored, rows, strict=True):
        place = one.span
        assert [place.file, place.begin, place.length, place.offset, place.checksum] == [
            *(file, begin, length, offset, digest)
        ]
        assert hashlib.sha256(raw[offset : offset + one.nbytes]).hexdigest() == digest
