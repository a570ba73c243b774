"""The states of generators as plain values, and back."""

import random
import sys
from typing import Any

import pytest
import torch

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
    text, tensors = flatten(random_states())
    drawn = torch.rand(3), random.random(), random.gauss(0, 1)
    numbers.state = None
    set_random_states(unflatten(text, tensors))
    again = torch.rand(3), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
    assert numbers.state == before


@pytest.mark.parametrize(
    "states", [{"python": (3, torch.zeros(3), None)}, {"python": 1}, {"torch": torch.zeros(2)}, {"torch": 5}, 5]
)
def test_states_that_are_none_are_refused(states: Any) -> None:
    with pytest.raises(ValueError, match="Expected states of random number generators"):
        set_random_states(states)
