"""The tensors that the inner optimizer steps, and their gradients: parameters, masters, or a part of either.

A *master* is an fp32 copy of an fp16 or bf16 parameter on the rank that owns it. The model computes with the parameter,
and the parameter is what is sent; the step reads and writes the master, so that updates smaller than the parameter's
resolution add up instead of being rounded away. See Micikevicius et al., "Mixed Precision Training", 2018.

A *part* is what this rank owns of a parameter that is cut: a 1-D window of the parameter's memory, or a master of that.

A parameter that is *away* is stepped in different memory than its own, see `ddp_zero.core.offload`: what the inner
optimizer holds is a copy, into which its value is copied before each step, or a master.

Gradients are lent for the duration of a bucket's step: a master gets its parameter's gradient in fp32. Where the step
scales gradients (clipping, loss scaling), it scales copies, so ``param.grad`` stays as backward left it.

Users may change gradients of what a rank owns; in stage 1 every other rank keeps what was averaged. From then on a
gradient counts on its owner only: norms are gathered from owners, and of a parameter that is cut each owner takes its
own part. Nothing else may change gradients before the step: DDP, for one, would average what the owner has changed with
what other ranks have not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.local.parts import part_of
from ddp_zero.core.local.placeholders import untouched
from ddp_zero.core.offload.copy_pipeline import Load
from ddp_zero.core.offload.placement import Residence

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


class SteppedTensors:
    """The tensors that the inner optimizer holds: parameters, or what stands in for them, masters and parts.

    Args:
        table: the parameters.
        has_masters: True if low-precision parameters have masters.
        residence: where stand-ins that are copies live.

    Attributes:
        has_masters, residence: as given.
        are_parked: whether states and masters were moved away on demand, and cannot be stepped.
    """

    def __init__(self, table: ParameterTable, has_masters: bool, residence: Residence | None = None) -> None:
        self.has_masters = has_masters
        self.residence = Residence() if residence is None else residence
        self.are_parked = False
        self._table = table
        self._stand_ins: dict[int, Tensor] = {}
        self._index_of_stand_in: dict[Tensor, int] = {}
        self._parts: dict[int, slice] = {}  # of owned parameters that are cut
        self._followed: dict[int, int] = {}  # addresses of parameters in whose memory their parts are
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

    def is_away(self, index: int) -> bool:
        """Whether a parameter is stepped in different memory than its own."""
        return self.residence.is_away(self._table.params[index].device)

    def is_copied(self, index: int) -> bool:
        """Whether the owner of a parameter steps a copy of it, away or as a master, instead of its memory."""
        return self.wants_master(index) or self.is_away(index)

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
            if index not in self._stand_ins and self.has_stand_in(index, parts.get(index)):
                self.take(index, None, parts.get(index))
        return {self._table.params[index]: self[index] for index in kept}

    def has_stand_in(self, index: int, part: slice | None) -> bool:
        """Whether something stands in for a parameter, or a part of it, on the rank that owns it."""
        return part is not None or self.is_copied(index)

    def like(self, index: int, part: slice | None) -> Tensor:
        """What would be stepped for a parameter or a part of it, without memory."""
        whole = torch.empty_like(self._table.params[index], dtype=self.dtype_of(index), device="meta")
        return whole if part is None else part_of(whole, whole, part)

    def give(self, index: int) -> Tensor | None:
        """Remove a stand-in that moves to a different rank, and return it if it is a master."""
        stand_in = self._stand_ins.pop(index, None)
        self._parts.pop(index, None)
        self._followed.pop(index, None)
        if stand_in is not None:
            del self._index_of_stand_in[stand_in]
        return stand_in if self.wants_master(index) else None

    def take(self, index: int, value: Tensor | None, part: slice | None = None) -> None:
        """Create a stand-in with the parameter's attributes, which optimizers may read.

        Args:
            index: the parameter.
            value: of the copy, copied; None: that of the parameter.
            part: the elements that it stands for; None: all.
        """
        self.give(index)
        param = self._table.params[index]
        if value is None:
            value = param if part is None else part_of(param, param, part)
        if self.is_copied(index):
            value = self.residence.new(value, self.dtype_of(index), param.device)
        self.put(index, _like(param, value), part)

    def as_on_owner(self, index: int) -> Tensor:
        """The tensor that the owner of a parameter, if not cut, steps before the first step; a copy is made anew."""
        param = self._table.params[index]
        if not self.is_copied(index):
            return param
        device = torch.device("cpu") if self.is_away(index) else param.device
        return _like(param, param.detach().to(device, self.dtype_of(index), copy=True))

    def put(self, index: int, stand_in: Tensor, part: slice | None = None) -> None:
        """Use this tensor itself as a stand-in."""
        self.give(index)
        self._stand_ins[index] = stand_in
        self._index_of_stand_in[stand_in] = index
        if part is not None:
            self._parts[index] = part

    def stand_ins(self) -> list[tuple[int, Tensor, slice | None]]:
        """Every stand-in as parameter index, tensor, and owned range."""
        return [(index, held, self._parts.get(index)) for index, held in self._stand_ins.items()]

    def extend(self, table: ParameterTable) -> None:
        """Use a table to which parameters were added; existing parameters keep their index."""
        self._table = table

    def own_part(self, index: int, value: Tensor) -> Tensor:
        """What this rank steps of a value that has the shape of the parameter, or is of that part already."""
        part, param = self._parts.get(index), self._table.params[index]
        is_whole = part is not None and value.shape == param.shape  # a part has fewer elements
        return part_of(value, param, part) if is_whole and part is not None else value

    def keep(self, indices: Iterable[int], state: Mapping[Any, Any]) -> int:
        """After a step of these parameters, or a load: move their states, changed in place, to where states live.

        Returns:
            How many bytes of memory that frees.
        """
        if not self.residence.keeps:
            return 0
        owned = [(self[index], self.master(index)) for index in indices]
        masters = [master.detach() for _, master in owned if master is not None]
        return self.residence.keep([*(state[stepped] for stepped, _ in owned if stepped in state), masters])

    def settle(self, state: Mapping[Any, Any]) -> None:
        """Move copies and states that were made elsewhere, as by a deep copy, to where they live."""
        for index, held in self._stand_ins.items():
            if self.is_copied(index):
                device = self._table.params[index].device
                self.repoint(held, self.residence.new(held, held.dtype, device))
        self.keep(self._stand_ins, state)

    # A step

    def loads(self, indices: Sequence[int], source: GradientSource) -> list[Load]:
        """What has to travel for a step of these parameters, which are away: gradients, and values without a master."""
        found = []
        for index in indices:
            grad = self._as_reduced(index, source)
            if grad is not None:
                param = self._table.params[index].detach()
                value = None if self.wants_master(index) else self.own_part(index, param)
                found.append(Load(index, self.own_part(index, grad), value, self[index]))
        return found

    @contextmanager
    def lent(self, indices: Sequence[int], source: GradientSource) -> Iterator[None]:
        """For a step of these parameters: put their gradients where the inner optimizer reads them.

        Afterwards parameters equal their rounded masters, and every ``grad`` is restored.
        """
        before: list[tuple[Tensor, Tensor | None]] = []
        params, has_stand_ins = self._table.params, bool(self._stand_ins)
        try:
            if has_stand_ins:
                with torch.no_grad():
                    self.follow_memory(indices)
                    pairs = [(self[index], self.gradient(index, source)) for index in indices]
            else:
                pairs = [(params[index], source.gradient(index)) for index in indices]
            for stepped, grad in pairs:
                if grad is not stepped.grad:
                    before.append((stepped, stepped.grad))
                    stepped.grad = grad
            moved = [index for index in indices if index in self._stand_ins and self[index].grad is not None]
            yield
            if moved:
                self.show(moved)
                increment_version([params[index] for index in moved if not self.is_copied(index)])
        finally:
            for stepped, grad in before:
                stepped.grad = grad

    def gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """The gradient of what is stepped for a parameter, in its shape and dtype; None if there is no gradient."""
        grad = self.whole_gradient(index, source)
        return None if grad is None else self.own_part(index, grad)

    def whole_gradient(self, index: int, source: GradientSource) -> Tensor | None:
        """The same of all of a parameter that is cut, if the source has that."""
        grad = self._as_reduced(index, source)
        return grad.to(torch.float32) if self.master(index) is not None and grad is not None else grad

    def _as_reduced(self, index: int, source: GradientSource) -> Tensor | None:
        exact = source.exact(index) if self.master(index) is not None else None
        return source.gradient(index) if exact is None else exact

    def follow_memory(self, indices: Iterable[int] | None = None) -> None:
        """Point parts, of these parameters or of all, at the parameters' memory, which may have moved since."""
        for index in self._parts if indices is None else [index for index in indices if index in self._parts]:
            param = self._table.params[index]
            if self._followed.get(index) == (address := param.data_ptr()) or self.is_copied(index):
                continue
            stand_in, window = self._stand_ins[index], part_of(param, param, self._parts[index])
            if window.data_ptr() != stand_in.data_ptr():
                self.repoint(stand_in, window)
            self._followed[index] = address

    @torch.no_grad()
    def follow_values(self) -> None:
        """Copy parameters to what stands in for them away, for code that steps them without gradients."""
        for index, held in self._stand_ins.items():
            if self.is_away(index) and not self.wants_master(index):
                held.copy_(self.own_part(index, self._table.params[index].detach()))

    def repoint(self, stand_in: Tensor, memory: Tensor) -> None:
        """Give a stand-in different memory."""
        stand_in.data = memory

    @torch.no_grad()
    def show(self, indices: Iterable[int]) -> None:
        """Copy what is stepped for these parameters to them, rounded."""
        copied = [index for index in indices if index in self._stand_ins and self.is_copied(index)]
        params = {index: self._table.params[index] for index in copied}
        if copied:
            self.residence.show([(self.own_part(i, params[i].detach()), self._stand_ins[i].detach()) for i in copied])
            increment_version(list(params.values()))

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


