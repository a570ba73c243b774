"""This rank's part of a case's model, or all of it: one code, so that one device differs by the order of sums only."""

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.fuzz.late_values import read_again
from tests.fuzz.mesh.case import CUTS, Layer, Layout, MeshCase
from tests.multiproc.cut_models import SumInBackward, SumInForward

Values = Mapping[str, Tensor]
"""Parameters and buffers by their names in the whole model, whole."""


def piece(case: MeshCase, name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A tensor-parallel rank's part of a value, or of a state of its shape."""
    dim = CUTS.get(case.role_of(name)) if whole.dim() else None
    return whole.clone() if dim is None else whole.tensor_split(ranks, dim)[rank].clone()


class _Gather(torch.autograd.Function):
    """Rows of all ranks, in rank order; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks; gradients of all ranks' rows are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Seen(nn.Module):
    """Counts forward passes in training, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("count").add_(1)
        return x


class Block(nn.Module):
    """Two matrices with tanh between them, around which rows pass by: whole, or cut by hand over a group."""

    def __init__(self, width: int, hidden: int, layer: Layer, cut: ProcessGroup | None = None, passes: bool = True):
        super().__init__()
        self.before = nn.Sequential(*([Seen()] if layer.buffer else []))
        self.norm = nn.LayerNorm(width) if layer.norm else nn.Identity()
        self.up, self.down = nn.Linear(width, hidden, bias=layer.bias), nn.Linear(hidden, width, bias=layer.bias)
        self.cut, self.passes = cut, passes
        self.late_value: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late_value is not None:
            x = read_again(self.late_value, x, self.norm.get_parameter("weight")) * 0.25
        rows = self.norm(self.before(x))
        if self.cut is None:
            result: Tensor = self.down(torch.tanh(self.up(rows)))
        else:
            rows = SumInBackward.apply(rows, self.cut)  # type: ignore[no-untyped-call]
            partial = torch.tanh(self.up(rows)) @ self.down.weight.T
            result = SumInForward.apply(partial, self.cut)  # type: ignore[no-untyped-call]
            result = result if self.down.bias is None else result + self.down.bias
        return x + result if self.passes else result


class Experts(nn.Module):
    """Some experts, and the exchange of rows with the ranks that hold the others; it may become a DDP model's module.

    Args:
        case: with the model.
        layer: its layer.
        numbers: of the experts here, in the whole layer.
        group: the ranks that hold one copy of all; None: all are here.
    """

    def __init__(self, case: MeshCase, layer: Layer, numbers: range, group: ProcessGroup | None) -> None:
        super().__init__()
        bare = Layer(bias=layer.bias)
        first = 0 if case.how.renames else numbers.start
        blocks = {
            str(first + place): Block(case.net.width, layer.hidden + number, bare, passes=False)
            for place, number in enumerate(numbers)
        }
        self.local = nn.ModuleDict(blocks)
        self.numbers, self.group = numbers, group
        self.runs_empty = case.how.ddp == "both" and case.net.idle == "empty"

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        every: Tensor = rows if self.group is None else _Gather.apply(rows, self.group)  # type: ignore[no-untyped-call]
        results = every * 0  # also where no row has arrived, backward must exchange gradients
        for number, expert in zip(self.numbers, self.local.values(), strict=True):
            places = (chosen == number).nonzero().flatten()
            if len(places) or self.runs_empty:
                results = results.index_add(0, places, expert(every[places]))
        if self.group is not None:
            results = _Scatter.apply(results, self.group)  # type: ignore[no-untyped-call]
        return results


class Mixture(nn.Module):
    """A gate, and experts chosen by the case; `routes` has one entry per forward pass to come."""

    def __init__(self, case: MeshCase, layer: Layer, experts: Experts) -> None:
        super().__init__()
        self.gate = nn.Linear(case.net.width, layer.experts, bias=layer.bias)
        self.experts: nn.Module = experts
        self.routes: deque[tuple[Tensor, Tensor]] = deque()

    def forward(self, x: Tensor) -> Tensor:
        own, every = self.routes.popleft()
        weight = self.gate(x).softmax(dim=1).gather(1, own[:, None])
        result: Tensor = x + weight * self.experts(x, every)
        return result


class Part(nn.Module):
    """The layers of one pipeline stage, with this rank's parts of matrices and this rank's experts.

    Args:
        case: with the model.
        layout: of the ranks; of one rank for the whole model.
        place: this rank's coordinates.
        tensor: the group over which matrices are cut, or None.
        spread: for each layer of experts, the ranks that hold a copy of all, or None.
        mesh: of the tensor dimension alone, if cut layers are distributed tensors.
        values: what parameters and buffers begin with.
    """

    def __init__(
        self,
        case: MeshCase,
        layout: Layout,
        place: Mapping[str, int],
        values: Values,
        tensor: ProcessGroup | None = None,
        spread: tuple[ProcessGroup | None, ...] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        net, stage = case.net, place["pipe"]
        self.is_first, self.is_last = stage == 0, stage == layout.pipe - 1
        has_table = self.is_first or (self.is_last and net.tied)
        self.embedding = nn.Parameter(torch.empty(net.tokens, net.width)) if has_table else None
        self.head = nn.Parameter(torch.empty(net.tokens, net.width)) if self.is_last and not net.tied else None
        self.layers = nn.ModuleDict()
        expert_layers = case.expert_layers()
        self.names: dict[str, str] = {}
        for number in layout.layers_of(stage):
            layer = net.layers[number]
            if layer.kind == "experts":
                place_among = expert_layers.index(number)
                numbers = layout.experts_of(place_among, place["data"])
                group = spread[place_among] if spread else None
                self.layers[str(number)] = Mixture(case, layer, Experts(case, layer, numbers, group))
                if case.how.renames:
                    shift = {f"layers.{number}.experts.local.{i}": i + numbers.start for i in range(len(numbers))}
                    self.names |= {name: f"{name.rpartition('.')[0]}.{to}" for name, to in shift.items()}
                continue
            is_cut, rank, ranks = layer.kind == "cut", place["tensor"], layout.tensor
            is_by_hand = is_cut and mesh is None
            hidden = _share(layer.hidden, rank, ranks) if is_by_hand else layer.hidden
            block = Block(net.width, hidden, layer, tensor if is_by_hand else None)
            block.late_value = net.late_value if layer.norm else None
            self.layers[str(number)] = block
        self.to(getattr(torch, net.dtype))
        self._begin(case, values, 0 if mesh is not None else place["tensor"], 1 if mesh is not None else layout.tensor)
        if mesh is not None:
            for number in layout.layers_of(stage):
                if net.layers[number].kind == "cut":
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(self.layers[str(number)], mesh, plan)

    def whole_name(self, name: str) -> str:
        """A name of this module in the whole model; DDP models inside do not show."""
        name = name.replace(".module.", ".")
        for here, there in self.names.items():
            if name.startswith(here + "."):
                return there + name[len(here) :]
        return name

    def _begin(self, case: MeshCase, values: Values, rank: int, ranks: int) -> None:
        with torch.no_grad():
            for name, param in self.named_parameters():
                whole = self.whole_name(name)
                param.copy_(piece(case, whole, values[whole], rank, ranks))
                param.requires_grad_(whole not in case.net.frozen)
            for name, buffer in self.named_buffers():
                buffer.copy_(values.get(name, buffer))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.embedding(x, self.embedding) if self.is_first and self.embedding is not None else x
        for layer in self.layers.values():
            rows = layer(rows)
        if not self.is_last:
            return rows
        table = self.embedding if self.head is None else self.head
        assert table is not None
        return rows @ table.T


def _share(count: int, rank: int, ranks: int) -> int:
    return count // ranks + (rank < count % ranks)


def first_values(case: MeshCase) -> dict[str, Tensor]:
    """All parameters of the whole model, different in each, and equal wherever it is called."""
    dtype, found = getattr(torch, case.net.dtype), {}
    for name, shape in case.shapes().items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {name}".encode()))
        value = torch.randn(shape, generator=generator, dtype=torch.float64) / max(1, shape[-1]) ** 0.5
        found[name] = (value + ("norm.weight" in name)).to(dtype)
    return found
