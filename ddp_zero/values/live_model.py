"""A model's values by the names of `torch.distributed.checkpoint.state_dict`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.values.chunks import Chunk
from ddp_zero.values.shapes import Value

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
            is_tensor = holds_tensor(name, value)
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

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.entries.items() if holds_tensor(name, value)}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that are not frozen, aliases included."""
        given = self._given.items()
        names = dict.fromkeys(name for name, value in given if holds_tensor(name, value) and value.requires_grad)
        return [*names, *(alias for alias, name in self.aliases.items() if name in names)]

    def values(self) -> dict[str, Value]:
        """Shape and dtype under every name, aliases included."""
        found = {name: value_of(name, entry) for name, entry in self.entries.items()}
        return {**found, **{alias: found[name] for alias, name in self.aliases.items()}}

    def tensor(self, name: str) -> Tensor | None:
        """The tensor of a name or an alias; None for an entry that is not a tensor."""
        entry = self.entries[self.aliases.get(name, name)]
        return entry if holds_tensor(name, entry) else None

    def chunk(self, name: str) -> Chunk | None:
        """The elements of a value that this rank holds; None: all."""
        return None

    def load_extra(self, states: Mapping[str, Any]) -> None:
        """Load module state that is not a tensor."""
        if states:
            raw_of = {clean(raw): raw for raw in self.module.state_dict(keep_vars=True)}
            self.module.load_state_dict({raw_of[name]: state for name, state in states.items()}, strict=False)


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The process group of the DDP model that a module is or contains; None without DDP, or with several groups."""
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
    models = ddp_models_in(model) if isinstance(model, nn.Module) else {}
    if not models:
        raise TypeError(
            f"Expected a DistributedDataParallel model, or a module that holds one, got {type(model).__name__}. Wrap "
            "the model first: DistributedDataParallel(model). [ZERO-201]"
        )
    if len(models) > 1:
        raise ValueError(
            f"Expected a module that holds one DistributedDataParallel model, got {len(models)}: "
            f"{', '.join(map(repr, models))}. Shard an optimizer for each of them. [ZERO-202]"
        )
    return next(iter(models.values()))


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
    if not holds_tensor(name, entry):
        return Value(None, None)
    return Value(tuple(entry.shape), str(entry.dtype).removeprefix("torch."))


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers of DDP, ``torch.compile`` and containers of one DDP model."""
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


def holds_tensor(name: str, entry: Any) -> bool:
    return isinstance(entry, Tensor) and not is_extra(name)
