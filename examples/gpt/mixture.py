"""A GPT whose perceptrons are mixtures of experts, which are spread over ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gpt.model import GPT, Block

BALANCE = 0.01  # the weight of the loss that keeps experts equally busy


class Exchange(Function):
    """Sends rows to the ranks of a group and receives theirs; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        """Exchange rows, ``sent[r]`` of them with rank ``r`` of the group, which sends ``received[r]``."""
        ctx.sizes, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Exchange gradients."""
        sent, received = ctx.sizes
        rows = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(rows, grads[0].contiguous(), sent, received, group=ctx.group)
        return rows, None, None, None


class Mixture(nn.Module):
    """A mixture of experts; each token goes to one of them.

    Args:
        width: width of a token.
        experts: number of experts; equally many on each rank of the group.
        group: the ranks that together hold one of each expert.
    """

    def __init__(self, width: int, experts: int, group: ProcessGroup) -> None:
        super().__init__()
        self.total, self.group, self.parts = experts, group, dist.get_world_size(group)
        self.here = experts // self.parts
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(_experts(width, experts)[dist.get_rank(group) * self.here :][: self.here])
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape (..., width); sets ``balance``, a loss that is 1 if experts are equally busy."""
        tokens = x.flatten(0, -2)
        scores = self.gate(tokens).softmax(dim=1)
        weight, chosen = scores.max(dim=1)
        counts = torch.bincount(chosen, minlength=self.total)
        self.balance = self.total * (counts / len(tokens) * scores.mean(dim=0)).sum()
        order = chosen.argsort(stable=True)
        every = [torch.empty_like(counts) for _ in range(self.parts)]
        dist.all_gather(every, counts, group=self.group)
        first = dist.get_rank(self.group) * self.here
        received = torch.stack(every)[:, first : first + self.here]  # by rank and expert
        sent, into = counts.view(self.parts, -1).sum(1).tolist(), received.sum(1).tolist()
        arrived: Tensor = Exchange.apply(tokens[order], sent, into, self.group)  # type: ignore[no-untyped-call]
        number = torch.arange(self.here).repeat(self.parts).repeat_interleave(received.flatten())
        results = arrived * 0  # also without a token, so that backward sends gradients back
        for index, expert in enumerate(self.experts):
            places = (number == index).nonzero().flatten()
            results = results.index_copy(0, places, expert(arrived[places]))
        back: Tensor = Exchange.apply(results, into, sent, self.group)  # type: ignore[no-untyped-call]
        mixed = torch.zeros_like(tokens).index_copy(0, order, back)
        result: Tensor = (mixed * weight[:, None]).view_as(x)
        return result


class MixtureBlock(Block):
    """A transformer block with a `Mixture` in place of the perceptron."""

    def __init__(self, width: int, heads: int, experts: int, group: ProcessGroup) -> None:
        super().__init__(width, heads)
        del self.expand, self.contract
        self.mixture = Mixture(width, experts, group)

    def transform(self, x: Tensor) -> Tensor:
        """Apply the experts."""
        result: Tensor = self.mixture(x)
        return result


class MixtureGPT(GPT):
    """A GPT of such blocks."""

    def __init__(self, context: int, layers: int, width: int, heads: int, experts: int, group: ProcessGroup) -> None:
        super().__init__(context, layers, width, heads)
        self.blocks = nn.Sequential(*(MixtureBlock(width, heads, experts, group) for _ in range(layers)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss, in nats per byte, plus a loss that keeps experts equally busy."""
        loss = super().forward(inputs, targets)
        balances = [block.mixture.balance for block in self.blocks if isinstance(block, MixtureBlock)]
        return loss + BALANCE * torch.stack(balances).mean()


def is_of_an_expert(name: str) -> bool:
    """True if only some ranks hold a parameter."""
    return ".experts." in name


def _experts(width: int, count: int) -> list[nn.Module]:
    """All experts, drawn alike on every rank."""
    return [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)]


def evaluate_loss(model: nn.Module, batches: Any) -> float:
    """The mean loss on batches of inputs and targets."""
    with torch.no_grad():
        losses = [F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten()) for x, y in batches]  # type: ignore[operator]
    return torch.stack(losses).mean().item()
