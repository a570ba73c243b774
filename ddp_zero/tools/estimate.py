"""Memory that a rank will need, by part, for all modes side by side, before any allocation.

`estimate` is `ddp_zero.estimate`; ``ddp-zero estimate MODULE:FUNCTION`` prints its result.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.backward import SideStream, pools_for
from ddp_zero.core.comm import RING_BYTES, RING_RANKS, receive_window, ring_recv_numel
from ddp_zero.core.local import (
    CLASS_KEY,
    LOW_PRECISION,
    Cost,
    Grouping,
    Weigh,
    Weight,
    check_can_be_sharded,
    check_cost,
    check_elementwise,
    class_for,
    classes_in,
    group_by_options,
    read_classes,
    state_like,
    weigher,
)
from ddp_zero.core.offload import tensors_in
from ddp_zero.core.plan import (
    CAP_BYTES,
    FIRST_CAP_BYTES,
    MAX_BYTE_IMBALANCE,
    Bucket,
    GroupRank,
    ParameterSpec,
    Segment,
    ShardPlan,
    WeightedParameters,
    bucket_mb,
    ddp_layout,
    is_cut,
    padded_size,
    partition_named,
    piece_of,
)
from ddp_zero.core.step import OWN_LIMIT
from ddp_zero.options import Offload

PACKED_IN_FLIGHT = 2
"""Number of buckets whose copies a sync without flat storage holds at once."""
SUMS_IN_FLIGHT = 2
"""Number of buckets whose fp32 sums exist at once if a step follows each reduction."""

_MIB, _GIB = 1 << 20, 1 << 30
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
_SHARED = ("masters", "state", "sums in fp32")
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


@dataclass(frozen=True)
class Mode:
    """A way to train."""

    name: str  # name for people
    stage: int  # 0 for DDP with the unsharded optimizer, 1 or 2
    waits: bool = False  # True if the step needs all gradients
    steps_buckets: bool = True  # True if the plan follows DDP's buckets
    partition: str = "parameters"  # partition of the parameters
    offload: str | None = None  # None or "cpu"


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

    def plot(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Draw the parts of each mode, and with ``ranks`` the totals by rank count. Needs ``ddp_zero[plot]``.

        Args:
            path: path of the picture; its suffix determines the format.
            ranks: numbers of ranks for a second panel.

        Raises:
            ModuleNotFoundError: without matplotlib.
        """
        try:
            import matplotlib.figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("A plot needs matplotlib. Install ddp_zero[plot]. [ZERO-909]") from error
        panels = 2 if ranks else 1
        size = (7.2 * panels, 1.6 + 0.42 * len(self))
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        self._draw_parts(axes[0])
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=8, frameon=False
        )
        if ranks:
            self._draw_totals(axes[1], ranks)
        figure.savefig(path, dpi=110)

    def _draw_parts(self, axis: Any) -> None:
        left = [0.0] * len(self)
        for number, part in enumerate(dict.fromkeys(part for one in self._found for part in one.device)):
            widths = [one.device.get(part, 0) / _GIB for one in self._found]
            axis.barh(range(len(self)), widths, left=left, label=part, color=f"C{number}")
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axis.text(total, place, f" {total:.1f}", va="center", fontsize=8)
        axis.set_yticks(range(len(self)), [one.mode for one in self._found])
        axis.invert_yaxis()
        axis.set_xlim(0, 1.12 * max(left))
        axis.set_xlabel(f"GiB on the rank that needs most, {self.ranks} ranks")

    def _draw_totals(self, axis: Any, ranks: Sequence[int]) -> None:
        for mode in self._modes:
            axis.plot(ranks, [self._at(mode, n).total / _GIB for n in ranks], marker=".", label=mode.name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, list(map(str, ranks)))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("ranks")
        axis.set_ylabel("GiB")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)


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
    wrapped: bool = False,
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
        bucket_cap_mb: as for `DistributedDataParallel`; None for 25, or the library's own choice if ``wrapped`` and in
            stage 2.
        wrapped: True if `ddp_zero.wrap` builds the DDP model; on an accelerator with native collectives.
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
    check_cost(cost, max_byte_imbalance)
    found = group_by_options(model.named_parameters(), params) if callable(params) else params
    groups, optimizer_class = read_classes(found or [{"params": list(model.parameters())}], optimizer_class)
    for kind in classes_in(optimizer_class):
        check_can_be_sharded(kind)
    trained = list(model.parameters())
    states = GroupedStates(trained, groups, optimizer_class, options)
    where = trained[0].device if device is None and trained else torch.device(device or "cpu")
    place = "accelerator" if where.type == "meta" else where.type
    weigh = weigher(optimizer_class, options, cost)
    offloaded = Offload.of(offload)
    training = _Training(
        params=trained,
        specs=[
            ParameterSpec(
                numel=one.numel(),
                nbytes=one.nbytes,
                kind=f"{place}/{one.dtype}",
                active=one.requires_grad and states.has(index),
                cost=weight.cost,
                may_be_cut=weight.may_be_cut,
            )
            for index, (one, weight) in enumerate(zip(trained, states.weights(weigh), strict=True))
        ],
        states=states,
        is_weighted=weigh is not None,
        max_byte_imbalance=max_byte_imbalance,
        on_accelerator=place != "cpu",
        model_buffers=sum(buffer.nbytes for buffer in model.buffers()),
        masters=master_weights,
        flat=parameters_as_bucket_view,
        views=gradient_as_bucket_view,
        pinned_buffers=0 if offloaded is None else offloaded.buffers,
        bucket_cap_mb=bucket_cap_mb,
        wrapped=wrapped,
    )
    partitions = ["parameters", "elements"] if states.any_elementwise else ["parameters"]
    if partition is not None:
        partitions = [partition_named(partition).name]
    return Estimates(training.at, _modes(stage, partitions, None if offloaded is None else offloaded.to), ranks)


