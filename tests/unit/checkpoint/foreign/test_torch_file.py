"""The reader of files of torch.save: it builds what torch would, and does nothing that a hostile file wants."""

import io
import os
import pickle
import pickletools
import subprocess
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_zero.checkpoint.foreign.torch_file import Inert, Known, RawTensor, interpret, load, open_archive
from ddp_zero.checkpoint.rows import stored_of
from ddp_zero.checkpoint.tensor_file import verify

KNOWN: Known = {("collections", "OrderedDict"): dict, ("builtins", "set"): list, ("__builtin__", "set"): list}
PLAIN = {
    "numbers": [0, -1, 255, 256, 65536, -(2**31), 2**40, -(2**70), 1.5, float("inf")],
    "text": ["", "short", "long" * 100, "ünïcode"],
    "constants": (None, True, False),
    "nested": {"a": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, {"b": {"c": []}}]},
    1: OrderedDict([("z", 1), ("a", 2)]),
}


def forbid(*_: Any) -> Any:
    raise ValueError("nothing is outside this pickle")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_those_of_pickle(protocol: int) -> None:
    for value in [*PLAIN.values(), PLAIN, [PLAIN, PLAIN]]:
        assert interpret(pickle.dumps(value, protocol), KNOWN, forbid, "it") == value
    assert sorted(interpret(pickle.dumps({3, 1, 2}, protocol), KNOWN, forbid, "it")) == [1, 2, 3]


def test_objects_of_known_classes_become_their_attributes() -> None:
    known = {("argparse", "Namespace"): lambda: Inert("Namespace")}
    found = interpret(pickle.dumps([Namespace(a=1, b=[2])], 2), known, forbid, "it")
    assert found == [Inert("Namespace", {"a": 1, "b": [2]})]


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


