"""The order in which states were created."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

Birth = tuple[int, int]
"""When a state was created: the step, and its place within the step. Saved in checkpoints."""
State = MutableMapping[Any, Any]


class StateOrder:
    """The order in which the unsharded optimizer would have created its per-parameter states.

    `torch.optim` keeps states in the order of creation: by step, then by parameter index. A rank has only its shard, so
    each rank notes the birth of its states, and gathered states are sorted by birth. States are keyed by step target.
    """

    def __init__(self) -> None:
        self.births: dict[Tensor, Birth] = {}  # when each state was created
        self._known_keys: list[Any] = []  # the state's keys when births were last noted
        self.step = 0  # number of steps taken
        # True until a step begins or state is loaded: at most the states that construction creates exist, on every rank
        self.has_initial_state = True
        # True until parameters are added or a state dict is loaded, even an empty one
        self.is_as_constructed = True

    def after_step(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> list[Tensor]:
        """Note the states that a step, or a method of the inner class, has created. Returns their keys."""
        self.step += 1
        return self.note_new(state, index_of)

    def note_new(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> list[Tensor]:
        """Note the states that are new since the last call; some optimizers create theirs at construction."""
        now = [*state]
        if len(now) == len(self._known_keys) and all(map(is_, now, self._known_keys)):  # without hashing tensors
            return []
        self._known_keys = now
        if state.keys() == self.births.keys():
            return []
        keys = [key for key in state if isinstance(key, Tensor)]
        new = [key for key in keys if key not in self.births]
        self.births = {key: self.births.get(key) or (self.step, index_of(key)) for key in keys}
        return new

    def follow_load(self, stepped: Sequence[Tensor], state: Mapping[Any, Any]) -> None:
        """Forget all births; states are now in the order of the state dict, given as stepped tensors."""
        self.has_initial_state = self.has_initial_state and not stepped
        self.is_as_constructed, self._known_keys = False, []
        position = {key: place for place, key in enumerate(stepped)}
        self.births = {key: (self.step, position[key]) for key in state if key in position}

    def sort(self, state: State) -> State:
        """A state in the unsharded order; states that belong to no parameter first."""
        born = sorted(
            (key for key in state if isinstance(key, Tensor)), key=lambda key: self.births.get(key, (self.step, 0))
        )
        others = [key for key in state if not isinstance(key, Tensor)]
        return {key: state[key] for key in [*others, *born]}

    def births_of(self, stepped: Mapping[int, Tensor]) -> dict[int, Birth]:
        """The births of states, by parameter index; the current step with this index if there is no state yet."""
        return {index: self.births.get(tensor, (self.step, index)) for index, tensor in stepped.items()}

    def pop(self, param: Tensor) -> Birth:
        """Forget a state that moves to another rank; returns its birth."""
        self._known_keys = []
        return self.births.pop(param)

    def insert(self, param: Tensor, birth: Birth) -> None:
        """Note a state that was received from another rank."""
        self.births[param], self._known_keys = birth, []
