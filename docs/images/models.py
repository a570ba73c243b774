"""Models of the pictures: functions that return one, to be called on the meta device."""

from torch import nn


def gpt_1b() -> nn.Module:
    """The weights of a transformer with 1.3 billion parameters: 24 layers of width 2048, 50,257 tokens."""
    width = 2048
    layers: list[nn.Module] = [nn.Embedding(50_257, width), nn.Embedding(2048, width)]
    for _ in range(24):
        layers += [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)]
        layers += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers, nn.LayerNorm(width))
