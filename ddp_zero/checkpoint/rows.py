"""Rows: the values of a model and an optimizer's state that a rank writes; the rows of all ranks are a checkpoint.

A *row* is a value of the model or of an optimizer's state, or some elements of it: the name of the value, the shape of
the whole, the offsets of the elements, and these as a tensor. So a value that ranks hold in any boxes, or in any runs
of its memory, is the rows of its name, and a reader copies the overlaps of its own chunk with theirs.

A rank's *part* is its rows and a few other values; see `ddp_zero.checkpoint.tensor_file` for its JSON. It may come from
an untrusted source: everything is checked before use, and nothing is unpickled.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ddp_zero.checkpoint.folder import Marker, newest, part_name, read_marker, read_text
from ddp_zero.checkpoint.foreign import deepspeed
from ddp_zero.checkpoint.foreign.deepspeed import Foreign
from ddp_zero.checkpoint.foreign.torch_file import RawTensor
from ddp_zero.checkpoint.tensor_file import FileSpan, StoredTensor, check_spec, decode_part, text_and_tensors
from ddp_zero.checkpoint.view import View
from ddp_zero.core.comm import Peers
from ddp_zero.core.local import MASTER_KEY
from ddp_zero.core.plan import partition_greedy
from ddp_zero.error_codes import coded
from ddp_zero.parallel.placement import group_options
from ddp_zero.parallel.whole_model import Layout
from ddp_zero.tools.files import LOAD_EARLIER, check_types, is_of
from ddp_zero.values import Chunk, TensorSpec, Tree, boxes_of, by_group, fill, part_of

State = dict[Any, Any]

# Rows of a value


class Row(NamedTuple):
    """A value, or some of its elements, as many per dimension as the tensor has."""

    name: str  # of a value of the model
    key: str | int | None  # of its optimizer state; None: the value itself
    value: Any
    shape: tuple[int, ...] | None = None  # of the whole; None: this is the whole
    stride: tuple[int, ...] | None = None  # of the whole in memory; None: contiguous, or not known
    offsets: tuple[int, ...] = ()  # index of the first element, per dimension

    @classmethod
    def of(cls, columns: Sequence[Any]) -> "Row":
        """A row of these columns; TypeError for anything else, as from an untrusted source."""
        row = cls(*columns)
        tuples = (row.shape or (), row.stride or (), row.offsets)
        are_typed = type(columns) is tuple and type(row.name) is str and type(row.key) in (str, int, NoneType)
        if not are_typed or any(
            type(numbers) is not tuple or any(type(n) is not int for n in numbers) for numbers in tuples
        ):
            raise TypeError(f"damaged rows: {columns!r:.200}")
        return row


def rows_of(
    name: str,
    held: Any,
    state: Mapping[Any, Any],
    shape: tuple[int, ...] | None,
    chunk: Chunk | None,
    part: slice | None = None,
) -> list[Row]:
    """The rows of a value and of its optimizer state.

    A tensor in the state is per element if it has the shape of the stepped tensor; anything else is of the whole.

    Args:
        name: of the value.
        held: the value, or the elements of it that this rank holds.
        state: of ``part``.
        shape: of the whole value.
        chunk: the place of ``held`` in the whole; None: all.
        part: of ``held``, that is written.
    """
    if part is None and (chunk is None or chunk.sizes == shape):
        return [Row(name, key, value) for key, value in {None: held, **state}.items()]
    held = held.detach()
    rows = []
    chunk = chunk or Chunk.whole(held.shape)
    stepped = part_of(held, held, part)
    stride = None if part is None else held.stride()
    for key, value in {None: stepped, **state}.items():
        if not isinstance(value, Tensor) or value.shape != stepped.shape:
            rows.append(Row(name, key, value))
            continue
        for one, inside in boxes_of(value, held, part):
            rows.append(Row(name, key, inside, shape, stride, one.moved_by(chunk.offsets).offsets))
    return rows


# A rank's part


@dataclass(frozen=True)
class Shared:
    """Values that a checkpoint holds once, not per rank; if ranks hold different parts of the model, each its own."""

    optimizer: str | None = None  # the sharded class, or None if no optimizer was saved
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # its groups, with names as ``params``
    other_state: dict[str, Any] = field(default_factory=dict)  # state that belongs to no parameter
    loss_scale: dict[str, int | float] | None = None  # state of a dynamic loss scale, or None
    trainable: list[str] = field(default_factory=list)  # names of the parameters that required a gradient
    # additional names of the model's tensors, each with the name under which the tensor is saved
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)  # names of values that are not parameters
    extra: Tree = None  # the user's state
    excludes_frozen: bool = False  # True if frozen parameters may be missing from the model


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint."""

    rows: list[Row]
    births: dict[str, tuple[int, int]]  # step and place of creation of states, by the parameter's name
    rank_extra: Tree  # the user's state of this rank
    shared: Shared | None  # on rank 0 only if all ranks hold the same, else None

    def as_text(self, where: str) -> tuple[str, list[Tensor]]:
        """The part as text, and its tensors; TypeError naming ``where`` for a value that no checkpoint can hold."""
        rows = [tuple(row if row.shape is not None else row[:3]) for row in self.rows]
        shared = None if self.shared is None else dict(vars(self.shared))
        return text_and_tensors({**vars(self), "rows": rows, "shared": shared}, where)

    @classmethod
    def read(cls, folder: Path, rank: int, digest: str) -> "Part":
        """A rank's part, with a `StoredTensor` in the place of each tensor; ValueError if damaged or malformed."""
        path = folder / part_name(rank)
        part: Part = decode_part(read_text(path), digest, path, cls._of_tree)
        return part

    @classmethod
    def _of_tree(cls, tree: Any) -> "Part":
        shared = None if tree["shared"] is None else Shared(**tree["shared"])
        part = cls(**{**tree, "rows": [*map(Row.of, tree["rows"])], "shared": shared})
        check_types(part)
        if shared is not None:
            check_types(shared)
            if not is_of([group["params"] for group in shared.param_groups], list[list[str]]):
                raise TypeError("damaged groups")
            if {"state", "param_groups"} & set(shared.other_state):
                raise TypeError("other_state has the name of the state")
        return part


