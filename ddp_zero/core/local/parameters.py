"""The user's parameters in one fixed order, the tensor that is stepped for each of them, and its gradient.

A parameter's *index* is its position when the groups are walked in order, as in an optimizer's ``state_dict``. Other
modules refer to parameters by index; this module holds the tensors.

A *master* is an fp32 copy of an fp16 or bf16 parameter on the rank that owns it. The model computes with the parameter,
and sends the parameter; the step reads and writes the master, so that updates smaller than the parameter's
resolution add up instead of being rounded away. See Micikevicius et al., "Mixed Precision Training", 2018.

A *part* is this rank's share of a parameter that is cut: a 1-D view of the parameter's memory, or its master.

An *offloaded* parameter is stepped in other memory than its own, see `placement.py`: the inner optimizer holds a
master, or a copy that gets the parameter's value before each step.

Targets have gradients only during their bucket's step: a master gets its parameter's gradient in fp32. Where the step
scales gradients (clipping, loss scaling), it scales copies, so ``param.grad`` stays as backward left it.
"""

import copy
import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse, pairwise, repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from ddp_zero.core.local.arguments import PARALLEL_REMEDY
from ddp_zero.core.local.copy_pipeline import StepInputs
from ddp_zero.core.local.placement import StatePlacement
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import ParameterSpec
from ddp_zero.options import PARALLEL_KEYS
from ddp_zero.values.live_model import LiveModel
from ddp_zero.values.parts import narrow_value, part_of
from ddp_zero.values.placeholders import AbsentGradient, not_awaiting_params, on_its_owner
from ddp_zero.values.shapes import Part, is_dense, shape_of
from ddp_zero.values.tree import as_bytes

_SAMPLED_ELEMENTS = 64
_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")


@dataclass(frozen=True)
class PartitionHints:
    """What the partition by cost needs to know about a parameter."""

    cost: int = 0  # of the parameter's step, in any unit
    may_be_cut: bool = True  # whether its class steps each element by itself
    owner: GroupRank | None = None  # the rank that must own it; None: the partition chooses


HintsOf = Callable[[Tensor, Mapping[str, Any]], PartitionHints]
"""Gives the hints for a parameter in a group."""


@dataclass(frozen=True)
class SteppedWhole:
    """A parameter whose parts are on several ranks, and which one of these ranks steps whole and keeps the state of.

    Masters are of parts, on every rank.
    """

    shape: tuple[int, ...]  # of the whole parameter
    steps_here: bool  # whether this rank steps the whole


