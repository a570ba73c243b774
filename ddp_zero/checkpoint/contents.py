"""A checkpoint on disk as one object: its marker and all parts, read and checked, with tensors still in their files."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_zero.checkpoint.folder import (
    CutTensor,
    JoinedTensor,
    Marker,
    PiecedTensor,
    StoredTensor,
    decode_part,
    fill,
    newest,
    part_name,
    read_marker,
    read_text,
    stored_in,
    total_bytes,
)
from ddp_zero.checkpoint.foreign import deepspeed
from ddp_zero.checkpoint.foreign.deepspeed import Foreign
from ddp_zero.checkpoint.foreign.torch_file import RawTensor
from ddp_zero.core.local.parameters import MASTER_KEY
from ddp_zero.core.local.tree import Tree
from ddp_zero.core.plan.boxes import Box, fault
from ddp_zero.error_codes import coded

State = dict[Any, Any]


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint."""

    model: dict[str, Any]  # values of parameters and buffers, by name
    state: dict[str, State]  # states of the parameters that the rank owns, by name
    births: list[tuple[int, int, str]]  # step and place of creation of each of those states, and the parameter's name
    rank_extra: Tree  # the user's state of this rank
    shared: "Shared | None"  # values that are equal on every rank; on rank 0 only, else None
    # for each value held in parts by several ranks, the shape of the whole and the offsets of this part
    cuts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    # for each parameter of which this part has a piece, in its value and in its state: shape and strides of the whole,
    # and the place of the piece's first element in the order of memory
    pieces: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = field(default_factory=dict)
    # states of whole parameters that this rank steps for all ranks that hold parts, without masters, which are of parts
    wholes: dict[str, State] = field(default_factory=dict)

    def as_tree(self) -> Tree:
        """The part as dicts, without those of cut parameters if there are none."""
        tree = {**vars(self), "shared": None if self.shared is None else dict(vars(self.shared))}
        return {key: value for key, value in tree.items() if key not in ("cuts", "pieces", "wholes") or value}