def capture(
    view: View,
    layout: Layout | None,
    peers: Peers,
    extra: Tree,
    rank_extra: Tree,
    exclude_frozen: bool = False,
) -> Part:
    """This rank's part of a checkpoint, made of live tensors.

    The writer of a parameter's state also writes its value; parameters in no optimizer are spread over the ranks;
    buffers, which may differ between ranks, are taken from rank 0, as DDP broadcasts them. If ranks hold different
    parts of the model, ``layout`` gives the writers of each value.
    """
    rank, live, state = peers.group_rank, view.live, view.state
    # state of a value that is not there would have no shape of the whole to be joined to, and is never loaded
    params = {name: value for name, value in live.entries.items() if isinstance(value, nn.Parameter)}
    frozen = {name for name, param in params.items() if exclude_frozen and not param.requires_grad}
    rows, births = _rows_of_rank(view, layout, peers, frozen)
    if rank != 0 and layout is None:
        return Part(rows, births, rank_extra, None)
    groups = [] if state is None else state.optimizer.param_groups
    names_of_groups = by_group(view.names, groups)
    shared = Shared(
        optimizer=None if state is None else state.class_name,
        param_groups=[
            {**group_options(group), "params": names} for group, names in zip(groups, names_of_groups, strict=True)
        ],
        other_state={} if state is None or rank != 0 else state.other_state(),
        loss_scale=None if state is None else state.scale(),
        trainable=live.trainable,
        aliases={alias: name for alias, name in live.aliases.items() if name not in frozen},
        buffers=[name for name in live.entries if name not in params],
        extra=extra if rank == 0 else None,
        excludes_frozen=exclude_frozen,
    )
    return Part(rows, births, rank_extra, shared)