def _check(model: object, ranks: object, stage: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a module, got {type(model).__name__}. [ZERO-905]")
    if type(ranks) is not int:
        raise TypeError(f"Expected ranks to be an int, got {ranks!r}. [ZERO-905]")
    if ranks < 1:
        raise ValueError(f"Expected at least 1 rank, got {ranks}. [ZERO-905]")
    if stage not in (None, 0, 1, 2):
        raise ValueError(f"Expected stage 0, 1, 2 or None, got {stage!r}. [ZERO-905]")


def _modes(stage: int | None, partitions: Sequence[str], offload: str | None) -> list[Mode]:
    """The modes of a stage, or of all; without offload, then with it if requested."""
    found = []
    for mode in _MODES:
        if stage is not None and mode.stage != stage:
            continue
        for partition in partitions if mode.stage else ("parameters",):
            for place in dict.fromkeys((None, offload)) if mode.stage else (None,):
                cut = ", cut" if partition == "elements" else ""
                name = mode.name + cut + (f", offload {place}" if place else "")
                found.append(replace(mode, name=name, partition=partition, offload=place))
    return sorted(found, key=lambda mode: mode.offload is not None)


# The model and its optimizer


class StateBytes:
    """Sizes of an optimizer class's state tensors, found by a step of meta tensors; TypeError for wrong options."""

    def __init__(self, optimizer_class: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        plain = {key: False if key in ("fused", "foreach") else value for key, value in options.items()}
        self.optimizer = optimizer_class([nn.Parameter(torch.empty(1, 1, device="meta"))], **plain)
        self._known: dict[Any, tuple[int, ...]] = {}  # each shape is stepped once

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of each state tensor of a parameter with this shape and dtype."""
        if (shape, dtype) not in self._known:
            stepped = torch.empty(shape, dtype=dtype, device="meta")
            state = state_like(self.optimizer, self.optimizer.param_groups[0], stepped)
            self._known[shape, dtype] = tuple(tensor.nbytes for tensor in tensors_in(state))
        return self._known[shape, dtype]


class GroupedStates:
    """State tensors and weights of all of a model's parameters, whose groups may be of several classes.

    ``options`` belong to the class of groups without one of their own.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        options: dict[str, Any],
    ) -> None:
        self._params = params
        self._groups = [{key: value for key, value in one.items() if key != "params"} for one in groups]
        self._class = optimizer_class
        members = [[one[1] if isinstance(one, tuple) else one for one in group["params"]] for group in groups]
        of_param = {id(one): place for place, held in enumerate(members) for one in held}
        self._group_of = [of_param.get(id(param)) for param in params]
        default = classes_in(optimizer_class)[0]
        self._bytes = []
        for group in self._groups:
            kind: Any = class_for(optimizer_class, group)
            own = {key: value for key, value in group.items() if key not in (CLASS_KEY, OWN_LIMIT)}
            self._bytes.append(StateBytes(kind, {**(options if kind is default else {}), **own}))
        self.any_elementwise = any(_is_elementwise(one.optimizer) for one in self._bytes)

    def has(self, index: int) -> bool:
        return self._group_of[index] is not None

    def of(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of each state tensor of a parameter, or of a part of it with this shape."""
        group = self._group_of[index]
        return () if group is None else self._bytes[group].of(shape, dtype)

    def weights(self, weigh: Weigh | None) -> list[Weight]:
        """The weight of every parameter in the partition by cost; all the same without one."""
        places = zip(self._params, self._group_of, strict=True)
        return [
            Weight() if weigh is None or group is None else weigh(param, self._groups[group]) for param, group in places
        ]


def _is_elementwise(optimizer: Optimizer) -> bool:
    with suppress(TypeError):
        check_elementwise(optimizer)
        return True
    return False


class _Part(NamedTuple):
    """Elements of a parameter; all of them, in its shape, unless it is cut."""

    param: int
    numel: int
    is_cut: bool


@dataclass(frozen=True)
class _Training:
    params: Sequence[Tensor]
    specs: Sequence[ParameterSpec]
    states: GroupedStates
    is_weighted: bool
    max_byte_imbalance: float
    on_accelerator: bool
    model_buffers: int
    masters: bool
    flat: bool
    views: bool
    pinned_buffers: int
    bucket_cap_mb: float | None
    wrapped: bool

    def at(self, mode: Mode, ranks: int) -> Estimate:
        plan = None if mode.stage == 0 else self._plan(mode, ranks)
        device, host = _Rank(self, mode, plan, 0 if plan is None else self._owner_of_most(plan)).needs()
        if self.model_buffers:
            device["buffers of the model"] = self.model_buffers
        return Estimate(mode.name, ranks, device, host)

    def _plan(self, mode: Mode, ranks: int) -> ShardPlan:
        specs, cuts = self.specs, mode.partition == "elements"
        by_cost = WeightedParameters(self.max_byte_imbalance, cuts=cuts)
        partition = by_cost if self.is_weighted else partition_named(mode.partition)
        owned = partition.assign(specs, ranks, CAP_BYTES)
        if not mode.steps_buckets:
            return partition.plan(owned, None, CAP_BYTES)
        reduced = [index for index, spec in enumerate(specs) if spec.active]
        trained, kinds = [specs[index].nbytes for index in reduced], [specs[index].kind for index in reduced]
        caps = [FIRST_CAP_BYTES, CAP_BYTES]
        if self.bucket_cap_mb is not None:
            caps = [int(self.bucket_cap_mb * _MIB)]
        elif self.wrapped or mode.stage == 2:
            whole = [spec.nbytes for spec in specs if spec.active and not (cuts and spec.may_be_cut)]
            cap = bucket_mb(trained, ranks, is_native=self.on_accelerator, largest_whole=max(whole, default=0))
            caps = [int(cap * _MIB)]
        layout = [[reduced[place] for place in bucket] for bucket in ddp_layout(trained, kinds, caps)]
        return partition.plan(partition.assign_by_bucket(owned, layout), layout, CAP_BYTES)

    def _owner_of_most(self, plan: ShardPlan) -> int:
        """The rank with most state and masters; of several the one with most parameters or largest part of a bucket.

        Bytes of parameters do not tell: one in bf16 with a master has more state than one in fp32 of as many bytes.
        """
        kept, owned, largest = ([0] * plan.world_size for _ in range(3))
        for index, (spec, pieces) in enumerate(zip(plan.specs, plan.pieces, strict=True)):
            whole = _Part(index, spec.numel, is_cut=False)
            nbytes = sum(self.masters_of([whole])) + (sum(self.state_of(whole)) if spec.active else 0)
            for piece in pieces if spec.numel else ():
                kept[piece.owner] += (piece.stop - piece.start) * nbytes // spec.numel
                owned[piece.owner] += (piece.stop - piece.start) * spec.nbytes // spec.numel if spec.active else 0
        for bucket in plan.buckets:
            for segment in bucket.segments:
                largest[segment.owner] = max(largest[segment.owner], segment.numel)
        return max(range(plan.world_size), key=lambda rank: (kept[rank], owned[rank], largest[rank]))

    def is_low(self, index: int) -> bool:
        return self.params[index].dtype in LOW_PRECISION

    def has_master(self, index: int) -> bool:
        return self.masters and self.is_low(index)

    def itemsize(self, index: int) -> int:
        return self.params[index].element_size()

    def state_of(self, part: _Part) -> tuple[int, ...]:
        param = self.params[part.param]
        dtype = torch.float32 if self.has_master(part.param) else param.dtype
        return self.states.of(part.param, (part.numel,) if part.is_cut else tuple(param.shape), dtype)

    def masters_of(self, parts: Sequence[_Part]) -> list[int]:
        return [4 * part.numel for part in parts if self.has_master(part.param)]


# The memory of a rank


class _Rank:
    """The memory of one rank in one mode; ``plan`` is None without sharding."""

    def __init__(self, training: _Training, mode: Mode, plan: ShardPlan | None, rank: int) -> None:
        self._training, self._mode, self._plan, self._rank = training, mode, plan, rank
        buckets = () if plan is None else plan.buckets
        self._segments = [self._parts_of(bucket.segments[rank]) for bucket in buckets] or [[]]

    def needs(self) -> tuple[dict[str, int], dict[str, int]]:
        training, mode = self._training, self._mode
        owned = self._parts_owned()
        states = [nbytes for part in owned for nbytes in training.state_of(part)]
        masters = training.masters_of(owned if self._plan is None else self._parts_owned(frozen_too=True))
        device = {
            "parameters": sum(spec.nbytes for spec in training.specs),
            "masters": sum(masters),
            "state": sum(states),
        }
        host: dict[str, int] = {}
        if mode.offload is not None and training.on_accelerator and self._plan is not None:
            copies = [training.itemsize(index) * n for index, n, _ in owned if not training.has_master(index)]
            device |= {"masters": 0, "state": 0}
            host |= {"masters": sum(masters), "copies": sum(copies), "state": sum(states)}
            host["pinned"] = training.pinned_buffers * max(self._traffic(parts) for parts in self._segments)
        device |= self._gradients(owned)
        device["gradient under way"] = max((spec.nbytes for spec in training.specs if spec.active), default=0)
        if self._plan is not None and not training.flat:
            device["sync"] = sum(sorted(map(self._bytes_of, self._plan.buckets))[-PACKED_IN_FLIGHT:])
        return {part: nbytes for part, nbytes in device.items() if nbytes}, host

    def _gradients(self, owned: Sequence[_Part]) -> dict[str, int]:
        training, mode, plan = self._training, self._mode, self._plan
        whole = sum(spec.nbytes for spec in training.specs if spec.active)
        if mode.stage < 2 or plan is None:
            return {"gradients": whole, "buckets": 0 if training.views else whole}
        shown = sum(training.itemsize(index) * numel for index, numel, _ in owned) if mode.waits else 0
        sums = [sum(4 * numel for index, numel, _ in parts if training.is_low(index)) for parts in self._segments]
        in_fp32 = sum(sums if mode.waits else sorted(sums)[-SUMS_IN_FLIGHT:])
        filled = [bucket for bucket in plan.buckets if any(segment.params for segment in bucket.segments)]
        firsts = [next(one.params[0] for one in bucket.segments if one.params) for bucket in filled]
        buckets = [
            _BucketSizes([one.numel for one in bucket.segments], training.itemsize(first), training.is_low(first))
            for bucket, first in zip(filled, firsts, strict=True)
        ]
        shared = buffer_bytes(buckets, self._rank, training.on_accelerator)
        return {"gradients": shown, "sums in fp32": in_fp32, "buckets": shared}

    def _parts_owned(self, *, frozen_too: bool = False) -> list[_Part]:
        specs = self._training.specs
        counts = [index for index, spec in enumerate(specs) if spec.active or frozen_too]
        if self._plan is None:
            return [_Part(index, specs[index].numel, is_cut=False) for index in counts]
        pieces = [(index, self._plan.pieces[index]) for index in counts]
        mine = [(index, piece_of(of_all, GroupRank(self._rank)), is_cut(of_all)) for index, of_all in pieces]
        return [_Part(index, piece.stop - piece.start, cut) for index, piece, cut in mine if piece is not None]

    def _parts_of(self, segment: Segment) -> list[_Part]:
        assert self._plan is not None, "segments are those of a plan"
        ranges = zip(segment.params, segment.ranges, strict=True)
        return [_Part(index, stop - start, is_cut(self._plan.pieces[index])) for index, (start, stop) in ranges]

    def _bytes_of(self, bucket: Bucket) -> int:
        parts = [part for segment in bucket.segments for part in self._parts_of(segment)]
        return sum(part.numel * self._training.itemsize(part.param) for part in parts)

    def _traffic(self, parts: Sequence[_Part]) -> int:
        """Bytes of a segment's gradients, and of its parameters without a master."""
        training, total = self._training, 0
        for index, numel, _ in parts:
            itemsize = training.itemsize(index)
            if training.has_master(index):
                total += numel * (4 if self._mode.stage == 2 else itemsize)  # stage 2 sums low precision in fp32
            else:
                total += numel * 2 * itemsize
        return total


# Buffers that the buckets of stage 2 share

_META = torch.device("meta")


@dataclass(frozen=True)
class _BucketSizes:
    """One bucket of stage 2: elements that each rank owns, and bytes per element; fp32 sums if of low precision."""

    slices: Sequence[int]
    itemsize: int
    is_low: bool

    @property
    def nbytes(self) -> int:
        return sum(self.slices) * self.itemsize

    def received_bytes(self, rank: int, on_accelerator: bool) -> int:
        world_size = len(self.slices)
        if world_size == 1:
            return 0
        if on_accelerator:
            padded = padded_size(self.slices)
            return 0 if padded is None else self.itemsize * padded * (world_size + 1)
        if world_size >= RING_RANKS and self.nbytes >= RING_BYTES and not self.is_low:
            return ring_recv_numel(self.slices, self.itemsize) * self.itemsize
        window = receive_window(self.slices[rank], world_size, sum(self.slices))
        return window * (world_size - 1) * self.itemsize


def buffer_bytes(buckets: Sequence[_BucketSizes], rank: int, on_accelerator: bool) -> int:
    """Bytes that a rank needs to fill, reduce and receive buckets, from the second iteration on.

    Found by lending buffers as an iteration does, in the order of reduction; NCCL reduces on an accelerator, else Gloo.
    """
    scratches, recv_buffers = pools_for([bucket.nbytes for bucket in buckets], SideStream())
    received = [bucket.received_bytes(rank, on_accelerator) for bucket in buckets]
    for _ in range(2):  # the second iteration finds the free buffers of the first, and may need another
        reduced: Tensor | None = None
        for bucket, nbytes in zip(buckets, received, strict=True):
            filled = scratches.lend(bucket.nbytes, _META)  # while the one before is being reduced
            if reduced is not None:
                scratches.give_back(reduced)
            reduced = filled
            if nbytes:
                recv_buffers.give_back(recv_buffers.lend(nbytes, _META))
        if reduced is not None:
            scratches.give_back(reduced)
    return scratches.statistics.most_bytes + recv_buffers.statistics.most_bytes


# The command

_OF_ESTIMATE = "ranks stage partition master_weights offload device bucket_cap_mb wrapped".split()
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
        if options.plot is not None:
            found.plot(options.plot, [2**power for power in range(8)])
    except (TypeError, ValueError, ImportError, AttributeError, OSError) as error:
        print(f"ddp-zero estimate: error: {error}", file=sys.stderr)
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
    built = getattr(importlib.import_module(module), function)()
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
