"""Writes the universal format of DeepSpeed, which it loads at any number of ranks; see `deepspeed`, which reads it."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "0.19.0"
"""DeepSpeed reads this to tell formats apart; all since 0.3.17 are alike to it."""

MODEL_FILE = "mp_rank_00_model_states.pt"
LATEST = "latest_universal"


def write_universal(
    root: Path,
    tag: str,
    params: Iterable[tuple[str, Mapping[str, Any]]],
    groups: Sequence[Mapping[str, Any]],
    module: Mapping[str, Tensor],
    others: Mapping[str, Any],
) -> Path:
    """Write a checkpoint as ``root/tag``, and its name to ``root/latest_universal`` at last.

    Args:
        root: a folder, which exists.
        tag: the name of the checkpoint, which must not exist.
        params: names of trainable parameters, one at a time, with ``fp32`` and states of the parameter's shape, and
            ``step`` if there is one.
        groups: options and ``params``, names, of each group.
        module: values of the model by name.
        others: what DeepSpeed keeps next to ``module``, such as ``global_steps``.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileExistsError: if it exists.
        ValueError: for a name that cannot be that of a folder.
    """
    folder = root / tag
    (folder / "zero").mkdir(parents=True)
    shapes: dict[str, torch.Size] = {}
    steps: dict[str, Any] = {}
    for name, values in params:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"Expected the name of a parameter that can be that of a folder, got {name!r}.")
        (folder / "zero" / name).mkdir()
        shapes[name] = values["fp32"].shape
        for key, value in values.items():
            _save(value if key == "step" else {"param": value}, folder / "zero" / name / f"{key}.pt")
        steps[name] = values.get("step")
    numbered = [_numbered(group, steps) for group in groups]
    _save({"param_groups": numbered, "ds_version": VERSION, "overflow": False}, folder / "zero" / "optimizer_state.pt")
    param_shapes = [OrderedDict((name, shapes[name]) for name in group["params"]) for group in groups]
    sizes = {"dp_world_size": 1, "mp_world_size": 1}
    state = {"module": OrderedDict(module), "param_shapes": param_shapes, "optimizer": None, **sizes, **others}
    _save({**state, "ds_version": VERSION}, folder / MODEL_FILE)
    (root / LATEST).write_text(tag, encoding="utf-8")
    return folder


def _numbered(group: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """A group with numbers for parameters, and its step where DeepSpeed's own Adam looks for it."""
    found = [step for name in group["params"] if (step := steps[name]) is not None]
    step = {"step": int(max(float(one) for one in found))} if found else {}
    return {**group, **step, "params": list(range(len(group["params"])))}


def _save(value: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
