"""One of the three runs of a case: ours, the same parallel model with plain optimizers, or the whole on one device."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import DynamicLossScale, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.fuzz.mesh.case import CUTS, DIMS, ROLES, Evaluate, Layout, MeshCase, Step, Uneven
from tests.fuzz.mesh.net import Mixture, Part, Seen, Values
from tests.fuzz.sides import Place
from tests.fuzz.toys import find_optimizer
from tests.multiproc.cases import added, gathered, ready
from tests.multiproc.two_memories import taken_for_a_device

FIRST_SCALE, INTERVAL = 1024.0, 2
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}
MASTER = "master_weight"  # among a parameter's state, its master
_ADDED = 1e-6  # to a norm, by torch.nn.utils.clip_grad_norm_
_LOW = ("float16", "bfloat16")


# Process groups


@dataclass(frozen=True)
class Grid:
    """This rank's groups at a layout; made once per process, so that cases are cheap. Making them is a collective."""

    mesh: DeviceMesh | None
    place: dict[str, int]
    data: ProcessGroup
    tensor: ProcessGroup | None
    pipe: ProcessGroup | None
    ends: ProcessGroup | None  # both ends of this rank's pipelines, at its place along the tensor dimension
    names: tuple[str, ...]  # of the mesh's dimensions
    data_dims: tuple[str, ...]  # the data-parallel ones among them