def rounds_to(master: Tensor, param: Tensor) -> bool:
    """True if both are equal in the dtype of the parameter, NaN being equal to NaN."""
    rounded, value = master.detach().to(param.device, param.dtype), param.detach()
    if torch.equal(rounded, value):
        return True
    return bool(((rounded == value) | (rounded.isnan() & value.isnan())).all())


ALIGNMENT = 64
"""Bytes: where CPU allocations begin; CUDA's begin at multiples of it."""


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

    def __init__(self, stepped: SteppedTensors, source: GradientSource, factors: GradientFactors) -> None:
        self._stepped = stepped
        self._source = source
        self._factors = factors

    def gradient(self, index: int) -> Tensor | None:
        """The scaled gradient: a new tensor, unless there are no factors."""
        grad = self._stepped.gradient(index, self._source)
        return None if grad is None else self._factors.apply(index, grad)

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


class AlignedGradients:
    """Gradients that begin where memory that is allocated does, as DDP's own do: products of matrices round by that.

    Args:
        source: the gradients, in buckets.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source

    def gradient(self, index: int) -> Tensor | None:
        """The gradient: a copy if it begins elsewhere."""
        return _aligned(self._source.gradient(index))

    def exact(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, if that differs."""
        return _aligned(self._source.exact(index))


