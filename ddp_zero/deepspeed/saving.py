"""Checkpoints of an engine: folders of `ddp_zero.checkpoint` by tag, and a file ``latest`` with the newest tag.

``save_dir/tag/step-<number>/`` holds model, optimizer, schedule, counters and client state; nothing in it is unpickled.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero import checkpoint
from ddp_zero.checkpoint.export import model_state
from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.tracing import logger
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.params import full_fp32_param
from ddp_zero.optimizer import ZeroRedundancyOptimizer, sharded_of

PathLike = str | os.PathLike[str]

CustomLoad = Callable[..., object]
"""Loads a state dict ``src`` into a model ``dst``, both by name."""
LATEST = "latest"
_COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")


class Saved(Protocol):
    """What is saved: an engine. Attributes are those of `ddp_zero.deepspeed.engine.Engine`."""

    module: nn.Module
    optimizer: Optimizer
    lr_scheduler: Any
    comm: Communicator
    global_steps: int

    @property
    def ddp(self) -> nn.Module:
        """The wrapped model."""

    @property
    def zero(self) -> ZeroRedundancyOptimizer | None:
        """The sharded optimizer, or None."""

    @property
    def parsed(self) -> Config:
        """The configuration."""

    def gradient_accumulation_steps(self) -> int:
        """How many rounds a step takes."""

    def counters(self) -> dict[str, int]:
        """What counts steps."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        folder: the checkpoint; None if there is none.
        client_state: as it was given to `save`.
        counters: those of the engine, by name.
    """

    folder: str | None = None
    client_state: dict[str, Any] | None = None
    counters: dict[str, int] | None = None


@dataclass(frozen=True)
class Wanted:
    """What to load.

    Attributes:
        strict: whether the model must fit exactly.
        optimizer: the optimizer's state.
        scheduler: the schedule's.
        custom: loads the model.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    custom: CustomLoad | None = None


