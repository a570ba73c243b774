"""Small networks for the scripts."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block, causal or not: (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, is_causal: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.heads, self.is_causal = heads, is_causal

    def forward(self, inputs: Tensor) -> Tensor:
        batch, time, width = inputs.shape
        parts = self.attend(self.norm_1(inputs)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.is_causal)
        inputs = inputs + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))
        output: Tensor = inputs + self.dropout(self.mlp(self.norm_2(inputs)))
        return output


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ConvNet(nn.Module):
    """A classifier of 8 x 8 images with batch normalisation: (batch, 3, 8, 8) to (batch, classes)."""

    def __init__(self, classes: int, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.stem(images)).mean((2, 3)))
        return logits


def images(batch: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images whose brightness tells their class."""
    labels = torch.randint(classes, (batch,), generator=generator)
    return torch.randn(batch, 3, 8, 8, generator=generator) + 0.3 * labels[:, None, None, None], labels