def _rows_of_rank(
    view: View, layout: Layout | None, peers: Peers, frozen: Collection[str]
) -> tuple[list[Row], dict[str, tuple[int, int]]]:
    """The rows that this rank writes, without those of ``frozen`` values; and births of states, by parameter name."""
    live, state = view.live, view.state
    # the parameters, or parts, of which this rank writes value and state
    holdings = {}
    if state is not None:
        holdings = {view.names[index]: holding for index, holding in state.holdings(peers).items()}
    written, whole_states = _values_to_write(view, layout, peers, holdings)
    stepped_whole = set() if state is None else {view.names[index] for index in state.table.wholes}
    rows = list[Row]()
    births = dict[str, tuple[int, int]]()
    values = live.values()
    for name, local_value in live.entries.items():
        holding = holdings.get(name)
        saved_state = {} if holding is None or holding.state is None else holding.state
        if odd := [key for key in saved_state if type(key) not in (str, int)]:
            raise TypeError(f"Expected str or int keys in the state of {name!r}, got {odd[0]!r}. [ZERO-611]")
        if name in frozen:
            continue
        writes_state = name in written
        if name in stepped_whole:  # its state, but for masters, which are of parts, is written by a single rank
            writes_state = name in whole_states
            if writes_state:
                rows += [Row(name, key, value) for key, value in saved_state.items() if key != MASTER_KEY]
            saved_state = {key: value for key, value in saved_state.items() if key == MASTER_KEY}
        if writes_state and holding is not None and holding.state is not None:
            births[name] = holding.birth
        if name in written:
            part = None if holding is None else holding.part
            rows += rows_of(name, local_value, saved_state, values[name].shape, live.chunk(name), part)
    return rows, births


def _values_to_write(
    view: View, layout: Layout | None, peers: Peers, holdings: Collection[str]
) -> tuple[set[str], set[str]]:
    """Names of the values that this rank writes, and names of the parameters of which it writes the whole's state."""
    rank, entries = peers.group_rank, view.live.entries
    if layout is not None:
        return layout.written_by(rank), layout.whole_states_of(rank)
    params = {name: value for name, value in entries.items() if isinstance(value, nn.Parameter)}
    in_no_optimizer = sorted(params.keys() - {*view.names})
    nbytes = [params[name].nbytes for name in in_no_optimizer]
    owners = partition_greedy(nbytes, peers.world_size) if in_no_optimizer else []
    written = {*holdings, *(name for name, owner in zip(in_no_optimizer, owners, strict=True) if owner == rank)}
    if rank == 0:
        written |= entries.keys() - params.keys()  # buffers
    return written, set(holdings)


