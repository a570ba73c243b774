"""Hostile checkpoints, by somebody who can recompute checksums: all are refused, nothing is changed, nothing is run."""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_zero import DynamicLossScale, checkpoint
from ddp_zero.checkpoint.folder import MARKER
from tests.multiproc.cases import assert_equal_models, assert_identical
from tests.multiproc.checkpointed import everything, sharded, train
from tests.multiproc.harness import Setup, run_ranks

Part = dict[str, Any]
Attack = Callable[[Path], None]


# Tools of the attacker


def sign(folder: Path) -> None:
    """Make checksums fit again."""
    _, line = (folder / MARKER).read_text().splitlines()
    marker = json.loads(line)
    names = [f"part-{rank}.json" for rank in range(len(marker["parts"]))]
    marker["parts"] = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    text = json.dumps(marker)
    (folder / MARKER).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def part(change: Callable[[Part], None], rank: int = 0) -> Attack:
    """Change what a part says."""

    def attack(folder: Path) -> None:
        path = folder / f"part-{rank}.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        sign(folder)

    return attack


def row(position: int, value: Any) -> Attack:
    """Change one column of the place of every tensor: file, begin, length, offset, digest."""

    def change(content: Part) -> None:
        for place in content["tensors"]:
            place[position] = value(place[position]) if callable(value) else value

    return part(change)


def spec(position: int, value: Any) -> Attack:
    """Change shape, strides, dtype or device of every tensor."""

    def walk(tree: Any) -> None:
        if isinstance(tree, dict) and "tensor" in tree:
            tree["spec"][position] = value(tree["spec"][position]) if callable(value) else value
        for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []:
            walk(item)

    return part(lambda content: walk(content["tree"]))


def entry(path: list[str], value: Any) -> Attack:
    """Replace something in the tree."""

    def change(content: Part) -> None:
        tree = content["tree"]
        for key in path[:-1]:
            tree = next(item for name, item in tree["dict"] if name == key)
        for pair in tree["dict"]:
            if pair[0] == path[-1]:
                pair[1] = value

    return part(change)


def flip(name: str, at: float) -> Attack:
    """Another bit somewhere in a file."""

    def attack(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= 0x10
        (folder / name).write_bytes(data)

    return attack


def cut(name: str, to: float) -> Attack:
    """A file that ends early."""

    def attack(folder: Path) -> None:
        os.truncate(folder / name, int(to * (folder / name).stat().st_size))

    return attack


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("pwned",))


