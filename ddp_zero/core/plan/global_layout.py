"""The values of a whole model across ranks: stated by each rank, checked by all, with the writer of each part.

A value has one name in the whole model. Ranks that state the same name must hold the same value, or different parts of
it; otherwise one expert could be saved, or loaded, in place of another.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ddp_zero.core.plan.chunks import Chunk, fault

GlobalNames = Mapping[str, str] | Callable[[str], str]
"""Maps a rank's names to names in the whole model: by full name or dotted prefix, or by a function of the name."""


@dataclass(frozen=True)
class Entry:
    """A value of the whole model, as one rank holds it."""

    shape: tuple[int, ...] | None  # shape of the whole value; None if the value is not a tensor
    dtype: str | None  # name of the dtype, or None
    chunk: Chunk | None  # the part that the rank holds, or None
    home: str  # identifies the ranks that hold this value or parts of it; a different home means a different value
    sample: str = ""  # sample of the elements where nothing else guarantees that ranks hold the same; else ""
    # the first global rank of the ranks that together write the part and its optimizer state, if this is one of them
    writers: int | None = None
    weight: int = 0  # bytes that the rank holds
    has_whole_state: bool = False  # True if the rank has the state of the whole value, and holds a part of it


@dataclass(frozen=True)
class Statement:
    """The values that one rank holds."""

    entries: Mapping[str, Entry]  # entries by name in the whole model
    aliases: Sequence[str] = ()  # additional names of these entries
    buffers: Sequence[str] = ()  # names of entries that are not parameters

    def as_text(self) -> str:
        rows = {name: astuple(entry) for name, entry in self.entries.items()}
        return json.dumps([rows, list(self.aliases), list(self.buffers)])

    @classmethod
    def of_text(cls, text: str) -> "Statement":
        rows, aliases, buffers = json.loads(text)
        return cls({name: _entry(row) for name, row in rows.items()}, aliases, buffers)


def _entry(row: Sequence[Any]) -> Entry:
    shape, dtype, chunk, *rest = row
    found = None if chunk is None else Chunk(tuple(chunk[0]), tuple(chunk[1]))
    return Entry(None if shape is None else tuple(shape), dtype, found, *rest)


