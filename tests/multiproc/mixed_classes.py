"""A language model whose matrices Muon steps and AdamW the rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tests.multiproc.cases import assert_equal_models, step_on, sum_in_rank_order
from tests.multiproc.harness import Setup

CAP = 0.01  # MiB: several buckets, some with matrices and cut parameters
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}


class Language(nn.Module):
    """Tokens to scores of tokens: embeddings, blocks of matrices, norms, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(150, 16)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16)) for _ in range(3)]
        )
        self.head = nn.Linear(16, 150)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return result


def language() -> Language:
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    model = Language()
    torch.random.set_rng_state(state)
    return model


def is_matrix(name: str, param: Tensor) -> bool:
    return "blocks" in name and param.ndim == 2


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if is_matrix(name, param)]
    rest = [param for name, param in named if not is_matrix(name, param)]
    return [{"params": rest}, {"params": matrices, "optimizer_class": torch.optim.Muon, **MUON}]


class Pair:
    """The plain optimizers of a loop without this library."""

    def __init__(self, model: nn.Module) -> None:
        rest, matrices = (group["params"] for group in groups_of(model))
        self.adamw, self.muon = AdamW(rest, lr=3e-3), torch.optim.Muon(matrices, **MUON)

    def step(self) -> None:
        self.adamw.step()
        self.muon.step()

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        self.muon.zero_grad()


def ddp_of(model: nn.Module, stage: int, is_plain: bool = False, **options: Any) -> DistributedDataParallel:
    options = {"bucket_cap_mb": CAP, "gradient_as_bucket_view": stage == 2} | options
    ddp = DistributedDataParallel(model, **options)
    if is_plain and stage == 2 and dist.get_world_size() > 2:
        ddp.register_comm_hook(None, sum_in_rank_order)
    return ddp


def train(setup: Setup, models: list[nn.Module], optimizers: list[Any], steps: int, first: int = 0) -> None:
    """Train all on the same data, comparing with the first after every step."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + setup.rank)
        tokens = torch.randint(0, 150, (2, 12), generator=generator)
        for model, opt in zip(models, optimizers, strict=True):
            scores = model(tokens[:, :-1])
            step_on(opt, nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()))
        for model in models[1:]:
            assert_equal_models(models[0], model, f"after step {step}")


def assert_moved(model: nn.Module) -> None:
    pairs = zip(language().parameters(), model.parameters(), strict=True)
    assert all(not torch.equal(before, after) for before, after in pairs)