@dataclass(frozen=True)
class Shared:
    """Values that a checkpoint holds once, not per rank."""

    optimizer: str | None = None  # the sharded class, or None if no optimizer was saved
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # its groups, with names as ``params``
    other_state: dict[str, Any] = field(default_factory=dict)  # state that belongs to no parameter
    loss_scale: dict[str, float] | None = None  # state of a dynamic loss scale, or None
    trainable: list[str] = field(default_factory=list)  # names of the parameters that required a gradient
    # additional names of the model's tensors, each with the name under which the tensor is saved
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: list[str] | None = None  # names of values that are not parameters; None if not known
    extra: Tree = None  # the user's state
    excludes_frozen: bool = False  # True if frozen parameters may be missing from the model


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    folder: Path  # its folder
    step: int  # the number under which it was saved
    digest: str  # hash that differs if any value of the checkpoint differs
    model: Mapping[str, Any]  # values by name, aliases included
    state: Mapping[str, State]  # optimizer state by parameter name, in the order of the unsharded optimizer
    shared: Shared  # values that it holds once
    rank_extras: Sequence[Tree]  # the user's state of each rank that saved
    foreign: Foreign | None = None  # the checkpoint of another library that this one was made from, or None

    @classmethod
    def open(cls, path: Path) -> "SavedCheckpoint":
        """Read everything except the tensors of the newest checkpoint at a path.

        Raises FileNotFoundError if there is no complete checkpoint, ValueError for a damaged or foreign one.
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
        state = {name: dict(states) for name, states in foreign.state.items()}
        for name, master in foreign.masters.items():
            state.setdefault(name, {})[MASTER_KEY] = master
        shared = Shared(
            optimizer=f"torch.optim.{min(foreign.kinds, default='unknown')}",
            param_groups=_stored(foreign.groups),
            loss_scale=foreign.loss_scale,
            trainable=foreign.trainable,
            aliases=foreign.aliases,
            buffers=foreign.buffers,
            extra=_stored(foreign.extra),
            excludes_frozen=True,
        )
        model = _stored(foreign.model)
        model.update({alias: model[name] for alias, name in foreign.aliases.items()})
        return cls(foreign.folder, foreign.step, foreign.digest, model, _stored(state), shared, [], foreign)

    def is_of(self, optimizer: str) -> bool:
        """True if its state may belong to this optimizer class; other libraries record only the kind of class."""
        if self.foreign is None:
            return self.shared.optimizer == optimizer
        return optimizer.rpartition(".")[2] in self.foreign.kinds

    @classmethod
    def read(cls, folder: Path, marker: Marker) -> "SavedCheckpoint":
        """As `open`, for a folder and its marker, which may not have been written yet."""
        parts = [_read_part(folder, rank, digest) for rank, digest in enumerate(marker.parts)]
        if not parts or parts[0].shared is None or any(part.shared is not None for part in parts[1:]):
            raise ValueError(
                f"Groups and options must be in the part of rank 0 only; they are missing or repeated in {folder}. "
                "[ZERO-622]"
            )
        shared = parts[0].shared
        boxes, pieces = _cut_values(parts, folder), _pieced_values(parts, folder)
        cut_model: dict[str, StoredTensor] = {**boxes[0], **pieces[0]}
        cut_state = {**boxes[1], **pieces[1]}
        model = _joined([part.model for part in parts], cut_model, folder)
        for alias, name in shared.aliases.items():
            if alias in model or name not in model:
                raise ValueError(
                    f"Expected {alias!r} to be another name of a saved tensor, got {name!r}: {folder}. [ZERO-622]"
                )
            model[alias] = model[name]
        state = _joined([part.state for part in parts], cut_state, folder)
        for name, of_whole in _joined([part.wholes for part in parts], {}, folder).items():
            state[name] = {**of_whole, **state.get(name, {})}
        births = _births(parts, cut_model)
        if sorted(name for _, _, name in births) != sorted(state):
            raise ValueError(
                f"Expected the order of all optimizer states, got an order of a different set: {folder}. [ZERO-622]"
            )
        if not set(state) <= {name for group in shared.param_groups for name in group["params"]}:
            raise ValueError(f"The optimizer state of a parameter is in no group: {folder}. [ZERO-622]")
        ordered = {name: state[name] for _, _, name in births}
        extras = [part.rank_extra for part in parts]
        return cls(folder, marker.step, "".join(marker.parts), model, ordered, shared, extras)

    def tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors, each under its first name."""
        named = {name: value for name, value in self.model.items() if isinstance(value, StoredTensor)}
        return {name: value for name, value in named.items() if name not in self.shared.aliases}

    def stored(self) -> list[StoredTensor]:
        """Every stored tensor, once."""
        shared = self.shared
        trees = [self.model, self.state, shared.param_groups, shared.other_state, shared.extra, *self.rank_extras]
        return list(dict.fromkeys(stored_in(trees)))

    def summary(self) -> list[tuple[str, str]]:
        """Its contents in words, by title."""
        shared, tensors = self.shared, self.tensors()
        sizes = Counter[str]()
        for stored in tensors.values():
            sizes[str(stored.spec.dtype).removeprefix("torch.")] += math.prod(stored.spec.shape)
        elements = ", ".join(f"{count:,} of {dtype}" for dtype, count in sizes.most_common())
        writer = f"ddp_zero, {_several(len(self.rank_extras), 'rank')}"
        if self.foreign is not None:
            writer = f"DeepSpeed {self.foreign.extra.get('ds_version')}"
        rows = [("written by", writer), ("step", str(self.step))]
        rows.append(("model", f"{_several(len(tensors), 'tensor')}; elements: {elements or 'none'}"))
        if shared.buffers is not None:
            frozen = [name for name in tensors if name not in {*shared.buffers, *shared.trainable}]
            left_out = ", which may have been left out" if shared.excludes_frozen and not frozen else ""
            rows.append(("frozen", f"{_several(len(frozen), 'parameter')}{left_out}"))
        if shared.optimizer is not None:
            kinds = " or ".join(sorted(self.foreign.kinds)) if self.foreign is not None else shared.optimizer
            rows.append(("optimizer", f"{kinds or 'unknown'}, {_several(len(shared.param_groups), 'group')}"))
            keys = dict.fromkeys(str(key) for state in self.state.values() for key in state)
            rows.append(("state", f"of {_several(len(self.state), 'parameter')}: {', '.join(keys) or 'none'}"))
        if shared.loss_scale is not None:
            rows.append(("loss scale", ", ".join(f"{name} {value:g}" for name, value in shared.loss_scale.items())))
        if isinstance(shared.extra, Mapping) and shared.extra:
            rows.append(("extra", ", ".join(map(str, shared.extra))))
        return [*rows, ("bytes", f"{total_bytes(self.stored()):,}")]

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


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _stored(value: Any) -> Any:
    if isinstance(value, RawTensor):
        return PiecedTensor.of(value)
    if isinstance(value, dict):
        return {key: _stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_stored(item) for item in value)
    return value


def _read_part(folder: Path, rank: int, digest: str) -> Part:
    path = folder / part_name(rank)
    tree = decode_part(read_text(path), digest, path)
    try:
        shared = None if tree["shared"] is None else Shared(**tree["shared"])
        part = Part(**{**tree, "shared": shared})
        _check_part(part)
        if shared is not None:
            _check_shared(shared)
    except (TypeError, KeyError, AttributeError) as error:
        message = f"Expected a part of a checkpoint in {path}, got {type(error).__name__}: {error}"
        raise ValueError(coded(message, "[ZERO-622]")) from error
    return part


