"""Models cut along a tensor-parallel dimension by hand, and into pipeline stages, for tests; and the same whole."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_zero import hook_with_zero_step
from tests.multiproc.cases import Twins, assert_equal_models
from tests.multiproc.harness import Setup


class SumInForward(torch.autograd.Function):
    """A sum over ranks in forward; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class SumInBackward(torch.autograd.Function):
    """Passes in forward; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class CutBlock(nn.Module):
    """LayerNorm, a matrix cut by columns, tanh, one cut by rows, and a bias that every rank holds.

    Args:
        group: the ranks that share it; None: it is whole.
        seed: of the whole weights.
        sizes: of the parts of the hidden dimension, by rank; None: equal parts of 16.
    """

    def __init__(self, group: ProcessGroup | None = None, seed: int = 0, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        parts, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        sizes = [16 // parts] * parts if sizes is None else list(sizes)
        hidden = sum(sizes)
        up, down = (torch.randn(shape, generator=generator) / 3 for shape in ((hidden, 8), (8, hidden)))
        self.group = group
        self.norm = nn.LayerNorm(8)
        self.up = nn.Parameter(up.split(sizes, dim=0)[rank].clone())
        self.down = nn.Parameter(down.split(sizes, dim=1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.group is not None:
            hidden = SumInBackward.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        result: Tensor = torch.tanh(hidden @ self.up.T) @ self.down.T
        if self.group is not None:
            result = SumInForward.apply(result, self.group)  # type: ignore[no-untyped-call]
        return x + result + self.bias


def gather_parts(parts: Sequence[Tensor], group: ProcessGroup) -> list[list[Tensor]]:
    """Of tensors of which every rank of a group has a part, the parts of all ranks, in rank order: one collective.

    They travel as numbers: a pickled tensor brings the whole storage that it is a view of.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, [(part.tolist(), tuple(part.shape)) for part in parts], group=group)
    return [
        [torch.tensor(numbers, dtype=part.dtype).view(shape) for numbers, shape in theirs]
        for part, *theirs in zip(parts, *of_ranks, strict=True)
    ]


def is_cut(name: str) -> bool:
    """Whether a parameter of a `CutBlock` is cut."""
    return name.endswith(("up", "down"))


class FirstStage(nn.Module):
    """Tokens to vectors by an embedding that the last stage shares, and a block."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.embedding = embedding()
        self.block = CutBlock(group, seed=1)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.block(nn.functional.embedding(tokens, self.embedding))
        return result


class MiddleStage(nn.Module):
    """A block."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.block = CutBlock(group, seed=4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        return result


class LastStage(nn.Module):
    """A block, and scores of tokens by the embedding of the first stage."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.block = CutBlock(group, seed=2)
        self.embedding = embedding()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x) @ self.embedding.T
        return result


class Whole(nn.Module):
    """Both stages on one device, with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = FirstStage(), LastStage()
        self.last.embedding = self.first.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(tokens))
        return result


def embedding() -> nn.Parameter:
    """The same on every rank."""
    return nn.Parameter(torch.randn(11, 8, generator=torch.Generator().manual_seed(3)) / 3)


def token_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Eight tokens, and the ones that follow; different on every data-parallel rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (8,), generator=generator), torch.randint(0, 11, (8,), generator=generator)


CUT: dict[str, Any] = {"partition": "elements"}
CAP = 0.006  # MiB: several buckets, most of which cut a parameter


def large_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """As `build_model`, but with parameters that are worth cutting, some of them of odd sizes."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 67), nn.Tanh(), nn.LayerNorm(67), nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 3))
    torch.random.set_rng_state(state)
    return model.to(dtype)


def grow_and_train(twins: Twins, setup: Setup, cap: float, where: str) -> None:
    """Append a layer in a parameter group of its own, wrap both again with buckets of this cap, and compare steps."""
    for ddp in (twins.plain_model, twins.model):
        ddp.module.append(nn.Linear(3, 97, bias=False))
        nn.init.constant_(ddp.module[6].weight, 0.01)
    twins.zero_grad()
    twins.opt.reset()
    twins.wrap_again(bucket_cap_mb=cap)
    twins.plain.add_param_group({"params": [twins.plain_model.module[6].weight], "lr": 1e-3})
    twins.opt.add_param_group({"params": [twins.model.module[6].weight], "lr": 1e-3})
    twins.model.register_comm_hook(None, hook_with_zero_step(None, twins.model, twins.opt, True))
    for step in range(4):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + setup.rank))
        for ddp, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        assert_equal_models(twins.plain_model, twins.model, f"{where}, step {step}")
