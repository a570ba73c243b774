"""``ddp-zero checkpoint``: describes a checkpoint, and exports it to plain files, in one process.

Weights become a safetensors file and the optimizer the state dict of the plain `torch.optim` class, or both together a
checkpoint that DeepSpeed loads. The safetensors format (https://github.com/huggingface/safetensors, its README) is a
length, a JSON header and the bytes; it is written here, a piece of a tensor at a time, since the library of that name
needs all tensors in memory at once.
"""

import json
import mmap
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ddp_zero.checkpoint.folder import folder_of, sync_folder
from ddp_zero.checkpoint.foreign.deepspeed import write_universal
from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.checkpoint.tensor_file import StoredTensor, pieces, read, stored_in, total_bytes, verify
from ddp_zero.core.local import MASTER_KEY
from ddp_zero.error_codes import coded
from ddp_zero.tools.files import Counted, open_regular, showing, written
from ddp_zero.values import fill, memory_of, restore

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"

_SAFETENSORS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
}
_ALIGNMENT = 8
_CPU = torch.device("cpu")


def export(path: Path, out: Path, *, fp32: bool = False, exclude_frozen: bool = False) -> list[Path]:
    """Write ``model.safetensors`` and, if an optimizer was saved, ``optimizer.pt`` into a folder. Returns the files.

    The latter is for ``torch.load(file, weights_only=True, mmap=True)`` and the plain optimizer's ``load_state_dict``,
    over the same parameters in the same order. Existing files of these names are replaced, each atomically.

    Args:
        path: a checkpoint, or a folder of them; of this library or of DeepSpeed.
        out: a folder, created if missing.
        fp32: write all floating-point weights in fp32, from their master weights if they have any.
        exclude_frozen: leave out parameters that are not trainable.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged, or holds a name or a dtype that safetensors does not support.
    """
    saved = SavedCheckpoint.open(path)
    shared = saved.shared
    stored = stored_in([saved.model, saved.state, shared.param_groups, shared.other_state])
    verify(saved.folder, stored, shows=True)
    out.mkdir(parents=True, exist_ok=True)
    values = _values(saved, fp32, exclude_frozen)
    with showing(f"exporting {saved.folder.name}", total_bytes(stored)):
        files = [_replace(out / MODEL_FILE, lambda file: _write_model(saved.folder, values, file))]
        if shared.optimizer is not None:
            state = _optimizer_state(saved)
            files.append(_replace(out / OPTIMIZER_FILE, lambda file: torch.save(state, cast(BinaryIO, Counted(file)))))
    return files


def model_state(path: Path) -> dict[str, Any]:
    """The saved state dict of the model, whole, on the CPU; not verified."""
    saved = SavedCheckpoint.open(path)
    return dict(fill(saved.model, StoredTensor, lambda stored: read(saved.folder, stored, _CPU)))


def _replace(target: Path, write: Callable[[BinaryIO], None]) -> Path:
    """Write a file beside the target, and put it in the place of the target once it is on disk."""
    beside = target.with_name(f".{target.name}.unfinished")
    try:
        with written(beside, "wb") as file:
            write(file)
        # on disk before: a crash leaves the old file or the complete new file
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def _values(saved: SavedCheckpoint, fp32: bool, exclude_frozen: bool) -> dict[str, tuple[StoredTensor, torch.dtype]]:
    """Tensors to write, by name, with the dtype of each in the file."""
    shared, found = saved.shared, {}
    kept = {*shared.buffers, *shared.trainable} if exclude_frozen else saved.model.keys()
    for name, stored in saved.model.items():
        first = shared.aliases.get(name, name)
        if not isinstance(stored, StoredTensor) or first not in kept:
            continue
        dtype = stored.spec.dtype
        if fp32 and dtype.is_floating_point:
            stored = saved.state.get(first, {}).get(MASTER_KEY, stored)
            dtype = torch.float32
        found[name] = stored, dtype
    return found


