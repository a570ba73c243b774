"""A rank's part of a model, under the names and with the shapes that values have in the whole."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.local.live_model import LiveModel, is_extra, value_of
from ddp_zero.core.local.parameters import sample_values
from ddp_zero.core.local.tree import flatten, memory_of, specs_in, unflatten
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.global_layout import Entry, Statement
from ddp_zero.core.plan.global_names import GlobalNames, renamed
from ddp_zero.core.plan.shapes import Value


@dataclass(frozen=True)
class Placed:
    """A tensor that a rank holds, and its place in the whole.

    Attributes:
        part: what the rank holds, a plain tensor in the memory that the model uses.
        shape: of the whole tensor.
        box: which of its elements the rank holds.
        home: see `ddp_zero.core.plan.global_layout.Entry`.
    """

    part: Tensor
    shape: tuple[int, ...]
    box: Box
    home: str


class PartModel(LiveModel):
    """As `LiveModel`, with the names and shapes of the whole model.

    Args:
        model: what this rank holds; DDP models inside it leave no trace in names.
        placed: the parameters of the optimizer, as the model has them.
        names: of the values in the whole model; None: as they are.
        home: of values that no parameter of the optimizer is near to.

    Raises:
        ValueError: for two values that ``names`` gives one name.
    """

    def __init__(self, model: nn.Module, placed: Mapping[Tensor, Placed], names: GlobalNames | None, home: str) -> None:
        super().__init__(model)
        wrapped = [name for name, one in self.module.named_modules() if isinstance(one, DistributedDataParallel)]
        bare = {name: _without_ddp(name, wrapped) for name in (*self.entries, *self.aliases)}
        found = renamed(bare.values(), {} if names is None else names, "global_names=", "the model")
        self._whole_name = {name: found[short] for name, short in bare.items()}
        known = {self._whole_name[self._names[id(one)]]: placed[one].home for one in placed if id(one) in self._names}
        self._homes = _Homes(known, home)
        self._given: dict[str, Any] = {self._whole_name[name]: entry for name, entry in self.entries.items()}
        self.aliases = {self._whole_name[alias]: self._whole_name[name] for alias, name in self.aliases.items()}
        self._names = {number: self._whole_name[name] for number, name in self._names.items()}
        self.placed = {
            name: self._place(name, entry, placed) for name, entry in self._given.items() if _is_tensor(name, entry)
        }
        self.entries = {
            name: self.placed[name].part if name in self.placed else one for name, one in self._given.items()
        }
        self._names.update({id(one.part): name for name, one in self.placed.items()})
        self._in_optimizer = {name for name, one in self._given.items() if _is_tensor(name, one) and one in placed}

    def box(self, name: str) -> Box | None:
        """The elements of a value that this rank holds, by name or alias; None if it is not a tensor."""
        one = self.placed.get(self.aliases.get(name, name))
        return None if one is None else one.box

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that are not frozen, aliases included."""
        first = dict.fromkeys(name for name in self.placed if self._given[name].requires_grad)
        return [*first, *(alias for alias, name in self.aliases.items() if name in first)]

    def values(self) -> dict[str, Value]:
        """Shape of the whole and dtype under every name, aliases included."""
        found = {name: value_of(name, entry) for name, entry in self.entries.items()}
        found |= {name: Value(one.shape, found[name].dtype) for name, one in self.placed.items()}
        return {**found, **{alias: found[name] for alias, name in self.aliases.items()}}

    def load_extra(self, states: Mapping[str, Any]) -> None:
        """Load module state that is not a tensor."""
        here = {whole: name for name, whole in self._whole_name.items()}
        super().load_extra({here[name]: state for name, state in states.items()})

    def statement(self, owned: Sequence[str], groups: Sequence[tuple[str, Sequence[str]]]) -> Statement:
        """What this rank holds.

        Args:
            owned: the parameters whose state it has.
            groups: of the optimizer; see `Statement`.
        """
        mine = set(owned)
        loose = [name for name in self.placed if self._is_loose(name)]
        samples = dict(zip(loose, sample_values([self.placed[name].part for name in loose]), strict=True))
        values = self.values()
        entries = {}
        for name, value in self.entries.items():
            place = self.placed.get(name)
            entries[name] = Entry(
                shape=values[name].shape,
                dtype=values[name].dtype,
                box=None if place is None else place.box,
                home=self._homes.of(name),
                sample=samples.get(name, ""),
                is_owned=name in mine,
                weight=0 if place is None else value.nbytes,
            )
        buffers = [name for name, value in self._given.items() if not isinstance(value, nn.Parameter)]
        return Statement(entries, self.trainable, self.aliases, buffers, groups)

    def _is_loose(self, name: str) -> bool:
        """Whether a value is a parameter in no group: ranks may hold different ones without anything showing it."""
        return isinstance(self._given[name], nn.Parameter) and name not in self._in_optimizer

    def _place(self, name: str, entry: Any, placed: Mapping[Tensor, Placed]) -> Placed:
        found = placed.get(entry)
        if found is not None:
            return found
        if not hasattr(entry, "device_mesh"):
            return Placed(entry, tuple(entry.shape), Box.whole(entry.shape), self._homes.of(name))
        return Placed(entry.detach().to_local(), tuple(entry.shape), box_of(entry, name), self._homes.of(name))


class _Homes:
    """Whose values are whose: that of parameters of the optimizer, and of values near them."""

    def __init__(self, known: Mapping[str, str], otherwise: str) -> None:
        self._known = known
        self._otherwise = otherwise
        self._inside: dict[str, set[str]] = {}
        for name, home in known.items():
            while name:
                name = name.rpartition(".")[0]
                self._inside.setdefault(name, set()).add(home)

    def of(self, name: str) -> str:
        """That of the value, or the one of all parameters in the nearest module around it that has any."""
        if name in self._known:
            return self._known[name]
        while name:
            name = name.rpartition(".")[0]
            homes = list(self._inside.get(name, ()))
            if homes:
                return homes[0] if len(homes) == 1 else self._otherwise
        return self._otherwise


def box_of(tensor: Any, label: str) -> Box:
    """The elements of a distributed tensor that this rank holds.

    Raises:
        NotImplementedError: for one of which it holds several parts.
    """
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise NotImplementedError(
            f"Expected one part of {label} on each rank, got {len(chunks)}. Redistribute it first."
        )
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def options_as_text(options: Mapping[str, Any]) -> str:
    """Options of a parameter group, with their tensors, as one text; equal options make equal texts."""
    text, tensors = flatten(dict(options))
    return json.dumps([text, [bytes(memory_of(one.detach().cpu().contiguous())).hex() for one in tensors]])


def options_of_text(text: str) -> dict[str, Any]:
    """Options from `options_as_text`, tensors on the CPU."""
    tree, contents = json.loads(text)
    pairs = zip(specs_in(tree), map(bytes.fromhex, contents), strict=True)
    tensors = [torch.frombuffer(bytearray(raw), dtype=spec.dtype).reshape(spec.shape) for spec, raw in pairs]
    found: dict[str, Any] = unflatten(tree, tensors)
    return found


def _is_tensor(name: str, entry: Any) -> bool:
    return isinstance(entry, Tensor) and not is_extra(name)


def _without_ddp(name: str, wrapped: Sequence[str]) -> str:
    """A name without the ``module`` that DDP models inside the model add."""
    for place in sorted(wrapped, key=len, reverse=True):
        name = f"{place}.{name.removeprefix(f'{place}.module.')}" if name.startswith(f"{place}.module.") else name
    return name
