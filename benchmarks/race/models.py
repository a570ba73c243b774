"""Models of `compare`, which return their loss, and the data for them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt.model import GPT, VOCABULARY

Batch = tuple[Tensor, ...]


class Residual(nn.Module):
    """Small linear layers, each added to its input."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        """One layer after the other; their results are scaled so that many of them stay small."""
        for layer in self.layers:
            inputs = torch.add(inputs, layer(inputs), alpha=0.01)
        return inputs


class ManySmall(nn.Module):
    """Blocks of small layers: work per parameter takes most of the time."""

    def __init__(self, blocks: int, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(layers, width) for _ in range(blocks)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.blocks(inputs), targets)


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        build: builds the model, from torch's random numbers; FSDP shards its ``blocks`` one by one.
        draw: draws a batch of so many samples.
        sample: unit of a sample, in words.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    sample: str


def draw_tokens(context: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Inputs and targets of `GPT`."""
    tokens = torch.randint(VOCABULARY, (batch_size, context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def draw_vectors(width: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Inputs and targets of `ManySmall`."""
    vectors = torch.randn(2, batch_size, width, generator=generator)
    return vectors[0], vectors[1]


def gpt(context: int, layers: int, width: int, heads: int) -> Task:
    """The model of ``examples/train_gpt.py``."""
    build = partial(GPT, context=context, layers=layers, width=width, heads=heads)
    return Task(build, partial(draw_tokens, context), f"{context} tokens")


def many_small(blocks: int, layers: int, width: int) -> Task:
    """Two tensors per layer."""
    build = partial(ManySmall, blocks=blocks, layers=layers, width=width)
    return Task(build, partial(draw_vectors, width), f"{width} numbers")


MODELS = {
    "26m": gpt(context=64, layers=8, width=512, heads=8),
    "87m": gpt(context=64, layers=12, width=768, heads=12),
    "8m": gpt(context=64, layers=4, width=400, heads=8),
    "small": gpt(context=32, layers=2, width=64, heads=2),
    "many": many_small(blocks=20, layers=50, width=32),
    "tiny": gpt(context=16, layers=1, width=32, heads=2),
}
