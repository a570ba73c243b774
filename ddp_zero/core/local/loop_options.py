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
from typing import Any, NamedTuple

import torch
from torch import Tensor

OptionTexts = dict[str, str]
"""Options of a group by name, as text: equal texts are equal values."""

_SUMMARY_BYTES = 440
_PER_PARAMETER = ("params", "param_names")
_COMPARABLE_AS_IS = {float, bool, int, str, NoneType}
_NEVER_EQUAL = object()


@dataclass(frozen=True)
class OptionsSummary:
    """The options of one rank, short enough to be sent with every step."""

    digest: int = 0  # of all options
    # JSON: [[position of the group, name, value], ...] of as many options as fit, the last changed first
    excerpt: str = ""


class OptionDifference(NamedTuple):
    """An option in which two ranks differ; a value is None where it is not known."""

    position: int  # of the group, in the user's list of groups
    name: str
    own_value: str | None  # on this rank
    their_value: str | None  # on the other rank


class _CachedOptions(NamedTuple):
    """A group's options, and the objects from which they were made."""

    names: list[str]
    values: list[Any]
    options: dict[str, Any]


class LoopOptions:
    """Tracks the options that the loop has set in the groups of one optimizer, to compare them between ranks.

    ``known`` are the names of the class's options. For other options see `must_be_equal`.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self.positions: Sequence[int] | None = (
            None  # of the groups in the user's list of groups; None: the user has these groups only
        )
        self.initial: list[OptionTexts] = []  # the options that each group was built with
        self.values: list[OptionTexts] = []  # the options of each group as the loop has set them last
        self.summary = OptionsSummary()  # of ``values``, for other ranks
        self._last_seen: list[dict[str, Any]] = []  # the options of each group at the last note, as `comparable` values
        self._cache: list[_CachedOptions] = []  # of `_compared_options`, by group
        self._changed: dict[tuple[int, str], None] = {}  # options that the loop has changed, in order

    def note_changes_of_loop(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Before a step: note the options that the loop has changed since the last note."""
        has_changed = len(groups) != len(self._last_seen)
        if has_changed:
            self._follow_number_of(groups)
        for index, (group, seen) in enumerate(zip(groups, self._last_seen, strict=True)):
            now = self._compared_options(index, group)
            if now != seen:
                self._last_seen[index] = now
                has_changed |= self._note_changes(index, now, seen)
        if has_changed:
            self._summarise()

    def note_changes_of_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """After a step, or another method of the optimizer: take its changes as not made by the loop."""
        if len(groups) != len(self._last_seen):
            self.note_changes_of_loop(groups)
        else:
            self._last_seen = [self._compared_options(place, group) for place, group in enumerate(groups)]

    def note_load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """After a state dict was loaded: take all its options as set by the loop."""
        self._last_seen = [{} for _ in self._last_seen]
        self.values = [{} for _ in self.values]
        self.note_changes_of_loop(groups)

    def position(self, index: int) -> int:
        """The position of a group of this optimizer in the user's list of groups."""
        return index if self.positions is None else self.positions[index]

    def find_difference(self, theirs: OptionsSummary) -> OptionDifference:
        """An option in which this rank and the rank of ``theirs`` differ; their digests must differ."""
        values_at = {self.position(index): values for index, values in enumerate(self.values)}
        their_options = json.loads(theirs.excerpt or "[]")
        for position, name, value in their_options:
            if (own_value := values_at.get(position, {}).get(name)) != value:
                return OptionDifference(position, name, own_value, value)
        same = {(position, name) for position, name, _ in their_options}
        for position, name, value in json.loads(self.summary.excerpt):
            if (position, name) not in same:
                return OptionDifference(position, name, value, None)
        return OptionDifference(self.position(0), "an option", None, None)

    def _follow_number_of(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Drop what was noted of groups that are gone, and note the options of new groups as their initial ones."""
        for noted in (self.initial, self.values, self._last_seen, self._cache):
            del noted[len(groups) :]
        self._changed = {key: None for key in self._changed if key[0] < len(groups)}
        for index, group in enumerate(groups[len(self._last_seen) :], len(self._last_seen)):
            now = self._compared_options(index, group)
            self.initial.append({name: text_of(value) for name, value in now.items()})
            self.values.append(dict(self.initial[-1]))
            self._last_seen.append(now)

    def _note_changes(self, index: int, now: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
        """Bring ``values`` of a group from ``seen`` up to ``now``; returns True if that changed any."""
        values = self.values[index]
        has_changed = False
        for name in seen.keys() - now.keys():
            has_changed |= values.pop(name, None) is not None
        for name, value in now.items():
            if name in seen and seen[name] == value:
                continue
            new_text = text_of(value)
            if values.get(name) != new_text:
                values[name] = new_text
                self._changed.pop((index, name), None)
                self._changed[index, name] = None  # at the end: the order of changes
                has_changed = True
        return has_changed

    def _summarise(self) -> None:
        """Set ``summary`` to the digest of ``values`` and the excerpt that fits into a message."""
        entries: list[str] = []
        for index, name in self._last_changed_first():
            entries.append(json.dumps([self.position(index), name, self.values[index][name]]))
            if sum(map(len, entries)) + len(entries) > _SUMMARY_BYTES:
                entries.pop()
                break
        digest = digest_of([sorted(values.items()) for values in self.values])
        self.summary = OptionsSummary(digest, f"[{','.join(entries)}]")

    def _last_changed_first(self) -> Iterator[tuple[int, str]]:
        """Index of the group and name of each option in ``values``."""
        yield from (key for key in reversed(self._changed) if key[1] in self.values[key[0]])
        for index, values in enumerate(self.values):
            yield from ((index, name) for name in values if (index, name) not in self._changed)

    def _compared_options(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group that must be equal on all ranks, as `comparable` values. Must not be changed."""
        names, values = [*group], [*group.values()]
        if index < len(self._cache):
            cached = self._cache[index]
            if names == cached.names and all(map(is_, values, cached.values)):
                return cached.options
        compared = {name: value for name, value in group.items() if must_be_equal(name, value, self._known)}
        options = {
            name: value if type(value) in _COMPARABLE_AS_IS else comparable(value) for name, value in compared.items()
        }
        # the result can be reused for the same objects, unless one of them can change in place
        items = [item for value in compared.values() for item in (value if type(value) is tuple else (value,))]
        are_immutable = _COMPARABLE_AS_IS.issuperset(map(type, items))
        cached = _CachedOptions(names, values if are_immutable else [_NEVER_EQUAL], options)
        self._cache[index : index + 1] = [cached]
        return options


def comparable_options(group: Mapping[str, Any], known: Collection[str] = ()) -> OptionTexts:
    """The options of a group that must be equal on all ranks, as text; waits for values on accelerators."""
    compared = {name: value for name, value in group.items() if must_be_equal(name, value, known)}
    return {name: comparable_text(value) for name, value in compared.items()}


def comparable_text(value: Any) -> str:
    """The text of a value, equal for equal values on any rank; waits for values on accelerators."""
    return text_of(comparable(value, reads_devices=True))


def must_be_equal(name: str, value: Any, known: Collection[str]) -> bool:
    """True if an option must be equal on all ranks: its name is ``known``, or its value could affect the step.

    Such values are floats, tensors, flags and None. Loops keep other values in groups for their own use, such as text
    or the number of an expert, and these may differ.
    """
    if name in _PER_PARAMETER:
        return False
    values = value if isinstance(value, tuple) else (value,)
    return name in known or all(map(_may_affect_step, values))


def _may_affect_step(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Real | Tensor | NoneType) and not isinstance(value, int))


def comparable(value: Any, reads_devices: bool = False) -> Any:
    """Convert an option's value to plain Python values, which can be compared by ``==``.

    Of a tensor the first elements are read; without ``reads_devices`` a tensor on an accelerator is named but not read,
    so that nothing waits for the device.
    """
    if isinstance(value, tuple | list):
        return tuple(comparable(item, reads_devices) for item in value)
    if isinstance(value, Tensor):
        if value.is_meta or not (value.device.type == "cpu" or reads_devices):
            return f"a tensor on {value.device.type}"
        elements = value.detach().flatten()[:16].tolist()
        return f"tensor({elements[0] if value.numel() == 1 else elements})"
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.dtype | torch.device | str | NoneType):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def text_of(value: Any) -> str:
    """A value of `comparable` as text, a number with all its digits."""
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))})"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if is_number else str(value)


def digest_of(facts: object) -> int:
    """48 bits of a digest, exact in a 64-bit float, and never 0."""
    text = json.dumps(facts, sort_keys=True)
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") % (2**48 - 1)