def _write_model(folder: Path, values: Mapping[str, tuple[StoredTensor, torch.dtype]], file: BinaryIO) -> None:
    """Write tensors to a file of safetensors: each with the dtype that it gets in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (stored, in_file) in values.items():
        if name in header:
            raise ValueError(
                f"Expected a name that safetensors does not reserve, got {name!r}. Rename it in the model, and save "
                "again. [ZERO-616]"
            )
        if in_file not in _SAFETENSORS:
            raise ValueError(
                f"Expected a dtype that safetensors supports for {name!r}, got {in_file}. Export with "
                "--fp32, or load it with checkpoint.load(). [ZERO-616]"
            )
        begin = end
        end = end + stored.numel * in_file.itemsize
        shape = list(stored.spec.shape)
        header[name] = {"dtype": _SAFETENSORS[in_file], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for stored, in_file in values.values():
        for piece in pieces(folder, stored):
            file.write(memory_of(torch.frombuffer(piece, dtype=stored.spec.dtype).to(in_file)))


def _optimizer_state(saved: SavedCheckpoint) -> dict[str, Any]:
    shared, names = saved.shared, saved.names()
    index_of = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in shared.param_groups]
    states: dict[Any, Any] = {**shared.other_state, **{index_of[name]: state for name, state in saved.state.items()}}
    scale = {} if shared.loss_scale is None else {"loss_scale": shared.loss_scale}
    return restore(_read_tree({"state": states, "param_groups": groups, **scale}, saved))  # type: ignore[no-any-return]


def export_deepspeed(path: Path, out: Path) -> Path:
    """Write a checkpoint in DeepSpeed's universal format, and return its folder.

    It is named ``<tag>_universal`` if the engine of `ddp_zero.deepspeed` saved it under that tag, with its counters,
    schedule and client state; else ``step-<number>_universal``. DeepSpeed loads it with ``"checkpoint":
    {"load_universal": true}`` into stages 1 and 2, at any number of ranks. ``out`` is created if missing.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        FileExistsError: if ``out`` already has a checkpoint of this name.
        ValueError: if it is damaged, or was saved without an optimizer.
    """
    saved = SavedCheckpoint.open(path)
    shared = saved.shared
    if shared.optimizer is None:
        raise ValueError(
            f"This checkpoint has a model only, and no optimizer to export: {saved.folder}. "
            "Export it with --format plain. [ZERO-616]"
        )
    verify(saved.folder, stored_in([saved.model, saved.state, shared.param_groups]))
    out.mkdir(parents=True, exist_ok=True)

    def whole(name: str) -> dict[str, Any]:
        """A parameter's value in fp32, and its states of the same shape."""
        states = dict(saved.state.get(name, {}))
        best = states.pop(MASTER_KEY, saved.model[name])
        values = _read_tree(states, saved)
        shape = best.spec.shape
        kept = {key: value for key, value in values.items() if key == "step" or getattr(value, "shape", None) == shape}
        return {"fp32": _read_tree(best, saved).float(), **kept}

    tag, others = _progress(saved)
    others |= {
        "shared_params": dict(shared.aliases),
        "buffer_names": list(shared.buffers),
        "frozen_param_shapes": None,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    module = {name: value for name, value in saved.model.items() if isinstance(value, StoredTensor)}
    params = ((name, whole(name)) for name in saved.names())
    groups, values = _read_tree(shared.param_groups, saved), _read_tree(module, saved)
    return write_universal(out, f"{tag}_universal", params, groups, values, others)


def _progress(saved: SavedCheckpoint) -> tuple[str, dict[str, Any]]:
    """The tag of a checkpoint, and its training progress under DeepSpeed's names."""
    extra = _read_tree(saved.shared.extra, saved)
    given = extra if isinstance(extra, dict) else {}
    is_engines = {"engine", "scheduler", "client_state"} <= given.keys()
    counted = given["engine"] if is_engines else given if saved.foreign is not None else {}
    progress = {name: int(counted.get(name) or 0) for name in ("global_steps", "skipped_steps", "global_samples")}
    progress["global_steps"] = progress["global_steps"] or saved.step
    if is_engines:
        tagged = saved.folder.parent
        return tagged.name, {**given["client_state"], **progress, "lr_scheduler": given["scheduler"]}
    taken = progress["global_steps"] - progress["skipped_steps"]
    schedule = given.get("lr_scheduler") if saved.foreign is not None else None
    schedule = schedule or {"last_batch_iteration": taken - 1, "last_epoch": taken}  # as schedules of either kind count
    return f"step-{saved.step:08d}", {**progress, "lr_scheduler": schedule}


def _read_tree(tree: Any, saved: SavedCheckpoint) -> Any:
    """The tree with tensors on the CPU; see `_map_tensor`."""
    return fill(tree, StoredTensor, lambda stored: _map_tensor(saved.folder, stored))


def _map_tensor(folder: Path, stored: StoredTensor) -> Tensor:
    """A tensor whose memory is the file, which the system reads on use and can evict at any time."""
    if not stored.nbytes:
        return torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
    if len(stored.chunks) > 1 or stored.span.is_shared:
        return read(folder, stored, _CPU)
    start = stored.span.offset - stored.span.offset % mmap.ALLOCATIONGRANULARITY
    with open_regular(folder / stored.span.file) as file:
        length = stored.span.offset + stored.nbytes - start
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(memory, dtype=stored.spec.dtype, count=stored.numel, offset=stored.span.offset - start)
    return flat.view(stored.spec.shape)


# The command


def main(options: Namespace) -> int:
    """Run a command. Returns its exit code: 1, with a message, for a checkpoint that cannot be read."""
    try:
        {"info": _info, "export": _export}[options.action](options)
    except (OSError, ValueError) as error:
        print(f"ddp-zero checkpoint: error: {coded(str(error), '[ZERO-618]')}", file=sys.stderr)
        return 1
    return 0


def _info(options: Namespace) -> None:
    """The command ``info``: print a summary of a checkpoint, and on request its tensors."""
    saved = SavedCheckpoint.open(folder_of(options.path))
    print(saved.folder)
    for title, text in summary(saved):
        print(f"  {title:<14}{text}")
    for name, stored in saved.tensors().items() if options.tensors else ():
        print(f"  {name}: {stored.describe()}")
    if options.verify:
        verify(saved.folder, stored_in(saved.as_tree()))
        print("  everything fits its checksums")


def summary(saved: SavedCheckpoint) -> list[tuple[str, str]]:
    """Title and text of each line about a checkpoint."""
    shared, tensors = saved.shared, saved.tensors()
    sizes = Counter[str]()
    for stored in tensors.values():
        sizes[str(stored.spec.dtype).removeprefix("torch.")] += stored.numel
    elements = ", ".join(f"{count:,} of {dtype}" for dtype, count in sizes.most_common())
    writer = f"ddp_zero, {_several(len(saved.rank_extras), 'rank')}"
    if saved.foreign is not None:
        writer = f"DeepSpeed {saved.foreign.extra.get('ds_version')}"
    rows = [("written by", writer), ("step", str(saved.step))]
    rows.append(("model", f"{_several(len(tensors), 'tensor')}; elements: {elements or 'none'}"))
    frozen = [name for name in tensors if name not in {*shared.buffers, *shared.trainable}]
    left_out = ", which may have been left out" if shared.excludes_frozen and not frozen else ""
    rows.append(("frozen", f"{_several(len(frozen), 'parameter')}{left_out}"))
    if shared.optimizer is not None:
        kinds = " or ".join(sorted(saved.foreign.kinds)) if saved.foreign is not None else shared.optimizer
        rows.append(("optimizer", f"{kinds or 'unknown'}, {_several(len(shared.param_groups), 'group')}"))
        keys = dict.fromkeys(str(key) for state in saved.state.values() for key in state)
        rows.append(("state", f"of {_several(len(saved.state), 'parameter')}: {', '.join(keys) or 'none'}"))
    if shared.loss_scale is not None:
        rows.append(("loss scale", ", ".join(f"{name} {value:g}" for name, value in shared.loss_scale.items())))
    if isinstance(shared.extra, Mapping) and shared.extra:
        rows.append(("extra", ", ".join(map(str, shared.extra))))
    nbytes = total_bytes(set(stored_in(saved.as_tree())))
    return [*rows, ("bytes", f"{nbytes:,}")]


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _export(options: Namespace) -> None:
    """The command ``export``: write a checkpoint in another format, and print its files."""
    path, out = folder_of(options.path), folder_of(options.out)
    if options.format == "deepspeed-universal":
        if options.fp32 or options.exclude_frozen:
            raise ValueError(
                "Expected --fp32 and --exclude-frozen with --format plain: DeepSpeed's has fp32 alone. [ZERO-616]"
            )
        print(export_deepspeed(path, out))
        return
    for file in export(path, out, fp32=options.fp32, exclude_frozen=options.exclude_frozen):
        print(f"{file}: {file.stat().st_size:,} bytes")