@cache
def _group(ranks: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """The group among these that has this rank."""
    found = None
    for members in ranks:
        group = dist.new_group(list(members))
        found = group if dist.get_rank() in members else found
    return found


@cache
def _grid(
    sizes: tuple[int, int, int], order: tuple[str, ...], is_bare: bool, replicas: int, strides: bool, splits: bool
) -> Grid:
    layout = Layout(sizes, order, is_bare)
    lengths = {dim: layout.size(dim) for dim in order if dim == "data" or layout.size(dim) > 1 or not is_bare}
    data_dims: tuple[str, ...] = ("data",)
    if splits:
        data_dims = ("shard", "replicate") if strides else ("replicate", "shard")
        parts = {"replicate": replicas, "shard": layout.data // replicas}
        split: dict[str, int] = {}
        for dim, length in lengths.items():
            split |= {one: parts[one] for one in data_dims} if dim == "data" else {dim: length}
        lengths = split
    names = tuple(lengths)
    is_alone = is_bare and names == ("data",)
    mesh = None if is_alone else init_device_mesh("cpu", tuple(lengths.values()), mesh_dim_names=names)
    own = {dim: mesh.get_group(dim) for dim in names} if mesh is not None else {"data": _world()}
    if splits and mesh is not None:
        own["data"] = mesh[data_dims]._flatten().get_group()
    ends: Any = None
    if layout.pipe > 1:
        last = layout.pipe - 1
        own_ends = [
            tuple(sorted(layout.rank(data=d, pipe=p, tensor=t) for d in range(layout.data) for p in (0, last)))
            for t in range(layout.tensor)
        ]
        between = set(range(dist.get_world_size())).difference(*own_ends)
        # ranks in unequal numbers of groups could not make groups across a part of the job later (torch 2.13.0)
        ends = _group((*own_ends, *([tuple(sorted(between))] if between else [])))
        if layout.place(dist.get_rank())["pipe"] not in (0, last):
            ends = None
    tensor = own.get("tensor") if layout.tensor > 1 else None
    pipe = own.get("pipe") if layout.pipe > 1 else None
    return Grid(mesh, layout.place(dist.get_rank()), own["data"], tensor, pipe, ends, names, data_dims)


def grid_of(layout: Layout) -> Grid:
    """This rank's groups at a layout."""
    split = (layout.replicas, layout.strides) if layout.splits else (1, False)
    return _grid(layout.sizes, layout.order, layout.is_bare, *split, layout.splits)


def forget_groups() -> None:
    """They are of a job that has ended."""
    _grid.cache_clear()
    _group.cache_clear()


def _world() -> ProcessGroup:
    found: ProcessGroup = dist.distributed_c10d._get_default_group()
    return found


def _along_data(layout: Layout, split: Callable[[int], range]) -> ProcessGroup | None:
    """This rank's group of a partition of the data-parallel ranks, at every place along the other dimensions."""
    tables = {
        tuple(layout.rank(**{**place, "data": data}) for data in split(place["data"])) for place in layout.everyone()
    }
    return _group(tuple(sorted(tables)))


def _even_out() -> None:
    """Put each rank into as many process groups as every other one: by that number torch names those that ours makes.

    Earlier ones of ours are over the ranks of a stage with experts alone. A collective.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, len(dist.distributed_c10d._world.pg_names))
    for _ in range(max(every) - every[dist.get_rank()]):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


# Parameters and groups


@dataclass
class Slot:
    """A parameter of this rank.

    ``param`` is stepped: the given one, or this rank's part of a distributed tensor, in its memory. ``full`` is the
    whole of one whose parts meet; ``master`` the copy in fp32 of one of low precision.
    """

    name: str
    own_name: str
    role: str
    given: Any
    param: nn.Parameter
    full: nn.Parameter | None = None
    master: nn.Parameter | None = None

    @property
    def clipped(self) -> nn.Parameter:
        """What has the gradient that is looked at and clipped."""
        return self.param if self.master is None else self.master

    @property
    def stepped(self) -> nn.Parameter:
        """What a plain optimizer steps."""
        return self.clipped if self.full is None else self.full

    def bring_gradient(self) -> None:
        """Of a distributed tensor, this rank's part."""
        if self.given is not self.param:
            grad: Any = self.given.grad
            self.param.grad = None if grad is None else grad.to_local().detach().clone()


@dataclass
class Group:
    """A parameter group: its role, parameters, and the ranks that hold them; None for all data-parallel ones."""

    role: str
    slots: list[Slot]
    ranks: ProcessGroup | None
    is_reduced: bool  # by a DDP model
    sharers: ProcessGroup | None = field(default=None)  # the ranks that share one copy of its state; None: all


def options_of(case: MeshCase, role: str) -> dict[str, Any]:
    """Options of a group's own."""
    own = {key: value for one, key, value in case.how.groups if one == role}
    return {**(MUON if role in case.how.muon else {}), **own}


class Side:
    """A model in its wrappers, and its groups.

    Args:
        case: which.
        layout: of the ranks.
        values: what the model begins with.
        frozen: names of parameters that do not train now.
    """

    def __init__(self, case: MeshCase, layout: Layout, values: Values, frozen: set[str]) -> None:
        self.case, self.layout, self.grid = case, layout, grid_of(layout)
        self.place = self.grid.place
        counts = range(len(layout.experts))
        spread = [_along_data(layout, lambda d, n=n: layout.spread(n, d)) for n in counts]  # type: ignore[misc]
        self._same = [_along_data(layout, lambda d, n=n: layout.same(n, d)) for n in counts]  # type: ignore[misc]
        self._sharers: ProcessGroup | None = None
        if layout.replicas > 1:
            own = self.grid.mesh["shard"].get_group() if layout.splits and self.grid.mesh is not None else None
            self._sharers = own or _along_data(layout, layout.sharers)
        self._expert_sharers = [self._sharers_of_experts(number) for number in counts]
        apart = tuple(one if len(layout.experts[n]) > 1 else None for n, one in enumerate(spread))
        is_by_tensor = case.net.by_tensor and self.grid.mesh is not None and "tensor" in self.grid.names
        mesh = self.grid.mesh["tensor"] if is_by_tensor and self.grid.mesh is not None else None
        self.part = Part(case, layout, self.place, values, self.grid.tensor, apart, mesh)
        self.names = {self.part.whole_name(name): param for name, param in self.part.named_parameters()}
        self.model = self._wrapped()
        self.groups = self._grouped()
        self.slots = [slot for group in self.groups for slot in group.slots]
        for name in frozen - set(case.net.frozen):
            self.set_trains(name, False)
        self._schedule = self._scheduled()
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        self.weight = 1.0  # of the loss

    def _sharers_of_experts(self, number: int) -> ProcessGroup | None:
        layout = self.layout
        if layout.expert_sharers(number, 0) is None:
            return None
        return _along_data(layout, lambda data: layout.expert_sharers(number, data) or range(0))

    def _wrapped(self) -> nn.Module:
        how, part = self.case.how, self.part
        self.inner: list[DistributedDataParallel] = []
        if how.ddp == "none":
            return part
        options: dict[str, Any] = {"bucket_cap_mb": how.cap, "gradient_as_bucket_view": True}
        for layer in self.part.layers.values():
            if isinstance(layer, Mixture) and how.ddp == "both":
                more: dict[str, Any] = {"find_unused_parameters": self.case.net.idle == "unused"}
                more["bucket_cap_mb"] = how.inner_cap
                layer.experts = DistributedDataParallel(layer.experts, process_group=self._same[0], **options | more)
                self.inner.append(layer.experts)
        ignored = [name for name, _ in part.named_parameters() if ".experts." in name]
        if self._is_shared:
            ignored += ["embedding", ".embedding"]  # DDP knows the latter, other parts of torch the former
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, ignored)
        return DistributedDataParallel(part, process_group=self.grid.data, **options)

    @property
    def _is_shared(self) -> bool:
        return self.case.net.tied and self.layout.pipe > 1

    def _grouped(self) -> list[Group]:
        case, expert_layers = self.case, self.case.expert_layers()
        found: dict[tuple[str, int], list[Slot]] = {}
        for name, given in self.part.named_parameters():
            whole = self.part.whole_name(name)
            if whole in case.net.frozen and not case.how.lists_frozen:
                continue
            role = case.role_of(whole)
            number = expert_layers.index(int(whole.split(".")[1])) if role == "experts" else 0
            found.setdefault((role, number), []).append(Slot(whole, name, role, given, stepped_part(given)))
        groups = []
        added = case.how.added
        for role in sorted(ROLES, key=lambda role: role in added):
            numbers = range(len(expert_layers)) if role == "experts" else range(1)
            for number in numbers:
                slots, ranks, reduced = found.get((role, number), []), None, case.how.ddp != "none"
                if role == "experts":
                    ranks, reduced = self._same[number], case.how.ddp == "both"
                elif role == "embedding" and self._is_shared:
                    ranks, reduced = self.grid.ends, False
                    if not slots and role not in added:
                        continue  # stages between the ends are not among those ranks
                if role in added and not slots:
                    groups.append(Group(role, [], None, False))  # all ranks add as many
                elif slots or (case.how.has_empty and role != "experts"):
                    sharers = self._expert_sharers[number] if role == "experts" else None
                    groups.append(Group(role, slots, ranks, reduced, sharers))
        return groups

    def _scheduled(self) -> Any:
        case, layout = self.case, self.layout
        if layout.pipe == 1:
            return None
        stage, dtype = self.place["pipe"], getattr(torch, case.net.dtype)
        between = [torch.zeros(case.net.rows, case.net.width, dtype=dtype, requires_grad=True) for _ in range(2)]
        tokens = torch.zeros(case.net.rows, dtype=torch.int64)
        scores = torch.zeros(case.net.rows, case.net.tokens, dtype=dtype, requires_grad=True)
        shapes: dict[str, Any] = {
            "input_args": tokens if stage == 0 else between[0],
            "output_args": scores if stage == layout.pipe - 1 else between[1],
        }
        kind: Any = ScheduleGPipe if case.how.schedule == "GPipe" else Schedule1F1B
        one = PipelineStage(self.model, stage, layout.pipe, torch.device("cpu"), group=self.grid.pipe, **shapes)
        return kind(one, n_microbatches=case.how.micro, loss_fn=self._loss, scale_grads=False)

    def _loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(scores, targets) / self._parts
        return self.scale(loss if self.weight == 1.0 else loss * self.weight)

    # What a loop does

    def set_trains(self, name: str, trains: bool) -> None:
        """Freeze a parameter, if it is here, or let it train."""
        if name in self.names:
            self.names[name].requires_grad_(trains)

    def backward(self, op: Step, number: int) -> None:
        """All passes of an iteration."""
        hooks = []
        if op.poison is not None:
            name, data = op.poison
            is_here = name in self.names and self.place["data"] == data and self.place["tensor"] == 0
            is_here = is_here and (name != "embedding" or self.place["pipe"] == 0)  # of both ends
            if is_here and self.names[name].requires_grad:
                hooks.append(self.names[name].register_hook(self._poisoned))
        for run in range(op.runs):
            is_last = run == op.runs - 1
            with contextlib.ExitStack() as stack:
                if not is_last:
                    self._hold_back(stack)
                self._run(number, run, op.runs)
        for hook in hooks:
            hook.remove()

    def _poisoned(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = float("nan" if self.case.how.clip == "value" else "inf")  # which clamps infinity
        return grad

    def _hold_back(self, stack: contextlib.ExitStack) -> None:
        if self._schedule is not None:
            stack.enter_context(self.accumulating())
        elif isinstance(self.model, DistributedDataParallel):
            for ddp in (self.model, *self.inner):
                stack.enter_context(ddp.no_sync())

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """What runs of a schedule are wrapped in that take no step."""
        return contextlib.nullcontext()

    def _run(self, number: int, run: int, runs: int) -> None:
        case, data = self.case, self.place["data"]
        tokens, targets = (torch.tensor(one) for one in case.tokens_of(number, run, data))
        self._lay_out_routes(number, run)
        if self._schedule is None:
            self._parts = runs
            self._loss(self.model(tokens), targets).backward()
            return
        self._parts = runs * case.how.micro
        stage = self.place["pipe"]
        if stage == 0:
            self._schedule.step(tokens)
        elif stage < self.layout.pipe - 1:
            self._schedule.step()
        else:
            self._schedule.step(target=targets)

    def _lay_out_routes(self, number: int, run: int) -> None:
        case, layout, data = self.case, self.layout, self.place["data"]
        for among, layer_number in enumerate(case.expert_layers()):
            if str(layer_number) not in self.part.layers:
                continue
            layer: Any = self.part.layers[str(layer_number)]
            layer.routes.clear()
            spread = list(layout.spread(among, data))
            every = [torch.tensor(case.routes(layout, among, number, run, one)) for one in spread]
            own = every[spread.index(data)]
            size = case.net.rows if self._schedule is not None else len(own)
            for first in range(0, len(own), size):
                rows = slice(first, first + size)
                layer.routes.append((own[rows], torch.cat([one[rows] for one in every])))

    def evaluate(self, op: Evaluate, number: int) -> Tensor | None:
        """Scores without gradients; None where there are stages."""
        if self._schedule is not None:
            return None
        self._lay_out_routes(number, 1000)
        self.model.eval()
        with torch.no_grad():
            scores: Tensor = self.model(torch.tensor(self.case.tokens_of(number, 1000, self.place["data"])[0]))
        self.model.train()
        return scores


def stepped_part(given: Any) -> nn.Parameter:
    """What a loop steps: of a distributed tensor, this rank's part, in its memory."""
    if not isinstance(given, DTensor):
        return given  # type: ignore[no-any-return]
    own: Any = given.detach()
    return nn.Parameter(own.to_local(), requires_grad=given.requires_grad)


# Ours


class Ours(Side):
    """With a `ParallelOptimizer`.

    If a mistake is injected, learning rates are one unit in the last place off, or norms that it shows.
    """

    def __init__(
        self,
        case: MeshCase,
        layout: Layout,
        values: Values,
        frozen: set[str],
        place: Place,
        scaler: torch.amp.GradScaler | None = None,
        sync: str | None = None,
    ) -> None:
        super().__init__(case, layout, values, frozen)
        how, grid = case.how, self.grid
        self._injects = place.injects
        kind = find_optimizer(how.name)
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            own: dict[str, Any] = options_of(case, group.role)
            if group.ranks is not None:
                own["process_group"] = group.ranks
            if group.sharers is not None:
                own["shard_group"] = group.sharers
            if group.role in CUTS and "tensor" in grid.names and not case.net.by_tensor:
                own["sharded_over"] = {"tensor": CUTS[group.role]}
            if group.role in how.muon:
                own["optimizer_class"] = torch.optim.Muon
            params: list[Any] = [(slot.own_name, slot.given) if how.named else slot.given for slot in group.slots]
            groups.append({"params": params, **own})
        arguments: dict[str, Any] = {"data_parallel_group": grid.data}
        if grid.mesh is not None:
            dims: Any = grid.data_dims if len(grid.data_dims) > 1 else "data"
            arguments = {"mesh": grid.mesh, "data_parallel_dim": dims}
            arguments |= {"pipeline_dim": "pipe"} if "pipe" in grid.names else {}
        if how.renames:
            arguments["global_names"] = self.part.names
        for key in ("stage", "overlap", "partition", "nonfinite"):
            arguments[key] = getattr(how, key)
        arguments["sync"] = sync or how.sync
        if self._sharers is not None:
            arguments["shard_group"] = self._sharers
        if how.masters:
            arguments |= {"master_weights": True, "accumulate_in_fp32": how.sums_in_fp32}
        if how.offload:
            arguments["offload"] = "cpu"
        if how.clip == "option":
            arguments |= {"max_grad_norm": how.limit, "norm_type": how.norm_type}
        if how.loss_scale is not None:
            is_dynamic = how.loss_scale == "dynamic"
            policy = DynamicLossScale(initial=FIRST_SCALE, growth_interval=INTERVAL)
            arguments["loss_scale"] = policy if is_dynamic else how.loss_scale
        if layout.replicas > 1 or layout.expert_replicas > 1:
            _even_out()
        with taken_for_a_device() if how.offload else contextlib.nullcontext():
            late = [group.role in how.added for group in self.groups]
            early = [one for one, is_late in zip(groups, late, strict=True) if not is_late]
            self.opt: Any = shard_optimizer(self.model, kind.build, early, **arguments, **kind.options)
            for one in groups[len(early) :]:
                self.opt.add_param_group(one)
        assert isinstance(self.opt, ParallelOptimizer)
        if place.injects == "lr":
            for one in self.opt.param_groups:
                one["lr"] = one["lr"] * (1 + 2.0**-52) if case.net.dtype == "float64" else one["lr"] * (1 + 2.0**-23)
        if how.loss_scale is not None:
            self.scale = self.opt.scale
        self.scaler: Any = scaler
        if how.scaler:
            if scaler is None:
                self.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=INTERVAL)
                self.scaler.scale(torch.ones(()))  # stages without a loss have no other call that creates the scale
            self.scale = self.scaler.scale

    @property
    def value(self) -> float | None:
        """The loss scale."""
        found: float | None = self.opt.loss_scale if self.scaler is None else self.scaler.get_scale()
        return found

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """No step is taken meanwhile."""
        found: contextlib.AbstractContextManager[Any] = self.opt.accumulate()
        return found

    def step(self) -> Tensor | None:
        """Clip if the loop does, and step; the norm, if one was found."""
        how, found = self.case.how, None
        if how.scaler and (how.unscales or how.clip in ("loop", "value")):
            self.scaler.unscale_(self.opt)
        if how.clip == "loop":
            found = self.opt.clip_grad_norm_(how.limit, how.norm_type)
        elif how.clip == "value":
            self.opt.clip_grad_value_(how.limit)
        if how.scaler:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()
        if how.sync == "forward" and how.finishes:
            self.opt.finish_sync()
        if how.clip == "option" and self.opt.last_step.stepped:
            found = self.opt.last_step.grad_norm
        if found is None:
            return None
        return torch.as_tensor(found, dtype=torch.float64) * (1.001 if self._injects == "norm" else 1.0)

    def train_unevenly(self, op: Uneven, number: int) -> list[Tensor | None]:
        """Iterate under Join; the norm of each iteration of this rank."""
        joined = [one for one in (self.model,) if isinstance(one, DistributedDataParallel)]
        norms = []
        with Join([*joined, self.opt], divide_by_initial_world_size=op.counts_all):
            for iteration in range(op.batches[self.place["data"]]):
                self.opt.zero_grad()
                self.backward(Step(), number + iteration)
                norms.append(self.step())
        return norms

    def refuse_to_join(self) -> None:
        """Ask for what is refused."""
        Join([self.opt])

    def move_state(self) -> None:
        """Away, and back."""
        self.opt.offload_state()
        self.opt.reload_state()


# Plain


def _plain_optimizers(case: MeshCase, groups: Sequence[tuple[str, list[Any]]]) -> dict[bool, Optimizer]:
    """Optimizers over groups by role, by whether it is Muon; only those that have parameters."""
    kind = find_optimizer(case.how.name)
    rest = [{"params": params, **options_of(case, role)} for role, params in groups if role not in case.how.muon]
    muon = [{"params": params, **options_of(case, role)} for role, params in groups if role in case.how.muon]
    found: dict[bool, Optimizer] = {}
    if any(group["params"] for group in rest):
        found[False] = kind.build(rest, **kind.options)
    if any(group["params"] for group in muon):
        found[True] = torch.optim.Muon(muon, **MUON)
    return found


class _Sums:
    """DDP's averaging with sums of ranks that share a copy of the state first, as stage 2 does.

    Args:
        parts: of the ranks of the DDP model, by their places in its group.
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._parts = parts

    def average(self, group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        ranks = dist.get_world_size(group)
        every = gathered(bucket.buffer().mul_(1.0 / ranks), group)
        return ready(added([added([every[rank] for rank in part]) for part in self._parts]))


def _apart(ranks: range, sharers: Callable[[int], range | None]) -> list[list[int]]:
    """The ranks that share a copy of the state, by their places among those that hold the parameter."""
    found = sorted({tuple(sharers(rank) or ranks) for rank in ranks})
    return [[ranks.index(rank) for rank in part] for part in found]


class Plain(Side):
    """With plain optimizers; whatever DDP does not reduce is reduced by hand, and parts that must meet, too."""

    def __init__(self, case: MeshCase, layout: Layout, values: Values, frozen: set[str]) -> None:
        super().__init__(case, layout, values, frozen)
        how = case.how
        if how.stage == 2 and how.ddp != "none":
            everyone, data = range(layout.data), self.place["data"]
            self._add_up(self.model, _apart(everyone, layout.sharers))
            for ddp in self.inner:
                self._add_up(ddp, _apart(layout.same(0, data), lambda rank: layout.expert_sharers(0, rank)))
        for slot in self.slots:
            if self.meets(slot.role):
                slot.full = nn.Parameter(self._joined(slot.param.detach(), slot.role))
            if how.masters:
                slot.master = nn.Parameter(slot.param.detach().float())
        self._kinds = _plain_optimizers(
            case, [(group.role, [slot.stepped for slot in group.slots]) for group in self.groups]
        )
        self.optimizers = list(self._kinds.values())
        is_dynamic, given = how.loss_scale == "dynamic", how.loss_scale
        is_dynamic |= how.scaler
        self.value: float | None = FIRST_SCALE if is_dynamic else given  # type: ignore[assignment]
        self._follows = is_dynamic
        self.good = 0
        self.divisor = layout.data
        self.scale = lambda loss: loss if self.value is None else loss * self.value

    @staticmethod
    def _add_up(ddp: nn.Module, parts: list[list[int]]) -> None:
        if isinstance(ddp, DistributedDataParallel):
            ddp.register_comm_hook(ddp.process_group, _Sums(parts).average)

    def meets(self, role: str) -> bool:
        """Whether parts of a group's parameters are stepped whole."""
        needs = self.case.how.name == "toy LAMB" or role in self.case.how.muon
        return needs and role in CUTS and self.layout.tensor > 1

    def _joined(self, part: Tensor, role: str) -> Tensor:
        parts: list[Any] = [None] * self.layout.tensor  # of any sizes
        dist.all_gather_object(parts, part.contiguous(), group=self.grid.tensor)
        return torch.cat(parts, dim=CUTS[role])

    def zero_grad(self, to_none: bool) -> None:
        """Drop or zero gradients."""
        for slot in self.slots:
            for one in (slot.given, slot.param):
                if one.grad is not None and not to_none and one is slot.given:
                    one.grad.zero_()
                else:
                    one.grad = None

    def average(self) -> None:
        """Of what no DDP model reduces: sums over ranks that hold it, divided by the number of data-parallel ranks."""
        members: dict[int, list[Group]] = {}
        for group in self.groups:
            if not group.is_reduced:
                members.setdefault(id(group.ranks), []).append(group)
        for slot in self.slots:
            slot.bring_gradient()
        for groups in members.values():
            ranks = groups[0].ranks or self.grid.data
            slots = [slot for group in groups for slot in group.slots]
            has = torch.tensor([slot.param.grad is not None for slot in slots], dtype=torch.uint8)
            dist.all_reduce(has, dist.ReduceOp.MAX, group=ranks)
            used = [slot.param for slot, one in zip(slots, has.tolist(), strict=True) if one]
            if not used:
                continue
            for param in used:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            flat = torch.cat([param.grad.reshape(-1) for param in used if param.grad is not None])
            flat = (flat.float() if self.case.net.dtype in _LOW else flat).mul_(1.0 / self.divisor)
            dist.all_reduce(flat, group=ranks)
            for param, part in zip(used, flat.split([param.numel() for param in used]), strict=True):
                param.grad = part.view(param.shape).to(param.dtype, copy=True)
        for slot in self.slots:
            if slot.master is not None:
                slot.master.grad = None if slot.param.grad is None else slot.param.grad.float()

    def is_finite(self) -> bool:
        """Whether all gradients of all ranks are. A collective."""
        grads = [slot.clipped.grad for slot in self.slots if slot.clipped.grad is not None]
        bad = torch.tensor([float(not all(bool(grad.isfinite().all()) for grad in grads))])
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return not bad.item()

    def unscale(self) -> None:
        """Divide the loss scale out."""
        for slot in self.slots:
            if slot.clipped.grad is not None and self.value is not None:
                slot.clipped.grad.mul_(1.0 / self.value)

    def follow(self, stepped: bool) -> None:
        """Change a dynamic scale."""
        if not self._follows or self.value is None:
            return
        self.good = self.good + 1 if stepped else 0
        if not stepped:
            self.value = max(1.0, self.value * 0.5)
        elif self.good == INTERVAL:
            self.value, self.good = self.value * 2.0, 0

    def norm(self) -> Tensor:
        """Of all gradients of the whole model, each once. A collective."""
        norm_type, mine = self.case.how.norm_type, dict[tuple[str, int], float]()
        for slot in self.slots:
            if slot.clipped.grad is not None and slot.clipped.numel():  # some norms of no elements are errors
                part = self.place["tensor"] if slot.role in CUTS else 0
                mine[slot.name, part] = float(slot.clipped.grad.double().norm(norm_type))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        found = {key: value for one in every for key, value in one.items()}
        total: Tensor = torch.tensor(list(found.values()), dtype=torch.float64).norm(norm_type)
        return total

    def train_uneven_step(self, op: Uneven, number: int, iteration: int) -> None:
        """Up to the averages of one iteration; a rank without a batch runs one whose loss does not count."""
        has_joined = op.batches[self.place["data"]] <= iteration
        training = sum(count > iteration for count in op.batches)
        self.weight = 0.0 if has_joined else 1.0
        self.divisor = self.layout.data if op.counts_all else training
        counters = [module for module in self.part.modules() if isinstance(module, Seen)]
        for module in counters:  # DDP sends the buffers of a rank that still trains
            module.train(not has_joined or isinstance(self.model, DistributedDataParallel))
        try:
            self.zero_grad(to_none=True)
            self.backward(Step(), number + iteration)
            self.average()
        finally:
            self.weight, self.divisor = 1.0, self.layout.data
            for module in counters:
                module.train()
        self.unscale()

    def step(self, norm: Tensor | None) -> None:
        """Clip by this norm, and step; parts that meet come back."""
        clip_by(self.case, [slot.clipped for slot in self.slots], norm)
        for slot in self.slots:
            if slot.full is not None:
                slot.full.grad = None if slot.param.grad is None else self._joined(slot.param.grad, slot.role)
        for one in self.optimizers:
            one.step()
        for slot in self.slots:
            if slot.full is not None:
                parts = slot.full.detach().tensor_split(self.layout.tensor, CUTS[slot.role])
                slot.param.data.copy_(parts[self.place["tensor"]])
            if slot.master is not None:
                slot.param.data.copy_(slot.master.detach())

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """A parameter's state; empty if there is none."""
        key, found = slot.stepped, dict[str, Any]()
        for one in self.optimizers:
            if key in one.state:
                found |= one.state[key]
        return found if slot.master is None else {**found, MASTER: slot.master.detach()}

    def set_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Begin with this state, in the dtypes that torch gives it when it loads a state dict."""
        key = slot.stepped
        if slot.master is not None:
            slot.master.data.copy_(state[MASTER])
        state = {
            name: value.to(key.dtype)
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step"
            else value
            for name, value in state.items()
            if name != MASTER
        }
        for one in self.optimizers:
            if state and any(key is param for group in one.param_groups for param in group["params"]):
                one.state[key] = state

    def copy_of(self, other: "Plain") -> "Plain":
        """This one, with the values, states and options of another one at the same layout."""
        self.part.load_state_dict(other.part.state_dict())
        for slot, old in zip(self.slots, other.slots, strict=True):
            if slot.full is not None and old.full is not None:
                slot.full.data.copy_(old.full.detach())
            self.set_state(slot, copy.deepcopy(other.state_of(old)))
        for one, another in zip(self.optimizers, other.optimizers, strict=True):
            for group, old_group in zip(one.param_groups, another.param_groups, strict=True):
                group.update({key: value for key, value in old_group.items() if key != "params"})
        self.value, self.good = other.value, other.good
        return self

    def options(self, role: str) -> list[dict[str, Any]]:
        """The groups of a role, in the plain optimizers."""
        is_muon = role in self.case.how.muon
        if is_muon not in self._kinds:
            return []
        roles = [group.role for group in self.groups if (group.role in self.case.how.muon) == is_muon]
        groups = self._kinds[is_muon].param_groups
        return [group for one, group in zip(roles, groups, strict=True) if one == role]


def clip_by(case: MeshCase, params: Sequence[Any], norm: Tensor | None) -> None:
    """As the loop or the option does."""
    grads = [param.grad for param in params if param.grad is not None]
    if case.how.clip == "value":
        for grad in grads:
            grad.clamp_(-case.how.limit, case.how.limit)
    if norm is not None and case.how.clip in ("option", "loop"):
        total = norm.to(torch.float32 if case.net.dtype in _LOW else getattr(torch, case.net.dtype))
        factor = torch.clamp(case.how.limit / (total + _ADDED), max=1.0)
        for grad in grads:
            grad.mul_(factor)


# One device


class Whole:
    """The whole model with plain optimizers, on the tokens of all ranks."""

    def __init__(self, case: MeshCase, values: Values) -> None:
        self.case = case
        everything = tuple((layer.experts,) for layer in case.net.layers if layer.kind == "experts")
        alone = Layout((1, 1, 1), DIMS, True, (len(case.net.layers),), everything)
        self.part = Part(case, alone, alone.place(0), values)
        self.names = {self.part.whole_name(name): param for name, param in self.part.named_parameters()}
        groups: dict[tuple[str, int], list[nn.Parameter]] = {}
        for name, param in self.names.items():
            if name in case.net.frozen and not case.how.lists_frozen:
                continue
            groups.setdefault((case.role_of(name), 0), []).append(param)
        self._roles = [role for role in ROLES if (role, 0) in groups]
        self._kinds = _plain_optimizers(case, [(role, groups[role, 0]) for role in self._roles])
        self.optimizers = list(self._kinds.values())

    def zero_grad(self, to_none: bool) -> None:
        """Drop or zero gradients."""
        for param in self.names.values():
            if to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()

    def backward(
        self, op: Step, number: int, layout: Layout, places: Sequence[int] | None = None, factor: float = 1.0
    ) -> None:
        """The gradients of the mean over all ranks, or those at these places, and runs; times a factor."""
        case = self.case
        keys = [(run, data) for run in range(op.runs) for data in (range(layout.data) if places is None else places)]
        pairs = [case.tokens_of(number, run, data) for run, data in keys]
        tokens, targets = (torch.tensor([token for pair in pairs for token in pair[place]]) for place in (0, 1))
        factors: dict[str, float] = {}
        for among, layer_number in enumerate(case.expert_layers()):
            routes = [one for run, data in keys for one in case.routes(layout, among, number, run, data)]
            layer: Any = self.part.layers[str(layer_number)]
            layer.routes.clear()
            layer.routes.append((torch.tensor(routes), torch.tensor(routes)))
            if case.how.ddp == "both":  # which divides by the ranks with the same experts
                factors[f"layers.{layer_number}.experts."] = float(len(layout.experts[among]))
        old = {name: param.grad.clone() for name, param in self.names.items() if param.grad is not None}
        (nn.functional.cross_entropy(self.part(tokens), targets) * factor).backward()
        for name, param in self.names.items():
            factor = next((value for prefix, value in factors.items() if name.startswith(prefix)), 1.0)
            if param.grad is not None and factor != 1.0:
                param.grad.sub_(old.get(name, 0.0)).mul_(factor).add_(old.get(name, 0.0))

    def norm(self) -> Tensor:
        """Of all gradients."""
        norm_type = self.case.how.norm_type
        norms = [p.grad.detach().norm(norm_type) for p in self.names.values() if p.grad is not None]
        total: Tensor = torch.stack(norms).norm(norm_type)
        return total.double()

    def step(self, norm: Tensor | None) -> None:
        """Clip by this norm, and step."""
        clip_by(self.case, list(self.names.values()), norm)
        for one in self.optimizers:
            one.step()

    def load_own(self) -> None:
        """Load its own state, which changes dtypes as in the other runs."""
        for one in self.optimizers:
            one.load_state_dict(one.state_dict())

    def options(self, role: str) -> list[Mapping[str, Any]]:
        """The groups of a role."""
        is_muon = role in self.case.how.muon
        if is_muon not in self._kinds:
            return []
        roles = [one for one in self._roles if (one in self.case.how.muon) == is_muon]
        return [g for one, g in zip(roles, self._kinds[is_muon].param_groups, strict=True) if one == role]
