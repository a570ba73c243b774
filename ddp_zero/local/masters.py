"""The tensors that the inner optimizer steps, and their gradients: parameters, masters, or a part of either.

A *master* is an fp32 copy of an fp16 or bf16 parameter on the rank that owns it. The model computes with the parameter,
and the parameter is what is sent; the step reads and writes the master, so that updates smaller than the parameter's
resolution add up instead of being rounded away. See Micikevicius et al., "Mixed Precision Training", 2018.

A *part* is what this rank owns of a parameter that is cut: a 1-D window of the parameter's memory, or a master of that.

Gradients are lent for the duration of a bucket's step: a master gets its parameter's gradient in fp32. Where the step
scales gradients (clipping, loss scaling), it scales copies, so ``param.grad`` stays as backward left it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.elements.memory import part_of
from ddp_zero.local.awaited import untouched
from ddp_zero.local.local_step import ParamGroup, restrict_group
from ddp_zero.local.parameters import ParameterTable

LOW_PRECISION = (torch.float16, torch.bfloat16)

MASTER_KEY = "master_weight"
"""The key of a parameter's fp32 master in its state."""


class GradientSource(Protocol):
    """Where a step finds gradients, by parameter index."""

    def gradient(self, index: int) -> Tensor | None:
        """The gradient in the parameter's dtype; None if the parameter has no gradient.

        In the parameter's shape, or 1-D of what this rank owns of a parameter that is cut.
        """

    def exact(self, index: int) -> Tensor | None:
        """The gradient in the dtype of the sum, if that differs from the parameter's; else None."""


class PublishedGradients:
    """Gradients in ``param.grad``, summed in the dtype of their parameters.

    Args:
        params: all parameters, by index.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    def gradient(self, index: int) -> Tensor | None:
        """The value of ``param.grad``."""
        return self._params[index].grad

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


@dataclass(frozen=True)
class GradientFactors:
    """The factors that a step multiplies gradients by, in this order.

    Attributes:
        inverse_scale: one over the loss scale, rounded to fp32; None means 1.
        coefficients: clipping coefficients by parameter group; groups left out are not clipped.
        groups: the group of every parameter, by index.
    """

    inverse_scale: Tensor | float | None = None
    coefficients: Mapping[int, Tensor | float] = field(default_factory=dict)
    groups: Sequence[int] = ()

    def apply(self, index: int, grad: Tensor) -> Tensor:
        """A parameter's gradient times its factors: a new tensor, unless there are no factors."""
        if self.inverse_scale is not None:
            grad = _times(grad, self.inverse_scale)
        if self.coefficients and self.groups[index] in self.coefficients:
            grad = _times(grad, self.coefficients[self.groups[index]])
        return grad

    def __bool__(self) -> bool:
        return self.inverse_scale is not None or bool(self.coefficients)


class ScaledGradients:
    """Gradients as the step uses them: in the dtype of the stepped tensor, times its factors.

    Args:
        stepped: the tensors that are stepped.
        source: the gradients.
        factors: the factors to multiply them by.
    """

    def __init__(self, stepped: "SteppedTensors", source: GradientSource, factors: GradientFactors) -> None:
        self._stepped = stepped
        self._source = source
        self._factors = factors

    def gradient(self, index: int) -> Tensor | None:
        """The scaled gradient: a new tensor, unless there are no factors."""
        grad = self._stepped.gradient(index, self._source)
        return None if grad is None else self._factors.apply(index, grad)

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


