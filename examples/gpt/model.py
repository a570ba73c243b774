"""The model: a small GPT over bytes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte
TEMPERATURE = 0.7


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape (batch, positions, width) into a result of the same shape."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.transform(self.norm_2(x))

    def transform(self, x: Tensor) -> Tensor:
        """Apply the perceptron."""
        result: Tensor = self.contract(F.gelu(self.expand(x)))
        return result


class GPT(nn.Module):
    """A transformer that predicts the next byte. The embedding of bytes is also the output layer."""

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, param in self.named_parameters():
            if param.ndim >= 2:
                ends_a_branch = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(param, std=0.5 / math.sqrt(2 * layers * width if ends_a_branch else width))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss, in nats per byte."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1).float(), targets.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        """Score every byte as the next one, at every position."""
        here = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.tokens(inputs) + self.positions(here))
        return F.linear(self.norm(x), self.tokens.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, seed: int) -> bytes:
        """Return ``prompt`` and the ``count`` bytes that the model adds, or fewer if the model has diverged."""
        device = self.tokens.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)], device=device)
        for _ in range(count):
            scores = self.logits(text[:, -self.context :])[:, -1].float().cpu()
            if not scores.isfinite().all():
                break
            drawn = torch.multinomial(F.softmax(scores / TEMPERATURE, dim=-1), 1, generator=generator)
            text = torch.cat([text, drawn.to(device)], dim=1)
        return bytes(text[0].tolist())
