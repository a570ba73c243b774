"""The values of a whole model across ranks: stated by each rank, checked by all, with the writers of each part.

A value has one name in the whole model. Ranks that state the same name must hold the same value, or different parts of
it; otherwise one expert could be saved, or loaded, in place of another.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.local import sample_values
from ddp_zero.parallel.names import GlobalNames, rename_all
from ddp_zero.values import Chunk, LiveModel, Value


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
class RankValues:
    """The values that one rank holds."""

    entries: Mapping[str, Entry]  # entries by name in the whole model
    aliases: Sequence[str] = ()  # additional names of these entries
    buffers: Sequence[str] = ()  # names of entries that are not parameters

    def as_text(self) -> str:
        rows = {name: astuple(entry) for name, entry in self.entries.items()}
        return json.dumps([rows, list(self.aliases), list(self.buffers)])

    @classmethod
    def of_text(cls, text: str) -> "RankValues":
        rows, aliases, buffers = json.loads(text)
        return cls({name: _entry(row) for name, row in rows.items()}, aliases, buffers)


def _entry(row: Sequence[Any]) -> Entry:
    shape, dtype, chunk, *rest = row
    found = None if chunk is None else Chunk(tuple(chunk[0]), tuple(chunk[1]))
    return Entry(None if shape is None else tuple(shape), dtype, found, *rest)


class Layout:
    """The `RankValues` of all ranks, in rank order; ValueError naming a value and two ranks if they contradict."""

    def __init__(self, values_of_rank: Sequence[RankValues], name_of: Callable[[int], str]) -> None:
        self.values_of_rank = values_of_rank
        self._name_of = name_of
        self._holders: dict[str, list[int]] = {}
        for rank, values in enumerate(values_of_rank):
            for name in values.entries:
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
        for place, values in enumerate(self.values_of_rank):
            for name, entry in values.entries.items():
                if entry.has_whole_state:
                    firsts.setdefault(name, place)
        return {name for name, first in firsts.items() if first == rank}

    def only_elsewhere(self, rank: int) -> set[str]:
        """Names, aliases included, that other ranks hold and this rank does not."""
        names_of_rank = [{*values.entries, *values.aliases} for values in self.values_of_rank]
        return {name for names in names_of_rank for name in names} - names_of_rank[rank]

    def _entry(self, rank: int, name: str) -> Entry:
        return self.values_of_rank[rank].entries[name]

    def _check(self, name: str, holders: Sequence[int]) -> None:
        """ValueError unless the ranks that hold a name hold the same value, or parts that make up one."""
        first = holders[0]
        expected = self._entry(first, name)
        chunks: dict[Chunk, int] = {}
        for rank in holders:
            entry = self._entry(rank, name)
            between = f"{self._name_of(first)} and {self._name_of(rank)}"
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
            if entry.chunk is None:  # not a tensor
                continue
            first_with_chunk = chunks.setdefault(entry.chunk, rank)
            if entry.sample != self._entry(first_with_chunk, name).sample:
                raise ValueError(
                    f"{name!r} is in no parameter group and has different values on "
                    f"{self._name_of(first_with_chunk)} and {self._name_of(rank)}. Put it into the group of its ranks, "
                    "or give each its name by global_names=. [ZERO-814]"
                )
        fault = None if expected.shape is None else Chunk.fault(expected.shape, list(chunks))
        if fault is not None:
            chunks_of_ranks = "; ".join(
                f"{chunk.describe()} on {self._name_of(rank)}" for chunk, rank in chunks.items()
            )
            raise ValueError(
                f"Expected the parts of {name!r} to make up {_text_of(expected)}, got {fault}: {chunks_of_ranks}. "
                "State how it is cut in sharded_over=, alike on all ranks. [ZERO-805]"
            )

    def _assign(self) -> list[set[str]]:
        """Names that each rank writes: the first ranks that share the optimizer state do, else the least loaded."""
        names_of_rank: list[set[str]] = [set() for _ in self.values_of_rank]
        loads = [0] * len(self.values_of_rank)
        without_state = []
        for name, holders in self._holders.items():
            by_chunk: dict[Chunk | None, list[int]] = {}
            for rank in holders:
                by_chunk.setdefault(self._entry(rank, name).chunk, []).append(rank)
            for chunk, ranks in by_chunk.items():
                if chunk is not None and not chunk.numel and len(by_chunk) > 1:
                    continue  # a part without elements
                writer_groups = [self._entry(rank, name).writers for rank in ranks]
                first = next((group for group in writer_groups if group is not None), None)
                if first is None:
                    without_state.append((name, ranks))
                for rank, group in zip(ranks, writer_groups, strict=True):
                    if first is not None and group == first:
                        names_of_rank[rank].add(name)
                        loads[rank] += self._entry(rank, name).weight
        buffers = {name for values in self.values_of_rank for name in values.buffers}
        for name, ranks in without_state:
            writer = ranks[0] if name in buffers else min(ranks, key=lambda rank: loads[rank])
            names_of_rank[writer].add(name)
            loads[writer] += self._entry(writer, name).weight
        return names_of_rank


def _text_of(entry: Entry) -> str:
    return "no tensor" if entry.shape is None else f"shape {list(entry.shape)} of {entry.dtype}"


# A rank's part


@dataclass(frozen=True)
class Placed:
    """A tensor that a rank holds, and its place in the whole."""

    part: Tensor  # the rank's tensor, a plain tensor in the memory that the model uses
    shape: tuple[int, ...]  # of the whole tensor
    chunk: Chunk  # which of its elements the rank holds
    home: str  # see `Entry`


class PartModel(LiveModel):
    """As `LiveModel`, with the names and shapes of the whole model; ValueError for two values that ``names`` gives one.

    Args:
        model: the modules of this rank; DDP models inside it leave no trace in names.
        placed: the parameters of the optimizer, as the model has them.
        names: of the values in the whole model; None: as they are.
        home: of values that no parameter of the optimizer is near to.
    """

    def __init__(self, model: nn.Module, placed: Mapping[Tensor, Placed], names: GlobalNames | None, home: str) -> None:
        super().__init__(model)
        wrapped = [name for name, entry in self.module.named_modules() if isinstance(entry, DistributedDataParallel)]
        bare = {name: _without_ddp(name, wrapped) for name in (*self.entries, *self.aliases)}
        found = rename_all(bare.values(), {} if names is None else names, "global_names=", "the model")
        self._whole_name = {name: found[short] for name, short in bare.items()}
        known = {
            self._whole_name[self._names[id(entry)]]: placed[entry].home for entry in placed if id(entry) in self._names
        }
        self._home, self._known_homes = home, known
        self._homes_inside: dict[str, set[str]] = {}  # by the names of modules
        for place, own_home in known.items():
            while place:
                place = place.rpartition(".")[0]
                self._homes_inside.setdefault(place, set()).add(own_home)
        self._given = self.entries = {self._whole_name[name]: entry for name, entry in self.entries.items()}
        self.aliases = {self._whole_name[alias]: self._whole_name[name] for alias, name in self.aliases.items()}
        self._names = {number: self._whole_name[name] for number, name in self._names.items()}
        self.placed = {name: self._place(name, entry, placed) for name, entry in self.tensors.items()}
        self.entries = {
            name: self.placed[name].part if name in self.placed else entry for name, entry in self._given.items()
        }
        self._names.update({id(entry.part): name for name, entry in self.placed.items()})
        self._in_optimizer = {name for name in self.placed if self._given[name] in placed}

    def chunk(self, name: str) -> Chunk | None:
        """The elements of a value that this rank holds, by name or alias; None if it is not a tensor."""
        placed = self.placed.get(self.aliases.get(name, name))
        return None if placed is None else placed.chunk

    def values(self) -> dict[str, Value]:
        values = super().values()
        values |= {name: Value(placed.shape, values[name].dtype) for name, placed in self.placed.items()}
        return {**values, **{alias: values[name] for alias, name in self.aliases.items()}}

    def load_extra(self, states: Mapping[str, Any]) -> None:
        local_name = {whole: name for name, whole in self._whole_name.items()}
        super().load_extra({local_name[name]: state for name, state in states.items()})

    def rank_values(self, writers: Mapping[str, int], whole_states: Collection[str] = ()) -> RankValues:
        """The tensors and values that this rank holds; with state of the whole of those in ``whole_states``.

        ``writers``: for each that it may write, the first of the ranks that share its state; see `Entry`.
        """
        # parameters in no group: ranks may hold different parameters without anything showing it
        params = [name for name in self.placed if isinstance(self._given[name], nn.Parameter)]
        ungrouped = [name for name in params if name not in self._in_optimizer]
        samples = dict(zip(ungrouped, sample_values([self.placed[name].part for name in ungrouped]), strict=True))
        values = self.values()
        entries = {}
        for name, value in self.entries.items():
            place = self.placed.get(name)
            entries[name] = Entry(
                shape=values[name].shape,
                dtype=values[name].dtype,
                chunk=None if place is None else place.chunk,
                home=self._home_of(name),
                sample=samples.get(name, ""),
                writers=writers.get(name),
                weight=0 if place is None else value.nbytes,
                has_whole_state=name in whole_states,
            )
        buffers = [name for name, value in self._given.items() if not isinstance(value, nn.Parameter)]
        return RankValues(entries, list(self.aliases), buffers)

    def _place(self, name: str, entry: Any, placed: Mapping[Tensor, Placed]) -> Placed:
        found = placed.get(entry)
        if found is not None:
            return found
        if not hasattr(entry, "device_mesh"):
            return Placed(entry, tuple(entry.shape), Chunk.whole(entry.shape), self._home_of(name))
        return Placed(entry.detach().to_local(), tuple(entry.shape), chunk_of(entry, name), self._home_of(name))

    def _home_of(self, name: str) -> str:
        """The home of a parameter, or the one of all parameters in the nearest module around a value that has any."""
        if name in self._known_homes:
            return self._known_homes[name]
        while name:
            name = name.rpartition(".")[0]
            homes = list(self._homes_inside.get(name, ()))
            if homes:
                return homes[0] if len(homes) == 1 else self._home
        return self._home


def chunk_of(tensor: Any, label: str) -> Chunk:
    """The elements of a distributed tensor that this rank holds; NotImplementedError if it holds several parts."""
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise NotImplementedError(
            f"Expected one part of {label} on each rank, got {len(chunks)}. Redistribute it first. [ZERO-806]"
        )
    return Chunk(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _without_ddp(name: str, wrapped: Sequence[str]) -> str:
    """A name without the ``module`` that DDP models inside the model add."""
    for place in sorted(wrapped, key=len, reverse=True):
        name = f"{place}.{name.removeprefix(f'{place}.module.')}" if name.startswith(f"{place}.module.") else name
    return name
