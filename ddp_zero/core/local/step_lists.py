"""Steps torch's own Adam, AdamW and SGD by torch's functional API (`adam.adam`, `sgd.sgd`), over lists that are kept.

``optimizer.step()`` collects the lists of parameters, gradients and states in every call; for a small bucket that takes
longer than the arithmetic. Here lists of the same tensor objects are kept from step to step: kernels read addresses and
values when they run. At the beginning of every step options are read, and the content of all lists is compared with the
optimizer, at about a microsecond per parameter; lists that differ are dropped. Buckets without lists are stepped by
``optimizer.step()``, and so are all buckets of other classes, with hooks on steps, with a replaced step, or with
options that are tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, getitem, is_
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, adam, sgd

from ddp_zero.core.local.step_hooks import is_wrapped_by_torch

Lists = list[list[Tensor]]
_dtype_of = attrgetter("dtype")
_PLAIN = {type(None), bool, int, float}
_KIND = attrgetter("dtype", "device")


class _FunctionalStep(NamedTuple):
    """The functional step of a group, with the options of the current step.

    Attributes:
        keys: the states' keys, in the order of the lists that the functions take; "" for a list that is empty.
        function: takes parameters, gradients and a list of states for each key.
        kernel: the same for tensors of one dtype on one device; ``function`` if there is no such kernel.
    """

    keys: tuple[str, ...]
    function: Callable[..., object]
    kernel: Callable[..., object]


def _adam_step(group: Mapping[str, Any]) -> _FunctionalStep | None:
    beta1, beta2 = group["betas"]
    options: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options.update(beta1=beta1, beta2=beta2)
    how: dict[str, Any] = {name: group[name] for name in ("foreach", "fused", "capturable", "decoupled_weight_decay")}
    if group["differentiable"] or not _are_plain((*options.values(), *how.values())):
        return None
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if options["amsgrad"] else "", "step")
    by_function = partial(adam.adam, **how, **options)
    if not how["fused"]:
        return _FunctionalStep(keys, by_function, by_function)
    add = torch._foreach_add_
    fused = torch._fused_adamw_ if how["decoupled_weight_decay"] else torch._fused_adam_
    kernel = partial(fused, grad_scale=None, found_inf=None, **options)

    def by_kernel(*lists: list[Tensor]) -> None:
        add(lists[-1], 1)
        kernel(*lists)

    return _FunctionalStep(keys, by_function, by_kernel)


def _sgd_step(group: Mapping[str, Any]) -> _FunctionalStep | None:
    options = {name: group[name] for name in ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")}
    how: dict[str, Any] = {name: group[name] for name in ("foreach", "fused")}
    if group["differentiable"] or not _are_plain((*options.values(), *how.values())):
        return None
    keys = ("momentum_buffer" if options["momentum"] != 0 else "",)

    def by_function(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> None:
        sgd.sgd(params, grads, [*momenta], **how, **options)

    beside: dict[str, Any] = {"is_first_step": False, "grad_scale": None, "found_inf": None}
    by_kernel = partial(torch._fused_sgd_, **beside, **options)
    return _FunctionalStep(keys, by_function, by_kernel if how["fused"] else by_function)


def _are_plain(values: Sequence[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(isinstance(value, bool | int | float | None) for value in values)


class _Family(NamedTuple):
    """Classes that share a ``step()``: the module that defines it, the functions that it calls, our functional step."""

    module: ModuleType
    functions: Mapping[str, Any]
    step_of: Callable[[Mapping[str, Any]], _FunctionalStep | None]


_ADAM = _Family(adam, {name: getattr(adam, name) for name in ("adam", "_fused_adam")}, _adam_step)
_SGD = _Family(sgd, {name: getattr(sgd, name) for name in ("sgd", "_fused_sgd")}, _sgd_step)
_FAMILIES: Mapping[type[Optimizer], _Family] = {Adam: _ADAM, AdamW: _ADAM, SGD: _SGD}


def _family_of(inner: Optimizer) -> _Family | None:
    """The family of an optimizer of exactly torch's class, without hooks on its step or a replaced step; else None."""
    family = _FAMILIES.get(type(inner))
    if (
        family is None
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # the profiler shows a range for each step
        or inner._optimizer_step_pre_hooks
        or inner._optimizer_step_post_hooks
        or getattr(inner, "grad_scale", None) is not None
        or getattr(inner, "found_inf", None) is not None
        or getattr(inner, "_need_device_dtype_check_for_fused", False)  # the first step checks dtypes and devices
        or inner.defaults.get("differentiable")
        or "_init_group" in vars(inner)
        or not is_wrapped_by_torch(inner)
    ):
        return None
    step: Any = type(inner).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    module_globals = vars(family.module)
    for function in (step, type(inner)._init_group):  # type: ignore[attr-defined]
        if getattr(function, "__globals__", None) is not module_globals:
            return None
    return family if all(module_globals.get(name) is function for name, function in family.functions.items()) else None