class ParameterTable:
    """Index, tensor, group and name of every parameter of an optimizer's groups.

    Raises ValueError for a parameter that is given twice, is not dense, is on the meta device, is not initialised, or
    shares memory with another parameter; TypeError for a group with ranks of its own, or a distributed tensor.

    Args:
        param_groups: as `torch.optim.Optimizer.param_groups`; ``param_names`` are used where present.
        hints_of: gives hints for the partition by cost; None if only bytes count.
        norm_order: the indices of all parameters, in the order in which norms of gradients add up; None: ascending.

    Attributes:
        wholes: the parameters that are parts of a parameter that is stepped whole, by index.
    """

    def __init__(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        hints_of: HintsOf | None = None,
        norm_order: Sequence[int] | None = None,
    ) -> None:
        self.params: list[Tensor] = []
        self.groups: list[int] = []
        self._names: list[str | None] = []
        for group_index, group in enumerate(param_groups):
            _check_not_parallel(group_index, group)
            self.params.extend(group["params"])
            self.groups.extend([group_index] * len(group["params"]))
            self._names.extend(group.get("param_names", [None] * len(group["params"])))
        self._check_dense()
        self._ids = [id(param) for param in self.params]
        self._sizes = [len(group["params"]) for group in param_groups]
        self.index_of = {param: index for index, param in enumerate(self.params)}
        self.check_distinct()
        self.hints_of = hints_of
        self._hints = [PartitionHints()] * len(self.params)
        if hints_of is not None:
            groups = [param_groups[group] for group in self.groups]
            self._hints = [self._hints_for(hints_of, index, group) for index, group in enumerate(groups)]
        self.norm_order = range(len(self.params)) if norm_order is None else norm_order
        self.wholes: dict[int, SteppedWhole] = {}
        self._model: weakref.ref[nn.Module] | None = None

    def __len__(self) -> int:
        return len(self.params)

    def label(self, index: int) -> str:
        """A parameter's description for messages: its name if the user gave names, its index, group and shape."""
        name = f" {self._names[index]!r}" if self._names[index] is not None else ""
        return f"parameter {index}{name} (group {self.groups[index]}, shape {list(self.params[index].shape)})"

    def names_in(self, model: LiveModel) -> list[str]:
        """The names of the parameters in a model, by index; ValueError for a parameter that the model does not have."""
        return [model.name_of(param, self.label(index)) for index, param in enumerate(self.params)]

    def learn_names(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set names for messages where the user gave none; the groups are not changed."""
        name_of = {param: name for name, param in named}
        self._names = [
            name_of.get(param) if name is None else name for param, name in zip(self.params, self._names, strict=True)
        ]

    def order_norms_as(self, model: nn.Module) -> None:
        """Add up norms in the order of ``model.parameters()`` from now on; parameters not in the model come last."""
        self._model = weakref.ref(model)
        self._order_norms()

    def inherit_from(self, earlier: "ParameterTable") -> None:
        """Take over the order of norms, the names and the wholes of a table with whose parameters this table begins."""
        self.norm_order, self._model = earlier.norm_order, earlier._model
        self._names[: len(earlier)] = earlier._names
        self.wholes = {**earlier.wholes, **self.wholes}
        self._order_norms()

    def _order_norms(self) -> None:
        model = None if self._model is None else self._model()
        ordered = self.norm_order
        if model is not None:
            ordered = [self.index_of[param] for param in model.parameters() if param in self.index_of]
        self.norm_order = list(dict.fromkeys([*ordered, *range(len(self))]))

    def shape_of_state(self, index: int, key: object) -> tuple[int, ...]:
        """The shape of the tensor that a parameter's state of this key belongs to: the parameter or its whole."""
        whole = self.wholes.get(index)
        return tuple(self.params[index].shape) if whole is None or key == MASTER_KEY else whole.shape

    def fits_state(self, index: int, key: object, shape: Sequence[int], part: Part) -> bool:
        """True if a state of this key may have this shape, where this rank owns ``part`` of the parameter.

        It may have the part's shape or `shape_of_state`, also with dimensions reduced to 1, as in Adafactor.
        """
        if part is not None and shape == shape_of(self.params[index].shape, part):
            return True
        target = self.shape_of_state(index, key)
        return len(shape) == len(target) and all(size in (1, full) for size, full in zip(shape, target, strict=True))

    def misfit(self, index: int, state: Mapping[Any, Any], part: Part) -> str:
        """The message about the first tensor of a parameter's state with a wrong shape; an empty text if all fit.

        ``part`` is the part of the parameter that this rank owns; see `fits_state`.
        """
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and not self.fits_state(index, key, value.shape, part):
                whole = self.wholes.get(index)
                fits = "its shape" if whole is None else f"its shape as a whole, {list(whole.shape)}"
                if part is not None:
                    fits += f", of which this rank has elements {part.start} to {part.stop}"
                return f"Expected state {key!r} of {self.label(index)} to fit {fits}, got shape {list(value.shape)}."
        return ""

    def name(self, index: int) -> str:
        """The name that the user gave, or ``parameter <index>``."""
        name = self._names[index]
        return name if name is not None else f"parameter {index}"

    def accelerator(self) -> torch.device:
        """The first device that is not the CPU, or the CPU."""
        return next((param.device for param in self.params if param.device.type != "cpu"), torch.device("cpu"))

    def specs(self, active: Sequence[bool]) -> list[ParameterSpec]:
        """The plan's input: the tensors as they are now, and which of them a step can change.

        Devices of a type are numbered as they appear: a plan must be the same on ranks that each have their own.
        """
        devices = list(dict.fromkeys(param.device for param in self.params))
        numbers = [
            str([other for other in devices if other.type == device.type].index(device) or "") for device in devices
        ]
        names = {device: f"{device.type}{number}" for device, number in zip(devices, numbers, strict=True)}
        return [
            ParameterSpec(
                numel=param.numel(),
                nbytes=param.numel() * param.element_size(),
                kind=f"{names[param.device]}/{str(param.dtype).removeprefix('torch.')}",
                active=is_active,
                cost=hints.cost,
                may_be_cut=hints.may_be_cut,
                owner=hints.owner,
            )
            for param, is_active, hints in zip(self.params, active, self._hints, strict=True)
        ]

    def _hints_for(self, hints_of: HintsOf, index: int, group: Mapping[str, Any]) -> PartitionHints:
        """The hints for a parameter; an error of ``hints_of`` is raised with the parameter named."""
        try:
            return hints_of(self.params[index], group)
        except (TypeError, ValueError) as error:
            if "[ZERO-127]" not in str(error):
                raise
            message = str(error).removesuffix(" [ZERO-127]")
            raise type(error)(f"{message} It was asked for {self.label(index)}. [ZERO-127]") from error

    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.params)

    def check_gradients(self) -> None:
        """Refuse sparse gradients, on every rank and before anything is sent; NotImplementedError naming the first."""
        with not_awaiting_params():
            layouts = {*map(getattr, map(_GRAD, self.params), repeat("layout"), repeat(torch.strided))}
        if layouts == {torch.strided}:
            return
        for index, param in enumerate(self.params):
            grad = param.grad
            if grad is not None and type(grad) is not AbsentGradient and grad.layout is not torch.strided:
                raise NotImplementedError(
                    f"Expected dense gradients, got a {grad.layout} gradient for {self.label(index)}. Build the "
                    "layer with sparse=False, or keep its parameters in an optimizer of their own. [ZERO-110]"
                )

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that groups, which users may edit, have these parameters; RuntimeError naming a difference."""
        members = [group["params"] for group in param_groups]
        # both: a parameter that moves to the next group may leave the order as it is
        if [*map(id, chain.from_iterable(members))] != self._ids or [*map(len, members)] != self._sizes:
            for position in range(max(len(param_groups), len(self._sizes))):
                built_with = [
                    id(param) for param, group in zip(self.params, self.groups, strict=True) if group == position
                ]
                is_there = position < min(len(param_groups), len(self._sizes))
                if not is_there or built_with != [id(param) for param in param_groups[position]["params"]]:
                    raise RuntimeError(
                        f"Expected the parameters that the optimizer was built with in group {position}, got a "
                        "different set. Use add_param_group() to add some; to remove some, build a new optimizer "
                        "over the rest, after opt.detach(). To go on as before, put them back; if backward() "
                        "raised this, wrap the module again, and call opt.reset() and opt.attach(model). [ZERO-117]"
                    )

    def check_sizes(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """As `check_groups`, if the numbers of parameters have changed: a cheaper check."""
        if [len(group["params"]) for group in param_groups] != self._sizes:
            self.check_groups(param_groups)

    def fingerprints(self) -> list["Fingerprint"]:
        """The properties that must be equal on every rank, and a sample of each parameter's values."""
        samples = sample_values(self.params)
        return [
            Fingerprint(
                name=self._names[index],
                group=self.groups[index],
                shape=tuple(param.shape),
                stride=tuple(param.stride()),
                dtype=str(param.dtype),
                device=param.device.type,
                trainable=param.requires_grad,
                cost=self._hints[index].cost,
                sample=sample,
            )
            for index, (param, sample) in enumerate(zip(self.params, samples, strict=True))
        ]

    def _check_dense(self) -> None:
        """ValueError for a parameter that is not initialised, nested or sparse."""
        for index, param in enumerate(self.params):
            name = self._names[index]
            label = f"parameter {index}" if name is None else f"parameter {index} {name!r}"
            if is_lazy(param):
                raise ValueError(
                    f"No data yet in {label}, which belongs to a lazy module that was not run. Run the model once "
                    "before building the optimizer. [ZERO-109]"
                )
            if param.is_nested or param.layout is not torch.strided:
                kind = "a nested tensor" if param.is_nested else f"of layout {param.layout}"
                raise ValueError(
                    f"Expected dense parameters, got {label}, which is {kind}. Keep it in a plain optimizer of its "
                    "own, on every rank. [ZERO-110]"
                )

    def check_distinct(self) -> None:
        """Check that each parameter has memory of its own; ValueError naming a parameter that has not."""
        if len(self.index_of) != len(self.params):
            first = next(i for i, param in enumerate(self.params) if self.index_of[param] != i)
            raise ValueError(
                f"Expected every parameter once, got {self.label(first)} again as "
                f"{self.label(self.index_of[self.params[first]])}. List it once. [ZERO-108]"
            )
        for index, param in enumerate(self.params):
            if param.is_meta:
                raise ValueError(
                    f"Expected parameters with data, got {self.label(index)} on the meta device. Call "
                    "module.to_empty(device=...) and initialise it before building the optimizer. [ZERO-109]"
                )
        # two owners would step the same memory, each unaware of the other
        spans = sorted(
            (param.untyped_storage().data_ptr(), *_span(param), index)
            for index, param in enumerate(self.params)
            if param.numel() and is_dense(param.shape, param.stride())
        )
        for (storage, _, end, first), (next_storage, start, _, second) in pairwise(spans):
            if storage == next_storage and start < end:
                raise ValueError(
                    f"Two parameters share memory: {self.label(min(first, second))} and "
                    f"{self.label(max(first, second))}. To tie weights, use one Parameter object in both places. "
                    "[ZERO-108]"
                )


