"""The states of generators as plain values, and back."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_zero.snapshots.random_state import random_states, set_random_states
from ddp_zero.values.tree import flatten, unflatten


class ModuleOfNumbers:
    """As much of NumPy's interface as is used."""

    uint32 = "uint32"

    class Keys(list[int]):
        def tolist(self) -> list[int]:
            return list(self)

    def __init__(self) -> None:
        self.random = self
        self.state: Any = ("MT19937", self.Keys(range(624)), 5, 0, 0.0)

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state

    def array(self, values: list[int], dtype: str) -> Any:
        assert dtype == "uint32"
        return self.Keys(values)


def test_generators_go_on_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ModuleOfNumbers()
    monkeypatch.setitem(sys.modules, "numpy", numbers)
    before = numbers.state
    random.gauss(0, 1)  # keeps a second number
    text, tensors = flatten(random_states(nn.Linear(1, 1)))
    drawn = torch.rand(3), random.random(), random.gauss(0, 1)
    numbers.state = None
    set_random_states(unflatten(text, tensors), nn.Linear(1, 1))
    again = torch.rand(3), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
    assert numbers.state == before


def test_an_accelerator_is_asked_of_its_own_generator_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current, states = [0], {index: torch.tensor([index]) for index in range(2)}

    @contextmanager
    def make_current(index: int | None) -> Iterator[None]:
        current.append(current[-1] if index is None else index)
        yield
        current.pop()

    def restore(state: torch.Tensor) -> None:
        states[current[-1]] = state

    module = SimpleNamespace(get_rng_state=lambda: states[current[-1]], set_rng_state=restore)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_index", make_current)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 1))]))
    assert random_states(nn.Linear(1, 1))["cuda"].item() == 0
    kept = random_states(model)
    states[1] = torch.tensor([5])
    set_random_states(kept, model)
    assert [state.item() for state in states.values()] == [0, 1]


@pytest.mark.parametrize(
    "states", [{"python": (3, torch.zeros(3), None)}, {"python": 1}, {"torch": torch.zeros(2)}, {"torch": 5}, 5]
)
def test_states_that_are_none_are_refused(states: Any) -> None:
    with pytest.raises(ValueError, match="Expected states of random number generators"):
        set_random_states(states, nn.Linear(1, 1))
