"""One of the three runs of a case: ours, the same parallel model with plain optimizers, or the whole on one device."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import DynamicLossScale, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.fuzz.mesh.case import CUTS, DIMS, ROLES, Evaluate, Layout, MeshCase, Step
from tests.fuzz.mesh.net import Mixture, Part, Values
from tests.fuzz.toys import find_optimizer
from tests.multiproc.cases import sum_in_rank_order

FIRST_SCALE, INTERVAL = 1024.0, 2
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}
_ADDED = 1e-6  # to a norm, by torch.nn.utils.clip_grad_norm_


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


@cache
def _group(ranks: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """The group among these that has this rank."""
    found = None
    for members in ranks:
        group = dist.new_group(list(members))
        found = group if dist.get_rank() in members else found
    return found


@cache
def _grid(sizes: tuple[int, int, int], order: tuple[str, ...], is_bare: bool) -> Grid:
    layout = Layout(sizes, order, is_bare)
    names = tuple(dim for dim in order if dim == "data" or layout.size(dim) > 1 or not is_bare)
    is_alone = is_bare and names == ("data",)
    mesh = None if is_alone else init_device_mesh("cpu", tuple(map(layout.size, names)), mesh_dim_names=names)
    own = {dim: mesh.get_group(dim) for dim in names} if mesh is not None else {"data": _world()}
    ends: Any = None
    if layout.pipe > 1:
        last = layout.pipe - 1
        ends = _group(
            tuple(
                tuple(sorted(layout.rank(data=d, pipe=p, tensor=t) for d in range(layout.data) for p in (0, last)))
                for t in range(layout.tensor)
            )
        )
        if layout.place(dist.get_rank())["pipe"] not in (0, last):
            ends = None
    tensor = own.get("tensor") if layout.tensor > 1 else None
    pipe = own.get("pipe") if layout.pipe > 1 else None
    return Grid(mesh, layout.place(dist.get_rank()), own["data"], tensor, pipe, ends, names)


def grid_of(layout: Layout) -> Grid:
    """This rank's groups at a layout."""
    return _grid(layout.sizes, layout.order, layout.is_bare)


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


# Parameters and groups


@dataclass
class Slot:
    """A parameter of this rank.

    ``param`` is stepped: the given one, or this rank's part of a distributed tensor, in its memory. ``full`` is the
    whole of one whose parts meet.
    """

    name: str
    own_name: str
    role: str
    given: Any
    param: nn.Parameter
    full: nn.Parameter | None = None

    @property
    def stepped(self) -> nn.Parameter:
        """What a plain optimizer steps."""
        return self.param if self.full is None else self.full

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

    def _wrapped(self) -> nn.Module:
        how, part = self.case.how, self.part
        self.inner: list[DistributedDataParallel] = []
        if how.ddp == "none":
            return part
        options: dict[str, Any] = {"bucket_cap_mb": how.cap, "gradient_as_bucket_view": True}
        for layer in self.part.layers.values():
            if isinstance(layer, Mixture) and how.ddp == "both":
                more: dict[str, Any] = {"find_unused_parameters": self.case.net.idle == "unused"}
                layer.experts = DistributedDataParallel(layer.experts, process_group=self._same[0], **options, **more)
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
        for role in ROLES:
            numbers = range(len(expert_layers)) if role == "experts" else range(1)
            for number in numbers:
                slots, ranks, reduced = found.get((role, number), []), None, case.how.ddp != "none"
                if role == "experts":
                    ranks, reduced = self._same[number], case.how.ddp == "both"
                elif role == "embedding" and self._is_shared:
                    ranks, reduced = self.grid.ends, False
                    if not slots:
                        continue  # stages between the ends are not among those ranks
                if slots or (case.how.has_empty and role != "experts"):
                    groups.append(Group(role, slots, ranks, reduced))
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
        loss: Tensor = nn.functional.cross_entropy(scores, targets)
        return self.scale(loss / self._parts)

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
    """With a `ParallelOptimizer`; a learning rate is one unit in the last place off if a mistake is injected."""

    def __init__(
        self, case: MeshCase, layout: Layout, values: Values, frozen: set[str], injects: str | None = None
    ) -> None:
        super().__init__(case, layout, values, frozen)
        how, grid = case.how, self.grid
        kind = find_optimizer(how.name)
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            own: dict[str, Any] = options_of(case, group.role)
            if group.ranks is not None:
                own["process_group"] = group.ranks
            if group.role in CUTS and "tensor" in grid.names and not case.net.by_tensor:
                own["sharded_over"] = {"tensor": CUTS[group.role]}
            if group.role in how.muon:
                own["optimizer_class"] = torch.optim.Muon
            params: list[Any] = [(slot.own_name, slot.given) if how.named else slot.given for slot in group.slots]
            groups.append({"params": params, **own})
        arguments: dict[str, Any] = {"data_parallel_group": grid.data}
        if grid.mesh is not None:
            arguments = {"mesh": grid.mesh, "data_parallel_dim": "data"}
            arguments |= {"pipeline_dim": "pipe"} if "pipe" in grid.names else {}
        if how.renames:
            arguments["global_names"] = self.part.names
        for key in ("stage", "overlap", "partition", "nonfinite", "sync"):
            arguments[key] = getattr(how, key)
        if how.clip == "option":
            arguments |= {"max_grad_norm": how.limit, "norm_type": how.norm_type}
        if how.loss_scale is not None:
            is_dynamic = how.loss_scale == "dynamic"
            policy = DynamicLossScale(initial=FIRST_SCALE, growth_interval=INTERVAL)
            arguments["loss_scale"] = policy if is_dynamic else how.loss_scale
        self.opt: Any = shard_optimizer(self.model, kind.build, groups, **arguments, **kind.options)
        assert isinstance(self.opt, ParallelOptimizer)
        if injects == "lr":
            for one in self.opt.param_groups:
                one["lr"] = one["lr"] * (1 + 2.0**-52) if case.net.dtype == "float64" else one["lr"] * (1 + 2.0**-23)
        if how.loss_scale is not None:
            self.scale = self.opt.scale

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """No step is taken meanwhile."""
        found: contextlib.AbstractContextManager[Any] = self.opt.accumulate()
        return found

    def step(self) -> Tensor | None:
        """Clip if the loop does, and step; the norm, if one was found."""
        how, found = self.case.how, None
        if how.clip == "loop":
            found = self.opt.clip_grad_norm_(how.limit, how.norm_type)
        elif how.clip == "value":
            self.opt.clip_grad_value_(how.limit)
        self.opt.step()
        if how.sync == "forward":
            self.opt.finish_sync()
        if how.clip == "option" and self.opt.last_step.stepped:
            found = self.opt.last_step.grad_norm
        return None if found is None else torch.as_tensor(found, dtype=torch.float64)


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