# All parts as one checkpoint


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: its marker and all parts, read and checked, with tensors still in their files."""

    folder: Path  # its folder
    step: int  # the number under which it was saved
    digest: str  # hash that differs if any value of the checkpoint differs
    model: Mapping[str, Any]  # values by name, aliases included
    state: Mapping[str, State]  # optimizer state by parameter name, in the order of the unsharded optimizer
    shared: Shared  # groups, options and other values that it holds once for all ranks
    rank_extras: Sequence[Tree]  # the user's state of each rank that saved
    foreign: Foreign | None = None  # the checkpoint of another library that this checkpoint was made from, or None

    @classmethod
    def open(cls, path: Path) -> "SavedCheckpoint":
        """Read everything except the tensors of the newest checkpoint at a path.

        Raises FileNotFoundError if there is no complete checkpoint, ValueError for a damaged or foreign checkpoint.
        """
        try:
            folder = newest(path)
        except FileNotFoundError:
            found = deepspeed.find(path)
            if found is None:
                raise
            return cls.of_foreign(deepspeed.read(found))
        return cls.read(folder, read_marker(folder))

    @classmethod
    def of_foreign(cls, foreign: Foreign) -> "SavedCheckpoint":
        """Convert another library's checkpoint; its masters become masters in the state of a sharded optimizer."""
        model, groups, state, masters, extra = fill(
            (foreign.model, foreign.groups, foreign.state, foreign.masters, foreign.extra), RawTensor, stored_of
        )
        for name, master in masters.items():
            state.setdefault(name, {})[MASTER_KEY] = master
        model.update({alias: model[name] for alias, name in foreign.aliases.items()})
        shared = Shared(
            optimizer=f"torch.optim.{min(foreign.kinds, default='unknown')}",
            param_groups=groups,
            loss_scale=foreign.loss_scale,
            trainable=foreign.trainable,
            aliases=foreign.aliases,
            buffers=foreign.buffers,
            extra=extra,
            excludes_frozen=True,
        )
        return cls(foreign.folder, foreign.step, foreign.digest, model, state, shared, [], foreign)

    @classmethod
    def read(cls, folder: Path, marker: Marker) -> "SavedCheckpoint":
        """As `open`, for a folder and its marker, which may not have been written yet."""
        parts = [Part.read(folder, rank, digest) for rank, digest in enumerate(marker.parts)]
        shared_of_ranks = [part.shared for part in parts if part.shared is not None]
        if not parts or parts[0].shared is None or len(shared_of_ranks) not in (1, len(parts)):
            raise ValueError(
                "Groups and options must be in the part of rank 0, or in all parts; they are missing or repeated in "
                f"{folder}. {LOAD_EARLIER} [ZERO-624]"
            )
        model, state = _join(parts, folder)
        shared = _join_shared(shared_of_ranks, model)
        for alias, name in shared.aliases.items():
            if alias in model or name not in model:
                raise ValueError(
                    f"Expected {alias!r} to be another name of a saved tensor, got {name!r}: {folder}. {LOAD_EARLIER} "
                    "[ZERO-624]"
                )
            model[alias] = model[name]
        extras = [part.rank_extra for part in parts]
        saved = cls(folder, marker.step, "".join(marker.parts), model, state, shared, extras)
        names = saved.names()
        if not set(state) <= set(names) or len(set(names)) < len(names):
            raise ValueError(
                f"Expected every parameter with state in one group, got a parameter in none or two: {folder}. "
                f"{LOAD_EARLIER} "
                "[ZERO-624]"
            )
        return saved

    def is_of(self, optimizer: str) -> bool:
        """True if its state may belong to this optimizer class; other libraries record only the kind of class."""
        if self.foreign is None:
            return self.shared.optimizer == optimizer
        return optimizer.rpartition(".")[2] in self.foreign.kinds

    def names(self) -> list[str]:
        """The optimizer's parameters, in the order of its groups."""
        return [name for group in self.shared.param_groups for name in group["params"]]

    def tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors, each under its first name."""
        named = {name: value for name, value in self.model.items() if name not in self.shared.aliases}
        return {name: value for name, value in named.items() if isinstance(value, StoredTensor)}

    def as_tree(self) -> Tree:
        """The tree for other readers, in the layout of `torch.distributed.checkpoint.state_dict`."""
        shared = self.shared
        optim = {"state": dict(self.state), "param_groups": shared.param_groups, **shared.other_state}
        return {
            "model": dict(self.model),
            **({"optim": optim} if shared.optimizer is not None else {}),
            **({"loss_scale": shared.loss_scale} if shared.loss_scale is not None else {}),
            "step": self.step,
            "extra": shared.extra,
            "rank_extra": list(self.rank_extras),
        }


def _join(parts: Sequence[Part], folder: Path) -> tuple[dict[str, Any], dict[str, State]]:
    """The values of a model, and states in the order of their births, from the parts of all ranks."""
    births: dict[str, tuple[int, int]] = {}
    rows_of_value: dict[tuple[str, Any], list[tuple[int, Row]]] = {}
    for rank, part in enumerate(parts):
        for name, birth in part.births.items():
            births[name] = min(birth, births.get(name, birth))
        for row in part.rows:
            rows_of_value.setdefault((row.name, row.key), []).append((rank, row))
    model: dict[str, Any] = {}
    state: dict[str, State] = {name: {} for name in sorted(births, key=births.__getitem__)}
    for (name, key), items in rows_of_value.items():
        try:
            (model if key is None else state[name])[name if key is None else key] = _one_value(
                [row for _, row in items]
            )
        except (ValueError, KeyError) as error:
            label = repr(name) if key is None else f"the state {key!r} of {name!r}"
            cause = error if isinstance(error, ValueError) else "one without the order in which it was created"
            ranks = list(dict.fromkeys(rank for rank, _ in items))
            message = (
                f"Expected the rows of {label} to make up one value, got {cause}, from ranks {ranks}: {folder}. "
                f"{LOAD_EARLIER}"
            )
            raise ValueError(coded(message, "[ZERO-624]")) from error
    return model, state


def _join_shared(shared_of_ranks: Sequence[Shared], model: Mapping[str, Any]) -> Shared:
    """Shared values of all ranks as one: groups of equal options are merged; a name of any rank's value is no alias."""
    if len(shared_of_ranks) == 1:
        return shared_of_ranks[0]
    groups: dict[str, dict[str, Any]] = {}
    for group in (group for shared in shared_of_ranks for group in shared.param_groups):
        options = dict(sorted({**group, "params": None}.items()))  # each rank gave them in an order of its own
        joined = groups.setdefault(repr(_content(options)), {**group, "params": []})
        joined["params"] = list(dict.fromkeys([*joined["params"], *group["params"]]))
    return replace(
        shared_of_ranks[0],
        param_groups=list(groups.values()),
        trainable=list(dict.fromkeys(name for shared in shared_of_ranks for name in shared.trainable)),
        aliases={
            alias: name for shared in shared_of_ranks for alias, name in shared.aliases.items() if alias not in model
        },
        buffers=list(dict.fromkeys(name for shared in shared_of_ranks for name in shared.buffers)),
    )


