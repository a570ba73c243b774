"""The checkpoints that tests/deepspeed/write_checkpoints.py had DeepSpeed write, unpacked for a test."""

import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
VERSIONS = tuple(sorted(path.name.split("-")[1].removesuffix(".tar.xz") for path in HERE.glob("deepspeed-*.tar.xz")))
VARIANTS = ("stage1-bf16", "stage1-bf16-fp32sum", "stage2-fp16")
WITHOUT = {("0.17.6", "stage1-bf16-fp32sum")}
"""Here DeepSpeed writes no file of the optimizer."""
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.10.11, 3.11.3 and older do not know it."""
EVERY = [(version, variant) for version in VERSIONS for variant in VARIANTS if (version, variant) not in WITHOUT]


def unpack(folder: Path) -> Path:
    """All of them, as ``VERSION/VARIANT`` in a folder."""
    for version in VERSIONS:
        with tarfile.open(HERE / f"deepspeed-{version}.tar.xz") as file:
            file.extractall(folder / version, **FILTER)
    return folder


@cache
def expected(root: Path) -> dict[str, Any]:
    """What DeepSpeed's own functions say is in a checkpoint: parameters in fp32, and the losses that follow."""
    found: dict[str, Any] = torch.load(f"{root}.expected.pt", weights_only=True)
    return found


def whole_states(root: Path) -> dict[str, dict[str, Any]]:
    """States by parameter, as DeepSpeed's converter wrote them."""
    return states_in(root / "last_universal")


def states_in(folder: Path) -> dict[str, dict[str, Any]]:
    """States by parameter of a checkpoint in the universal format."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "zero").glob("*/*.pt")):
        value = torch.load(path, weights_only=True)
        found.setdefault(path.parent.name, {})[path.stem] = value["param"] if isinstance(value, dict) else value
    return found