def replace(name: str, data: bytes) -> Attack:
    """Somebody else's bytes."""

    def attack(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return attack


def become(name: str, make: Callable[[Path], None]) -> Attack:
    """Something else than a file."""

    def attack(folder: Path) -> None:
        (folder / name).rename(folder / "hidden")
        make(folder / name)

    return attack


def _elements(folder: Path) -> tuple[str, int]:
    file, _, _, offset, _ = json.loads((folder / "part-0.json").read_text())["tensors"][0]
    return file, offset


def flip_an_element(folder: Path) -> None:
    file, offset = _elements(folder)
    data = bytearray((folder / file).read_bytes())
    data[offset + 2] ^= 1
    (folder / file).write_bytes(data)


def sparse(folder: Path) -> None:
    """A file that says it is huge and takes no room."""
    os.truncate(folder / "__0_0.distcp", 1 << 42)
    spec(0, [1 << 39])(folder)
    row(3, 0)(folder)


def other_part(folder: Path) -> None:
    shutil.copy(folder / "part-0.json", folder / "part-1.json")


def twice(folder: Path) -> None:
    """Two ranks with the same names."""
    other_part(folder)
    sign(folder)


def without_step(content: Part) -> None:
    (pair,) = (pair for pair in content["tree"]["dict"] if pair[0] == "rows")
    pair[1] = [row for row in pair[1] if row["tuple"][1] != "step"]
    numbers = iter(range(10_000))
    kept: list[Any] = []

    def renumber(tree: Any) -> None:
        if isinstance(tree, dict) and "tensor" in tree:
            kept.append(content["tensors"][tree["tensor"]])
            tree["tensor"] = next(numbers)
        for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []:
            renumber(item)

    renumber(content["tree"])
    content["tensors"] = kept


HUGE = 1 << 40
ATTACKS: dict[str, Attack] = {
    "pickle as the marker": replace(MARKER, pickle.dumps(_Bomb())),
    "pickle as a part": replace("part-0.json", pickle.dumps(_Bomb())),
    "pickle as the tensors": replace("__0_0.distcp", pickle.dumps(_Bomb())),
    "a file outside": row(0, "../../../../etc/passwd"),
    "an absolute file": row(0, "/etc/passwd"),
    "a file in a folder": row(0, "sub/__0_0.distcp"),
    "a file with a NUL": row(0, "__0_0.distcp\0"),
    "a link to a file outside": become("__0_0.distcp", lambda path: path.symlink_to("/etc/passwd")),
    "a link to an endless file": become("part-0.json", lambda path: path.symlink_to("/dev/zero")),
    "a pipe": become("__0_0.distcp", os.mkfifo),
    "a pipe as a part": become("part-1.json", os.mkfifo),
    "a folder": become("__0_0.distcp", os.mkdir),
    "a negative offset": row(3, -8),
    "an offset beyond the end": row(3, HUGE),
    "an offset that is a float": row(3, 64.0),
    "an offset that is another tensor's": row(3, lambda offset: offset + 4),
    "a length that is a text": row(2, "all"),
    "no digest": row(4, ""),
    "another digest": row(4, "0" * 64),
    "a huge shape": spec(0, [HUGE, HUGE]),
    "a shape that is large": spec(0, [1 << 35]),
    "a negative shape": spec(0, [-1]),
    "a shape with a flag": spec(0, lambda shape: [True, *shape]),
    "another shape": spec(0, lambda shape: [*shape, 1]),
    "another shape of as many": spec(0, lambda shape: list(reversed(shape)) if len(shape) > 1 else [1, *shape]),
    "strides with gaps": spec(1, [7, 7]),
    "strides of a broadcast": spec(1, lambda _: [0]),
    "a dtype that is a function": spec(2, "load"),
    "a quantized dtype": spec(2, "qint8"),
    "another dtype": spec(2, "float64"),
    "a dtype of the same size": spec(2, "int32"),
    "fewer tensors": part(lambda content: content["tensors"].pop()),
    "more tensors": part(lambda content: content["tensors"].append(content["tensors"][0])),
    "one tensor for two": part(
        lambda content: content.update(tensors=content["tensors"][:1] * len(content["tensors"]))
    ),
    "no tree": part(lambda content: content.pop("tree")),
    "a tree of lists": part(lambda content: content.update(tree=[])),
    "a part that is a list": replace("part-0.json", b"[]"),
    "a deep part": replace("part-0.json", b"[" * 200_000),
    "a part that is no text": replace("part-0.json", b"\xff\xfe\x00"),
    "an empty part": replace("part-0.json", b""),
    "no rows": entry(["rows"], []),
    "rows that are a dict": entry(["rows"], {"dict": []}),
    "a row that is a number": entry(["rows"], [3]),
    "a state of no key": entry(["rows"], [{"tuple": ["0.weight", {"dict": []}, 3]}]),
    "states without their step": part(without_step),
    "births of others": entry(["births"], {"dict": [["nobody", {"tuple": [0, 0]}]]}),
    "births of nobody": entry(["births"], {"dict": []}),
    "a row of many dimensions": entry(
        ["rows"], [{"tuple": ["0.weight", None, 3, {"tuple": [2] * 70}, None, {"tuple": [0] * 70}]}]
    ),
    "nothing shared": entry(["shared"], None),
    "groups that are text": entry(["shared", "param_groups"], "all"),
    "no groups": entry(["shared", "param_groups"], []),
    "a group without parameters": entry(["shared", "param_groups"], [{"dict": [["lr", 0.1]]}]),
    "a group of strangers": entry(["shared", "param_groups"], [{"dict": [["params", ["stranger"]], ["lr", 0.1]]}]),
    "options of another kind": entry(["shared", "optimizer"], {"dict": []}),
    "aliases to nowhere": entry(["shared", "aliases"], {"dict": [["more", "nowhere"]]}),
    "a loss scale of text": entry(["shared", "loss_scale"], {"dict": [["value", "much"]]}),
    "a bit of the marker": flip(MARKER, 0.5),
    "the marker's checksum": flip(MARKER, 0.1),
    "a bit of a part": flip("part-1.json", 0.7),
    "a bit of a tensor": flip_an_element,
    "half a marker": cut(MARKER, 0.5),
    "half a part": cut("part-0.json", 0.5),
    "half the tensors": cut("__0_0.distcp", 0.5),
    "no tensors": lambda folder: os.remove(folder / "__1_0.distcp"),
    "no part": lambda folder: os.remove(folder / "part-1.json"),
    "an empty marker": cut(MARKER, 0),
    "a part of another rank": other_part,
    "the same part twice": twice,
    "a file that is huge and takes no room": sparse,
}


def _refuses_all(setup: Setup, folder: str) -> list[str]:
    """Returns the names of attacks that were not refused, or that changed something."""
    root = Path(folder)
    os.chdir(root)
    model, opt = sharded(loss_scale=DynamicLossScale())
    train(setup, model, opt)
    good = checkpoint.save(root / "good", model, opt).wait()
    other, resumed = sharded(1, loss_scale=DynamicLossScale())
    train(setup, other, resumed, 5)
    before = everything(other, resumed)
    through = []
    for name in sorted(ATTACKS):
        bad = root / f"bad-{name}"
        if setup.rank == 0:
            shutil.copytree(good, bad)
            ATTACKS[name](bad)
        torch.distributed.barrier()
        try:
            checkpoint.load(bad, other, resumed)
            through.append(f"{name}: loaded")
        except (ValueError, TypeError, RuntimeError, FileNotFoundError) as error:
            if not re.search(r"\[ZERO-[16]\d\d\]$", str(error)):
                through.append(f"{name}: {error}")
        assert_identical(before, everything(other, resumed), f"after {name}")
    assert not (root / "pwned").exists()
    torch.distributed.barrier()
    if setup.rank == 0:
        part(lambda content: None)(good)  # the tools of the attacker work
    torch.distributed.barrier()
    checkpoint.load(good, other, resumed)
    assert_equal_models(model, other, "what nobody attacked")
    return through


@pytest.mark.parametrize("world_size", [2])
def test_hostile_checkpoints_are_refused_and_change_nothing(world_size: int, tmp_path: Path) -> None:
    for through in run_ranks(_refuses_all, world_size, str(tmp_path)):
        assert through == []