def _content(tree: Tree) -> Tree:
    """The tree with a spec and a checksum in the place of each tensor."""
    return fill(tree, StoredTensor, lambda stored: (stored.spec, stored.span.checksum))


def _one_value(rows: Sequence[Row]) -> Any:
    """The value that parts of it, or equal values, make up; ValueError if they do not make up one."""
    first = rows[0]
    if all(row.shape is None for row in rows):
        for other in rows[1:]:
            if _content(first.value) != _content(other.value):
                raise ValueError("different values")
        return first.value
    if not all(row.shape is not None and isinstance(row.value, StoredTensor) for row in rows):
        raise ValueError("values besides tensors of parts")
    if len({(row.shape, row.stride, row.value.spec.dtype) for row in rows}) > 1:
        raise ValueError("several shapes or dtypes")
    whole = check_spec(replace(first.value.spec, shape=first.shape, stride=first.stride))
    spans_of_chunks = [(Chunk(row.offsets, row.value.spec.shape), row.value.span) for row in rows]
    if any({len(chunk.offsets), len(chunk.sizes)} != {len(whole.shape)} for chunk, _ in spans_of_chunks):
        raise ValueError("other numbers of dimensions")
    if (fault := Chunk.fault(whole.shape, [chunk for chunk, _ in spans_of_chunks])) is not None:
        raise ValueError(fault)
    return StoredTensor(whole, tuple(spans_of_chunks))


def stored_of(raw: RawTensor) -> StoredTensor:
    """Another library's tensor as a `StoredTensor`.

    Its elements are spans of records in files, in the order of a contiguous tensor. Each span is cut into axis-aligned
    chunks, as a `StoredTensor` has them.
    """
    pieces, start = [], 0
    for span in raw.spans:
        record = span.record
        offset = span.record.offset + span.begin
        stop = start + span.nbytes // raw.dtype.itemsize
        for chunk in Chunk.of_run(raw.shape, start, stop):
            crc = f"{record.crc:08x}"
            pieces.append((chunk, FileSpan(record.file, record.offset, record.nbytes, offset, crc, is_shared=True)))
            offset += chunk.numel * raw.dtype.itemsize
        start = stop
    return StoredTensor(TensorSpec(raw.shape, None, raw.dtype, "cpu"), tuple(pieces))