def _check_part(part: Part) -> None:
    _expect(_is_dict(part.model, str) and _is_dict(part.state, str), "values and states by parameter name")
    _expect(all(isinstance(state, dict) for state in part.state.values()), "a dict as the state of each parameter")
    births = part.births
    _expect(isinstance(births, list), "a list of births")
    _expect(all(isinstance(b, tuple) and [type(x) for x in b] == [int, int, str] for b in births), "births of states")
    _expect(_is_dict(part.wholes, str), "states of whole parameters by name")
    _expect(all(isinstance(state, dict) for state in part.wholes.values()), "a dict as the state of each whole")
    _expect(_is_dict(part.cuts, str), "places of parts by parameter name")
    for name, cut in part.cuts.items():
        value = part.model.get(name)
        _expect(isinstance(value, StoredTensor), "a tensor for every part")
        _expect(isinstance(cut, tuple) and len(cut) == 2 and all(map(_is_tuple_of_sizes, cut)), "a shape and offsets")
        _expect(len(cut[0]) == len(cut[1]) == len(value.spec.shape), "as many offsets as dimensions")  # type: ignore[union-attr]
    _expect(_is_dict(part.pieces, str) and not part.pieces.keys() & part.cuts.keys(), "pieces by parameter name")
    for name, piece in part.pieces.items():
        value = part.model.get(name)
        _expect(isinstance(value, StoredTensor) and len(value.spec.shape) == 1, "a 1-D tensor for every piece")
        _expect(isinstance(piece, tuple) and len(piece) == 3, "a shape, strides and a place")
        _expect(_is_tuple_of_sizes(piece[0]) and _is_tuple_of_sizes(piece[1]), "a shape and strides")
        _expect(len(piece[0]) == len(piece[1]) and _is_tuple_of_sizes(piece[2:]), "as many strides as dimensions")


def _check_shared(shared: Shared) -> None:
    _expect(shared.optimizer is None or isinstance(shared.optimizer, str), "the name of an optimizer")
    groups = shared.param_groups
    _expect(isinstance(groups, list) and all(_is_dict(group, str) for group in groups), "a list of groups")
    _expect(all(_is_list_of_names(group.get("params")) for group in groups), "names of parameters in each group")
    names = [name for group in groups for name in group["params"]]
    _expect(len(set(names)) == len(names), "each parameter in one group")
    _expect(_is_dict(shared.other_state, str) and not {"state", "param_groups"} & set(shared.other_state), "a dict")
    _expect(shared.loss_scale is None or _is_dict(shared.loss_scale, str), "numbers of a loss scale")
    _expect(_is_list_of_names(shared.trainable), "names of trainable parameters")
    _expect(shared.buffers is None or _is_list_of_names(shared.buffers), "names of buffers")
    _expect(type(shared.excludes_frozen) is bool, "whether frozen parameters may be missing")
    _expect(_is_dict(shared.aliases, str) and _is_list_of_names(list(shared.aliases.values())), "names of aliases")


def _is_dict(value: object, key: type) -> bool:
    return isinstance(value, dict) and all(type(one) is key for one in value)


def _is_tuple_of_sizes(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value)


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise TypeError(f"A part of the checkpoint is damaged: expected {what}. [ZERO-622]")


def _births(parts: Sequence[Part], cut: Collection[str]) -> list[tuple[int, int, str]]:
    """The births of all states, in order; of a parameter that is cut from the rank that has stepped the whole, if any.

    Other ranks with a part of it, and of its master, do not know when its state was created.
    """
    found: list[tuple[int, int, str]] = []
    of_parts: dict[str, tuple[int, int, str]] = {}
    for part in parts:
        for birth in part.births:
            name = birth[2]
            if name not in cut:
                found.append(birth)
            elif name not in of_parts or name in part.wholes:
                of_parts[name] = birth
    return sorted([*found, *of_parts.values()])


def _cut_values(parts: Sequence[Part], folder: Path) -> tuple[dict[str, CutTensor], dict[str, State]]:
    """Values that several ranks wrote in parts, and their states, joined, by name."""
    model: dict[str, CutTensor] = {}
    state: dict[str, State] = {}
    for name in dict.fromkeys(name for part in parts for name in part.cuts):
        ranks = [rank for rank, part in enumerate(parts) if name in part.model]
        cuts = [parts[rank].cuts.get(name) for rank in ranks]
        values = [parts[rank].model[name] for rank in ranks]
        kinds = {(cut[0], value.spec.dtype) for cut, value in zip(cuts, values, strict=True) if cut is not None}
        if len(kinds) != 1 or None in cuts:
            raise ValueError(
                f"Expected one shape and dtype of {name!r}, got several from ranks {ranks}: {folder}. [ZERO-622]"
            )
        ((shape, _),) = kinds
        boxes = [Box(cut[1], value.spec.shape) for cut, value in zip(cuts, values, strict=True) if cut is not None]
        wrong = fault(shape, boxes)
        if wrong is not None:
            raise ValueError(
                f"Expected the parts of {name!r} to make up shape {list(shape)}, got {wrong}, from ranks {ranks}: "
                f"{folder}. [ZERO-622]"
            )
        model[name] = CutTensor.of(shape, list(zip(boxes, values, strict=True)))
        states = [parts[rank].state.get(name) for rank in ranks]
        if any(one is not None for one in states):
            state[name] = _cut_state(name, shape, boxes, [one or {} for one in states], ranks)
    return model, state