def _check_not_parallel(position: int, group: Mapping[str, Any]) -> None:
    """Refuse groups for `ddp_zero.parallel`, whose keys a plain optimizer would silently ignore."""
    feature = next((f"{key}=" for key in PARALLEL_KEYS if key in group), None)
    if feature is None and any(hasattr(param, "device_mesh") for param in group["params"]):
        feature = "a distributed tensor (DTensor)"
    if feature is not None:
        raise TypeError(
            f"Expected parameters that all ranks of the optimizer hold alike, got {feature} in group {position}. "
            f"{PARALLEL_REMEDY} [ZERO-116]"
        )


class Fingerprint(NamedTuple):
    """The properties of a parameter that ranks compare; ``sample``, a digest, may differ before a broadcast."""

    name: str | None
    group: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    trainable: bool
    cost: int
    sample: str

    def structure(self) -> tuple[Any, ...]:
        """Everything except the sampled values; it must be equal on every rank."""
        return self[:-1]


def _span(param: Tensor) -> tuple[int, int]:
    start = int(param.storage_offset()) * param.element_size()
    return start, start + param.numel() * param.element_size()


@torch.no_grad()
def sample_values(params: Iterable[Tensor]) -> list[str]:
    """A digest of the first elements of each parameter, for ranks to compare; one device transfer per device."""
    heads = [as_bytes(_head(param)) for param in params]
    by_device: dict[torch.device, list[int]] = {}
    for index, head in enumerate(heads):
        by_device.setdefault(head.device, []).append(index)
    digests = [""] * len(heads)
    for indices in by_device.values():
        joined = torch.cat([heads[index] for index in indices]).cpu()
        for index, head in zip(indices, torch.split(joined, [heads[i].numel() for i in indices]), strict=True):
            digests[index] = hashlib.sha256(bytes(head.tolist())).hexdigest()[:16]
    return digests


