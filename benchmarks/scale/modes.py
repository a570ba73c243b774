"""Models as sizes, plans of them at any number of ranks, and the modes with their schedules and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.race import models
from benchmarks.scale.schedule import (
    Job,
    Phases,
    Step,
    cut_step,
    ddp_step,
    fsdp_step,
    overlapped_step,
    standalone_step,
    torch_zero_step,
)
from benchmarks.scale.wire import Cut
from ddp_zero.core.comm.communicator import Transport
from ddp_zero.core.comm.reduction import recv_numel
from ddp_zero.core.plan.buckets import BufferBytes
from ddp_zero.core.plan.elements import cut_evenly
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import ParameterSpec, ShardPlan, whole_parameters
from ddp_zero.core.step.rank_shard import BUCKET_CAP_BYTES

MODELS = ("26m", "87m")  # of `models.MODELS`
MANY = "many"
MANY_SMALL = [4 * 32, 4 * 32 * 32] * 1000  # linear layers of width 32, each with its bias
FIRST_BUCKET_BYTES = 1 << 20  # DDP's default, as is 25 MiB for the others
ITEM_BYTES = 4  # of an element in fp32
STATE_FACTOR = 2  # AdamW keeps two moments of each element


@dataclass(frozen=True)
class Shape:
    """A model as plans see it.

    Attributes:
        name: name of the model.
        sizes: bytes of its tensors, the last first: about the order in which gradients are ready.
        layout: tensors of each of DDP's buckets.
        is_guessed: True if tensors are equally large only because nothing more is known.
    """

    name: str
    sizes: tuple[int, ...]
    layout: tuple[tuple[int, ...], ...]
    is_guessed: bool = False

    @property
    def largest_bucket(self) -> int:
        """In bytes."""
        return max(sum(self.sizes[tensor] for tensor in bucket) for bucket in self.layout)


def tensor_sizes(name: str) -> list[int]:
    """Bytes of a built-in model's tensors, the last first."""
    if name == MANY:
        return MANY_SMALL
    with torch.device("meta"):
        model = models.MODELS[name].build()
    return [param.nbytes for param in model.parameters()][::-1]


def built_in(name: str) -> Shape:
    """A model of `benchmarks.race`, or one of many small tensors, with DDP's default buckets."""
    sizes = tensor_sizes(name)
    return Shape(name, tuple(sizes), ddp_layout(sizes))


def ddp_layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """DDP's final buckets: each is closed by the tensor that fills it, the first at 1 MiB."""
    layout: list[tuple[int, ...]] = []
    members: list[int] = []
    for tensor in range(len(sizes)):
        members.append(tensor)
        cap = BUCKET_CAP_BYTES if layout else FIRST_BUCKET_BYTES
        if sum(sizes[member] for member in members) >= cap or tensor == len(sizes) - 1:
            layout.append(tuple(members))
            members = []
    return tuple(layout)


