"""A model's values, or a rank's part of them, by the names of `torch.distributed.checkpoint.state_dict`."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.local.parameters import ParameterTable, sample_values
from ddp_zero.core.plan.chunks import Chunk
from ddp_zero.core.plan.global_layout import Entry, GlobalNames, Statement, rename_all
from ddp_zero.core.plan.shapes import Value

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Name parts that torch.compile and activation checkpointing insert."""


class LiveModel:
    """The part of a model that is saved.

    Wrappers by DDP, `torch.compile` and activation checkpointing leave no trace in names, nor does a module around a
    DDP model that has nothing else to save. TypeError for a tensor in the state dict that is not a parameter or buffer
    of the model, as a hook may add.

    Attributes:
        module: the model without DDP around it.
        entries: parameters, persistent buffers, and module state that is not a tensor, by name; each once.
        aliases: additional names of tensors that have several, with their first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = _unwrap(model)
        self.entries: dict[str, Any] = {}
        self._given = self.entries  # as the model has them
        self.aliases: dict[str, str] = {}
        self._names: dict[int, str] = {}
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        for raw, value in self.module.state_dict(keep_vars=True).items():
            name = clean(raw)
            is_tensor = _is_tensor(name, value)
            if is_tensor and id(value) not in own:
                raise TypeError(
                    f"The model's state_dict() has the tensor {name!r}, which is neither a parameter nor a buffer. It "
                    "could not be loaded in place: save it as part of `extra`. [ZERO-632]"
                )
            first = self._names.setdefault(id(value), name) if is_tensor else name
            if first == name:
                self.entries[name] = value
            else:
                self.aliases[name] = first

    def name_of(self, param: Tensor, label: str) -> str:
        """The first name of a parameter; ValueError if the model does not have it."""
        name = self._names.get(id(param))
        if name is None:
            raise ValueError(
                f"The model's state_dict() lacks {label} of the optimizer. Give the model that the optimizer trains. "
                "[ZERO-632]"
            )
        return name

    def names_of(self, table: ParameterTable) -> list[str]:
        """The names of an optimizer's parameters, by index; ValueError for one that the model does not have."""
        return [self.name_of(param, table.label(index)) for index, param in enumerate(table.params)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.entries.items() if _is_tensor(name, value)}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that are not frozen, aliases included."""
        given = self._given.items()
        first = dict.fromkeys(name for name, value in given if _is_tensor(name, value) and value.requires_grad)
        return [*first, *(alias for alias, name in self.aliases.items() if name in first)]

    def values(self) -> dict[str, Value]:
        """Shape and dtype under every name, aliases included."""
        found = {name: value_of(name, entry) for name, entry in self.entries.items()}
        return {**found, **{alias: found[name] for alias, name in self.aliases.items()}}

    def tensor(self, name: str) -> Tensor | None:
        """The tensor of a name or an alias; None for an entry that is not a tensor."""
        entry = self.entries[self.aliases.get(name, name)]
        return entry if _is_tensor(name, entry) else None

    def chunk(self, name: str) -> Chunk | None:
        """The elements of a value that this rank holds; None: all."""
        return None

    def load_extra(self, states: Mapping[str, Any]) -> None:
        """Load module state that is not a tensor."""
        if states:
            raw_of = {clean(raw): raw for raw in self.module.state_dict(keep_vars=True)}
            self.module.load_state_dict({raw_of[name]: state for name, state in states.items()}, strict=False)


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The process group of the DDP model that a module is or contains; None without one, or with several groups."""
    groups = {id(ddp.process_group): ddp.process_group for ddp in ddp_models_in(model).values()}
    return next(iter(groups.values())) if len(groups) == 1 else None


def ddp_models_in(model: nn.Module) -> dict[str, DistributedDataParallel]:
    """The DDP models that a module is or contains, by their names in it, without those nested in other DDP models."""
    found: dict[str, DistributedDataParallel] = {}
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and not any(f"{name}.".startswith(f"{one}.") for one in found):
            found[name] = module
            if not name:
                break
    return found


def the_ddp_model_in(model: object) -> DistributedDataParallel:
    """The one DDP model that a module is or holds, within any wrappers; TypeError for none, ValueError for several."""
    found = ddp_models_in(model) if isinstance(model, nn.Module) else {}
    if not found:
        raise TypeError(
            f"Expected a DistributedDataParallel model, or a module that holds one, got {type(model).__name__}. Wrap "
            "the model first: DistributedDataParallel(model). [ZERO-201]"
        )
    if len(found) > 1:
        raise ValueError(
            f"Expected a module that holds one DistributedDataParallel model, got {len(found)}: "
            f"{', '.join(map(repr, found))}. Shard an optimizer for each of them. [ZERO-202]"
        )
    return next(iter(found.values()))