class _Noted(NamedTuple):
    """A parameter, and address and version of its gradient at a moment."""

    param: Tensor
    address: int
    version: int


class OwnedEdits:
    """Notes gradients when users get what this rank owns of them, as aliases with version counters of their own."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(self, params: Sequence[Tensor]) -> None:
        """Gradients are as they should be: from now on any change that is not made through an alias is wrong."""
        grads = [(param, param.grad) for param in params]
        self._noted = [_Noted(param, grad.data_ptr(), grad._version) for param, grad in grads if grad is not None]

    def forget(self) -> None:
        """Forget gradients that were used or dropped."""
        self._noted = []

    def forget_dropped(self) -> None:
        """Before a forward pass: forget gradients that were set to None without the optimizer."""
        self._noted = [noted for noted in self._noted if noted.param.grad is not None]

    @property
    def are_made(self) -> bool:
        """Whether gradients may have been changed on their owners alone."""
        return bool(self._noted)

    def hold(self, table: ParameterTable) -> bool:
        """As `are_made`, after a check that nothing else has changed gradients since. Alike on every rank.

        Raises:
            RuntimeError: naming the first parameter whose gradient was changed.
        """
        for param, *mark in self._noted:
            grad = param.grad
            if grad is not None and [grad.data_ptr(), grad._version] != mark:
                raise RuntimeError(
                    "Expected no other change of gradients between opt.owned_gradients() and opt.step(), got one of "
                    f"{table.label(table.index_of[param])}, by a backward pass, GradScaler.unscale_ or code over "
                    "param.grad. What opt.owned_gradients() has changed is on its owner only (stage 1), and they would "
                    "mix it with other ranks' gradients. Call opt.owned_gradients() after them; opt.clip_grad_norm_ "
                    "and opt.clip_grad_value_ also work after it. To drop gradients, call opt.zero_grad()."
                )
        return self.are_made

    def source(self, source: GradientSource, stepped: SteppedTensors) -> GradientSource:
        """Where a step finds gradients: if owners have changed theirs, no more than each owns of a cut parameter."""
        return _OwnParts(source, stepped) if self.are_made else source


class _OwnParts:
    """Gradients of which a rank sees nothing but what it owns."""

    def __init__(self, source: GradientSource, stepped: SteppedTensors) -> None:
        self._source = source
        self._stepped = stepped

    def gradient(self, index: int) -> Tensor | None:
        """The gradient, 1-D of this rank's part if the parameter is cut."""
        return self._own(index, self._source.gradient(index))

    def exact(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, if that differs."""
        return self._own(index, self._source.exact(index))

    def _own(self, index: int, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._stepped.own_part(index, grad)


def _aligned(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


def _times(grad: Tensor, factor: Tensor | float) -> Tensor:
    """The product in the gradient's dtype and on its device, where a 0-d gradient would take those of the factor."""
    factor = factor.to(grad.device) if isinstance(factor, Tensor) else factor
    return (grad * factor).to(grad.dtype)
