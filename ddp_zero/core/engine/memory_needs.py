"""Estimates the memory of the rank that needs most, by part and mode, from sizes alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.backward.overlap_machine import INTERLEAVED_LAG, Regime, turns
from ddp_zero.core.comm.communicator import Transport
from ddp_zero.core.comm.parameter_sync import COPIES_IN_FLIGHT
from ddp_zero.core.comm.reduction import recv_numel, sum_dtype
from ddp_zero.core.local.arguments import Grouping, group_by_options
from ddp_zero.core.local.costs import Cost, check_cost, make_hints_of
from ddp_zero.core.local.inner import check_can_be_sharded, check_elementwise, state_like
from ddp_zero.core.local.mixed import CLASS_KEY, class_for, classes_in, read_classes
from ddp_zero.core.local.parameters import LOW_PRECISION, HintsOf, PartitionHints
from ddp_zero.core.local.placement import tensors_in
from ddp_zero.core.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, BufferBytes, ddp_layout
from ddp_zero.core.plan.ownership import part_between, piece_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import partition_named
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, ShardPlan
from ddp_zero.core.plan.weighted import WeightedParameters
from ddp_zero.core.step.clipping import GROUP_LIMIT
from ddp_zero.options import Offload
from ddp_zero.values.shapes import shape_of

_MIB = 1 << 20


@dataclass(frozen=True)
class Mode:
    """A training mode to estimate."""

    name: str  # name for people
    stage: int  # 0 for DDP with the unsharded optimizer, 1 or 2
    waits: bool = False  # True if the step needs all gradients
    steps_buckets: bool = True  # True if the plan follows DDP's buckets
    partition: str = "parameters"  # partition of the parameters
    offload: str | None = None  # None or "cpu"


class StateBytes:
    """Finds the sizes of an optimizer class's state tensors by a step on meta tensors; TypeError for wrong options."""

    def __init__(self, optimizer_class: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        plain = {key: False if key in ("fused", "foreach") else value for key, value in options.items()}
        self.optimizer = optimizer_class([nn.Parameter(torch.empty(1, 1, device="meta"))], **plain)
        self._known: dict[Any, tuple[int, ...]] = {}  # cache, by shape and dtype

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of each state tensor of a parameter with this shape and dtype."""
        if (shape, dtype) not in self._known:
            stepped = torch.empty(shape, dtype=dtype, device="meta")
            state = state_like(self.optimizer, self.optimizer.param_groups[0], stepped)
            self._known[shape, dtype] = tuple(tensor.nbytes for tensor in tensors_in(state))
        return self._known[shape, dtype]


class GroupedStates:
    """The sizes of state tensors and the partition hints of all of a model's parameters, by group and class.

    ``options`` are for the default class, of groups that name no class.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        options: dict[str, Any],
    ) -> None:
        self._params = params
        self._groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._class = optimizer_class
        members = [[item[1] if isinstance(item, tuple) else item for item in group["params"]] for group in groups]
        of_param = {id(param): place for place, held in enumerate(members) for param in held}
        self._group_of = [of_param.get(id(param)) for param in params]
        default = classes_in(optimizer_class)[0]
        self._bytes = []
        for group in self._groups:
            kind: Any = class_for(optimizer_class, group)
            own = {key: value for key, value in group.items() if key not in (CLASS_KEY, GROUP_LIMIT)}
            self._bytes.append(StateBytes(kind, {**(options if kind is default else {}), **own}))
        self.any_elementwise = any(_is_elementwise(sizes.optimizer) for sizes in self._bytes)

    def has(self, index: int) -> bool:
        return self._group_of[index] is not None

    def of(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of each state tensor of a parameter, or of a part of it with this shape."""
        group = self._group_of[index]
        return () if group is None else self._bytes[group].of(shape, dtype)

    def hints(self, hints_of: HintsOf | None) -> list[PartitionHints]:
        """The hints for every parameter in the partition by cost; all the same without costs."""
        places = zip(self._params, self._group_of, strict=True)
        return [
            PartitionHints() if hints_of is None or group is None else hints_of(param, self._groups[group])
            for param, group in places
        ]


def _is_elementwise(optimizer: Optimizer) -> bool:
    with suppress(TypeError):
        check_elementwise(optimizer)
        return True
    return False


class _Part(NamedTuple):
    """The elements of a parameter that a rank steps."""

    param: int
    numel: int
    shape: tuple[int, ...]


class Training:
    """The sizes of a model and its optimizer in training. Takes and raises the same as `ddp_zero.estimate`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        options: dict[str, Any],
        *,
        params: Grouping | Sequence[Mapping[str, Any]] | None,
        device: str | torch.device | None,
        cost: Cost,
        max_byte_imbalance: float,
        offload: Offload | str | None,
        masters: bool,
        flat: bool,
        views: bool,
        bucket_cap_mb: float | None,
    ) -> None:
        check_cost(cost, max_byte_imbalance)
        found = group_by_options(model.named_parameters(), params) if callable(params) else params
        groups, optimizer_class = read_classes(found or [{"params": list(model.parameters())}], optimizer_class)
        for kind in classes_in(optimizer_class):
            check_can_be_sharded(kind)
        self.params = list[Tensor](model.parameters())
        self.states = states = GroupedStates(self.params, groups, optimizer_class, options)
        self.device = self.params[0].device if device is None and self.params else torch.device(device or "cpu")
        hints_of = make_hints_of(optimizer_class, options, cost)
        self.offload = Offload.of(offload)
        self.specs = [
            ParameterSpec(
                numel=one.numel(),
                nbytes=one.nbytes,
                kind=f"{self.device.type}/{one.dtype}",
                active=one.requires_grad and states.has(index),
                cost=weight.cost,
                may_be_cut=weight.may_be_cut,
            )
            for index, (one, weight) in enumerate(zip(self.params, states.hints(hints_of), strict=True))
        ]
        self.is_weighted = hints_of is not None
        self.max_byte_imbalance = max_byte_imbalance
        self._dtypes = {spec.kind: one.dtype for spec, one in zip(self.specs, self.params, strict=True)}
        self.model_buffers = sum(buffer.nbytes for buffer in model.buffers())
        self.masters, self.flat, self.views = masters, flat, views
        self.bucket_cap_mb = bucket_cap_mb

    def needs(self, mode: Mode, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part on the device and on the host, of the rank that needs most."""
        plan = None if mode.stage == 0 else self._plan(mode, ranks)
        device, host = _RankMemory(
            self, mode, plan, GroupRank(0) if plan is None else self._owner_of_most(plan)
        ).needs()
        if self.model_buffers:
            device["buffers of the model"] = self.model_buffers
        return device, host

    def partitions(self, asked: str | None) -> list[str]:
        """The partition of this name, or all that the optimizer can have; ValueError for an unknown name."""
        if asked is not None:
            return [partition_named(asked).name]
        return ["parameters", "elements"] if self.states.any_elementwise else ["parameters"]

    def _plan(self, mode: Mode, ranks: int) -> ShardPlan:
        is_native = ranks > 1 and self.transport(GroupRank(0), ranks).has_native_collectives(self.device)
        specs = self.specs
        partition = partition_named(mode.partition, is_native)
        if self.is_weighted:
            partition = WeightedParameters.like(partition, self.max_byte_imbalance, is_native)
        owned = partition.assign(specs, ranks, CAP_BYTES)
        if not mode.steps_buckets:
            return partition.plan(owned, None, CAP_BYTES)
        reduced = [index for index, spec in enumerate(specs) if spec.active]
        trained = [specs[index].nbytes for index in reduced]
        kinds = [specs[index].kind for index in reduced]
        caps = [FIRST_CAP_BYTES, CAP_BYTES]
        if self.bucket_cap_mb is not None:
            caps = [int(self.bucket_cap_mb * _MIB)]
        layout = [[reduced[place] for place in bucket] for bucket in ddp_layout(trained, kinds, caps)]
        return partition.plan(partition.assign_by_bucket(owned, layout), layout, CAP_BYTES)

    def transport(self, rank: GroupRank, ranks: int) -> Transport:
        """Gloo between CPUs, NCCL between accelerators."""
        return Transport(rank, ranks, {self.device.type: "nccl", "cpu": "gloo"})

    def _owner_of_most(self, plan: ShardPlan) -> GroupRank:
        """The rank with most state and masters; of several the rank with most parameters or largest part of a bucket.

        Bytes of parameters do not tell: one in bf16 with a master has more state than one in fp32 of as many bytes.
        """
        kept, owned, largest = ([0] * plan.world_size for _ in range(3))
        for index, (spec, pieces) in enumerate(zip(plan.specs, plan.pieces, strict=True)):
            whole = self.part(index, 0, spec.numel)
            nbytes = sum(self.masters_of([whole])) + (sum(self.state_of(whole)) if spec.active else 0)
            for piece in pieces if spec.numel else ():
                kept[piece.owner] += (piece.stop - piece.start) * nbytes // spec.numel
                owned[piece.owner] += (piece.stop - piece.start) * spec.nbytes // spec.numel if spec.active else 0
        for bucket in plan.buckets:
            for segment in bucket.segments:
                largest[segment.owner] = max(largest[segment.owner], segment.numel)
        ranks = map(GroupRank, range(plan.world_size))
        return max(ranks, key=lambda rank: (kept[rank], owned[rank], largest[rank]))

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        return self._dtypes[bucket.kind]

    def has_master(self, index: int) -> bool:
        return self.masters and self.params[index].dtype in LOW_PRECISION

    def itemsize(self, index: int) -> int:
        return self.params[index].element_size()

    def part(self, index: int, start: int, stop: int) -> _Part:
        shape = self.params[index].shape
        return _Part(index, stop - start, shape_of(shape, part_between(start, stop, shape.numel())))

    def state_of(self, part: _Part) -> tuple[int, ...]:
        dtype = torch.float32 if self.has_master(part.param) else self.params[part.param].dtype
        return self.states.of(part.param, part.shape, dtype)

    def masters_of(self, parts: Sequence[_Part]) -> list[int]:
        return [4 * part.numel for part in parts if self.has_master(part.param)]


# The memory of a rank


class _RankMemory:
    """Estimates the memory of one rank in one mode; ``plan`` is None without sharding."""

    def __init__(self, training: Training, mode: Mode, plan: ShardPlan | None, rank: GroupRank) -> None:
        self._training, self._mode, self._plan, self._rank = training, mode, plan, rank
        buckets = () if plan is None else plan.buckets
        self._buckets = [bucket for bucket in buckets if any(segment.params for segment in bucket.segments)]

    def needs(self) -> tuple[dict[str, int], dict[str, int]]:
        training, mode, offload = self._training, self._mode, self._training.offload
        owned = self._parts_owned()
        states = [nbytes for part in owned for nbytes in training.state_of(part)]
        masters = training.masters_of(owned if self._plan is None else self._parts_owned(frozen_too=True))
        device = {
            "parameters": sum(spec.nbytes for spec in training.specs),
            "masters": sum(masters),
            "state": sum(states),
        }
        host: dict[str, int] = {}
        if mode.offload and offload and training.device.type != "cpu" and self._plan is not None:
            copies = [training.itemsize(index) * n for index, n, _ in owned if not training.has_master(index)]
            device |= {"masters": 0, "state": 0}
            host |= {"masters": sum(masters), "copies": sum(copies), "state": sum(states)}
            host["pinned"] = offload.buffers * max(map(self._traffic, self._buckets), default=0)
        device |= self._gradients(owned)
        device["gradient under way"] = max((spec.nbytes for spec in training.specs if spec.active), default=0)
        device["sync"] = self._copies_in_syncs()
        return {part: nbytes for part, nbytes in device.items() if nbytes}, host

    def _gradients(self, owned: Sequence[_Part]) -> dict[str, int]:
        training, mode = self._training, self._mode
        whole = sum(spec.nbytes for spec in training.specs if spec.active)
        if mode.stage < 2:
            return {"gradients": whole, "buckets": 0 if training.views else whole}
        shown = sum(training.itemsize(index) * numel for index, numel, _ in owned) if mode.waits else 0
        return {"gradients": shown, "sums in fp32": self._wide_sums(), "buckets": self._buffers()}

    def _wide_sums(self) -> int:
        """Peak bytes of sums in another dtype than the gradients; each is freed when its bucket is stepped."""
        sizes, held, most = list[int](), 0, 0
        regime = Regime.REDUCE_ONLY if self._mode.waits else Regime.OVERLAPPED
        for bucket, due in zip(self._buckets, turns(regime, INTERLEAVED_LAG, len(self._buckets)), strict=True):
            dtype = self._training.dtype_of(bucket)
            wide = sum_dtype(dtype)
            sizes.append(0 if wide == dtype else bucket.segments[self._rank].numel * wide.itemsize)
            held += sizes[-1]
            most = max(most, held)
            held -= sum(sizes[place] for place in due)
        return most

    def _buffers(self) -> int:
        """Bytes of the buffers into which buckets are filled, reduced and received."""
        training, needs = self._training, list[tuple[int, int]]()
        for bucket in self._buckets:
            sizes = bucket.sizes
            dtype = training.dtype_of(bucket)
            received = recv_numel(training.transport(self._rank, len(sizes)), sizes, dtype, training.device)
            needs.append((self._bytes_of(bucket), received * dtype.itemsize))
        return BufferBytes.of(needs).total

    def _copies_in_syncs(self) -> int:
        """Bytes of parameter copies in syncs: packed segments of the buckets in flight, and padded receive buffers."""
        training, copies = self._training, list[int]()
        for bucket in self._buckets:
            sizes = [numel * training.dtype_of(bucket).itemsize for numel in bucket.sizes]
            transport = training.transport(self._rank, len(sizes))
            padded = 0 if bucket.is_even else transport.padded_all_gather_nbytes(training.device, sizes)
            copies.append(padded if training.flat else padded + sum(sizes))
        return sum(sorted(copies)[-COPIES_IN_FLIGHT:])

    def _parts_owned(self, *, frozen_too: bool = False) -> list[_Part]:
        specs = self._training.specs
        counts = [index for index, spec in enumerate(specs) if spec.active or frozen_too]
        if self._plan is None:
            return [self._training.part(index, 0, specs[index].numel) for index in counts]
        mine = [(index, piece_of(self._plan.pieces[index], GroupRank(self._rank))) for index in counts]
        return [self._training.part(index, piece.start, piece.stop) for index, piece in mine if piece is not None]

    def _bytes_of(self, bucket: Bucket) -> int:
        return sum(bucket.sizes) * self._training.dtype_of(bucket).itemsize

    def _traffic(self, bucket: Bucket) -> int:
        """Bytes of this rank's gradients in a bucket, and of its parameters without a master."""
        training = self._training
        segment = bucket.segments[self._rank]
        total = 0
        for index, (start, stop) in zip(segment.params, segment.ranges, strict=True):
            numel = stop - start
            itemsize = training.itemsize(index)
            if training.has_master(index):
                total += numel * (4 if self._mode.stage == 2 else itemsize)  # stage 2 sums low precision in fp32
            else:
                total += numel * 2 * itemsize
        return total