def by_group(names: Sequence[str], param_groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The names of an optimizer's parameters, by index, in a list for each of its groups."""
    remaining = iter(names)
    return [[next(remaining) for _ in group["params"]] for group in param_groups]


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_extra(name: str) -> bool:
    """True for the name of a result of `torch.nn.Module.get_extra_state`, a tensor or not."""
    return name.rpartition(".")[2] == "_extra_state"


def value_of(name: str, entry: Any) -> Value:
    """Shape and dtype of a parameter or a buffer; both None for anything else."""
    if not _is_tensor(name, entry):
        return Value(None, None)
    return Value(tuple(entry.shape), str(entry.dtype).removeprefix("torch."))


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # what torch.compile returns
            model = model.get_submodule("_orig_mod")
        elif (ddp := _all_of(model)) is not None:
            model = ddp
        else:
            return model


def _all_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model in a module that has no other state to save, else None."""
    models = list(ddp_models_in(model).values())
    if len(models) != 1:
        return None
    inside = {id(part) for part in models[0].modules()}
    outside = [part for part in model.modules() if id(part) not in inside]
    keeps_more = any(type(part).get_extra_state is not nn.Module.get_extra_state for part in outside)
    return None if keeps_more or any(part._parameters or part._buffers for part in outside) else models[0]


@dataclass(frozen=True)
class Placed:
    """A tensor that a rank holds, and its place in the whole."""

    part: Tensor  # the rank's tensor, a plain one in the memory that the model uses
    shape: tuple[int, ...]  # of the whole tensor
    chunk: Chunk  # which of its elements the rank holds
    home: str  # see `ddp_zero.core.plan.global_layout.Entry`


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
        wrapped = [name for name, one in self.module.named_modules() if isinstance(one, DistributedDataParallel)]
        bare = {name: _without_ddp(name, wrapped) for name in (*self.entries, *self.aliases)}
        found = rename_all(bare.values(), {} if names is None else names, "global_names=", "the model")
        self._whole_name = {name: found[short] for name, short in bare.items()}
        known = {self._whole_name[self._names[id(one)]]: placed[one].home for one in placed if id(one) in self._names}
        self._home, self._known_homes = home, known
        self._homes_inside: dict[str, set[str]] = {}  # by the names of modules
        for place, own_home in known.items():
            while place:
                place = place.rpartition(".")[0]
                self._homes_inside.setdefault(place, set()).add(own_home)
        self._given = {self._whole_name[name]: entry for name, entry in self.entries.items()}
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

    def chunk(self, name: str) -> Chunk | None:
        """The elements of a value that this rank holds, by name or alias; None if it is not a tensor."""
        one = self.placed.get(self.aliases.get(name, name))
        return None if one is None else one.chunk

    def values(self) -> dict[str, Value]:
        found = super().values()
        found |= {name: Value(one.shape, found[name].dtype) for name, one in self.placed.items()}
        return {**found, **{alias: found[name] for alias, name in self.aliases.items()}}

    def load_extra(self, states: Mapping[str, Any]) -> None:
        here = {whole: name for name, whole in self._whole_name.items()}
        super().load_extra({here[name]: state for name, state in states.items()})

    def statement(self, writers: Mapping[str, int], whole_states: Collection[str] = ()) -> Statement:
        """The tensors and values that this rank holds; with state of the whole of those in ``whole_states``.

        ``writers``: for each that it may write, the first of the ranks that share its state; see `Entry`.
        """
        # parameters in no group: ranks may hold different ones without anything showing it
        params = [name for name in self.placed if isinstance(self._given[name], nn.Parameter)]
        loose = [name for name in params if name not in self._in_optimizer]
        samples = dict(zip(loose, sample_values([self.placed[name].part for name in loose]), strict=True))
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
        return Statement(entries, list(self.aliases), buffers)

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


def _is_tensor(name: str, entry: Any) -> bool:
    return isinstance(entry, Tensor) and not is_extra(name)


def _without_ddp(name: str, wrapped: Sequence[str]) -> str:
    """A name without the ``module`` that DDP models inside the model add."""
    for place in sorted(wrapped, key=len, reverse=True):
        name = f"{place}.{name.removeprefix(f'{place}.module.')}" if name.startswith(f"{place}.module.") else name
    return name