class SteppedTensors:
    """The tensors that the inner optimizer holds: parameters, or what stands in for them, masters and parts.

    Args:
        table: the parameters.
        has_masters: True if low-precision parameters have masters.
    """

    def __init__(self, table: ParameterTable, has_masters: bool) -> None:
        self.has_masters = has_masters
        self._table = table
        self._stand_ins: dict[int, Tensor] = {}
        self._index_of_stand_in: dict[Tensor, int] = {}
        self._parts: dict[int, slice] = {}  # of owned parameters that are cut
        self._versions: list[tuple[int, int, int]] | None = None  # None before the first step: masters follow the model

    # Stepped tensors

    def __getitem__(self, index: int) -> Tensor:
        """The tensor that is stepped for a parameter."""
        return self._stand_ins.get(index, self._table.params[index])

    def index_of(self, tensor: Tensor) -> int:
        """The index of the parameter that a stepped tensor stands for."""
        found = self._index_of_stand_in.get(tensor)
        return self._table.index_of[tensor] if found is None else found

    def part(self, index: int) -> slice | None:
        """The elements of a parameter that this rank owns, if it is cut; None for all."""
        return self._parts.get(index)

    @property
    def are_parameters(self) -> bool:
        """True if nothing stands in for a parameter."""
        return not self._stand_ins and not self.has_masters

    def master(self, index: int) -> Tensor | None:
        """The master of a parameter, or of this rank's part of it, if this rank has one."""
        return self._stand_ins.get(index) if self.wants_master(index) else None

    @property
    def masters(self) -> Mapping[int, Tensor]:
        """The masters that this rank has, by parameter index."""
        return {index: held for index, held in self._stand_ins.items() if self.wants_master(index)}

    def wants_master(self, index: int) -> bool:
        """Whether the owner of a parameter keeps a master of it."""
        return self.has_masters and self._table.params[index].dtype in LOW_PRECISION

    def dtype_of(self, index: int) -> torch.dtype:
        """The dtype of the tensor that the owner steps for a parameter."""
        return torch.float32 if self.wants_master(index) else self._table.params[index].dtype

    def own(self, indices: Iterable[int], parts: Mapping[int, slice] = MappingProxyType({})) -> dict[Tensor, Tensor]:
        """Keep stand-ins for these parameters and no others.

        Args:
            indices: the parameters that this rank owns, or of which it owns a part.
            parts: which elements of those that are cut.

        Returns:
            For each parameter the tensor that is stepped for it.
        """
        kept = dict.fromkeys(indices)
        for index in list(self._stand_ins):
            if index not in kept or self._parts.get(index) != parts.get(index):
                self.give(index)
        for index in kept:
            if index not in self._stand_ins and (self.wants_master(index) or index in parts):
                self.take(index, None, parts.get(index))
        return {self._table.params[index]: self[index] for index in kept}

    def give(self, index: int) -> Tensor | None:
        """Remove a stand-in that moves to a different rank, and return it if it is a master."""
        stand_in = self._stand_ins.pop(index, None)
        self._parts.pop(index, None)
        if stand_in is not None:
            del self._index_of_stand_in[stand_in]
        return stand_in if self.wants_master(index) else None

    def take(self, index: int, value: Tensor | None, part: slice | None = None) -> None:
        """Create a stand-in with the parameter's attributes, which optimizers may read.

        Args:
            index: the parameter.
            value: of the master, copied; None: that of the parameter.
            part: the elements that it stands for; None: all.
        """
        self.give(index)
        param = self._table.params[index]
        if value is None:
            value = param if part is None else part_of(param, param, part)
        self.put(index, self._new_master(index, value) if self.wants_master(index) else _like(param, value), part)

    def as_on_owner(self, index: int) -> Tensor:
        """The tensor that the owner of a parameter, if not cut, steps before the first step; a master is made anew."""
        param = self._table.params[index]
        return self._new_master(index, param) if self.wants_master(index) else param

    def _new_master(self, index: int, value: Tensor) -> Tensor:
        param = self._table.params[index]
        return _like(param, value.detach().to(param.device, torch.float32, copy=True))

    def put(self, index: int, stand_in: Tensor, part: slice | None = None) -> None:
        """Use this tensor itself as a stand-in."""
        self.give(index)
        self._stand_ins[index] = stand_in
        self._index_of_stand_in[stand_in] = index
        if part is not None:
            self._parts[index] = part

    def stand_ins(self) -> list[tuple[int, Tensor, slice | None]]:
        """All of them: index, tensor, part."""
        return [(index, held, self._parts.get(index)) for index, held in self._stand_ins.items()]

    def extend(self, table: ParameterTable) -> None:
        """Use a table to which parameters were added; existing parameters keep their index."""
        self._table = table

    def own_part(self, index: int, value: Tensor) -> Tensor:
        """What this rank steps of a value that has the shape of the parameter, or is of that part already."""
        part, param = self._parts.get(index), self._table.params[index]
        is_whole = part is not None and value.shape == param.shape  # a part has fewer elements
        return part_of(value, param, part) if is_whole and part is not None else value

    # A step

    @contextmanager
    def lent(self, indices: Sequence[int], source: GradientSource) -> Iterator[None]:
        """For a step of these parameters: put their gradients where the inner optimizer reads them.

        Afterwards parameters equal their rounded masters, and every ``grad`` is restored.
        """
        before: list[tuple[Tensor, Tensor | None]] = []
        try:
            with torch.no_grad():
                self.follow_memory(indices)
                for index in indices:
                    stepped, grad = self[index], self.gradient(index, source)
                    if grad is not stepped.grad:
                        before.append((stepped, stepped.grad))
                        stepped.grad = grad
            moved = [index for index in indices if index in self._stand_ins and self[index].grad is not None]
            yield
            self._publish(moved)
        finally:
            for stepped, grad in before:
                stepped.grad = grad

    def gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """The gradient of what is stepped for a parameter, in its shape and dtype; None if there is no gradient."""
        grad = self.whole_gradient(index, source)
        return None if grad is None else self.own_part(index, grad)

    def whole_gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """The same of all of a parameter that is cut, if the source has that."""
        has_master = self.master(index) is not None
        exact = source.exact(index) if has_master else None
        grad = source.gradient(index) if exact is None else exact
        return grad.to(torch.float32) if has_master and grad is not None else grad

    def follow_memory(self, indices: Iterable[int] | None = None) -> None:
        """Point parts, of these parameters or of all, at the parameters' memory, which may have moved since."""
        for index in self._parts if indices is None else [index for index in indices if index in self._parts]:
            if self.wants_master(index):
                continue
            param, stand_in = self._table.params[index], self._stand_ins[index]
            window = part_of(param, param, self._parts[index])
            if window.data_ptr() != stand_in.data_ptr():
                stand_in.data = window

    @torch.no_grad()
    def _publish(self, stepped: Sequence[int]) -> None:
        """After a step: show what stand-ins hold in their parameters."""
        targets = [index for index in stepped if self.wants_master(index)]
        params = {index: self._table.params[index] for index in stepped}
        if targets:
            windows = [self.own_part(index, params[index].detach()) for index in targets]
            torch._foreach_copy_(windows, [self._stand_ins[index] for index in targets])
        increment_version([params[index] for index in stepped if not self.wants_master(index)])

    # The model's parameters and the masters

    def note_versions(self) -> None:
        """After a step: from now on a change of a low-precision parameter is the user's."""
        if self.has_masters:
            self._versions = self._current_versions()

    @property
    def are_fresh(self) -> bool:
        """True if masters were made from the model and no step was taken and no state loaded since."""
        return self.has_masters and self._versions is None

    def have_changed(self) -> bool:
        """True if parameters with a master may have been written since the last step, except through ``param.data``."""
        return self.has_masters and self._versions is not None and self._versions != self._current_versions()

    def diverged(self) -> list[int]:
        """Owned parameters that differ from their rounded masters. Reads them all."""
        params = self._table.params
        pairs = [(index, master, self.own_part(index, params[index])) for index, master in self.masters.items()]
        return [index for index, master, value in pairs if not rounds_to(master, value)]

    def follow_model(self) -> None:
        """Before the first step: copy the model's current parameters to the masters. Later: do nothing."""
        if self.are_fresh:
            self._copy_from_model({})

    def refresh(self, known: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Copy the model's parameters to the masters, except for masters in ``known``, by parameter index."""
        self._copy_from_model(known)
        self.note_versions()

    @torch.no_grad()
    def _copy_from_model(self, known: Mapping[int, Tensor]) -> None:
        for index, master in self.masters.items():
            master.copy_(self.own_part(index, known.get(index, self._table.params[index])))

    def _current_versions(self) -> list[tuple[int, int, int]]:
        with untouched():
            params = [(index, self._table.params[index]) for index in self.masters]
            return [(index, param._version, param.data_ptr()) for index, param in params]


def _like(param: Tensor, value: Tensor) -> Tensor:
    """A parameter on this memory, with the attributes of another."""
    made = torch.nn.Parameter(value.detach(), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def localise_group(group: ParamGroup, stepped: Mapping[Tensor, Tensor]) -> ParamGroup:
    """A copy of a user's group with the tensors stepped on this rank, names included."""
    local = restrict_group(group, stepped)
    local["params"] = [stepped[param] for param in local["params"]]
    return local


def with_masters(state: Mapping[Any, Any], stepped: SteppedTensors) -> dict[Any, Any]:
    """A state keyed by parameter index instead of by stepped tensor, with masters among its values."""
    by_index = {stepped.index_of(key) if isinstance(key, Tensor) else key: value for key, value in state.items()}
    for index, master in stepped.masters.items():
        by_index[index] = {**by_index.get(index, {}), MASTER_KEY: master.detach()}
    return by_index


def check_masters(table: ParameterTable, masters: Mapping[int, Tensor]) -> None:
    """Check that masters, such as those of a checkpoint, round to the model's parameters.

    Raises:
        ValueError: naming the first parameter whose master does not.
    """
    for index, master in masters.items():
        param = table.params[index]
        if master.shape != param.shape or not rounds_to(master, param):
            raise ValueError(
                f"Expected {table.label(index)} to be its master weight rounded to {param.dtype}, got a different "
                "value. Load the model's state dict of the same step before the optimizer's. To continue from the "
                "model as it is, leave 'master_weight' out of the optimizer's state."
            )


def _times(grad: Tensor, factor: Tensor | float) -> Tensor:
    """The product in the gradient's dtype and on its device, where a 0-d gradient would take those of the factor."""
    factor = factor.to(grad.device) if isinstance(factor, Tensor) else factor
    return (grad * factor).to(grad.dtype)


def rounds_to(master: Tensor, param: Tensor) -> bool:
    """True if both are equal in the dtype of the parameter, NaN being equal to NaN."""
    rounded, value = master.detach().to(param.device, param.dtype), param.detach()
    if torch.equal(rounded, value):
        return True
    return bool(((rounded == value) | (rounded.isnan() & value.isnan())).all())
