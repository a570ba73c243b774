"""Tracks the options of parameter groups as the training loop has set them, which must be the same on every rank.

A step may change options too: Prodigy changes its step size, other classes a count of steps. Ranks may differ in these
for a while (see `core.step.coupling`). So ranks compare the values that their loops have set last.

Ranks compare all options when an optimizer is built and a group is added, and at the end of each step the digest of a
`OptionsSummary`, in the message that tells how the step went.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

OptionTexts = dict[str, str]
"""Options of a group by name, as text: equal texts are equal values."""

_SHOWN_BYTES = 440
_PER_PARAMETER = ("params", "param_names")
_PLAIN = {float, bool, int, str, NoneType}
_UNKNOWN = object()


@dataclass(frozen=True)
class OptionsSummary:
    """The options of one rank, short enough to travel with every step."""

    digest: int = 0  # of all of them
    # group, name and value of as many options as fit, the last changed first, as JSON
    shown: str = ""


class GivenOptions:
    """Tracks the options that the loop has set in the groups of one optimizer, to compare them between ranks.

    ``known`` are options of the optimizer's class. Other options count if they are floats, tensors or flags.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self.positions: Sequence[int] | None = (
            None  # of the groups in the user's list of groups; None: the user has these groups only
        )
        self.initial: list[OptionTexts] = []  # the options that each group was built with
        self.values: list[OptionTexts] = []  # the options of each group as the loop has set them last
        self.summary = OptionsSummary()  # of ``values``, for other ranks
        self._seen: list[dict[str, Any]] = []  # the options of each group when last looked at
        self._shown: list[tuple[list[str], list[Any], dict[str, Any]]] = []  # cache of `_plain_options`, by group
        self._changed: dict[tuple[int, str], None] = {}  # options that the loop has changed, in order

    def note_changes_of_loop(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Before a step: note the options that the loop has changed since the last note."""
        is_new = len(groups) != len(self._seen)
        if is_new:
            self._follow_number_of(groups)
        for place, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            shown = self._plain_options(place, group)
            if shown != seen:
                self._seen[place] = shown
                is_new |= self._take(place, shown, seen)
        if is_new:
            self._state()

    def note_changes_of_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """After a step, or another method of the optimizer: take its changes as not made by the loop."""
        if len(groups) != len(self._seen):
            self.note_changes_of_loop(groups)
        else:
            self._seen = [self._plain_options(place, group) for place, group in enumerate(groups)]

    def note_load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """After a state dict was loaded: take all its options as set by the loop."""
        self._seen = [{} for _ in self._seen]
        self.values = [{} for _ in self.values]
        self.note_changes_of_loop(groups)

    def position(self, place: int) -> int:
        return place if self.positions is None else self.positions[place]

    def find_difference(self, theirs: OptionsSummary) -> tuple[int, str, str | None, str | None]:
        """Position and name of an option in which two ranks differ, its value here, and there; None if not known."""
        mine = {self.position(place): values for place, values in enumerate(self.values)}
        others = json.loads(theirs.shown or "[]")
        for position, name, value in others:
            if (own := mine.get(position, {}).get(name)) != value:
                return position, name, own, value
        known = {(position, name) for position, name, _ in others}
        last = next((option for option in json.loads(self.summary.shown) if (option[0], option[1]) not in known), None)
        return (self.position(0), "an option", None, None) if last is None else (last[0], last[1], last[2], None)

    def _follow_number_of(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for kept in (self.initial, self.values, self._seen, self._shown):
            del kept[len(groups) :]
        self._changed = {key: None for key in self._changed if key[0] < len(groups)}
        for place, group in enumerate(groups[len(self._seen) :], len(self._seen)):
            shown = self._plain_options(place, group)
            self.initial.append({name: text(value) for name, value in shown.items()})
            self.values.append(dict(self.initial[-1]))
            self._seen.append(shown)

    def _take(self, place: int, shown: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
        values = self.values[place]
        has_changed = False
        for name in seen.keys() - shown.keys():
            has_changed |= values.pop(name, None) is not None
        for name, value in shown.items():
            if name in seen and seen[name] == value:
                continue
            given = text(value)
            if values.get(name) != given:
                values[name] = given
                self._changed.pop((place, name), None)
                self._changed[place, name] = None
                has_changed = True
        return has_changed

    def _state(self) -> None:
        shown: list[str] = []
        for place, name in self._last_changed_first():
            shown.append(json.dumps([self.position(place), name, self.values[place][name]]))
            if sum(map(len, shown)) + len(shown) > _SHOWN_BYTES:
                shown.pop()
                break
        digest = digest_of([sorted(values.items()) for values in self.values])
        self.summary = OptionsSummary(digest, f"[{','.join(shown)}]")

    def _last_changed_first(self) -> Iterator[tuple[int, str]]:
        yield from (key for key in reversed(self._changed) if key[1] in self.values[key[0]])
        for place, values in enumerate(self.values):
            yield from ((place, name) for name in values if (place, name) not in self._changed)

    def _plain_options(self, place: int, group: Mapping[str, Any]) -> dict[str, Any]:
        names, values = [*group], [*group.values()]
        if place < len(self._shown):
            before = self._shown[place]
            if names == before[0] and all(map(is_, values, before[1])):
                return before[2]
        counted = {name: value for name, value in group.items() if counts(name, value, self._known)}
        shown = {name: value if type(value) in _PLAIN else plain(value) for name, value in counted.items()}
        # the result can be reused for the same objects, unless one of them can change in place
        held = [item for value in counted.values() for item in (value if type(value) is tuple else (value,))]
        are_fixed = _PLAIN.issuperset(map(type, held))
        self._shown[place : place + 1] = [(names, values if are_fixed else [_UNKNOWN], shown)]
        return shown


def written_options(group: Mapping[str, Any], known: Collection[str] = ()) -> OptionTexts:
    """The options of a group that must be equal on all ranks, as text; waits for values on accelerators."""
    shown = {name: value for name, value in group.items() if counts(name, value, known)}
    return {name: written(value) for name, value in shown.items()}


def written(value: Any) -> str:
    """A value as text that can be compared; waits for values on accelerators."""
    return text(plain(value, reads_devices=True))


def counts(name: str, value: Any, known: Collection[str]) -> bool:
    """True if an option must be equal on all ranks: the class knows it, or it may affect the step all the same.

    Unknown names and whole numbers do not count: a loop may keep them for itself, as the number of an expert.
    """
    if name in _PER_PARAMETER:
        return False
    values = value if isinstance(value, tuple) else (value,)
    return name in known or all(map(_may_count, values))


def _may_count(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Real | Tensor | NoneType) and not isinstance(value, int))


def plain(value: Any, reads_devices: bool = False) -> Any:
    """A value that can be compared; waits for an accelerator only if it ``reads_devices``."""
    if isinstance(value, tuple | list):
        return tuple(plain(item, reads_devices) for item in value)
    if isinstance(value, Tensor):
        if value.is_meta or not (value.device.type == "cpu" or reads_devices):
            return f"a tensor on {value.device.type}"
        shown = value.detach().flatten()[:16].tolist()
        return f"tensor({shown[0] if value.numel() == 1 else shown})"
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.dtype | torch.device | str | NoneType):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def text(value: Any) -> str:
    """A value of `plain` as text, a number with all its digits."""
    if isinstance(value, tuple):
        return f"({', '.join(map(text, value))})"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if is_number else str(value)


def digest_of(facts: object) -> int:
    """48 bits of a digest, exact in a 64-bit float, and never 0."""
    text = json.dumps(facts, sort_keys=True)
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") % (2**48 - 1)
