"""Small models of many kinds, of which `test_estimate` counts every byte."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Kind(NamedTuple):
    """A kind of model: builds one, and a batch for it, in a dtype."""

    build: Callable[[torch.dtype], nn.Module]
    batch: Callable[[torch.dtype], Tensor]


def _linear(*widths: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)])


def _perceptron(*widths: int) -> Kind:
    return Kind(lambda dtype: _linear(*widths).to(dtype), _numbers(3, widths[0]))


def _numbers(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(*shape).to(dtype)


def _tokens(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 90, (2, 7))


def _convolutional(dtype: torch.dtype) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24 * 16, 10)).to(dtype)


def _channels_last(dtype: torch.dtype) -> nn.Module:
    return _convolutional(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _partly_frozen(dtype: torch.dtype) -> nn.Module:
    """The first layer and a bias are not trained."""
    model = _linear(32, 200, 100, 50, 8)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model.to(dtype)


class _Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


class _Tied(nn.Module):
    """An embedding whose weight is the last layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(90, 40), nn.Linear(40, 40)
        self.head = nn.Linear(40, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.middle(self.embedding(tokens)))
        return outputs


class _Recurrent(nn.Module):
    """Two layers of LSTM, in both directions, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 12)
        self.lstm = nn.LSTM(12, 20, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(self.embedding(tokens))[0]
        return outputs


class _Mixed(nn.Module):
    """The middle stays in a dtype of its own, as norms and routers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 70, dtype=dtype), nn.Linear(70, 30, dtype=dtype)
        self.own = torch.float64 if dtype == torch.float32 else torch.float32
        self.middle, self.norm = nn.Linear(70, 70, dtype=self.own), nn.LayerNorm(70, dtype=self.own)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.middle(self.first(inputs).to(self.own))).to(inputs.dtype))
        return outputs


class _ManySmall(nn.Module):
    """A hundred and twenty parameters of up to five elements, some without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.rand(number % 5 + 1)) for number in range(100))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(())) for _ in range(20))

    def forward(self, inputs: Tensor) -> Tensor:
        for factor in self.factors:
            inputs = inputs * factor.mean() + factor[0]
        for scale in self.scales:
            inputs = inputs * scale
        return inputs


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(90, 48), nn.Parameter(torch.rand(7, 48))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(48, 4, 192, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(48, 90)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(tokens) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


class _Experts(nn.Module):
    """A router mixes four experts, whose weights are one parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, 4)
        self.rise, self.fall = nn.Parameter(torch.rand(4, 24, 60)), nn.Parameter(torch.rand(4, 60, 24))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eih->ebh", inputs, self.rise).relu()
        return torch.einsum("ebh,eho,be->bo", hidden, self.fall, self.router(inputs).softmax(-1))


class _UsedAgain(nn.Module):
    """One layer that is passed three times, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(50, 50), nn.PReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(3):
            inputs = self.gate(self.layer(inputs))
        return inputs


def _large_table(dtype: torch.dtype) -> nn.Module:
    """One parameter that holds nearly everything, between small ones."""
    return nn.Sequential(nn.Embedding(6000, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


KINDS = {
    "one layer": _perceptron(8, 3),
    "one wide layer": _perceptron(300, 300),
    "tiny": _perceptron(8, 16, 16, 3),
    "small": _perceptron(32, 64, 64, 64, 8),
    "deep": _perceptron(*[24] * 12, 4),
    "wide": _perceptron(16, 1024, 16),
    "first layer largest": _perceptron(400, 300, 8, 8),
    "last layer largest": _perceptron(8, 8, 300, 400),
    "convolutional": Kind(_convolutional, _numbers(3, 1, 8, 8)),
    "convolutional, channels last": Kind(_channels_last, _numbers(3, 1, 8, 8)),
    "partly frozen": Kind(_partly_frozen, _numbers(3, 32)),
    "adapters on frozen layers": Kind(
        lambda dtype: nn.Sequential(_Adapted(), nn.Tanh(), _Adapted()).to(dtype), _numbers(3, 64)
    ),
    "tied embedding": Kind(lambda dtype: _Tied().to(dtype), _tokens),
    "recurrent": Kind(lambda dtype: _Recurrent().to(dtype), _tokens),
    "two dtypes": Kind(_Mixed, _numbers(3, 48)),
    "many small": Kind(lambda dtype: _ManySmall().to(dtype), _numbers(3, 4)),
    "one parameter": Kind(lambda dtype: nn.Linear(37, 11, bias=False).to(dtype), _numbers(3, 37)),
    "large table": Kind(_large_table, _tokens),
    "transformer": Kind(lambda dtype: _Transformer().to(dtype), _tokens),
    "experts": Kind(lambda dtype: _Experts().to(dtype), _numbers(3, 24)),
    "used again": Kind(lambda dtype: _UsedAgain().to(dtype), _numbers(3, 50)),
}
