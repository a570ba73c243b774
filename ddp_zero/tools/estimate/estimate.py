"""`ddp_zero.estimate`: memory per rank by part, for every mode side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_zero.core.local.inner import check_can_be_sharded, check_elementwise
from ddp_zero.core.local.parameters import LOW_PRECISION
from ddp_zero.core.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, bucket_mb
from ddp_zero.core.plan.partitions import partition_named
from ddp_zero.core.plan.shard_plan import ParameterSpec
from ddp_zero.options import Offload
from ddp_zero.tools.estimate.modes import largest_needs, modes_for
from ddp_zero.tools.estimate.parts import Mode, Needs, Sizes
from ddp_zero.tools.estimate.picture import draw
from ddp_zero.tools.estimate.shapes import StateBytes

_MIB = 1 << 20
_MOST_RANKS = 1 << 12
_SHARED = ("masters", "state", "sums in fp32", "state of a bucket, host")
"""Parts that shrink with the number of ranks, as do the gradients that stage 2 keeps."""


@dataclass(frozen=True)
class Estimate:
    """What the rank needs that needs most, in one mode.

    Attributes:
        mode: its name.
        ranks: number of ranks.
        device: bytes by part where the parameters are.
        host: bytes by part on the host, if state is offloaded from an accelerator; else empty.
        disk: bytes by part in files.
    """

    mode: str
    ranks: int
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes where the parameters are."""
        return sum(self.device.values())


