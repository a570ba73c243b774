"""Export of a checkpoint to plain files, by one process that never holds more than a piece of a tensor.

Weights become a safetensors file, the optimizer the state dict of the plain `torch.optim` class. The safetensors format
(https://github.com/huggingface/safetensors, its README) is a length, a JSON header and the bytes; it is written here,
since the library of that name needs all tensors in memory at once.
"""

import json
import mmap
import os
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.folder import folder_of, open_regular, sync_folder
from ddp_zero.checkpoint.manifest import StoredTensor, fill, stored_in, total_bytes
from ddp_zero.checkpoint.tensor_file import pieces, verify
from ddp_zero.record.progress import Counted, showing

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


def export(path: Path, out: Path) -> list[Path]:
    """Write ``model.safetensors`` and, if an optimizer was saved, ``optimizer.pt`` into a folder.

    The latter is for ``torch.load(file, weights_only=True, mmap=True)`` and the plain optimizer's ``load_state_dict``,
    over the same parameters in the same order. Existing files of these names are replaced, each atomically.

    Args:
        path: a checkpoint, or a folder of them.
        out: a folder, created if missing.

    Returns:
        The files.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged, or holds a name or a dtype that safetensors does not support.
    """
    saved = SavedCheckpoint.open(path)
    shared = saved.shared
    stored = list(stored_in([saved.model, saved.state, shared.param_groups, shared.other_state]))
    with showing(f"checking {saved.folder.name}", total_bytes(stored)):
        verify(saved.folder, stored)
    out.mkdir(parents=True, exist_ok=True)
    with showing(f"exporting {saved.folder.name}", total_bytes(stored)):
        files = [_replace(out / MODEL_FILE, lambda file: _write_model(saved, file))]
        if shared.optimizer is not None:
            files.append(_replace(out / OPTIMIZER_FILE, lambda file: _write_optimizer(saved, file)))
    return files


def _write_optimizer(saved: SavedCheckpoint, file: BinaryIO) -> None:
    torch.save(_optimizer_state(saved), cast(BinaryIO, Counted(file)))


def _replace(target: Path, write: Callable[[BinaryIO], None]) -> Path:
    beside = target.with_name(f".{target.name}.unfinished")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def _write_model(saved: SavedCheckpoint, file: BinaryIO) -> None:
    tensors = {name: value for name, value in saved.model.items() if isinstance(value, StoredTensor)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        if name in header:
            raise ValueError(f"Expected a name that safetensors does not reserve, got {name!r}.")
        if stored.spec.dtype not in _SAFETENSORS:
            raise ValueError(f"Expected a dtype that safetensors supports for {name!r}, got {stored.spec.dtype}.")
        begin, end = end, end + stored.nbytes
        dtype, shape = _SAFETENSORS[stored.spec.dtype], list(stored.spec.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for stored in tensors.values():
        for piece in pieces(saved.folder, stored):
            file.write(piece)


def _optimizer_state(saved: SavedCheckpoint) -> dict[str, Any]:
    """The plain optimizer's state dict, its tensors still in the files."""
    shared = saved.shared
    index_of: dict[str, int] = {}
    groups = []
    for group in shared.param_groups:
        for name in group["params"]:
            index_of[name] = len(index_of)
        indices = [index_of[name] for name in group["params"]]
        groups.append({**group, "params": indices})
    states: dict[Any, Any] = {**shared.other_state, **{index_of[name]: state for name, state in saved.state.items()}}
    scale = {} if shared.loss_scale is None else {"loss_scale": shared.loss_scale}
    tree = {"state": states, "param_groups": groups, **scale}
    return fill(tree, lambda stored: _mapped(saved.folder, stored))  # type: ignore[no-any-return]


def _mapped(folder: Path, stored: StoredTensor) -> Tensor:
    """A tensor whose memory is the file: the system reads it on use and can evict it at any time."""
    if not stored.nbytes:
        return torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
    start = stored.span.offset - stored.span.offset % mmap.ALLOCATIONGRANULARITY
    with open_regular(folder / stored.span.file) as file:
        length = stored.span.offset + stored.nbytes - start
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
    count = stored.nbytes // stored.spec.dtype.itemsize
    flat = torch.frombuffer(memory, dtype=stored.spec.dtype, count=count, offset=stored.span.offset - start)
    return flat.view(stored.spec.shape)


def main() -> int:
    """``python -m ddp_zero.checkpoint export DIR OUT``."""
    parser = ArgumentParser(prog="python -m ddp_zero.checkpoint", description="Work with sharded checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help=f"write {MODEL_FILE} and {OPTIMIZER_FILE}, as plain as torch's own")
    command.add_argument("path", metavar="DIR", help="a checkpoint, or a folder of them: the newest")
    command.add_argument("out", metavar="OUT", help="a folder for the files")
    options = parser.parse_args()
    try:
        for file in export(folder_of(options.path), folder_of(options.out)):
            print(f"{file}: {file.stat().st_size:,} bytes")
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return 0
