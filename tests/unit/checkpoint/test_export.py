import copy
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from ddp_zero.__main__ import main
from ddp_zero.checkpoint import tensor_file
from ddp_zero.checkpoint.export import MODEL_FILE, OPTIMIZER_FILE, export
from tests.unit.checkpoint.bits import bits, of_random_bits
from tests.unit.checkpoint.saved import Tied, adamw, save, sgd, train, trained

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "C64": torch.complex64},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}


def parsed(path: Path) -> dict[str, Tensor]:
    """A safetensors file, read as its specification says."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text, data = raw[8 : 8 + length], raw[8 + length :]
    assert length % 8 == 0
    assert text.startswith(b"{")
    header: dict[str, Any] = json.loads(text)
    assert header.pop("__metadata__") == {"format": "pt"}
    found, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        begin, next_end = entry["data_offsets"]
        assert begin == end, "neither holes nor overlaps"
        end, dtype = next_end, DTYPES[entry["dtype"]]
        assert end - begin == torch.Size(entry["shape"]).numel() * dtype.itemsize
        whole = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8) if end > begin else torch.empty(0)
        found[name] = (whole.view(dtype) if end > begin else torch.empty(0, dtype=dtype)).view(entry["shape"])
    assert end == len(data)
    return found


def buffers(**tensors: Tensor) -> nn.Module:
    """A model of nothing but these."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


def loaded(path: Path) -> Any:
    """As a user is told to load it."""
    return torch.load(path, weights_only=True, mmap=True)