def _cut_state(
    name: str, shape: tuple[int, ...], boxes: Sequence[Box], states: Sequence[State], ranks: Sequence[int]
) -> State:
    """The state of a whole parameter: tensors of the parts' shapes are joined; all other values must be equal."""
    found: State = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state.get(key) for state in states]
        pairs = list(zip(boxes, values, strict=True))
        if all(isinstance(one, StoredTensor) and one.spec.shape == box.sizes for box, one in pairs):
            found[key] = CutTensor.of(shape, [(box, one) for box, one in pairs if one is not None])
            continue
        found[key] = _the_one_value(name, key, values, ranks)
    return found


def _pieced_values(parts: Sequence[Part], folder: Path) -> tuple[dict[str, JoinedTensor], dict[str, State]]:
    """Values of parameters of which several ranks wrote a piece each, and their states, joined, by name."""
    model: dict[str, JoinedTensor] = {}
    state: dict[str, State] = {}
    for name in dict.fromkeys(name for part in parts for name in part.pieces):
        ranks = [rank for rank, part in enumerate(parts) if name in part.pieces]
        ranks.sort(key=lambda rank: parts[rank].pieces[name][2])
        values = [parts[rank].model[name] for rank in ranks]
        kinds = {(*parts[rank].pieces[name][:2], parts[rank].model[name].spec.dtype) for rank in ranks}
        if len(kinds) != 1 or len(ranks) < sum(name in part.model for part in parts):
            raise ValueError(
                f"Expected one shape and dtype of {name!r}, got several from ranks {ranks}: {folder}. [ZERO-622]"
            )
        ((shape, stride, _),) = kinds
        begins = [parts[rank].pieces[name][2] for rank in ranks]
        ends = [begin + value.numel for begin, value in zip(begins, values, strict=True)]
        if [*begins, math.prod(shape)] != [0, *ends]:
            raise ValueError(
                f"Expected pieces of {name!r} from end to end of its {math.prod(shape)} elements, got gaps or "
                f"overlaps, from ranks {ranks}: {folder}. [ZERO-622]"
            )
        model[name] = JoinedTensor.of(shape, stride, values)
        states = [parts[rank].state.get(name) for rank in ranks]
        if any(one is not None for one in states):
            if any(one is None or one.keys() != (states[0] or {}).keys() for one in states):
                raise ValueError(
                    f"Expected the same kinds of state of {name!r} from ranks {ranks}, got different kinds: {folder}. "
                    "[ZERO-622]"
                )
            state[name] = _pieced_state(name, shape, stride, values, states, ranks)
    return model, state


def _pieced_state(
    name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    pieces: Sequence[StoredTensor],
    states: Sequence[Any],
    ranks: Sequence[int],
) -> State:
    """The state of a whole parameter: tensors of the pieces' sizes are joined; all other values must be equal."""
    found: State = {}
    for key in states[0]:
        values = [state[key] for state in states]
        if all(
            isinstance(value, StoredTensor) and value.spec.shape == piece.spec.shape
            for value, piece in zip(values, pieces, strict=True)
        ):
            found[key] = JoinedTensor.of(shape, stride, values)
        else:
            found[key] = _the_one_value(name, key, values, ranks)
    return found


def _the_one_value(name: str, key: Any, values: Sequence[Any], ranks: Sequence[int]) -> Any:
    facts = [fill(value, lambda stored: (stored.spec, stored.span.checksum)) for value in values]
    other = next((rank for rank, fact in zip(ranks, facts, strict=True) if fact != facts[0]), None)
    if other is not None:
        raise ValueError(
            f"Ranks {ranks[0]} and {other} have saved different values of the state {key!r} of {name!r}. [ZERO-622]"
        )
    return values[0]


def _joined(parts: Sequence[Mapping[str, Any]], cut: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for part in parts:
        repeated = (joined.keys() & part.keys()) - cut.keys()
        if repeated:
            raise ValueError(
                f"Expected every name from one rank, got {sorted(repeated)[0]!r} from two: {folder}. [ZERO-622]"
            )
        joined.update({name: cut.get(name, value) for name, value in part.items()})
    return joined
