"""The order in which states were created."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

Birth = tuple[int, int]
State = MutableMapping[Any, Any]


class StateOrder:
    """The order in which the unsharded optimizer would have created its per-parameter states.

    `torch.optim` keeps states in the order of creation: by step, then by parameter index. A rank sees only its own, so
    each notes when its states were born and the gathered ones are sorted by that. States are keyed by stepped tensor.
    """

    def __init__(self) -> None:
        self.births: dict[Tensor, Birth] = {}  # when each state was created
        self._looked_at: list[Any] = []  # keys of the state when all their births were known
        self.step = 0  # how many were taken
        # until a step begins or state is loaded: at most the states that construction creates exist, on every rank
        self.is_at_birth = True
        # in addition no parameters were added and no state dict was loaded, not even an empty one
        self.is_as_built = True

    def after_step(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> list[Tensor]:
        """Note the states that a step, or a method of the inner class, has created. Returns their keys."""
        self.step += 1
        return self.note_new(state, index_of)

    def note_new(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> list[Tensor]:
        """Note the states that are new since the last call; some optimizers create theirs at construction."""
        now = [*state]
        if len(now) == len(self._looked_at) and all(map(is_, now, self._looked_at)):  # without the hashes of tensors
            return []
        self._looked_at = now
        if state.keys() == self.births.keys():
            return []
        keys = [key for key in state if isinstance(key, Tensor)]
        new = [key for key in keys if key not in self.births]
        self.births = {key: self.births.get(key) or (self.step, index_of(key)) for key in keys}
        return new

    def follow_load(self, stepped: Sequence[Tensor], state: Mapping[Any, Any]) -> None:
        """Forget all births; states are now in the order of the state dict, given as stepped tensors."""
        self.is_at_birth = self.is_at_birth and not stepped
        self.is_as_built, self._looked_at = False, []
        position = {key: place for place, key in enumerate(stepped)}
        self.births = {key: (self.step, position[key]) for key in state if key in position}

    def sort(self, state: State) -> State:
        """A state in the unsharded order; states that belong to no parameter first."""
        born = sorted((key for key in state if isinstance(key, Tensor)), key=self.of)
        others = [key for key in state if not isinstance(key, Tensor)]
        return {key: state[key] for key in [*others, *born]}

    def of(self, param: Tensor, index: int = 0) -> Birth:
        """Creation key of a state: (step, place within the step). Uses the current step if the state has none."""
        return self.births.get(param, (self.step, index))

    def give(self, param: Tensor) -> Birth:
        """Forget a state that moves to another rank; returns its creation key."""
        self._looked_at = []
        return self.births.pop(param)

    def take(self, param: Tensor, birth: Birth) -> None:
        """Note a state that has arrived from another rank."""
        self.births[param], self._looked_at = birth, []
