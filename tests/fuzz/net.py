"""The model of a case."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.case import Case, LeftOut, Model
from tests.fuzz.late_values import Events, read_again

_VOCABULARY = 11


class Blown(Exception):
    """What the model raises where a case asks for it."""


class Net(nn.Module):
    """Layers and extra parameters as a case describes them.

    Attributes:
        blows: ``"forward"`` or ``"backward"`` if the next pass shall raise `Blown` there.
        frozen_for_ever: positions of parameters that are never trained.
        on_pass: the same, with what to do there instead.
        left_out: what the next pass does not use.
        noted: where reads of the late value are noted, or None.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.blows: str | None = None
        self.on_pass: tuple[str | None, Callable[[], None]] | None = None
        self.left_out: LeftOut = ()
        self.noted: Events | None = None
        dtype = getattr(torch, model.dtype)
        self.first: nn.Module | None = None
        widths = model.widths
        if model.kind == "embedding":
            self.first = nn.Embedding(_VOCABULARY, widths[0], dtype=dtype)
        self.layers = nn.ModuleList(_layers(model, dtype))
        if model.tied:
            _tie(self, model)
        self.extras = nn.ParameterDict()
        for name in model.extras:
            if name in ("never", "sometimes"):
                self.extras[name] = nn.Parameter(torch.randn(3, 2, dtype=dtype))
            elif name == "zero":
                self.extras[name] = nn.Parameter(torch.empty(0, 3, dtype=dtype))
            elif name == "scalar":
                self.extras[name] = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        if "layer" in model.extras:
            self.other = nn.Linear(3, 3, bias=False, dtype=getattr(torch, model.second_dtype or model.dtype))
        self.dropout = nn.Dropout(0.3 if model.dropout else 0.0)
        params = list(self.parameters())
        self.frozen_for_ever = [position % len(params) for position in model.frozen if position % len(params)]
        for position in self.frozen_for_ever:  # DDP will not reduce their gradients
            params[position].requires_grad_(False)

    def forward(self, inputs: Tensor, uses: bool = True) -> Tensor:
        if self.model.late_value is not None and self.model.late_value[1] == "input" and torch.is_grad_enabled():
            inputs.requires_grad_()
        hidden = self.first(inputs).mean(dim=1) if self.first is not None else inputs.to(_dtype(self.model))
        hidden = self._read_again(hidden, "input")
        for number, layer in enumerate(self.layers):
            if number in self.left_out:
                continue
            hidden = layer(hidden)
            if number + 1 < len(self.layers):
                hidden = self.dropout(torch.tanh(hidden))
            if number == 0:
                hidden = self._read_again(self._interrupt(hidden), "first")
        if hidden.dim() == 4:
            hidden = hidden.mean(dim=(2, 3))
        if "layer" in self.model.extras and "layer" not in self.left_out:
            hidden = self.other(hidden.to(self.other.weight.dtype)) + hidden
        for name, param in self.extras.items():
            if name == "never" or name in self.left_out or (name == "sometimes" and not uses):
                continue
            hidden = hidden + param.sum() * (0.1 if name == "zero" else 0.3)
        return hidden

    @property
    def late_param(self) -> nn.Parameter:
        """The parameter whose value backward reads, of a model that has a late value."""
        return next(param for param in self.layers[-1].parameters() if param.dim() >= 2)

    def _read_again(self, hidden: Tensor, place: str) -> Tensor:
        if self.model.late_value is None or self.model.late_value[1] != place:
            return hidden
        return read_again(self.model.late_value[0], hidden, self.late_param, self._note_read)

    def _note_read(self) -> None:
        if self.noted is not None:
            self.noted.append(None)

    def _interrupt(self, hidden: Tensor) -> Tensor:
        where, act = (self.blows, _blow) if self.blows is not None else self.on_pass or (None, _blow)
        if where == "forward":
            act()
        elif where == "backward":
            hidden.register_hook(lambda grad: act())
        return hidden


def _blow() -> None:
    raise Blown


def _dtype(model: Model) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def _layers(model: Model, dtype: torch.dtype) -> list[nn.Module]:
    made: list[nn.Module] = []
    last = len(model.widths) - 2
    for number, (inputs, outputs) in enumerate(pairwise(model.widths)):
        layer: nn.Module
        if model.kind == "conv":
            layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=model.bias, dtype=dtype)
            layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            layer = nn.Linear(inputs, outputs, bias=model.bias, dtype=dtype)
        if model.spectral and number == min(1, last):
            layer = nn.utils.parametrizations.spectral_norm(layer)
        if model.norm is None or number == last:
            made.append(layer)
            continue
        norm: nn.Module
        if model.norm == "batch":
            norm = nn.BatchNorm2d(outputs) if model.kind == "conv" else nn.BatchNorm1d(outputs)
        else:
            norm = nn.LayerNorm(outputs)
        made.append(nn.Sequential(layer, norm.to(dtype)))
    return made


def _tie(net: Net, model: Model) -> None:
    """Two layers of one shape share their weight, where there are any."""
    linear = [layer for layer in net.modules() if isinstance(layer, nn.Linear) and "weight" in layer._parameters]
    for one, other in pairwise(linear):
        if one.weight.shape == other.weight.shape:
            other.weight = one.weight
            return


def build_net(case: Case) -> Net:
    """The same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        return Net(case.model)


def batch_of(case: Case, rank: int, op: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, different on every rank and in every pass."""
    generator = torch.Generator("cpu").manual_seed(random.Random(f"{case.seed} {rank} {op} {number}").getrandbits(40))
    rows, model, device = case.model.batch, case.model, torch.get_default_device()
    drawn: dict[str, Any] = {"generator": generator, "device": "cpu"}
    if model.kind == "embedding":
        inputs = torch.randint(0, _VOCABULARY, (rows, 4), **drawn)
    elif model.kind == "conv":
        inputs = torch.randn(rows, model.widths[0], 5, 4, **drawn)
    else:
        inputs = torch.randn(rows, model.widths[0], **drawn)
    return inputs.to(device), torch.randn(rows, model.widths[-1], **drawn).to(device)