HOSTILE = {
    "a command": Calls(os.system, "touch pwned"),
    "a process": Calls(subprocess.check_output, "touch pwned", 0),
    "code": Calls(eval, "__import__('os').system('touch pwned')"),
    "an attribute": Calls(getattr, "", "join"),
    "a file": Calls(open, "pwned", "w"),
    "an import": Calls(__import__, "pwned"),
    "another pickle": Calls(torch.storage._load_from_bytes, b"x"),
    "a class of its own": Calls(Calls, os.system),
    "a name that is only mentioned": os.system,
    "an object": Inert("x"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_names_that_are_not_known_are_refused(
    what: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = pickle.dumps({"harmless": 1, "hostile": HOSTILE[what]}, protocol)
    with pytest.raises(ValueError, match="known to be harmless in the file, got the name"):
        interpret(program, KNOWN, forbid, "the file")
    with pytest.raises(ValueError, match=r"in .*/hostile.pt, got the name"):
        load(tmp_path, archive(tmp_path, program), sha256(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'touch pwned'\ntR.",  # protocol 0, as exploits are written by hand
        b"(S'touch pwned'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch pwned'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # a code of the extension registry
        b"\x80\x02]\x85R.",  # a list in the place of a function
        b"\x80\x02}}b.",  # attributes of a dict: taken, and of no effect
        b"\x80\x02K\x01}b.",  # attributes of a number
        b"\x80\x02ccollections\nOrderedDict\nU\x01xR.",  # arguments that are no tuple
        b"\x80\x02" + b"]" * 10 + b".",  # several values
        b"\x80\x02h\x07.",  # memory that was never written
        b"\x80\x02u.",  # no mark
        b"\x80\x02K\x01K\x02s.",  # an item of a number
        b"\x80\x02}]K\x01s.",  # a key that cannot be one
        b"\x80\x02N",  # no end
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # a text that is longer than the file
        b"\x80\xff.",  # a protocol of the future
        b"",
        b"\x00\x01",
    ],
)
def test_programs_that_do_anything_else_are_refused(
    program: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if program == b"\x80\x02}}b.":
        assert interpret(program, KNOWN, forbid, "the file") == {}
        return
    with pytest.raises(ValueError, match="the file"):
        interpret(program, KNOWN, forbid, "the file")
    assert list(tmp_path.iterdir()) == []


def test_truncated_and_corrupted_pickles_raise_value_errors_only() -> None:
    program = pickle.dumps(PLAIN, 2)
    refused = 0
    for place in range(len(program)):
        for damaged in (program[:place], program[:place] + bytes([program[place] ^ 0x5B]) + program[place + 1 :]):
            try:
                interpret(damaged, KNOWN, forbid, "it")
            except ValueError:
                refused += 1
    assert refused > len(program), "most of the damaged programs, of which there are twice as many"


# Archives


def archive(folder: Path, program: bytes, **records: bytes) -> str:
    with zipfile.ZipFile(folder / "hostile.pt", "w") as file:
        file.writestr("x/data.pkl", program)
        for name, content in records.items():
            file.writestr(f"x/data/{name.removeprefix('_')}", content)
    return "hostile.pt"


def test_a_file_of_torch_is_read_as_places(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32)
    saved = {"all": base, "view": base[4:10].view(2, 3), "other": torch.ones(3, dtype=torch.bfloat16), "n": 3}
    saved |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(7), "parameter": torch.nn.Parameter(torch.ones(2))}
    saved |= {"dtype": torch.float16, "size": torch.Size([2, 3]), "device": torch.device("cuda:1")}
    torch.save(saved, tmp_path / "a.pt")
    digest = sha256()
    found = load(tmp_path, "a.pt", digest, {})
    assert (found["n"], found["dtype"], found["size"]) == (3, torch.float16, (2, 3))
    raw = (tmp_path / "a.pt").read_bytes()
    for name in ("all", "view", "other", "empty", "scalar", "parameter"):
        tensor, expected = found[name], saved[name]
        assert isinstance(tensor, RawTensor)
        assert isinstance(expected, torch.Tensor)
        content = b"".join(raw[span.record.offset + span.begin :][: span.nbytes] for span in tensor.spans)
        assert (tensor.shape, tensor.dtype) == (tuple(expected.shape), expected.dtype)
        assert content == bytes(expected.detach().reshape(-1).view(torch.uint8).tolist())
    torch.save({**saved, "n": 4}, tmp_path / "a.pt")
    other = sha256()
    load(tmp_path, "a.pt", other, {})
    assert digest.digest() != other.digest()


def test_tensors_that_do_not_fit_their_storages_are_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        program, elements = file.read("a/data.pkl"), file.read("a/data/0")
    assert load(tmp_path, archive(tmp_path, program, _0=elements), sha256(), {}).shape == (6,)
    six = pickletools.optimize(program).count(b"K\x06")
    assert six == 2  # elements of the storage, size of the tensor
    for changed, said in (
        (elements[:-4], "Expected 6 elements in storage '0', got 20 bytes"),
        (elements + b"1234", "got 28 bytes"),
    ):
        with pytest.raises(ValueError, match=said):
            load(tmp_path, archive(tmp_path, program, _0=changed), sha256(), {})
    with pytest.raises(ValueError, match="a storage of this file"):
        load(tmp_path, archive(tmp_path, program), sha256(), {})
    last = program.rfind(b"K\x06")
    larger = program[:last] + b"K\x07" + program[last + 2 :]
    with pytest.raises(ValueError, match="Expected 7 elements in a storage, got 6"):
        load(tmp_path, archive(tmp_path, larger, _0=elements), sha256(), {})
    torch.save(torch.ones(2, 3).t(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="Expected a contiguous tensor"):
        load(tmp_path, "a.pt", sha256(), {})


def test_pickles_of_recursive_or_too_deep_values_are_refused(tmp_path: Path) -> None:
    laughs: list[Any] = []
    for _ in range(60):
        laughs = [laughs, laughs]
    circle: list[Any] = []
    circle.append(circle)
    deep_program = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
    for program in (pickle.dumps(laughs, 2), pickle.dumps(circle, 2), deep_program):
        with pytest.raises(ValueError, match=r"Expected values|recursive or amplified"):
            load(tmp_path, archive(tmp_path, program), sha256(), {})


def test_a_small_file_takes_little_memory_unlike_with_torch(tmp_path: Path) -> None:
    """Cases for which `torch.load(weights_only=True)` cannot take the place of the reader: they grow without limit."""
    count = 1 << 22
    bomb = b"\x80\x02cbuiltins\nbytearray\nJ" + count.to_bytes(4, "little") + b"\x85R."
    packed = pickle.dumps("a" * count, 2)
    for program, compression in ((bomb, zipfile.ZIP_STORED), (packed, zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / "a.pt", "w", compression) as file:
            for name, content in (("data.pkl", program), ("version", b"3\n"), ("byteorder", b"little")):
                file.writestr(f"x/{name}", content)
        assert (tmp_path / "a.pt").stat().st_size < 10_000
        assert len(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)) == count
        with pytest.raises(ValueError, match=r"the name builtins.bytearray|compressed"):
            load(tmp_path, "a.pt", sha256(), {})


def test_damage_links_and_pipes_are_seen_unlike_with_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    place = load(tmp_path, "a.pt", sha256(), {})["a"].spans[0].record
    with (tmp_path / "a.pt").open("r+b") as file:
        file.seek(place.offset + 4 * 500)
        file.write(b"\0\0\x80\x3f")
    assert torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)["a"][500] == 1, "no CRC is checked"
    stored = stored_of(load(tmp_path, "a.pt", sha256(), {})["a"])
    with pytest.raises(ValueError, match=r"Expected shape \[4000\] of uint8 to fit its checksum"):
        verify(tmp_path, [stored])
    (tmp_path / "link.pt").symlink_to(tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("link.pt", "pipe.pt"):  # torch follows the one, and waits for the other
        with pytest.raises(ValueError, match="regular file"):
            load(tmp_path, name, sha256(), {})


@pytest.mark.parametrize("how", ["no zip", "compressed", "twice", "outside", "no pickle", "big-endian", "cut", "link"])
def test_archives_of_any_other_form_are_refused(how: str, tmp_path: Path) -> None:
    path, program = tmp_path / "a.pt", pickle.dumps({}, 2)
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED) as file:
        file.writestr("x/data.pkl" if how != "no pickle" else "x/other", program * (9 if how == "compressed" else 1))
        if how == "twice":
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr("x/data.pkl", program)
        if how == "outside":
            file.writestr("y/data/0", b"1234")
        if how == "big-endian":
            file.writestr("x/byteorder", b"big")
    raw = memory.getvalue()
    path.write_bytes({"no zip": program, "cut": raw[20:]}.get(how, raw))
    if how == "link":
        path.rename(tmp_path / "b.pt")
        path.symlink_to(tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"a\.pt"):
        open_archive(tmp_path, "a.pt")
