"""Every mode on the simulated accelerator, beside DDP with the plain optimizer on the same device."""

import contextlib
import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import ZeroRedundancyOptimizer, estimate, shard_optimizer
from ddp_zero import checkpoint as checkpoints
from ddp_zero.core.comm import communicator
from ddp_zero.core.comm.exchange import PaddedAllGather
from ddp_zero.values.placeholders import AbsentGradient
from tests import internals
from tests.accelerator.beside import Beside, Found, Reference
from tests.multiproc.cases import batches, loss_of
from tests.multiproc.harness import Setup

STEPS = 5
LR = 0.01


@dataclass
class Side:
    """One of the two trainings: ours, or DDP with the plain optimizer.

    Attributes:
        ddp: the model.
        opt: its optimizer.
        is_ours: whether the optimizer is sharded.
        masters: fp32 copies that the plain optimizer steps, by parameter; empty without.
    """

    setup: Setup
    device: torch.device
    ddp: DistributedDataParallel
    opt: Any
    is_ours: bool
    masters: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    scaler: Any = None
    stream: Any = None
    averages: list[Tensor] = field(default_factory=list)
    also: "Side | None" = None
    set_device: Callable[[], None] = lambda: None
    beside: Reference | Beside | None = None
    step_number: int = 0
    inputs: Tensor | None = None

    def at(self, point: str) -> None:
        """Set the current device, and let what is beside training have its turn."""
        self.set_device()
        if self.beside is not None:
            assert self.inputs is not None
            self.beside.at(self, point, self.step_number, self.inputs)

    def backward(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward and backward."""
        inputs, targets = (part.to(self.device, non_blocking=True) for part in batch)
        dtype = next(self.ddp.parameters()).dtype
        loss = loss_of(lambda x: self.ddp(x.to(dtype)).float(), inputs, targets)  # type: ignore[arg-type]
        if self.is_ours and self.opt.loss_scale is not None:
            loss = self.opt.scale(loss)
        self.at("after forward")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.at("after backward")

    def gather_masters(self) -> None:
        """Before the plain step: gradients of masters."""
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()

    def spread_masters(self) -> None:
        """After the plain step: parameters from masters."""
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)

    def step(self) -> None:
        """The optimizer's, with masters on the plain side."""
        self.gather_masters()
        self.opt.step()
        self.spread_masters()

    def stepped(self) -> list[Tensor]:
        """What the plain optimizer steps."""
        return list(self.masters.values()) or list(self.ddp.parameters())


Loop = Callable[[Side, int, tuple[Tensor, Tensor]], None]


def plain(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    side.opt.zero_grad()
    side.ddp.zero_grad()
    side.backward(batch)
    side.step()


def clipped(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    side.opt.zero_grad()
    side.ddp.zero_grad()
    side.backward(batch)
    side.gather_masters()
    if side.is_ours:
        side.opt.clip_grad_norm_(0.05)
    else:
        nn.utils.clip_grad_norm_(side.stepped(), 0.05, foreach=True)
    side.opt.step()
    side.spread_masters()


def clipped_inside(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    (plain if side.is_ours else clipped)(side, step, batch)


def scaled(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    if side.scaler is None:
        side.scaler = torch.amp.GradScaler(side.device.type, init_scale=2.0**10, growth_interval=2)
    side.opt.zero_grad()
    inputs, targets = batch
    side.backward((inputs * (float("inf") if step == 1 else 1.0), targets))
    side.scaler.unscale_(side.opt)
    side.scaler.step(side.opt)
    side.scaler.update()


def not_synced(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    side.opt.zero_grad()
    with side.ddp.no_sync():
        side.backward(batch)
    side.backward(batch)
    side.opt.step()


def accumulated(side: Side, step: int, batch: tuple[Tensor, Tensor], edits: bool = False) -> None:
    """Averages of two passes add up; with edits the user puts tensors of their own into ``param.grad`` between them."""
    side.opt.zero_grad()
    params = list(side.ddp.parameters())
    for part in range(2):
        with side.opt.accumulate() if side.is_ours and part == 0 else contextlib.nullcontext():
            side.backward((batch[0] * (1 + part), batch[1]))
        if side.is_ours:
            for param in params if edits and part == 0 else ():
                if param.grad is not None and not isinstance(param.grad, AbsentGradient):
                    param.grad = param.grad.clone()
            continue
        averages = [param.grad for param in params]
        assert all(grad is not None for grad in averages)
        if part:
            for earlier, param in zip(side.averages, params, strict=True):
                assert param.grad is not None
                param.grad.add_(earlier)
        else:
            side.averages = [grad.clone() for grad in averages if grad is not None]
            side.opt.zero_grad(set_to_none=True)
    side.opt.step()


def accumulated_after_edits(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """As `accumulated`, with edits."""
    accumulated(side, step, batch, edits=True)


def on_own_stream(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """The user trains on a stream of their own."""
    if side.stream is None:
        side.stream = torch.Stream(side.device)
        side.stream.wait_stream(torch.accelerator.current_stream(side.device))
    with side.stream:
        plain(side, step, batch)
    torch.accelerator.current_stream(side.device).wait_stream(side.stream)


def averaged(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """An average of the parameters on a stream of its own, which is the first to read them after a step."""
    current = torch.accelerator.current_stream(side.device)
    if side.stream is None:
        side.stream = torch.Stream(side.device)
        side.averages = [param.detach().clone() for param in side.ddp.parameters()]
    current.wait_stream(side.stream)  # parameters must not change while they are read, also inside backward
    side.opt.zero_grad()
    side.backward(batch)
    side.opt.step()
    side.stream.wait_stream(current)
    with side.stream, torch.no_grad():
        for average, param in zip(side.averages, side.ddp.parameters(), strict=True):
            average.lerp_(param.detach(), 0.1)


def consolidated(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """The state dict of every step, which all ranks ask for, is loaded again."""
    plain(side, step, batch)
    if side.is_ours:
        whole = side.opt.state_dict()
        dist.barrier()
        side.opt.load_state_dict(whole)


def saved(side: Side, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """A checkpoint in the middle, loaded again."""
    plain(side, step, batch)
    if side.is_ours and step == 2:
        folder = side.setup.folder / "checkpoint"
        checkpoints.save(folder, side.ddp, side.opt)
        checkpoints.load(folder, side.ddp, side.opt)


@dataclass(frozen=True)
class Mode:
    """A row of docs/accelerators.md.

    Attributes:
        name: in the table.
        options: of `shard_optimizer`.
        loop: one step, on either side.
        dtype: of the parameters.
        find_unused: an option of DDP.
        standalone: whether the optimizer is built by its class, without a hook.
        backend: of the device's memory.
        sets_device: whether the script calls ``set_device``.
        joins: whether ranks have different numbers of batches, under `Join`.
        models: how many there are, each with an optimizer.
        sizes: of the model's layers.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    loop: Loop = plain
    dtype: torch.dtype = torch.float32
    find_unused: bool = False
    standalone: bool = False
    backend: str = "cpu:gloo,sim:simccl"
    sets_device: bool = True
    joins: bool = False
    models: int = 1
    sizes: tuple[int, ...] = (8, 48, 48, 32, 64, 3)

    def build(self, ddp: DistributedDataParallel, setup: Setup) -> ZeroRedundancyOptimizer:
        """Our optimizer."""
        options = dict(self.options)
        if options.pop("groups_of", None):
            options["shard_group"] = _shard_group(setup, dist.get_backend_config(ddp.process_group))
        if options.pop("over_mesh", False):
            mesh = DeviceMesh.from_group(ddp.process_group, ddp.device_type, mesh_dim_names=("data",))
            parallel: ZeroRedundancyOptimizer = shard_optimizer(
                ddp, torch.optim.AdamW, mesh=mesh, data_parallel_dim="data", lr=LR, fused=True, **options
            )
            return parallel
        if self.standalone:
            return ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, process_group=ddp.process_group, lr=LR, fused=True, **options
            )
        options = {"partition": "parameters", **options}
        opt: ZeroRedundancyOptimizer = shard_optimizer(ddp, torch.optim.AdamW, lr=LR, fused=True, **options)
        return opt


def _shard_group(setup: Setup, backend: str) -> Any:
    mine = None
    for first in range(0, setup.world_size, 2):
        group = dist.new_group([first, first + 1], backend=backend)
        mine = group if setup.rank in (first, first + 1) else mine
    return mine


MASTERS = {"master_weights": True}
FLAT = {"parameters_as_bucket_view": True}
MODES = [
    Mode("stage 1, standalone", standalone=True),
    Mode("stage 1, standalone, flat storage", FLAT, standalone=True),
    Mode("stage 1, step after backward", {"overlap": False}),
    Mode("stage 1, step inside backward", {"interleaved": False}),
    Mode("stage 1, interleaved", {"interleaved": True}),
    Mode("stage 2, step after backward", {"stage": 2, "overlap": False}),
    Mode("stage 2, step inside backward", {"stage": 2, "interleaved": False}),
    Mode("stage 2, interleaved", {"stage": 2}),
    Mode("stage 2, parameters not in flat storage", {"stage": 2, "parameters_as_bucket_view": False}),
    Mode("stage 1, unused parameters looked for", {"interleaved": True}, find_unused=True),
    Mode("stage 2, unused parameters looked for", {"stage": 2}, find_unused=True),
    Mode('stage 1, `sync="forward"`', {"sync": "forward"}),
    Mode('stage 2, `sync="forward"`', {"stage": 2, "sync": "forward"}),
    Mode("stage 1, `opt.clip_grad_norm_`", {"overlap": False}, clipped),
    Mode("stage 2, `opt.clip_grad_norm_`", {"stage": 2, "overlap": False}, clipped),
    Mode("stage 2, `max_grad_norm`", {"stage": 2, "max_grad_norm": 0.05}, clipped_inside),
    Mode("stage 1, `GradScaler`", {"overlap": False}, scaled),
    Mode("stage 2, `GradScaler`", {"stage": 2, "overlap": False}, scaled),
    Mode("stage 2, own loss scale", {"stage": 2, "loss_scale": 1024.0}),
    Mode("stage 2, bf16 with masters", {"stage": 2, "master_weights": True}, dtype=torch.bfloat16),
    Mode(
        "stage 1, bf16 with masters, `max_grad_norm`",
        {**MASTERS, "max_grad_norm": 0.05},
        clipped_inside,
        torch.bfloat16,
    ),
    Mode(
        "stage 2, bf16 with masters, `max_grad_norm`",
        {**MASTERS, "stage": 2, "max_grad_norm": 0.05},
        clipped_inside,
        torch.bfloat16,
    ),
    Mode(
        "stage 2, bf16 with masters, step after backward",
        {**MASTERS, "stage": 2, "overlap": False},
        dtype=torch.bfloat16,
    ),
    Mode("stage 1, `no_sync`", {}, not_synced),
    Mode("stage 2, `no_sync`", {"stage": 2}, not_synced),
    Mode("stage 2, `accumulate`", {"stage": 2}, accumulated),
    Mode(
        "stage 2, `accumulate` after edits, layers of one size",
        {"stage": 2},
        accumulated_after_edits,
        sizes=(8, *(40,) * 14, 3),
    ),  # whose memory is handed from one to the next
    Mode("stage 2, fp32 accumulation", {"stage": 2, "accumulate_in_fp32": True}, accumulated),
    Mode("stage 1, fp32 accumulation", {"accumulate_in_fp32": True}, accumulated),
    Mode("stage 1, cut parameters", {"partition": "elements"}),
    Mode("stage 2, cut parameters", {"stage": 2, "partition": "elements"}),
    Mode('stage 2, cut parameters, `sync="forward"`', {"stage": 2, "partition": "elements", "sync": "forward"}),
    Mode('stage 2, `partition="auto"`', {"stage": 2, "partition": "auto"}),
    Mode(
        'stage 2, bf16 with masters, `partition="auto"`',
        {**MASTERS, "stage": 2, "partition": "auto"},
        dtype=torch.bfloat16,
    ),
    Mode("stage 1, offload", {"offload": "cpu"}),
    Mode("stage 2, offload", {"stage": 2, "offload": "cpu"}),
    Mode("stage 2, own stream", {"stage": 2}, on_own_stream),
    Mode("stage 1, average on a stream of its own", {}, averaged),
    Mode("stage 2, average on a stream of its own", {"stage": 2}, averaged),
    Mode('stage 2, `sync="forward"`, average on a stream of its own', {"stage": 2, "sync": "forward"}, averaged),
    Mode("stage 2, state dict saved and loaded", {"stage": 2}, consolidated),
    Mode("stage 2, checkpoint saved and loaded", {"stage": 2}, saved),
    Mode("stage 2, `mccl` without a CPU backend, no `set_device`", {"stage": 2}, backend="sim:mccl", sets_device=False),
    Mode("stage 2, `hccl`", {"stage": 2}, backend="cpu:gloo,sim:hccl"),
    Mode("stage 1, `Join`", {}, joins=True),
    Mode("stage 2, `Join`", {"stage": 2}, joins=True),
    Mode("stage 2, two models", {"stage": 2}, models=2),
    Mode("stage 1, over a mesh", {"over_mesh": True}),
    Mode(
        "stage 2, over a mesh, `max_grad_norm`", {"over_mesh": True, "stage": 2, "max_grad_norm": 0.05}, clipped_inside
    ),
]
GROUPS = Mode("stage 2, shard groups", {"stage": 2, "groups_of": 2})


@dataclass
class Report:
    """What a mode has shown on one rank.

    Attributes:
        races: of all steps.
        faults: of threads that may wait for the device, in all steps.
        different: parameters that differ from the plain side's, after any step.
        moved: whether parameters have changed at all.
        messages: of the last step: kind and elements.
        syncs: host synchronisations of the last step that the library has caused, with their lines.
        plain_races: of the plain side.
        first_syncs: host synchronisations of the first step.
        largest: difference to the plain side.
        digest: of all parameters after all steps.
        memory: bytes of stage 2's buffers and of the copies in syncs, and what `estimate` says of them; zeros where
            there are none.
        beside: what was done beside training, if asked for.
    """

    races: list[str]
    faults: list[str]
    different: list[str]
    moved: bool
    messages: list[tuple[str, int]]
    syncs: list[tuple[str, str]]
    plain_races: list[str]
    first_syncs: list[tuple[str, str]]
    largest: float
    digest: str
    memory: tuple[tuple[int, int], tuple[int, int]]
    beside: Found | None = None


def _sum_by_pairs(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's averages with the sums of pairs of ranks first, which is the order of shard groups."""
    mine = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    sums = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[mine.device])
    future.set_result(sum(sums[1:], sums[0]))
    return future


def small_model(sizes: Sequence[int], dtype: torch.dtype) -> nn.Module:
    """Layers; of several sizes, buckets are shared by ranks and owners change when DDP rebuilds them."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    torch.random.set_rng_state(state)
    return nn.Sequential(*layers[:-1]).to(dtype)


def run(
    mode: Mode,
    setup: Setup,
    extension: Any,
    device: torch.device,
    backend: str | None = None,
    has_beside: bool = False,
    currents: Sequence[int] = (),
) -> Report:
    """Train both sides and compare them after every step.

    Args:
        mode: of ours.
        setup: of this rank.
        extension: that of `simulation`, or what has its methods.
        device: this rank's.
        backend: another one than the mode's.
        has_beside: do what `beside` does, too.
        currents: devices that a script makes current, in turn, at points of its iterations; none: as the mode says.
    """
    turns = cycle(currents or [device.index if mode.sets_device else 0])

    def set_device() -> None:
        extension.set_device(next(turns))

    set_device()
    group = dist.new_group(list(range(setup.world_size)), backend=backend or mode.backend)
    module = small_model(mode.sizes, mode.dtype).to(device)
    before = [param.detach().cpu() for param in module.parameters()]

    Copies.alive, Copies.most = weakref.WeakSet(), 0

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(
            copy.deepcopy(module),
            device_ids=[device.index],
            process_group=group,
            bucket_cap_mb=0.008 if mode.dtype is torch.float32 else 0.004,
            gradient_as_bucket_view=True,
            find_unused_parameters=mode.find_unused,
        )

    extension.clear_reports()
    ddp = wrapped()
    if "groups_of" in mode.options:
        ddp.register_comm_hook(group, _sum_by_pairs)
    masters = (
        {p: nn.Parameter(p.detach().float()) for p in ddp.parameters()} if mode.options.get("master_weights") else {}
    )

    def plain_side() -> Side:
        ddp = wrapped()
        return Side(
            setup, device, ddp, torch.optim.AdamW(ddp.parameters(), lr=LR, fused=True), False, set_device=set_device
        )

    opt: Optimizer = torch.optim.AdamW(list(masters.values()) or list(ddp.parameters()), lr=LR, fused=True)
    reference = Side(setup, device, ddp, opt, False, masters, set_device=set_device)
    if mode.models == 2:
        reference.also = plain_side()
    noted = Reference()
    reference.beside = noted if has_beside else None
    expected = [_values(reference) for _ in _steps(mode, reference)]
    extension.synchronize(-1)
    plain_races = extension.races()

    extension.clear_reports()
    ddp = wrapped()
    ours = Side(setup, device, ddp, mode.build(ddp, setup), True, set_device=set_device)
    beside = Beside(setup, noted, mode.joins) if has_beside else None
    ours.beside = beside
    if mode.models == 2:
        other = wrapped()
        ours.also = Side(setup, device, other, mode.build(other, setup), True, set_device=set_device)
    found: list[list[Tensor]] = []
    first: list[tuple[str, str]] = []
    messages: list[tuple[str, int]] = []
    syncs: list[tuple[str, str]] = []
    for step in _counted(_steps(mode, ours, before_step=extension_marks(extension))):
        messages = [(kind, numel) for _, kind, _, numel in extension.messages()[_marks[0] :]]
        syncs = [(what, line) for what, line in extension.host_syncs()[_marks[1] :] if line]
        first = syncs if step == 0 else first
        found.append(_values(ours))
    if "sync" in mode.options:
        ours.opt.finish_sync()
    done_beside = None if beside is None else beside.end()
    races, faults = extension.races(), extension.faults()
    extension.synchronize(-1)
    on_host = [[[value.cpu() for value in values] for values in side] for side in (expected, found)]
    different, largest = list[str](), 0.0
    for step, pair in enumerate(zip(*on_host, strict=True)):
        for index, (one, other) in enumerate(zip(*pair, strict=True)):
            if not torch.equal(one, other):
                different.append(f"step {step}, parameter {index}")
                largest = max(largest, (one - other).abs().max().item())
    moved = all(not torch.equal(one, other.cpu()) for one, other in zip(before, found[-1], strict=False))
    digest = _digest(on_host[1])
    memory = _memory(mode, ours)
    return Report(
        *(races, faults, different, moved, messages, syncs, plain_races, first, largest, digest, memory, done_beside)
    )


class Copies(PaddedAllGather):
    """Counts the bytes of the copies that exist at once."""

    alive: "weakref.WeakSet[Copies]"
    most: int

    def __init__(self, group: Any, segments: Sequence[Tensor], nbytes: int, device: torch.device) -> None:
        super().__init__(group, segments, nbytes, device)
        self.nbytes = nbytes * len(segments)
        Copies.alive.add(self)
        Copies.most = max(Copies.most, sum(one.nbytes for one in Copies.alive))


def _counted(steps: Iterator[int]) -> Iterator[int]:
    with mock.patch.object(communicator, "PaddedAllGather", Copies):
        yield from steps


def _memory(mode: Mode, ours: Side) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of the buffers that the last step has used and of copies, and what `estimate` says of them."""
    # sums across shard groups, of which `estimate` knows nothing, have copies of their own
    if mode.options.get("stage") != 2 or mode.options.keys() & {"over_mesh", "groups_of"}:
        return (0, 0), (0, 0)
    found = estimate(
        ours.ddp.module,
        torch.optim.AdamW,
        ranks=ours.setup.world_size,
        stage=2,
        partition="elements" if internals.cuts_parameters(ours.opt) else "parameters",
        bucket_cap_mb=ours.ddp.bucket_bytes_cap / (1 << 20),
    )[0].device
    buffers = sum(one.memory.nbytes for one in internals.buffers_of(ours.opt))
    return (buffers, Copies.most), (found["buckets"], found.get("sync", 0))


def _digest(steps: list[list[Tensor]]) -> str:
    total = hashlib.sha256()
    for value in (value for values in steps for value in values):
        total.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


_marks = [0, 0]


def extension_marks(extension: Any) -> Callable[[], None]:
    def mark() -> None:
        _marks[:] = [len(extension.messages()), len(extension.host_syncs())]

    return mark


def _steps(mode: Mode, side: Side, before_step: Callable[[], None] = lambda: None) -> Iterator[int]:
    count = STEPS + (side.setup.rank == 0 and mode.joins)
    data = list(batches(side.setup.rank, count))
    joined: list[Any] = [side.ddp, side.opt] if side.is_ours else [side.ddp]
    with Join(joined) if mode.joins else contextlib.nullcontext():
        for step, batch in enumerate(data):
            before_step()
            side.step_number, side.inputs = step, batch[0]
            side.at("before forward")
            mode.loop(side, step, batch)
            side.at("after the step")
            if side.also is not None:
                mode.loop(side.also, step, batch)
            yield step


def _values(side: Side) -> list[Tensor]:
    """Copies on the device, which wait for nothing."""
    own = [param.detach().clone() for param in side.ddp.parameters()]
    return own if side.also is None else own + _values(side.also)
