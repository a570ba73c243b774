"""Memory that a rank will need, by part, for all modes side by side, before any allocation.

`estimate` is `ddp_zero.estimate`; ``ddp-zero estimate MODULE:FUNCTION`` prints its result.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_zero.core.engine import Mode, Training
from ddp_zero.core.local import Cost, Grouping
from ddp_zero.core.plan import MAX_BYTE_IMBALANCE
from ddp_zero.error_codes import coded
from ddp_zero.options import Offload

_MIB = 1 << 20
_MOST_RANKS = 1 << 12
_PARTS = {
    "parameters": "the model's parameters, whole on every rank",
    "masters": "fp32 copies of low-precision parameters that the rank owns",
    "state": "the optimizer's state for what the rank owns",
    "gradients": "gradients that are kept until the step",
    "sums in fp32": "low-precision gradients, while they are summed in fp32",
    "buckets": "DDP's buckets, where they are no views of gradients; in stage 2 what buckets are reduced in",
    "gradient under way": "the largest gradient, between autograd and its bucket",
    "sync": "copies of new parameters on their way to other ranks",
    "buffers of the model": "buffers that the model has registered",
    "copies": "low-precision parameters without a master that the rank owns",
    "pinned": "buffers between the device and the host",
}
_SHARED = ("masters", "state", "sums in fp32", "sync")
"""Parts that shrink with the number of ranks, as do the gradients in stage 2."""


@dataclass(frozen=True)
class Estimate:
    """Memory of the rank that needs most, in one mode.

    Attributes:
        mode: name of the mode.
        ranks: number of ranks.
        device: bytes by part on the parameters' device.
        host: bytes by part on the host, if state is offloaded from an accelerator; else empty. A rank on the CPU has
            one memory, counted in ``device``.
    """

    mode: str
    ranks: int
    device: dict[str, int]
    host: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes on the parameters' device."""
        return sum(self.device.values())


_MODES = (
    Mode("DDP", 0),
    Mode("stage 1", 1, waits=True, steps_buckets=False),
    Mode("stage 1, inside backward", 1),
    Mode("stage 2, inside backward", 2),
    Mode("stage 2, after backward", 2, waits=True),
)