class Plain(Side):
    """With plain optimizers; whatever DDP does not reduce is reduced by hand, and parts that must meet, too."""

    def __init__(self, case: MeshCase, layout: Layout, values: Values, frozen: set[str]) -> None:
        super().__init__(case, layout, values, frozen)
        how = case.how
        if how.stage == 2 and how.ddp != "none":
            for ddp in (self.model, *self.inner):
                if isinstance(ddp, DistributedDataParallel):
                    ddp.register_comm_hook(ddp.process_group, sum_in_rank_order)
        for slot in self.slots:
            if self.meets(slot.role):
                slot.full = nn.Parameter(self._joined(slot.param.detach(), slot.role))
        self._kinds = _plain_optimizers(
            case, [(group.role, [slot.stepped for slot in group.slots]) for group in self.groups]
        )
        self.optimizers = list(self._kinds.values())
        is_dynamic, given = how.loss_scale == "dynamic", how.loss_scale
        self.value: float | None = FIRST_SCALE if is_dynamic else given  # type: ignore[assignment]
        self.good = 0
        self.scale = lambda loss: loss if self.value is None else loss * self.value

    def meets(self, role: str) -> bool:
        """Whether parts of a group's parameters are stepped whole."""
        needs = self.case.how.name == "toy LAMB" or role in self.case.how.muon
        return needs and role in CUTS and self.layout.tensor > 1

    def _joined(self, part: Tensor, role: str) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.layout.tensor)]
        dist.all_gather(parts, part.contiguous(), group=self.grid.tensor)
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
            flat.mul_(1.0 / self.layout.data)
            dist.all_reduce(flat, group=ranks)
            for param, part in zip(used, flat.split([param.numel() for param in used]), strict=True):
                param.grad = part.view(param.shape).clone()

    def is_finite(self) -> bool:
        """Whether all gradients of all ranks are. A collective."""
        grads = [slot.param.grad for slot in self.slots if slot.param.grad is not None]
        bad = torch.tensor([float(not all(bool(grad.isfinite().all()) for grad in grads))])
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return not bad.item()

    def unscale(self) -> None:
        """Divide the loss scale out."""
        for slot in self.slots:
            if slot.param.grad is not None and self.value is not None:
                slot.param.grad.mul_(1.0 / self.value)

    def follow(self, stepped: bool) -> None:
        """Change a dynamic scale."""
        if self.case.how.loss_scale != "dynamic" or self.value is None:
            return
        self.good = self.good + 1 if stepped else 0
        if not stepped:
            self.value = max(1.0, self.value * 0.5)
        elif self.good == INTERVAL:
            self.value, self.good = self.value * 2.0, 0

    def step(self, norm: Tensor | None) -> None:
        """Clip by this norm, and step; parts that meet come back."""
        clip_by(self.case, [slot.param for slot in self.slots], norm)
        for slot in self.slots:
            if slot.full is not None:
                slot.full.grad = None if slot.param.grad is None else self._joined(slot.param.grad, slot.role)
        for one in self.optimizers:
            one.step()
        for slot in self.slots:
            if slot.full is not None:
                parts = slot.full.detach().tensor_split(self.layout.tensor, CUTS[slot.role])
                slot.param.data.copy_(parts[self.place["tensor"]])

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """A parameter's state; empty if there is none."""
        key = slot.stepped
        return next((dict(one.state[key]) for one in self.optimizers if key in one.state), {})

    def set_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Begin with this state, in the dtypes that torch gives it when it loads a state dict."""
        key = slot.stepped
        state = {
            name: value.to(key.dtype)
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step"
            else value
            for name, value in state.items()
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
        total = norm.to(getattr(torch, case.net.dtype))
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

    def backward(self, op: Step, number: int, layout: Layout) -> None:
        """The gradients of the mean over all ranks and runs."""
        case = self.case
        keys = [(run, data) for run in range(op.runs) for data in range(layout.data)]
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
        nn.functional.cross_entropy(self.part(tokens), targets).backward()
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