# Weights


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_safetensors_has_is_written_under_its_name(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    tensors = {
        "matrix": of_random_bits((3, 5), dtype),
        "transposed": of_random_bits((3, 5), dtype).t(),
        "scalar": of_random_bits((), dtype),
        "empty": of_random_bits((0, 3), dtype),
    }
    export(save(tmp_path / "runs", buffers(**tensors)), tmp_path)
    found = parsed(tmp_path / MODEL_FILE)
    for key, value in tensors.items():
        assert (found[key].dtype, found[key].shape, bits(found[key])) == (dtype, value.shape, bits(value))


def test_the_library_of_safetensors_reads_the_file(tmp_path: Path) -> None:
    tensors = {name: of_random_bits((3, 5), dtype) for name, dtype in DTYPES.items()}
    model = buffers(**tensors, transposed=torch.arange(6.0).view(2, 3).t(), empty=torch.ones(0, 2))
    export(save(tmp_path / "runs", model), tmp_path)
    found = safetensors.torch.load_file(tmp_path / MODEL_FILE)
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (value.dtype, value.shape, bits(value))
    with safetensors.safe_open(tmp_path / MODEL_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_a_dtype_that_safetensors_lacks_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(tmp_path / "runs", buffers(fine=torch.ones(2), strange=torch.zeros(2, dtype=dtype)))
    with pytest.raises(ValueError, match=f"Expected a dtype that safetensors supports for 'strange', got {dtype}"):
        export(folder, tmp_path / "plain")
    assert not (tmp_path / "plain" / MODEL_FILE).exists()


def test_names_of_any_characters_are_written(tmp_path: Path) -> None:
    export(save(tmp_path / "runs", nn.ModuleDict({'ä "x" \\ 𝄞': nn.Linear(1, 1, bias=False)})), tmp_path)
    assert list(parsed(tmp_path / MODEL_FILE)) == ['ä "x" \\ 𝄞.weight']


@pytest.mark.parametrize("length", range(1, 9))
def test_headers_of_any_length_are_padded_and_parsed(length: int, tmp_path: Path) -> None:
    export(save(tmp_path / "runs", buffers(**{"x" * length: torch.ones(1)})), tmp_path)
    assert list(parsed(tmp_path / MODEL_FILE)) == ["x" * length]


def test_weights_take_the_memory_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1 << 12)
    folder = save(tmp_path / "runs", buffers(large=torch.arange(1 << 18), small=torch.arange(2)))
    tracemalloc.start()
    export(folder, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19
    assert torch.equal(parsed(tmp_path / MODEL_FILE)["large"], torch.arange(1 << 18))


def test_large_weights_in_low_precision_are_converted_piece_by_piece(tmp_path: Path) -> None:
    large = torch.arange(3 << 20).remainder(251).to(torch.bfloat16)
    export(save(tmp_path / "runs", buffers(large=large)), tmp_path, fp32=True)
    assert torch.equal(parsed(tmp_path / MODEL_FILE)["large"], large.float())


# The optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": adamw,
    "SGD": sgd,
    "AMSGrad": lambda model: Adam(model.parameters(), amsgrad=True, foreach=False),
    "named": lambda model: AdamW([pair for pair in model.named_parameters() if pair[1].requires_grad]),
    "without state": lambda model: SGD(model.parameters(), lr=0.5),
    "LBFGS of one parameter": lambda model: LBFGS([next(model.parameters())], max_iter=2),
}


def options(state_dict: Any) -> list[dict[str, Any]]:
    """The groups of a state dict but the names of their parameters, which torch does not need."""
    return [
        {key: value for key, value in group.items() if key != "param_names"} for group in state_dict["param_groups"]
    ]


def step(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        param = optimizer.param_groups[0]["params"][0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (param - 3).square().sum()
            loss.backward()
            return loss

        param.requires_grad_(True)
        optimizer.step(closure)
    else:
        train(model, optimizer, 5)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_plain_optimizer_goes_on_bit_for_bit(make: Callable[[nn.Module], Optimizer], tmp_path: Path) -> None:
    model = Tied()
    optimizer = make(model)
    for _ in range(2):
        step(model, optimizer)
    files = export(save(tmp_path / "runs", model, optimizer), tmp_path / "plain")
    assert files == [tmp_path / "plain" / MODEL_FILE, tmp_path / "plain" / OPTIMIZER_FILE]

    other = Tied()
    other.load_state_dict(parsed(files[0]), strict=False)
    its = make(other)
    its.load_state_dict(loaded(files[1]))
    assert options(its.state_dict()) == options(optimizer.state_dict())
    assert its.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    for _ in range(2):
        step(model, optimizer)
        step(other, its)
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                assert torch.equal(other.state_dict()[name], value), name


def test_states_of_any_layout_and_dtype_are_exported(tmp_path: Path) -> None:
    model, optimizer = trained(sgd, steps=0)
    states = {
        "transposed": torch.arange(15.0).view(3, 5).t(),
        "every other": torch.arange(10)[::2],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.ones(0, 4, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "plain": [1, (2.5, None), {"deep": torch.ones(2, dtype=torch.complex64)}],
    }
    optimizer.state[model.embedding.weight] = copy.deepcopy(states)
    export(save(tmp_path / "runs", model, optimizer), tmp_path)
    (found,) = loaded(tmp_path / OPTIMIZER_FILE)["state"].values()
    assert list(found) == list(states)
    for key, value in states.items():
        if isinstance(value, Tensor):
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert torch.equal(found[key], value)
    assert found["plain"][:2] == [1, (2.5, None)]
    assert torch.equal(found["plain"][2]["deep"], torch.ones(2, dtype=torch.complex64))


def test_state_that_belongs_to_no_parameter_is_exported(tmp_path: Path) -> None:
    model, optimizer = trained(sgd)
    state: dict[Any, Any] = optimizer.state
    state["calls"] = 12
    export(save(tmp_path / "runs", model, optimizer), tmp_path)
    assert loaded(tmp_path / OPTIMIZER_FILE)["state"]["calls"] == 12


def test_export_without_an_optimizer_writes_the_model_alone(tmp_path: Path) -> None:
    assert export(save(tmp_path / "runs", trained()[0]), tmp_path / "plain") == [tmp_path / "plain" / MODEL_FILE]
    assert [path.name for path in (tmp_path / "plain").iterdir()] == [MODEL_FILE]


# Files


def test_the_newest_of_a_folder_is_exported_into_folders_that_are_made(tmp_path: Path) -> None:
    for number in range(9, 12):
        save(tmp_path / "runs", buffers(number=torch.tensor(number)), step=number)
    (file,) = export(tmp_path / "runs", tmp_path / "not" / "yet" / "there")
    assert parsed(file)["number"].item() == 11
    export(tmp_path / "runs" / "step-00000009", file.parent)
    assert parsed(file)["number"].item() == 9


def test_files_are_replaced_in_one_moment(tmp_path: Path) -> None:
    first, second = trained(), trained(steps=3)
    files = export(save(tmp_path / "runs", *first, step=1), tmp_path / "plain")
    before = [file.read_bytes() for file in files]
    handles = [file.open("rb") for file in files]
    assert export(save(tmp_path / "runs", *second, step=2), tmp_path / "plain") == files
    assert [handle.read() for handle in handles] == before, "who was reading goes on"
    for handle in handles:
        handle.close()
    assert [file.read_bytes() != old for file, old in zip(files, before, strict=True)] == [True, True]
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == sorted([MODEL_FILE, OPTIMIZER_FILE])


def test_export_of_a_damaged_checkpoint_changes_no_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = save(tmp_path / "runs", model, optimizer)
    files = export(folder, tmp_path / "plain")
    before = [(file.read_bytes(), file.stat().st_ino) for file in files]
    raw = bytearray((folder / "__0_0.distcp").read_bytes())
    state = optimizer.state[model.embedding.weight]["exp_avg"]
    raw[raw.index(bits(state))] ^= 1
    (folder / "__0_0.distcp").write_bytes(raw)
    for out in (tmp_path / "plain", tmp_path / "new"):
        with pytest.raises(ValueError, match=r"fit its checksum, got damaged bytes in .*__0_0\.distcp"):
            export(folder, out)
    assert [(file.read_bytes(), file.stat().st_ino) for file in files] == before
    assert not (tmp_path / "new").exists()


# The command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["ddp-zero", "checkpoint", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        sys.exit(main())
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command_prints_the_files_and_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "runs", *trained())
    assert run(monkeypatch, "export", tmp_path / "runs", tmp_path / "plain") == 0
    sizes = [(tmp_path / "plain" / name).stat().st_size for name in (MODEL_FILE, OPTIMIZER_FILE)]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"{tmp_path / 'plain' / name}: {size:,} bytes"
        for name, size in zip((MODEL_FILE, OPTIMIZER_FILE), sizes, strict=True)
    ]


def a_damaged_marker(folder: Path, out: Path) -> str:
    (folder / "complete.json").write_text("damaged")
    return "complete.json"


def a_damaged_part(folder: Path, out: Path) -> str:
    (folder / "part-0.json").write_text("damaged")
    return "part-0.json"


def no_tensors(folder: Path, out: Path) -> str:
    (folder / "__0_0.distcp").unlink()
    return "__0_0.distcp"


def a_file_for_a_folder(folder: Path, out: Path) -> str:
    out.write_text("mine")
    return "plain"


@pytest.mark.parametrize("spoil", [a_damaged_marker, a_damaged_part, no_tensors, a_file_for_a_folder])
def test_the_export_command_prints_an_error_in_one_line(
    spoil: Callable[[Path, Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save(tmp_path / "runs", *trained())
    what = spoil(folder, tmp_path / "plain")
    assert run(monkeypatch, "export", tmp_path / "runs", tmp_path / "plain") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("ddp-zero checkpoint: error: ")
    assert what in err
