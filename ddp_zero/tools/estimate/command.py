"""``python -m ddp_zero estimate MODULE:FUNCTION``: memory per rank of a model, before anything is allocated."""

import importlib
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_zero.options import Offload
from ddp_zero.tools.estimate.estimate import estimate

PROGRAM = "python -m ddp_zero estimate"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9, "MB": 10**6}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and what else was asked for."""
    options = _parser().parse_args(arguments)
    try:
        with torch.device("meta"):
            model = _built(options.model)
        kind: Any = getattr(torch.optim, options.optimizer, None)
        if kind is None:
            raise ValueError(f"Expected the name of a class in torch.optim, got {options.optimizer!r}.")
        if options.dtype is not None:
            model = model.to(getattr(torch, options.dtype))
        found = estimate(
            model,
            kind,
            ranks=options.ranks,
            stage=options.stage,
            partition=options.partition,
            master_weights=options.master_weights,
            offload=Offload("disk", folder=".") if options.offload == "disk" else options.offload,
            device=options.device,
            bucket_cap_mb=options.bucket_cap_mb,
            wrapped=options.wrapped,
        )
        memory = None if options.memory is None else _bytes(options.memory)
        if options.plot is not None:
            found.plot(options.plot, [2**power for power in range(8)])
    except (TypeError, ValueError, ImportError, AttributeError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(found)
    if memory is not None:
        print(f"\nfewest ranks at which {options.memory} suffice:")
        for mode, ranks in found.fewest_ranks(memory).items():
            print(f"{mode}: {'none' if ranks is None else ranks}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", help="MODULE:FUNCTION that returns a module; it is called on the meta device")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--optimizer", default="AdamW", help="a class in torch.optim")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), help="only this one; 0 is DDP")
    parser.add_argument("--partition", choices=("parameters", "elements"), help="only this one")
    parser.add_argument("--dtype", help="of the parameters, such as bfloat16")
    parser.add_argument("--master-weights", action="store_true")
    parser.add_argument("--offload", choices=("cpu", "disk"))
    parser.add_argument("--device", default="cuda", help="where the model is to be trained: cpu, cuda, ...")
    parser.add_argument("--bucket-cap-mb", type=float, help="of DistributedDataParallel")
    parser.add_argument("--wrapped", action="store_true", help="ddp_zero.wrap chooses the buckets")
    parser.add_argument("--memory", help="such as 80GiB: print the fewest ranks at which that suffices")
    parser.add_argument("--plot", type=Path, help="a picture (needs matplotlib)")
    return parser


def _built(name: str) -> nn.Module:
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"Expected MODULE:FUNCTION, got {name!r}.")
    sys.path.insert(0, "")
    built = getattr(importlib.import_module(module), function)()
    if not isinstance(built, nn.Module):
        raise TypeError(f"Expected {name} to return a module, got {type(built).__name__}.")
    return built


def _bytes(text: str) -> int:
    for unit, size in _UNITS.items():
        if text.endswith(unit) and text.removesuffix(unit).strip().replace(".", "", 1).isdigit():
            return int(float(text.removesuffix(unit)) * size)
    raise ValueError(f"Expected an amount of memory such as 80GiB, with one of the units {list(_UNITS)}, got {text!r}.")