class _GroupLists(NamedTuple):
    """The lists for the parameters of a bucket in one group.

    Attributes:
        place: index of the group.
        taken: positions of these parameters' gradients in the bucket; None: all.
        lists: a list of states for each key of the functional step.
        is_uniform: whether all tensors have one dtype and are on one device.
    """

    place: int
    taken: list[int] | None
    params: list[Tensor]
    lists: Lists
    is_uniform: bool


class _BucketLists(NamedTuple):
    targets: list[Tensor]  # the tensors to step, in the order of gradients
    dtypes: list[torch.dtype]  # of the targets
    listed: list[_GroupLists]  # by group
    places: list[int]  # indices of these groups


@dataclass
class StepLists:
    """Keeps the lists of an optimizer's buckets, and steps the buckets that have lists.

    Attributes:
        groups_of: the optimizer's groups restricted to a bucket's parameters, by bucket.
        may_step: whether some bucket may have lists in this step.
        has_stepped: whether a bucket was stepped by its lists in this step.
    """

    inner: Optimizer
    groups_of: Mapping[int, Sequence[Mapping[str, Any]]]
    may_step: bool = False
    has_stepped: bool = False
    _steps: list[_FunctionalStep | None] = field(default_factory=list)  # of each group, in this step; empty: no lists
    _buckets: dict[int, _BucketLists | None] = field(default_factory=dict)  # None: has no lists in this step
    _states: list[Any] = field(default_factory=list)  # keys and values of the optimizer's state
    # the content of all lists, flat, so that `_is_current` compares it without a Python loop
    _holders: list[Mapping[str, Any]] = field(default_factory=list)  # the state that has each tensor of a state
    _keys: list[str] = field(default_factory=list)  # its key in that state
    _state_tensors: list[Tensor] = field(default_factory=list)  # the tensors
    _tensors: list[Tensor] = field(default_factory=list)  # these tensors and the targets
    _kinds: list[Any] = field(default_factory=list)  # their dtypes and devices

    def forget(self) -> None:
        """Drop all lists, as after parameters or state have moved."""
        self._buckets.clear()
        self._holders, self._keys, self._state_tensors, self._tensors, self._kinds = [], [], [], [], []
        self._steps, self._states, self.may_step = [], [], False

    def begin(self) -> None:
        """Begin a step with the groups' current options: drop lists if anything in them was replaced."""
        self.has_stepped = False
        family = _family_of(self.inner)
        if family is None:
            self.forget()
            return
        steps = [_functional_step_of(family, group) for group in self.inner.param_groups]
        state = self.inner.state
        states = [*state, *state.values()]
        is_same = len(states) == len(self._states) and all(map(is_, states, self._states))
        if not (is_same and self._is_current() and _keys_in(steps) == _keys_in(self._steps)):
            self.forget()
        elif None in self._buckets.values():  # a bucket without lists may have states by now
            self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket is not None}
        self._states, self._steps, self.may_step = states, steps, True

    def step(self, index: int, targets: list[Tensor], grads: Sequence[Tensor | None]) -> list[int]:
        """Step a bucket, if it has lists; with gradients off.

        Args:
            index: the bucket.
            targets: the tensors to step.
            grads: their gradients, in the same order; they need not be in ``grad``.

        Returns:
            Indices of the groups that were stepped; empty if ``optimizer.step()`` must be called instead.
        """
        steps = self._steps
        if not steps:
            return []
        if index not in self._buckets:
            self._buckets[index] = self._build_lists(self.groups_of.get(index, ()), targets)
        bucket = self._buckets[index]
        if bucket is None or (targets is not bucket.targets and not all(map(is_, targets, bucket.targets))):
            return []
        try:
            if [*map(_dtype_of, grads)] != bucket.dtypes:
                return []
        except AttributeError:  # a gradient is None
            return []
        for place, taken, params, lists, is_uniform in bucket.listed:
            functional: Any = steps[place]  # not None, as it has lists
            step = functional.kernel if is_uniform else functional.function
            step(params, grads if taken is None else [grads[position] for position in taken], *lists)
        self.has_stepped = True
        return bucket.places

    def _is_current(self) -> bool:
        try:
            is_held = all(map(is_, map(getitem, self._holders, self._keys), self._state_tensors))
        except KeyError:
            return False
        return is_held and [*map(_KIND, self._tensors)] == self._kinds

    def _build_lists(self, groups: Sequence[Mapping[str, Any]], targets: list[Tensor]) -> _BucketLists | None:
        """The lists of a bucket; None if some state does not exist yet, or is not as a step would leave it."""
        position_of = {target: position for position, target in enumerate(targets)}
        all_states: Mapping[Any, Any] = self.inner.state
        found: list[_GroupLists] = []
        held: list[tuple[Mapping[str, Any], str, Tensor]] = []
        for place, group in enumerate(groups):
            params = sorted(group["params"], key=position_of.__getitem__)
            functional = self._steps[place]
            if not params:
                continue
            if functional is None or any(param.is_complex() for param in params):
                return None
            states = [all_states.get(param, {}) for param in params]
            lists = [[state.get(key) for state in states] if key else [] for key in functional.keys]
            tensors = [*params, *chain.from_iterable(lists)]
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                return None
            taken = [position_of[param] for param in params]
            is_all = taken == list(range(len(targets)))
            found.append(_GroupLists(place, None if is_all else taken, params, lists, _are_uniform(tensors)))
            for key, values in zip(functional.keys, lists, strict=True):
                held += zip(states, repeat(key), values)
        if sum(len(listed.params) for listed in found) != len(targets):
            return None
        tensors = [*targets, *(tensor for *_, tensor in held)]
        self._holders += [owner for owner, *_ in held]
        self._keys += [key for _, key, _ in held]
        self._state_tensors += tensors[len(targets) :]
        self._tensors += tensors
        self._kinds += map(_KIND, tensors)
        return _BucketLists(targets, [target.dtype for target in targets], found, [listed.place for listed in found])


def _functional_step_of(family: _Family, group: Mapping[str, Any]) -> _FunctionalStep | None:
    try:
        return family.step_of(group)
    except (KeyError, TypeError, ValueError):  # options that ``step()`` refuses
        return None


def _keys_in(steps: Sequence[_FunctionalStep | None]) -> list[tuple[str, ...] | None]:
    return [None if step is None else step.keys for step in steps]


def _are_uniform(tensors: Sequence[Tensor]) -> bool:
    """True if tensors have one dtype and device; scalars, such as step counters, may be fp32."""
    first = tensors[0]
    return all(
        each.device == first.device and (each.dtype == first.dtype or (each.ndim == 0 and each.dtype == torch.float32))
        for each in tensors
    )