class Estimates(Sequence[Estimate]):
    """Estimates of every mode. ``str`` of it is a table in Markdown, in MiB.

    Args:
        at: computes one, by mode and number of ranks.
        modes: the modes.
        ranks: number of ranks.
    """

    def __init__(self, at: Callable[[Mode, int], Needs], modes: Sequence[Mode], ranks: int) -> None:
        self._at = at
        self._modes = modes
        self.ranks = ranks
        self._found = [self._estimate(mode, ranks) for mode in modes]

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        """An estimate by its place, or by the name of its mode."""
        if isinstance(place, str):
            names = [one.mode for one in self._found]
            if place not in names:
                raise KeyError(f"Expected one of the modes {names}, got {place!r}.")
            return self._found[names.index(place)]
        return self._found[place]

    def fewest_ranks(self, memory: int) -> dict[str, int | None]:
        """The smallest number of ranks at which each mode fits, by its name; None if none does.

        Args:
            memory: bytes for what is estimated: leave room for activations, and for what PyTorch itself needs.
        """
        return {mode.name: self._fewest(mode, memory) for mode in self._modes}

    def plot(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Draw the parts of each mode, and with ``ranks`` how they shrink. Needs matplotlib (``ddp_zero[plot]``).

        Args:
            path: of the picture; its suffix decides the format.
            ranks: numbers of ranks for a second panel.
        """
        over = {n: [sum(self._at(mode, n).device.values()) for mode in self._modes] for n in ranks or ()}
        draw(path, [one.mode for one in self._found], [one.device for one in self._found], self.ranks, over)

    def __str__(self) -> str:
        parts = list(dict.fromkeys(part for one in self._found for part in one.device))
        hosts = list(dict.fromkeys(part for one in self._found for part in one.host))
        disks = any(one.disk for one in self._found)
        heads = [*parts, "total", *(f"{part} (host)" for part in hosts), *(["disk"] if disks else [])]
        rows = [f"| MiB per rank, {self.ranks} ranks | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
        for one in self._found:
            sizes = [
                *(one.device.get(part, 0) for part in parts),
                one.total,
                *(one.host.get(part, 0) for part in hosts),
            ]
            sizes += [sum(one.disk.values())] if disks else []
            rows.append(f"| {one.mode} | {' | '.join(_written(size) for size in sizes)} |")
        return "\n".join(rows)

    def _estimate(self, mode: Mode, ranks: int) -> Estimate:
        needs = self._at(mode, ranks)
        return Estimate(mode.name, ranks, needs.device, needs.host, needs.disk)

    def _fewest(self, mode: Mode, memory: int) -> int | None:
        fits = 1
        while (needs := self._at(mode, fits)).total > memory:
            shrinks = [*_SHARED, *(["gradients"] if mode.stage == 2 else [])]
            least = sum(nbytes for part, nbytes in needs.device.items() if part not in shrinks)
            if mode.stage == 0 or least > memory or fits >= _MOST_RANKS:
                return None
            fits *= 2
        return next(n for n in range(max(1, fits // 2), fits + 1) if self._at(mode, n).total <= memory)


def estimate(  # noqa: D417  # options that are those of the class are documented there
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
    wrapped: bool = False,
    gradient_as_bucket_view: bool = True,
    parameters_as_bucket_view: bool = True,
    **options: Any,
) -> Estimates:
    """How much memory a rank needs for parameters, gradients and state: by part, in every mode, of the rank with most.

    Nothing is allocated: the model may be on the meta device. Activations, and what PyTorch and the process need, are
    not part of it.

    Args:
        model: the model, not wrapped.
        optimizer_class: the class to shard.
        ranks: number of ranks that share the state.
        stage: 0, which is DDP with the unsharded optimizer, 1 or 2; None: all.
        partition: ``"parameters"`` or ``"elements"``; None: both, if the optimizer steps each element by itself.
        master_weights, offload: see `ZeroRedundancyOptimizer`; each mode is estimated with and without offload.
        device: where the model is to be trained; None: where it is, and an accelerator for one on the meta device.
        bucket_cap_mb: of `DistributedDataParallel`; None: 25, or the library's own choice if ``wrapped``.
        wrapped: whether `ddp_zero.wrap` builds the DDP model.
        gradient_as_bucket_view: of `DistributedDataParallel`.
        parameters_as_bucket_view: see `ZeroRedundancyOptimizer`.
        **options: for ``optimizer_class``.

    Raises:
        TypeError: for arguments of the wrong type, or options that the class does not accept.
        ValueError: for a stage, a partition or a number of ranks that there is not.
    """
    _check(model, ranks, stage)
    check_can_be_sharded(optimizer_class)
    params = list(model.parameters())
    states = StateBytes(optimizer_class, options)
    place_of = Offload.of(offload)
    sizes = _sizes(params, states, _place(params, device), master_weights)
    base = Mode("", 0, masters=master_weights, flat=parameters_as_bucket_view, views=gradient_as_bucket_view)
    to, buffers = (None, 3) if place_of is None else (place_of.to, place_of.buffers)
    modes = modes_for(stage, _partitions(partition, states), to, buffers, base)
    trained = [param.nbytes for param in params if param.requires_grad]

    def at(mode: Mode, ranks: int) -> Needs:
        """What the rank that needs most needs in a mode."""
        needs = largest_needs(mode, sizes, ranks, _caps(mode, trained, ranks, bucket_cap_mb, wrapped))
        buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
        return Needs(
            {**needs.device, **({"buffers of the model": buffer_bytes} if buffer_bytes else {})}, needs.host, needs.disk
        )

    return Estimates(at, modes, ranks)


def _caps(mode: Mode, trained: Sequence[int], ranks: int, given: float | None, wrapped: bool) -> list[int]:
    if given is not None:
        return [int(given * _MIB)]
    if wrapped:
        return [int(bucket_mb(trained, ranks, cuts=mode.partition == "elements") * _MIB)]
    return [FIRST_CAP_BYTES, CAP_BYTES]


def _check(model: object, ranks: object, stage: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a module, got {type(model).__name__}.")
    if type(ranks) is not int:
        raise TypeError(f"Expected ranks to be an int, got {ranks!r}.")
    if ranks < 1:
        raise ValueError(f"Expected at least 1 rank, got {ranks}.")
    if stage not in (None, 0, 1, 2):
        raise ValueError(f"Expected stage 0, 1, 2 or None, got {stage!r}.")


def _place(params: Sequence[nn.Parameter], device: str | torch.device | None) -> str:
    found = params[0].device if device is None and params else torch.device(device or "cpu")
    return "accelerator" if found.type == "meta" else found.type


def _spec(param: nn.Parameter, place: str) -> ParameterSpec:
    return ParameterSpec(
        param.numel(), param.numel() * param.element_size(), f"{place}/{param.dtype}", param.requires_grad
    )


def _sizes(params: Sequence[nn.Parameter], states: StateBytes, place: str, masters: bool) -> Sizes:
    return Sizes(
        specs=[_spec(param, place) for param in params],
        states=lambda index, part: states.of(params[index], _stepped_dtype(params[index], masters), part),
        is_low=[param.dtype in LOW_PRECISION for param in params],
        on_accelerator=place != "cpu",
    )


def _stepped_dtype(param: nn.Parameter, masters: bool) -> torch.dtype:
    return torch.float32 if masters and param.dtype in LOW_PRECISION else param.dtype


def _partitions(given: str | None, states: StateBytes) -> list[str]:
    if given is not None:
        return [partition_named(given).name]
    try:
        check_elementwise(states._inner)
    except TypeError:
        return ["parameters"]
    return ["parameters", "elements"]


def _written(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}" if nbytes else "0"