def measured_shape(name: str, tensors: int, bucket_bytes: Sequence[int]) -> Shape:
    """A model that was measured: its buckets are known, its tensors only if it is built in."""
    if name in (*MODELS, MANY):
        shape = built_in(name)
        found = [sum(shape.sizes[tensor] for tensor in bucket) for bucket in shape.layout]
        if found == list(bucket_bytes):
            return shape
        return Shape(name, shape.sizes, _cut_at(shape.sizes, bucket_bytes))
    each = max(1, round(tensors / len(bucket_bytes)))
    sizes = [nbytes // each + (part < nbytes % each) for nbytes in bucket_bytes for part in range(each)]
    layout = tuple(tuple(range(each * index, each * (index + 1))) for index in range(len(bucket_bytes)))
    return Shape(name, tuple(sizes), layout, is_guessed=True)


def _cut_at(sizes: Sequence[int], bucket_bytes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive tensors in buckets of about these bytes: a tensor goes where its middle lies."""
    members: list[list[int]] = [[] for _ in bucket_bytes]
    index, end, start = 0, bucket_bytes[0], 0
    for tensor, size in enumerate(sizes):
        while start + size / 2 > end and index < len(bucket_bytes) - 1:
            index += 1
            end += bucket_bytes[index]
        members[index].append(tensor)
        start += size
    return tuple(tuple(bucket) for bucket in members if bucket)


@dataclass(frozen=True)
class Shards:
    """The ranks' shards of a model, at one number of ranks; bytes of the rank that owns most.

    Attributes:
        overlapped, cut, standalone: of its parameters.
        buffers, cut_buffers: of stage 2's buffers, with Gloo, of whole parameters and of cut ones.
    """

    overlapped: int
    cut: int
    standalone: int
    buffers: int
    cut_buffers: int


def plan_job(shape: Shape, ranks: int, phases: Phases) -> tuple[Job, Shards]:
    """Plan the model as the library would."""
    specs = [ParameterSpec(size, size, "bytes") for size in shape.sizes]
    whole = partition_greedy(shape.sizes, ranks)
    partition, owned = WholeParameters(), whole_parameters(specs, whole, ranks)
    overlapped = partition.plan(partition.assign_by_bucket(owned, shape.layout), shape.layout, BUCKET_CAP_BYTES)
    standalone = partition.plan(owned, None, BUCKET_CAP_BYTES)
    cut = tuple(_cut_evenly([shape.sizes[tensor] for tensor in bucket], ranks) for bucket in shape.layout)
    job = Job(ranks, phases, _cuts(overlapped), cut, _cuts(standalone), Cut.of(_loads(standalone)))
    most_of_cut = int(torch.stack([bucket.segments for bucket in cut]).sum(0).max())
    buffers, cut_buffers = _buffers(job.overlapped), _buffers(cut)
    return job, Shards(max(_loads(overlapped)), most_of_cut, max(_loads(standalone)), buffers, cut_buffers)


def _buffers(cuts: Sequence[Cut]) -> int:
    """Bytes of stage 2's buffers, of the rank that owns most of these buckets."""
    most = GroupRank(int(torch.stack([bucket.segments for bucket in cuts]).sum(0).argmax()))
    cpu, transport = torch.device("cpu"), Transport(most, cuts[0].ranks, {"cpu": "gloo"})
    needs = []
    for bucket in cuts:
        sizes = [int(nbytes) // ITEM_BYTES for nbytes in bucket.segments.tolist()]
        received = recv_numel(transport, sizes, torch.float32, cpu)
        needs.append((ITEM_BYTES * sum(sizes), ITEM_BYTES * received))
    return BufferBytes.of(needs).total


def _cut_evenly(sizes: Sequence[int], ranks: int) -> Cut:
    """A bucket with ``partition="elements"``, of tensors in fp32."""
    segments = torch.zeros(ranks, dtype=torch.float64)
    for pieces in cut_evenly([size // ITEM_BYTES for size in sizes], ranks):
        for piece in pieces:
            segments[piece.owner] += ITEM_BYTES * (piece.stop - piece.start)
    return Cut(segments)


def _cuts(plan: ShardPlan) -> tuple[Cut, ...]:
    return tuple(Cut.of([segment.numel for segment in bucket.segments]) for bucket in plan.buckets)


def _loads(plan: ShardPlan) -> list[int]:
    loads = [0] * plan.world_size
    for spec, owner in zip(plan.specs, plan.owners, strict=True):
        loads[owner] += spec.nbytes
    return loads


@dataclass(frozen=True)
class Sizes:
    """Bytes that memory is made of, at one number of ranks: parameters, those a rank owns, the largest bucket."""

    ranks: int
    params: int
    shards: Shards
    bucket: int

    @property
    def even(self) -> float:
        """Parameters per rank if tensors could be cut anywhere."""
        return self.params / self.ranks


Memory = Callable[[Sizes], float]


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Attributes:
        step: its schedule.
        memory: bytes of parameters, state and gradients on the rank that needs most; activations come on top.
        formula: the same in words.
    """

    step: Step
    memory: Memory
    formula: str


def _stage_1(owned: Callable[[Shards], int]) -> Memory:
    return lambda sizes: 2 * sizes.params + STATE_FACTOR * owned(sizes.shards)


def _stage_2(keeps_shard: bool, cuts: bool = False) -> Memory:
    def memory(sizes: Sizes) -> float:
        shards = sizes.shards
        owned, buffers = (shards.cut, shards.cut_buffers) if cuts else (shards.overlapped, shards.buffers)
        return sizes.params + (STATE_FACTOR + keeps_shard) * owned + buffers

    return memory


STATE_ALL = "parameters + state of the owned + all gradients"
BUCKETS_ONLY = "parameters + state of the owned + buffers"
BUCKETS_AND_SHARD = f"{BUCKETS_ONLY} + gradients of the owned"
DDP = "DDP + fused AdamW"
ONE, TWO = "ddp_zero stage 1", "ddp_zero stage 2"


def _overlapped(stage: int, lag: int | None, syncs_in_forward: bool = False) -> Mode:
    step = partial(overlapped_step, stage=stage, lag=lag, syncs_in_forward=syncs_in_forward)
    if stage == 1:
        return Mode(step, _stage_1(lambda shards: shards.overlapped), STATE_ALL)
    return Mode(step, _stage_2(keeps_shard=lag is None), BUCKETS_ONLY if lag else BUCKETS_AND_SHARD)


def _elements(syncs_in_forward: bool) -> Mode:
    return Mode(partial(cut_step, syncs_in_forward=syncs_in_forward), _stage_2(False, cuts=True), BUCKETS_ONLY)


MODES: dict[str, Mode] = {
    DDP: Mode(ddp_step, lambda sizes: (2 + STATE_FACTOR) * sizes.params, "parameters + all state + all gradients"),
    "torch ZeroRedundancyOptimizer, bucket views": Mode(
        torch_zero_step, _stage_1(lambda shards: shards.standalone), STATE_ALL
    ),
    "FSDP2, no reshard after forward": Mode(
        fsdp_step,
        lambda sizes: sizes.params + (2 + STATE_FACTOR) * sizes.even + 2 * sizes.bucket,
        "parameters + even shards of parameters, state and gradients + 2 buckets",
    ),
    f"{ONE}, standalone": Mode(standalone_step, _stage_1(lambda shards: shards.standalone), STATE_ALL),
    f"{ONE}, overlapped": _overlapped(stage=1, lag=None),
    f"{ONE}, interleaved": _overlapped(stage=1, lag=1),
    f"{ONE}, interleaved, sync in forward": _overlapped(stage=1, lag=1, syncs_in_forward=True),
    f"{TWO}, interleaved": _overlapped(stage=2, lag=1),
    f"{TWO}, last bucket": _overlapped(stage=2, lag=None),
    f"{TWO}, after backward": _overlapped(stage=2, lag=None),
    f"{TWO}, sync in forward": _overlapped(stage=2, lag=1, syncs_in_forward=True),
    f"{TWO}, elements": _elements(syncs_in_forward=False),
    f"{TWO}, elements, sync in forward": _elements(syncs_in_forward=True),
}


def ideal(sizes: Sizes) -> float:
    """Stage 2 of state cut evenly by elements, and nothing kept of gradients: no partition of the state needs less."""
    return sizes.params + STATE_FACTOR * sizes.even + sizes.shards.cut_buffers