class Estimates(Sequence[Estimate]):
    """Estimates of every mode. ``str`` of it is a table in Markdown, in MiB, with the meaning of its columns below.

    Args:
        at: computes the estimate for a mode and a number of ranks.
        modes: the modes.
        ranks: number of ranks.
    """

    def __init__(self, at: Callable[[Mode, int], Estimate], modes: Sequence[Mode], ranks: int) -> None:
        self._at = at
        self._modes = modes
        self.ranks = ranks
        self._found = [at(mode, ranks) for mode in modes]

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        """An estimate by its index, or by the name of its mode."""
        if isinstance(place, str):
            names = [one.mode for one in self._found]
            if place not in names:
                raise KeyError(f"Expected one of the modes {names}, got {place!r}.")
            return self._found[names.index(place)]
        return self._found[place]

    @property
    def recommended(self) -> Estimate:
        """The mode that needs least, offload aside, which costs time; of several the first."""
        on_device = [one for mode, one in zip(self._modes, self._found, strict=True) if mode.offload is None]
        return min(on_device, key=lambda one: one.total)

    def fewest_ranks(self, memory: int) -> dict[str, int | None]:
        """The smallest number of ranks at which each mode fits, by its name; None if none does.

        Args:
            memory: bytes available for the estimated parts: leave room for activations, and for PyTorch itself.
        """
        return {mode.name: self._fewest(mode, memory) for mode in self._modes}

    def _fewest(self, mode: Mode, memory: int) -> int | None:
        fits = 1
        while (found := self._at(mode, fits)).total > memory:
            shrinks = [*_SHARED, *(["gradients"] if mode.stage == 2 else [])]
            least = sum(nbytes for part, nbytes in found.device.items() if part not in shrinks)
            if mode.stage == 0 or least > memory or fits >= _MOST_RANKS:
                return None
            fits *= 2
        return next(n for n in range(max(1, fits // 2), fits + 1) if self._at(mode, n).total <= memory)

    def __str__(self) -> str:
        parts = list(dict.fromkeys(part for one in self._found for part in one.device))
        hosts = list(dict.fromkeys(part for one in self._found for part in one.host))
        heads = [*parts, "total", *(f"{part} (host)" for part in hosts)]
        rows = [f"| MiB per rank, {self.ranks} ranks | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
        for one in self._found:
            sizes = [*(one.device.get(part, 0) for part in parts), one.total]
            sizes += [one.host.get(part, 0) for part in hosts]
            shown = (f"{nbytes / _MIB:,.1f}" if nbytes else "0" for nbytes in sizes)
            mark = " (recommended)" if one is self.recommended else ""
            rows.append(f"| {one.mode}{mark} | {' | '.join(shown)} |")
        rows += ["", *(f"{part}: {_PARTS[part]}" for part in dict.fromkeys([*parts, *hosts]))]
        rows += ["recommended: the mode that needs least, without offload; where the step needs all gradients, as with"]
        rows += ["clipping or a loss scale, 'after backward'. 'cut': equal parts, partition=\"elements\""]
        return "\n".join(rows)


def estimate(
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *,
    ranks: int,
    stage: int | None = None,
    partition: str | None = None,
    master_weights: bool = False,
    offload: Offload | str | None = None,
    device: str | torch.device | None = None,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = True,
    parameters_as_bucket_view: bool = True,
    params: Grouping | Sequence[Mapping[str, Any]] | None = None,
    cost: Cost = "auto",
    max_byte_imbalance: float = MAX_BYTE_IMBALANCE,
    **options: Any,
) -> Estimates:
    """Memory that a rank needs for parameters, gradients and state: by part, in every mode, of the rank with most.

    Nothing is allocated: the model may be on the meta device. Activations, and the memory of PyTorch and the process,
    are excluded.

    Args:
        model: the model, not wrapped.
        optimizer_class: the class to shard.
        ranks: number of ranks that share the state.
        stage: 0, which is DDP with the unsharded optimizer, 1 or 2; None for all.
        partition: ``"parameters"`` or ``"elements"``; None for both, if the optimizer steps each element independently.
        master_weights: see `ZeroRedundancyOptimizer`.
        offload: see `ZeroRedundancyOptimizer`; each mode is estimated with and without offload.
        device: device of the training; None for the model's, or an accelerator for a model on the meta device.
        bucket_cap_mb: as for `DistributedDataParallel`, or ``bucket_mb`` of `ddp_zero.wrap`; None for 25.
        gradient_as_bucket_view: as for `DistributedDataParallel`.
        parameters_as_bucket_view: see `ZeroRedundancyOptimizer`.
        params: parameter groups as a list, or a function, as for `shard_optimizer`: options and classes of parameters.
            Parameters in no group take part as if frozen, without state.
        cost: see `ZeroRedundancyOptimizer`; the plan is as in training.
        max_byte_imbalance: see `ZeroRedundancyOptimizer`.
        **options: options for ``optimizer_class``.

    Returns:
        An estimate for each mode.

    Raises:
        TypeError: for arguments of the wrong type, or options that the class does not accept.
        ValueError: for an unknown stage or partition, or fewer than one rank.
    """
    _check(model, ranks, stage)
    training = Training(
        model,
        optimizer_class,
        options,
        params=params,
        device=device,
        cost=cost,
        max_byte_imbalance=max_byte_imbalance,
        masters=master_weights,
        offload=offload,
        flat=parameters_as_bucket_view,
        views=gradient_as_bucket_view,
        bucket_cap_mb=bucket_cap_mb,
    )

    def at(mode: Mode, number: int) -> Estimate:
        return Estimate(mode.name, number, *training.needs(mode, number))

    return Estimates(at, _modes(stage, training.partitions(partition), training.offload), ranks)


def _check(model: object, ranks: object, stage: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a module, got {type(model).__name__}. [ZERO-905]")
    if type(ranks) is not int:
        raise TypeError(f"Expected ranks to be an int, got {ranks!r}. [ZERO-905]")
    if ranks < 1:
        raise ValueError(f"Expected at least 1 rank, got {ranks}. [ZERO-905]")
    if stage not in (None, 0, 1, 2):
        raise ValueError(f"Expected stage 0, 1, 2 or None, got {stage!r}. [ZERO-905]")


def _modes(stage: int | None, partitions: Sequence[str], offload: Offload | None) -> list[Mode]:
    """The modes of a stage, or of all; without offload, then with it if requested."""
    found = []
    to = None if offload is None else offload.to
    for mode in _MODES:
        if stage is not None and mode.stage != stage:
            continue
        for partition in partitions if mode.stage else ("parameters",):
            for place in dict.fromkeys((None, to)) if mode.stage else (None,):
                cut = ", cut" if partition == "elements" else ""
                name = mode.name + cut + (f", offload {place}" if place else "")
                found.append(replace(mode, name=name, partition=partition, offload=place))
    return sorted(found, key=lambda mode: mode.offload is not None)


# The command

_OF_ESTIMATE = "ranks stage partition master_weights offload device bucket_cap_mb".split()
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9, "MB": 10**6}


def main(options: Namespace) -> int:
    """Print the table, and further requested output."""
    try:
        with torch.device("meta"):
            model = _build_model(options.model)
        kind: Any = getattr(torch.optim, options.optimizer, None)
        if kind is None:
            raise ValueError(f"Expected the name of a class in torch.optim, got {options.optimizer!r}. [ZERO-905]")
        if options.dtype is not None:
            model = model.to(getattr(torch, options.dtype))
        found = estimate(model, kind, **{name: getattr(options, name) for name in _OF_ESTIMATE})
        memory = None if options.memory is None else _bytes(options.memory)
    except (TypeError, ValueError, ImportError, AttributeError, OSError) as error:
        print(f"ddp-zero estimate: error: {coded(str(error), '[ZERO-905]')}", file=sys.stderr)
        return 1
    print(found)
    if memory is not None:
        print(f"\nfewest ranks at which {options.memory} suffice:")
        for mode, ranks in found.fewest_ranks(memory).items():
            print(f"{mode}: {'none' if ranks is None else ranks}")
    return 0


def _build_model(name: str) -> nn.Module:
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"Expected MODULE:FUNCTION, got {name!r}. [ZERO-905]")
    sys.path.insert(0, "")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"Expected MODULE:FUNCTION that can be imported here, got {name!r}: {error}. Start the command in the "
            "module's folder, or set PYTHONPATH to that. [ZERO-905]"
        ) from error
    built = build()
    if not isinstance(built, nn.Module):
        raise TypeError(f"Expected {name} to return a module, got {type(built).__name__}. [ZERO-905]")
    return built


def _bytes(text: str) -> int:
    for unit, size in _UNITS.items():
        if text.endswith(unit) and text.removesuffix(unit).strip().replace(".", "", 1).isdigit():
            return int(float(text.removesuffix(unit)) * size)
    raise ValueError(
        f"Expected an amount of memory such as 80GiB, with one of the units {list(_UNITS)}, got {text!r}. [ZERO-905]"
    )