def save(
    engine: Saved,
    save_dir: PathLike,
    tag: str | int | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """Save everything as ``save_dir/tag``. A collective.

    Args:
        engine: after a step.
        save_dir: a folder that all ranks share.
        tag: a name without a path, the same on every rank; None: ``global_step<number>``.
        client_state: numbers, strings, tensors, and lists, tuples and dicts of them, saved from rank 0.
        save_latest: name the tag in the file ``latest``.
        exclude_frozen_parameters: leave out parameters that do not require a gradient; `load` leaves them as they are.

    Returns:
        True.

    Raises:
        ValueError: for an empty ``save_dir``, a tag that is a path or empty, or, with
            ``checkpoint.tag_validation: Fail``, differs between ranks.
        TypeError: for client state that cannot be saved without pickle.
    """
    if not str(save_dir):
        raise ValueError("Expected save_dir to be a folder, got ''. For the working folder, pass '.'.")
    name = _checked(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    extra = {
        "client_state": client_state,
        "engine": engine.counters(),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
    }
    folder, left_out = Path(save_dir) / name, exclude_frozen_parameters
    checkpoint.save(folder, engine.ddp, engine.optimizer, extra=extra, keep=1, exclude_frozen=left_out).wait()
    if save_latest:
        with Agreement(engine.comm, "naming the latest checkpoint"):
            if engine.comm.group_rank == 0:
                _write(Path(save_dir) / LATEST, name)
    return True


def _checked(engine: Saved, tag: str) -> str:
    """Rank 0's tag, once ranks have been compared as the configuration says."""
    if not tag or Path(tag).name != tag or tag == LATEST:
        raise ValueError(f"Expected a tag that names a folder, got {tag!r}.")
    tags = engine.comm.all_gather_text(tag)
    validation = engine.parsed.tag_validation
    if len(set(tags)) > 1 and validation == "fail":
        raise ValueError(f"Expected the same tag on every rank, got {tags}.")
    if len(set(tags)) > 1 and validation == "warn":
        logger.warning("Expected the same tag on every rank, got %s: saving as %r.", tags, tags[0])
    return tags[0]


def _write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.unfinished")
    beside.write_text(text)
    beside.replace(file)


def load(engine: Saved, load_dir: PathLike, tag: str | int | None, wanted: Wanted) -> Loaded:
    """Load what `save` or DeepSpeed itself saved, at any number of ranks and in any stage. A collective.

    Args:
        engine: before a step or between two.
        load_dir: the folder given to `save`.
        tag: None: that in the file ``latest``.
        wanted: what to load besides the model.

    Returns:
        What was loaded; nothing, with a warning, if there is no tag and no ``latest``.

    Raises:
        FileNotFoundError: if there is no complete checkpoint of the tag.
        ValueError: if it is damaged or does not fit.
    """
    name = _latest(engine, Path(load_dir)) if tag is None else str(tag)
    if name is None:
        return Loaded()
    folder = Path(load_dir) / name
    optimizer = engine.optimizer if wanted.optimizer else None
    custom = wanted.custom
    loaded = checkpoint.load(folder, engine.ddp, optimizer, strict=wanted.strict and custom is None)
    if custom is not None:
        load_module(engine, model_state(loaded.folder), True, custom)
    zero = engine.zero
    keeps_masters = wanted.optimizer and engine.parsed.zero.load_from_fp32_weights
    if zero is not None and engine.parsed.has_masters and not keeps_masters:
        zero.refresh_master_weights()
    extra = loaded.extra if "engine" in loaded.extra else _of_deepspeed(engine, loaded.extra)
    if wanted.scheduler and engine.lr_scheduler is not None and extra["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(extra["scheduler"])
    return Loaded(str(folder), extra["client_state"], extra["engine"])


def load_module(engine: Saved, weights: Mapping[str, Any], strict: bool, custom: CustomLoad | None) -> None:
    """Load a state dict into the model, and into masters: see `Engine.load_module_state_dict`."""
    if custom is None:
        engine.module.load_state_dict(weights, strict=strict)
    else:
        custom(src=weights, dst=engine.module)
    if engine.zero is not None and engine.parsed.has_masters:
        engine.zero.refresh_master_weights()


def _of_deepspeed(engine: Saved, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint that DeepSpeed wrote holds besides the model and the optimizer, as `save` would write it."""
    counters = {counter: int(extra.get(counter) or 0) for counter in _COUNTERS}
    counters["micro_steps"] = counters["global_steps"] * engine.gradient_accumulation_steps()
    return {"scheduler": extra.get("lr_scheduler"), "client_state": extra["client_state"], "engine": counters}


def _latest(engine: Saved, folder: Path) -> str | None:
    """The tag in the file ``latest``, as rank 0 reads it."""
    comm = engine.comm
    file = folder / LATEST
    mine = file.read_text().strip() if comm.group_rank == 0 and file.is_file() else ""
    name = comm.all_gather_text(mine)[0]
    if not name:
        logger.warning("Expected a file %s, or a tag, got neither: nothing was loaded.", file)
        return None
    if Path(name).name != name:
        raise ValueError(f"Expected the name of a folder in {file}, got {name!r:.80}.")
    return name


def save_weights(
    engine: Saved, save_dir: PathLike, filename: str, exclude_frozen_parameters: bool, in_fp32: bool
) -> bool:
    """Save the model's state dict by `torch.save` on rank 0, for ``torch.load(file, weights_only=True)``. A collective.

    Args:
        engine: after a step.
        save_dir: created if missing.
        filename: of the file.
        exclude_frozen_parameters: leave out parameters that do not require a gradient.
        in_fp32: masters in place of low-precision parameters, and other floating values converted.

    Returns:
        True.

    Raises:
        ValueError: for a name that ends in ``.safetensors``.
        OSError: on rank 0 if writing fails; RuntimeError on the others.
    """
    if filename.endswith(".safetensors"):
        raise ValueError(
            f"Expected a name for torch.save, such as pytorch_model.bin, got {filename!r}. For safetensors use "
            "engine.save_checkpoint() and python -m ddp_zero checkpoint export."
        )
    comm, weights = engine.comm, dict[str, Any]()
    for name, value in engine.module.state_dict(keep_vars=True).items():
        is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        if exclude_frozen_parameters and is_frozen:
            continue
        found = _in_fp32(engine, value) if in_fp32 else value
        if comm.group_rank == 0:
            weights[name] = found.detach() if isinstance(found, Tensor) else found
    with Agreement(comm, "saving the model's weights"):
        if comm.group_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(weights, Path(save_dir) / filename)
    return True


def _in_fp32(engine: Saved, value: Any) -> Any:
    """A value in fp32, if it is a floating one. A collective for a parameter with a master."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    zero = engine.zero
    if zero is not None and value in sharded_of(zero).table.index_of:
        return full_fp32_param(zero, value)
    return value.float()
