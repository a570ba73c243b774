"""A mixture of experts whose experts are spread over ranks, for tests; and the same model whole."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8


class Exchange(torch.autograd.Function):
    """Rows to ranks and rows from ranks, as many as the lists say; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received = ctx.sizes
        rows = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(rows, grads[0].contiguous(), sent, received, group=ctx.group)
        return rows, None, None, None


class Experts(nn.Module):
    """The experts of this rank, and the exchange of tokens with the ranks that hold the others.

    Args:
        numbers: of the experts here, out of ``total``.
        total: how many experts there are; every rank of the group holds as many.
        group: the ranks that hold one copy of all experts; None: all are here.
    """

    def __init__(self, numbers: range, total: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self.total, self.group = total, group
        self.runs_empty = False  # experts without a token, too, as a DDP model over them requires
        self.local = nn.ModuleList(_expert(number) for number in numbers)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.total)
        sent, received = tokens[order], counts[None]
        if self.group is not None:
            parts = dist.get_world_size(self.group)
            every = [torch.empty_like(counts) for _ in range(parts)]
            dist.all_gather(every, counts, group=self.group)
            mine = slice(dist.get_rank(self.group) * len(self.local), (dist.get_rank(self.group) + 1) * len(self.local))
            received = torch.stack(every)[:, mine]
            out, into = counts.view(parts, -1).sum(1).tolist(), received.sum(1).tolist()
            arrived = Exchange.apply(sent, out, into, self.group)  # type: ignore[no-untyped-call]
        else:
            arrived = sent
        results = arrived * 0  # also where no token has arrived, backward must send gradients back
        number = torch.arange(len(self.local)).repeat(len(received)).repeat_interleave(received.flatten())
        for index, expert in enumerate(self.local):
            places = (number == index).nonzero().flatten()
            if len(places) or self.runs_empty:
                results = results.index_copy(0, places, expert(arrived[places]))
        if self.group is not None:
            results = Exchange.apply(results, into, out, self.group)  # type: ignore[no-untyped-call]
        return torch.zeros_like(tokens).index_copy(0, order, results)


class Mixture(nn.Module):
    """A dense layer, a gate and experts, and a dense layer; the same weights on every rank and in every cut."""

    def __init__(self, numbers: range, total: int, group: ProcessGroup | None = None) -> None:
        super().__init__()
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        self.enter, self.gate, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, total), nn.Linear(WIDTH, 3)
        self.gate.weight.data.mul_(4)
        torch.random.set_rng_state(state)
        self.experts = Experts(numbers, total, group)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(inputs))
        weight, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
        result: Tensor = self.leave(hidden + weight[:, None] * self.experts(hidden, chosen))
        return result


def _expert(number: int) -> nn.Module:
    state = torch.random.get_rng_state()
    torch.manual_seed(100 + number)
    expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
    torch.random.set_rng_state(state)
    return expert


def expert_groups(
    rank: int, world_size: int, expert_ranks: int, backend: str | None = None
) -> tuple[ProcessGroup, ProcessGroup]:
    """This rank's group of ranks with other experts, and of those with the same; every rank calls it."""
    found: list[Any] = [None, None]
    spread = [range(start, start + expert_ranks) for start in range(0, world_size, expert_ranks)]
    same = [range(start, world_size, expert_ranks) for start in range(expert_ranks)]
    for place, groups in enumerate((spread, same)):
        for members in groups:
            group = dist.new_group(list(members), backend=backend)
            if rank in members:
                found[place] = group
    return found[0], found[1]


def cut_mixture(rank: int, expert_ranks: int, total: int, group: ProcessGroup) -> Mixture:
    """The part of the model that a rank holds."""
    each = total // expert_ranks
    first = rank % expert_ranks * each
    return Mixture(range(first, first + each), total, group)


def wrapped_without_experts(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP model that leaves the experts' parameters alone."""
    ignored = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)


def dense_and_experts(model: nn.Module, group: ProcessGroup) -> list[dict[str, Any]]:
    """Parameter groups with the experts' process group."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if "experts." not in name]},
        {"params": [(name, param) for name, param in named if "experts." in name], "process_group": group},
    ]