class Layout:
    """The statements of all ranks, in rank order; ValueError naming a value and two ranks if they contradict."""

    def __init__(self, statements: Sequence[Statement], name_of: Callable[[int], str]) -> None:
        self.statements = statements
        self._name_of = name_of
        self._holders: dict[str, list[int]] = {}
        for rank, statement in enumerate(statements):
            for name in statement.entries:
                self._holders.setdefault(name, []).append(rank)
        for name, holders in self._holders.items():
            self._check(name, holders)
        self._writers = self._assign()

    def written_by(self, rank: int) -> set[str]:
        """Names of the values of whose local part this rank writes its share; each element has exactly one writer."""
        return self._writers[rank]

    def whole_states_of(self, rank: int) -> set[str]:
        """Names of the values whose state this rank writes for all parts of them: the first rank that has it does."""
        firsts: dict[str, int] = {}
        for place, statement in enumerate(self.statements):
            for name, entry in statement.entries.items():
                if entry.has_whole_state:
                    firsts.setdefault(name, place)
        return {name for name, first in firsts.items() if first == rank}

    def only_elsewhere(self, rank: int) -> set[str]:
        """Names, aliases included, that other ranks hold and this rank does not."""
        every = [{*one.entries, *one.aliases} for one in self.statements]
        return {name for names in every for name in names} - every[rank]

    def _entry(self, rank: int, name: str) -> Entry:
        return self.statements[rank].entries[name]

    def _check(self, name: str, holders: Sequence[int]) -> None:
        first = holders[0]
        expected = self._entry(first, name)
        chunks: dict[Chunk, int] = {}
        for rank in holders:
            entry, between = self._entry(rank, name), f"{self._name_of(first)} and {self._name_of(rank)}"
            if entry.home != expected.home:
                raise ValueError(
                    f"Two parameters have the name {name!r} on {between}, with different values: one belongs to "
                    f"{expected.home}, the other to {entry.home}. Build the optimizer with global_names=, which gives "
                    "each its name in the whole model. [ZERO-814]"
                )
            if (entry.shape, entry.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"Expected {name!r} with one shape and dtype, got {_text_of(expected)} and {_text_of(entry)} on "
                    f"{between}. State how it is cut in sharded_over=, or give each its name by global_names=. "
                    "[ZERO-805]"
                )
            if entry.chunk is None:
                continue
            same = chunks.setdefault(entry.chunk, rank)
            if entry.sample != self._entry(same, name).sample:
                raise ValueError(
                    f"{name!r} is in no parameter group and has different values on {self._name_of(same)} and "
                    f"{self._name_of(rank)}. Put it into the group of its ranks, or give each its name by "
                    "global_names=. [ZERO-814]"
                )
        wrong = None if expected.shape is None else fault(expected.shape, list(chunks))
        if wrong is not None:
            shown = "; ".join(f"{chunk.describe()} on {self._name_of(rank)}" for chunk, rank in chunks.items())
            raise ValueError(
                f"Expected the parts of {name!r} to make up {_text_of(expected)}, got {wrong}: {shown}. State how it "
                "is cut in sharded_over=, alike on all ranks. [ZERO-805]"
            )

    def _assign(self) -> list[set[str]]:
        """Names that each rank writes: the first ranks that share the optimizer state do, else the least loaded one."""
        found: list[set[str]] = [set() for _ in self.statements]
        loads = [0] * len(self.statements)
        rest = []
        for name, holders in self._holders.items():
            by_chunk: dict[Chunk | None, list[int]] = {}
            for rank in holders:
                by_chunk.setdefault(self._entry(rank, name).chunk, []).append(rank)
            for chunk, ranks in by_chunk.items():
                if chunk is not None and not chunk.numel and len(by_chunk) > 1:
                    continue  # a part without elements
                sharing = [self._entry(rank, name).writers for rank in ranks]
                first = next((one for one in sharing if one is not None), None)
                if first is None:
                    rest.append((name, ranks))
                for rank, one in zip(ranks, sharing, strict=True):
                    if first is not None and one == first:
                        found[rank].add(name)
                        loads[rank] += self._entry(rank, name).weight
        buffers = {name for one in self.statements for name in one.buffers}
        for name, ranks in rest:
            writer = ranks[0] if name in buffers else min(ranks, key=lambda rank: loads[rank])
            found[writer].add(name)
            loads[writer] += self._entry(writer, name).weight
        return found


def _text_of(entry: Entry) -> str:
    return "no tensor" if entry.shape is None else f"shape {list(entry.shape)} of {entry.dtype}"


# Names


def rename_all(names: Iterable[str], rename: GlobalNames, argument: str, owner: str) -> dict[str, str]:
    """Map every name to its new name.

    ``rename`` maps old names or dotted prefixes to new ones, or to "" to drop a prefix; the longest match wins. Or it
    is a function of the old name. ``argument`` is the user's name for it, for messages, as is ``owner`` of the names.
    ValueError for an old name that matches nothing, or two names that become equal; TypeError if a function does not
    return a nonempty string.
    """
    names = list(names)
    if callable(rename):
        found = {}
        for name in names:
            new = found[name] = rename(name)
            if not isinstance(new, str) or not new:
                raise TypeError(f"Expected {argument} to return a name for {name!r}, got {new!r:.80}. [ZERO-813]")
    else:
        found = _by_prefix(names, rename, argument, owner)
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise ValueError(
            f"Expected {argument} to give every parameter a name of its own, got several parameters of {owner} under "
            f"{twice}. [ZERO-813]"
        )
    return found


def _by_prefix(names: Sequence[str], rename: Mapping[str, str], argument: str, owner: str) -> dict[str, str]:
    found, used = {}, set()
    for name in names:
        olds = [old for old in rename if name == old or name.startswith(f"{old}.")]
        if not olds:
            found[name] = name
            continue
        old = max(olds, key=len)
        used.add(old)
        found[name] = f"{rename[old]}{name[len(old) :]}".removeprefix(".")
    unused = sorted(set(rename) - used)
    if unused:
        raise ValueError(f"Expected names in {argument} that {owner} has, got {unused}. [ZERO-813]")
    return found