def _head(param: Tensor) -> Tensor:
    """The first elements in logical order, without copying the rest."""
    if param.is_contiguous() or not param.dim():
        return param.reshape(-1)[:_SAMPLED_ELEMENTS]
    return param[:_SAMPLED_ELEMENTS].reshape(-1)[:_SAMPLED_ELEMENTS]


LOW_PRECISION = (torch.float16, torch.bfloat16)

MASTER_KEY = "master_weight"
"""The key of a parameter's fp32 master in its state."""


class GradientSource(ABC):
    """Gives the gradients of a step by parameter index, narrowed to the elements that this rank owns."""

    without: set[Tensor] | None = None
    """The parameters without a gradient on this rank; None: those without a gradient in ``param.grad``."""

    @property
    def whole_gradients(self) -> "GradientSource | None":
        """The same gradients with all of their elements, in the parameters' shapes, if every rank has those."""
        return None

    @abstractmethod
    def gradient(self, index: int) -> Tensor | None:
        """The gradient of a parameter in the parameter's dtype; None if there is no gradient."""

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        """The gradients of several parameters, see `gradient`."""
        return [self.gradient(index) for index in indices]

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The gradient in the dtype of the sum, if that differs from the parameter's; else None."""
        return None


class PublishedGradients(GradientSource):
    """The gradients in ``param.grad``, with all elements, reduced in the dtype of their parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    def gradient(self, index: int) -> Tensor | None:
        return self._params[index].grad


class NarrowedGradients(GradientSource):
    """Narrows gradients that every rank has whole to the elements that this rank owns."""

    def __init__(self, targets: "StepTargets", whole_gradients: GradientSource) -> None:
        self._targets = targets
        self._whole_gradients = whole_gradients

    @property
    def whole_gradients(self) -> GradientSource:
        return self._whole_gradients

    def gradient(self, index: int) -> Tensor | None:
        grad = self._whole_gradients.gradient(index)
        return None if grad is None else self._targets.owned_elements(index, grad)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        total = self._whole_gradients.in_accumulation_dtype(index)
        return None if total is None else self._targets.owned_elements(index, total)


class Masters(dict[int, Tensor]):
    """The fp32 masters that this rank holds, by parameter index, and whether the model still agrees with them.

    Args:
        table: has all parameters; replaced by a longer table when parameters are added.
        are_kept: whether fp16 and bf16 parameters have masters at all.
        parts: the elements that this rank owns of each parameter; shared with `StepTargets`.
    """

    def __init__(self, table: ParameterTable, are_kept: bool, parts: Mapping[int, Part]) -> None:
        super().__init__()
        self.are_kept = are_kept
        self.table = table
        self._parts = parts
        self._versions: tuple[list[int], ...] | None = None  # None before the first step, when masters follow the model

    def needs_master(self, index: int) -> bool:
        """True if the owner of a parameter keeps a master of it."""
        return self.are_kept and self.table.params[index].dtype in LOW_PRECISION

    def note_versions(self) -> None:
        """After a step: from now on a change of a low-precision parameter is the user's."""
        if self.are_kept:
            self._versions = self._current_versions()

    @property
    def are_initial(self) -> bool:
        """True if masters are copies of the model's parameters: no step was taken and no state loaded yet."""
        return self.are_kept and self._versions is None

    def have_changed(self) -> bool:
        """True if parameters with a master may have been written since the last step, except through ``param.data``."""
        return self.are_kept and self._versions is not None and self._versions != self._current_versions()

    def find_diverged(self) -> list[int]:
        """The parameters that differ from their rounded masters, by index. Reads all of both."""
        return [index for index, master in self.items() if not rounds_to(master, self._own_elements(index))]

    def follow_model(self) -> None:
        """Before the first step: copy the model's current parameters to the masters. Later: do nothing."""
        if self.are_initial:
            self._copy_from_model({})

    def refresh(self, known: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Copy the model's parameters to the masters, except for masters in ``known``, by parameter index."""
        self._copy_from_model(known)
        self.note_versions()

    @torch.no_grad()
    def _copy_from_model(self, known: Mapping[int, Tensor]) -> None:
        for index, master in self.items():
            master.copy_(self._own_elements(index, known.get(index)))

    def _own_elements(self, index: int, value: Tensor | None = None) -> Tensor:
        """The elements of a parameter, or of a value for it, that this rank has a master of."""
        param = self.table.params[index]
        found: Tensor = narrow_value(param if value is None else value, param, None, self._parts.get(index))
        return found

    def _current_versions(self) -> tuple[list[int], list[int], list[int]]:
        """The parameters with a master, by index, with their versions and addresses."""
        with not_awaiting_params():
            params = [*map(self.table.params.__getitem__, self)]
            return [*self], [*map(_VERSION, params)], [*map(Tensor.data_ptr, params)]


class Route(NamedTuple):
    """The step targets of a bucket, and how their values get into the parameters; fixed until a target changes."""

    targets: list[Tensor]
    is_master: list[bool]  # for each target
    in_place: list[Tensor]  # parameters that are stepped in their own memory
    in_place_targets: list[Tensor]  # their targets: the parameters themselves, or views of them
    copied: list[int]  # indices of parameters that targets are copied to after the step
    copied_views: list[Tensor] | None  # the stepped elements of these parameters; None: the placement copies
    copied_targets: list[Tensor]
    copied_params: list[Tensor]


class StepTargets:
    """The tensor that the inner optimizer steps for each parameter: the parameter, a view of it, a master or a copy.

    A *stand-in* is any target that is not the parameter itself. This class alone knows which parameters are cut, are
    offloaded or have masters; other code asks for targets, parts and gradients by index.
    """

    def __init__(self, table: ParameterTable, has_masters: bool, placement: StatePlacement | None = None) -> None:
        self.placement = StatePlacement() if placement is None else placement
        self.are_moved_away = (
            False  # whether `opt.offload_state` has moved states and masters, so that no step is possible
        )
        self._table = table
        self._stand_ins: dict[int, Tensor] = {}
        self._index_of_stand_in: dict[Tensor, int] = {}
        self._parts: dict[int, Part] = {}  # the part that each stand-in is for
        self.masters = Masters(table, has_masters, self._parts)
        self._followed: dict[int, int] = {}  # address of each parameter that a view was last pointed at
        self.routes: dict[tuple[int, ...], Route] = {}  # of buckets, by their indices; dropped when a target changes
        self._viewed: list[Tensor] = []  # parameters of all routes that have views of their memory
        self._addresses: list[int] = []  # of these parameters when the views were last pointed at them

    # Targets

    def __getitem__(self, index: int) -> Tensor:
        """The tensor that is stepped for a parameter on this rank: its stand-in, or the parameter itself."""
        return self._stand_ins.get(index, self._table.params[index])

    def of(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """The targets of several parameters, by index."""
        return {index: self[index] for index in indices}

    def index_of(self, tensor: Tensor) -> int:
        """The index of the parameter that a target stands for."""
        found = self._index_of_stand_in.get(tensor)
        return self._table.index_of[tensor] if found is None else found

    def part(self, index: int) -> Part:
        """The elements of a parameter that this rank owns, as a slice; None for the whole parameter."""
        return self._parts.get(index)

    @property
    def are_parameters(self) -> bool:
        """True if nothing stands in for a parameter."""
        return not self._stand_ins and not self.masters.are_kept

    def is_offloaded(self, index: int) -> bool:
        """True if a parameter is stepped on the host instead of its device."""
        return self.placement.is_offloaded(self._table.params[index].device)

    def is_copied(self, index: int) -> bool:
        """True if the owner of a parameter steps a master or an offloaded copy, instead of the parameter's memory."""
        return self.masters.needs_master(index) or self.is_offloaded(index)

    def dtype_of(self, index: int) -> torch.dtype:
        """The dtype of the tensor that the owner steps for a parameter."""
        return torch.float32 if self.masters.needs_master(index) else self._table.params[index].dtype

    def assign(self, parts: Mapping[int, Part]) -> dict[Tensor, Tensor]:
        """Create stand-ins for the parts of parameters that this rank owns, and drop all others; returns targets."""
        for index in list(self._stand_ins):
            if index not in parts or self._parts.get(index) != parts[index]:
                self.release(index)
        for index, part in parts.items():
            if index not in self._stand_ins:
                self.create(index, None, part)
        return {self._table.params[index]: self[index] for index in parts}

    def whole_master(self, index: int) -> Tensor | None:
        """The master of a whole parameter, if this rank has it."""
        return self.masters.get(index) if self._parts.get(index) is None else None

    def release(self, index: int) -> Tensor | None:
        """Remove a stand-in, and return it if it is a master."""
        if self.routes:
            self._drop_routes()
        stand_in = self._stand_ins.pop(index, None)
        self._parts.pop(index, None)
        self._followed.pop(index, None)
        if stand_in is not None:
            del self._index_of_stand_in[stand_in]
        return self.masters.pop(index, None)

    def create(self, index: int, value: Tensor | None, part: Part = None) -> None:
        """Create the stand-in for a part of a parameter, if it needs one.

        The stand-in has the parameter's attributes, since optimizers read them, and a copy of ``value``, by default of
        the parameter's.
        """
        if part is None and not self.is_copied(index):
            return
        self.release(index)
        param = self._table.params[index]
        if value is None:
            value = part_of(param, param, part)
        if self.is_copied(index):
            value = self.placement.new(value, self.dtype_of(index), param.device)
        self.install(index, _like(param, value), part)

    def target_on_owner(self, index: int) -> Tensor:
        """The target that a whole parameter has on its owner before the first step; if that is a copy, a new one."""
        param = self._table.params[index]
        if not self.is_copied(index):
            return param
        device = torch.device("cpu") if self.is_offloaded(index) else param.device
        return _like(param, param.detach().to(device, self.dtype_of(index), copy=True))

    def install(self, index: int, stand_in: Tensor, part: Part = None) -> None:
        """Make a tensor the stand-in for a part of a parameter, in place of an earlier one."""
        self.release(index)
        self._parts[index] = part
        self._stand_ins[index] = stand_in
        self._index_of_stand_in[stand_in] = index
        if self.masters.needs_master(index):
            self.masters[index] = stand_in

    def extend(self, table: ParameterTable) -> None:
        """Take over a table that begins with the same parameters; targets stay as they are."""
        self._table = table
        self.masters.table = table
        if self.routes:
            self._drop_routes()

    def owned_elements(self, index: int, value: Tensor) -> Tensor:
        """The elements that this rank owns of a tensor in the shape of the parameter, such as its gradient.

        All of them, in that shape, unless the parameter is cut; else 1-D, a view if strides allow.
        """
        part = self._parts.get(index)
        return value if part is None else part_of(value, self._table.params[index], part)

    def narrowed_source(self, whole_gradients: GradientSource) -> GradientSource:
        """A source that gives only the elements that this rank owns, from a source of gradients with all elements."""
        return NarrowedGradients(self, whole_gradients) if any(self._parts.values()) else whole_gradients

    def owned_gradient(self, index: int, *, revives: bool = False) -> Tensor | None:
        """The elements of ``param.grad`` that this rank owns; None if it has no gradient, or does not have these.

        Args:
            index: the parameter.
            revives: whether a placeholder that was set to zero first becomes a gradient of zeros, as on its owner.
        """
        grad = self._table.params[index].grad
        if isinstance(grad, AbsentGradient):
            elements = on_its_owner(grad) if revives else grad.part
            if elements is not grad:
                return elements
        return None if grad is None else self.owned_elements(index, grad)

    def lay_out_gradient(self, index: int) -> None:
        """Give ``param.grad`` the strides of the parameter, without which this rank's part cannot be a view of it."""
        param = self._table.params[index]
        grad = param.grad
        if self._parts.get(index) is None or grad is None or isinstance(grad, AbsentGradient):
            return
        if grad.stride() != param.stride():
            param.grad = torch.empty_like(param).copy_(grad)

    def copy_for(self, table: ParameterTable, memo: dict[int, Any]) -> "StepTargets":
        """The targets for a copy of the optimizer, with a placement of the same kind."""
        clone = StepTargets(table, self.masters.are_kept, self.placement.for_copy())
        for index, stand_in in self._stand_ins.items():
            copied = copy.deepcopy(stand_in, memo)
            clone.install(index, copied, self._parts.get(index))
            if self.is_copied(index):
                clone.repoint(copied, clone.placement.new(copied, copied.dtype, table.params[index].device))
        if not self.masters.are_initial:
            clone.masters.note_versions()
        return clone

    def reason_to_refuse(self, where: str) -> str | None:
        """Why targets cannot be stepped now, or None; ``where`` is this rank's name in the message."""
        if self.are_moved_away:
            return (
                "Expected optimizer state where it is stepped, got state that opt.offload_state() has moved away "
                f"({where}). Call opt.reload_state() before the next backward pass. [ZERO-609]"
            )
        return self.wrong_master(where) if self.masters.are_kept else None

    def wrong_master(self, where: str) -> str | None:
        """A message if a low-precision parameter was written to, so that it is not its rounded master, or None."""
        if not self.masters.have_changed():
            return None
        if diverged := self.masters.find_diverged():
            return (
                f"Expected {self._table.label(diverged[0])} to be its fp32 master weight rounded, got a different "
                f"value: it was written to since the last step, which the next would undo ({where}). "
                "Call opt.refresh_master_weights() after writing to the model's parameters, as after loading them. "
                "[ZERO-323]"
            )
        self.masters.note_versions()
        return None

    # A step

    def step_inputs(self, indices: Sequence[int], source: GradientSource) -> list[StepInputs]:
        """The tensors to copy to the host for a step of offloaded parameters.

        Of each parameter with a gradient: the gradient, and the parameter's value unless a master on the host has it.
        """
        inputs = []
        for index in indices:
            grad = self._most_precise_gradient(index, source)
            if grad is not None:
                param = self._table.params[index].detach()
                value = None if self.masters.needs_master(index) else self.owned_elements(index, param)
                inputs.append(StepInputs(index, grad, value, self[index]))
        return inputs

    def follow_routes(self) -> None:
        """Before a step: follow parameters that the user has moved."""
        if [*map(Tensor.data_ptr, self._viewed)] != self._addresses:
            self.follow_memory()

    def route(self, indices: tuple[int, ...]) -> Route:
        """The route of these parameters, built if there is none."""
        if indices in self.routes:
            return self.routes[indices]
        self.follow_memory(indices)
        params = self._table.params
        stand_ins = [index for index in indices if index in self._stand_ins]
        in_place = [index for index in indices if not self.is_copied(index)]
        copied = [index for index in stand_ins if self.is_copied(index)]
        views = None if self.placement.offloads else [self.owned_elements(i, params[i].detach()) for i in copied]
        route = Route(
            targets=[self[index] for index in indices],
            is_master=[index in self.masters for index in indices],
            in_place=[params[index] for index in in_place],
            in_place_targets=[self[index] for index in in_place],
            copied=copied,
            copied_views=views,
            copied_targets=[self[index] for index in copied],
            copied_params=[params[index] for index in copied],
        )
        self.routes[indices] = route
        for index in stand_ins if views is not None else filterfalse(self.is_copied, stand_ins):
            self._viewed.append(params[index])
            self._addresses.append(self._followed[index] if index in self._followed else params[index].data_ptr())
        return route

    def _drop_routes(self) -> None:
        self.routes.clear()
        self._viewed, self._addresses = [], []

    def gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """A parameter's gradient from a source, in the dtype of the target; None if there is no gradient."""
        if index not in self.masters:
            return source.gradient(index)
        grad = self._most_precise_gradient(index, source)
        return None if grad is None else grad.to(torch.float32)

    def _most_precise_gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """The gradient, for a parameter with a master in the dtype in which it was accumulated, if that was kept."""
        accumulated = source.in_accumulation_dtype(index) if index in self.masters else None
        return source.gradient(index) if accumulated is None else accumulated

    def follow_memory(self, indices: Iterable[int] | None = None) -> None:
        """Point the views of these parameters, or of all, at the parameters' memory, which may have moved."""
        if indices is None and self.routes:
            self._drop_routes()
        for index in self._stand_ins if indices is None else filter(self._stand_ins.__contains__, indices):
            param = self._table.params[index]
            if self.is_copied(index) or self._followed.get(index) == (address := param.data_ptr()):
                continue
            stand_in = self._stand_ins[index]
            view = part_of(param, param, self._parts[index])
            if view.data_ptr() != stand_in.data_ptr():
                self.repoint(stand_in, view)
            self._followed[index] = address
            if self.routes:
                self._drop_routes()

    @torch.no_grad()
    def follow_values(self) -> None:
        """Copy parameters to their offloaded copies, for methods of the inner optimizer that read values."""
        for index, stand_in in self._stand_ins.items():
            if self.is_offloaded(index) and not self.masters.needs_master(index):
                stand_in.copy_(self.owned_elements(index, self._table.params[index].detach()))

    def repoint(self, stand_in: Tensor, memory: Tensor) -> None:
        """Let a stand-in use this memory; its identity, by which states are keyed, stays."""
        stand_in.data = memory

    def write_back_route(self, route: Route) -> None:
        """Copy the targets of a route to their parameters, rounded; called with gradients off."""
        if route.copied_views is None:
            self.write_back(route.copied)
        elif route.copied_views:
            torch._foreach_copy_(route.copied_views, route.copied_targets)
            increment_version(route.copied_params)

    @torch.no_grad()
    def write_back(self, indices: Iterable[int]) -> None:
        """Copy targets to these parameters, rounded."""
        copied = [index for index in indices if index in self._stand_ins and self.is_copied(index)]
        params = {index: self._table.params[index] for index in copied}
        if copied:
            self.placement.copy_back(
                [(self.owned_elements(i, params[i].detach()), self._stand_ins[i].detach()) for i in copied]
            )
            increment_version(list(params.values()))


def _like(param: Tensor, value: Tensor) -> Tensor:
    """A parameter over the memory of ``value``, with the attributes of ``param``."""
    parameter = torch.nn.Parameter(value.detach(), requires_grad=param.requires_grad)
    parameter.__dict__.update(param.__dict__)
    return parameter


def with_masters(state: Mapping[Any, Any], targets: StepTargets) -> dict[Any, Any]:
    """An optimizer's state by parameter index instead of by target, with masters among its values."""
    by_index = {targets.index_of(key) if isinstance(key, Tensor) else key: value for key, value in state.items()}
    for index, master in targets.masters.items():
        by_index[index] = {**by_index.get(index, {}), MASTER_KEY: master.detach()}
    return by_index


def check_masters(table: ParameterTable, masters: Mapping[int, Tensor]) -> None:
    """Check that masters, such as a checkpoint's, round to the model's parameters; ValueError if any does not."""
    for index, master in masters.items():
        param = table.params[index]
        if master.shape != param.shape or not rounds_to(master, param):
            raise ValueError(
                f"Expected {table.label(index)} to be its master weight rounded to {param.dtype}, got a different "
                "value. Load the model's state dict of the same step before the optimizer's. To continue from the "
                "model as it is, leave 'master_weight' out of the optimizer's state. [ZERO-606]"
            )


def rounds_to(master: Tensor, param: Tensor) -> bool:
    """True if a master, rounded to the parameter's dtype, equals the parameter; NaN equals NaN."""
    rounded = master.detach().to(param.device, param.dtype)
    value = param.detach()
    if torch.equal(rounded, value):
        return True
    return bool(((rounded == value) | (rounded.isnan() & value.isnan())).all())


ALIGNMENT = 64
"""Bytes to which CPU allocations are aligned; CUDA's are aligned to a multiple."""


@dataclass(frozen=True)
class GradientFactors:
    """The factors by which a step multiplies gradients, in the order in which they are applied."""

    inverse_scale: Tensor | float | None = None  # the reciprocal of the loss scale, rounded to fp32; None means 1
    coefficients: Mapping[int, Tensor | float] = field(default_factory=dict)  # clip coefficients, by group
    groups: Sequence[int] = ()  # the group of every parameter, by index
    divisor: Tensor | None = None  # the loss scale, instead of ``inverse_scale``

    def apply(self, index: int, grad: Tensor) -> Tensor:
        """A parameter's gradient times its factors: a new tensor, unless there are no factors."""
        if self.divisor is not None:
            grad = grad / self.divisor.to(grad.device)
        if self.inverse_scale is not None:
            grad = _times(grad, self.inverse_scale)
        if self.coefficients and self.groups[index] in self.coefficients:
            grad = _times(grad, self.coefficients[self.groups[index]])
        return grad

    def common(self, indices: Iterable[int]) -> Tensor | None:
        """The clip coefficient of all these gradients, if it is the same and their only factor; else None."""
        if not self.coefficients or self.divisor is not None or self.inverse_scale is not None:
            return None
        coefficients = [*map(self.coefficients.get, {*map(self.groups.__getitem__, indices)})]
        first = coefficients[0] if coefficients else None
        return first if isinstance(first, Tensor) and all(map(is_, coefficients, repeat(first))) else None

    def __bool__(self) -> bool:
        return self.divisor is not None or self.inverse_scale is not None or bool(self.coefficients)


class ScaledGradients(GradientSource):
    """Gradients in the dtype of their targets, times the factors of the step."""

    def __init__(self, targets: StepTargets, source: GradientSource, factors: GradientFactors) -> None:
        self._targets = targets
        self._source = source
        self._factors = factors

    def gradient(self, index: int) -> Tensor | None:
        grad = self._targets.gradient(index, self._source)
        return None if grad is None else self._factors.apply(index, grad)

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        factor = None if self._targets.masters else self._factors.common(indices)
        if factor is None:
            return super().gradients(indices)
        grads = self._source.gradients(indices)
        # in one call, as torch's clipping, but for gradients of no dimension, which would take the factor's dtype
        of_common_device = [grad for grad in grads if grad is not None and grad.ndim and grad.device == factor.device]
        if len(of_common_device) < len(grads):
            return [None if g is None else self._factors.apply(i, g) for i, g in zip(indices, grads, strict=True)]
        return [*torch._foreach_mul(of_common_device, factor)]


class AlignedGradients(GradientSource):
    """Gradients at the alignment of allocations, as DDP's own are: matrix products round differently at others."""

    def __init__(self, source: GradientSource) -> None:
        self._source = source

    def gradient(self, index: int) -> Tensor | None:
        return _align(self._source.gradient(index))

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        return _align(self._source.in_accumulation_dtype(index))


def _align(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


def _times(grad: Tensor, factor: Tensor | float) -> Tensor:
    """The product in the gradient's dtype and device; torch would give a 0-d gradient the factor's dtype."""
    factor = factor.to(grad.device) if isinstance(factor, Tensor) else factor
    return (grad * factor).to(grad.dtype)
