"""Steps of torch's own Adam, AdamW and SGD over lists of tensors that are made once, by the functions that torch calls.

``optimizer.step()`` collects these lists from groups, gradients and state in every call; for a small bucket that takes
longer than the arithmetic. So lists are kept from step to step, and only by objects: kernels read addresses and values
when they run. Options are read at the beginning of every step. There, too, all that lists hold is compared with the
optimizer, at about a microsecond per parameter, and dropped if it differs. Buckets without lists are stepped by
``optimizer.step()``, as are all of other classes, and all if somebody listens to steps, has replaced a step, or gives
options as tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
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


class _Rule(NamedTuple):
    """A step of a group with its options as they are now.

    Attributes:
        keys: of the states, in the order of the lists; "" for a list that is empty.
        function: steps parameters by gradients and a list for each key.
        kernel: does so for tensors of one dtype on one device; the function where there is none.
    """

    keys: tuple[str, ...]
    function: Callable[..., object]
    kernel: Callable[..., object]


def _adam_rule(group: Mapping[str, Any]) -> _Rule | None:
    beta1, beta2 = group["betas"]
    options: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options.update(beta1=beta1, beta2=beta2)
    how: dict[str, Any] = {name: group[name] for name in ("foreach", "fused", "capturable", "decoupled_weight_decay")}
    if group["differentiable"] or not _are_plain((*options.values(), *how.values())):
        return None
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if options["amsgrad"] else "", "step")
    by_function = partial(adam.adam, **how, **options)
    if not how["fused"]:
        return _Rule(keys, by_function, by_function)
    add = torch._foreach_add_
    fused = torch._fused_adamw_ if how["decoupled_weight_decay"] else torch._fused_adam_
    kernel = partial(fused, grad_scale=None, found_inf=None, **options)

    def by_kernel(*lists: list[Tensor]) -> None:
        add(lists[-1], 1)
        kernel(*lists)

    return _Rule(keys, by_function, by_kernel)


def _sgd_rule(group: Mapping[str, Any]) -> _Rule | None:
    options = {name: group[name] for name in ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")}
    how: dict[str, Any] = {name: group[name] for name in ("foreach", "fused")}
    if group["differentiable"] or not _are_plain((*options.values(), *how.values())):
        return None
    keys = ("momentum_buffer" if options["momentum"] != 0 else "",)

    def by_function(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> None:
        sgd.sgd(params, grads, [*momenta], **how, **options)

    beside: dict[str, Any] = {"is_first_step": False, "grad_scale": None, "found_inf": None}
    by_kernel = partial(torch._fused_sgd_, **beside, **options)
    return _Rule(keys, by_function, by_kernel if how["fused"] else by_function)


def _are_plain(values: Sequence[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(isinstance(value, bool | int | float | None) for value in values)


class _Family(NamedTuple):
    """Classes of one ``step()``: the module that has it, the functions there that it calls, and its rule."""

    module: ModuleType
    functions: Mapping[str, Any]
    rule_of: Callable[[Mapping[str, Any]], _Rule | None]


_ADAM = _Family(adam, {name: getattr(adam, name) for name in ("adam", "_fused_adam")}, _adam_rule)
_SGD = _Family(sgd, {name: getattr(sgd, name) for name in ("sgd", "_fused_sgd")}, _sgd_rule)
_FAMILIES: Mapping[type[Optimizer], _Family] = {Adam: _ADAM, AdamW: _ADAM, SGD: _SGD}


def _family_of(inner: Optimizer) -> _Family | None:
    """The family of an optimizer of exactly torch's class, whose step nobody listens to or has replaced."""
    family = _FAMILIES.get(type(inner))
    if (
        family is None
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # which shows a range of each step
        or inner._optimizer_step_pre_hooks
        or inner._optimizer_step_post_hooks
        or getattr(inner, "grad_scale", None) is not None
        or getattr(inner, "found_inf", None) is not None
        or getattr(inner, "_need_device_dtype_check_for_fused", False)  # the first step makes it
        or inner.defaults.get("differentiable")
        or "_init_group" in vars(inner)
        or not is_wrapped_by_torch(inner)
    ):
        return None
    step: Any = type(inner).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    its_own = vars(family.module)
    for function in (step, type(inner)._init_group):  # type: ignore[attr-defined]
        if getattr(function, "__globals__", None) is not its_own:
            return None
    return family if all(its_own.get(name) is one for name, one in family.functions.items()) else None


class _Listed(NamedTuple):
    """The parameters of a bucket in one group.

    Attributes:
        place: of the group.
        taken: the places of their gradients among the bucket's; None: all.
        lists: a list of states for each key of the group's rule.
        is_uniform: whether all tensors have one dtype and are on one device.
    """

    place: int
    taken: list[int] | None
    params: list[Tensor]
    lists: Lists
    is_uniform: bool


class _Bucket(NamedTuple):
    targets: list[Tensor]  # in the order of gradients
    dtypes: list[torch.dtype]
    listed: list[_Listed]
    places: list[int]  # of the groups of these


@dataclass
class StepLists:
    """The lists of an optimizer's buckets.

    Attributes:
        groups_of: the optimizer's groups with a bucket's parameters only, by bucket.
        may_step, has_stepped: whether some bucket may have lists in this step, and one was stepped.
    """

    inner: Optimizer
    groups_of: Mapping[int, Sequence[Mapping[str, Any]]]
    may_step: bool = False
    has_stepped: bool = False
    _rules: list[_Rule | None] = field(default_factory=list)  # of each group, in this step; empty: no lists
    _buckets: dict[int, _Bucket | None] = field(default_factory=dict)  # None: has no lists in this step
    _states: list[Any] = field(default_factory=list)  # keys and values of the optimizer's state
    # the content of all lists, in parallel lists that `_is_current` compares without a loop in Python
    _owners: list[Mapping[str, Any]] = field(default_factory=list)  # of each tensor of state: a parameter's state
    _keys: list[str] = field(default_factory=list)  # its key there
    _held: list[Tensor] = field(default_factory=list)  # tensors of state
    _tensors: list[Tensor] = field(default_factory=list)  # these, and parameters
    _kinds: list[Any] = field(default_factory=list)  # dtypes and devices of the latter

    def forget(self) -> None:
        """Make lists anew, as after parameters or state have moved."""
        self._buckets.clear()
        self._owners, self._keys, self._held, self._tensors, self._kinds = [], [], [], [], []
        self._rules, self._states, self.may_step = [], [], False

    def begin(self) -> None:
        """At the beginning of a step, whose options the groups have: drop lists that are not as they were."""
        self.has_stepped = False
        family = _family_of(self.inner)
        if family is None:
            self.forget()
            return
        rules = [_rule_of(family, group) for group in self.inner.param_groups]
        state = self.inner.state
        states = [*state, *state.values()]
        is_same = len(states) == len(self._states) and all(map(is_, states, self._states))
        if not (is_same and self._is_current() and _keys_in(rules) == _keys_in(self._rules)):
            self.forget()
        elif None in self._buckets.values():  # by now it may have states
            self._buckets = {index: bucket for index, bucket in self._buckets.items() if bucket is not None}
        self._states, self._rules, self.may_step = states, rules, True

    def step(self, index: int, targets: list[Tensor], grads: Sequence[Tensor | None]) -> list[int]:
        """Step a bucket, if it has lists; with gradients off.

        Args:
            index: of the bucket.
            targets: its parameters.
            grads: of these, in their order; they need not be in ``grad``.

        Returns:
            The places of groups that were stepped; none if ``optimizer.step()`` must be called instead.
        """
        rules = self._rules
        if not rules:
            return []
        if index not in self._buckets:
            self._buckets[index] = self._list(self.groups_of.get(index, ()), targets)
        bucket = self._buckets[index]
        if bucket is None or (targets is not bucket.targets and not all(map(is_, targets, bucket.targets))):
            return []
        try:
            if [*map(_dtype_of, grads)] != bucket.dtypes:
                return []
        except AttributeError:  # some parameter has none
            return []
        for place, taken, params, lists, is_uniform in bucket.listed:
            rule: Any = rules[place]  # the lists are those of a rule
            step = rule.kernel if is_uniform else rule.function
            step(params, grads if taken is None else [grads[one] for one in taken], *lists)
        self.has_stepped = True
        return bucket.places

    def _is_current(self) -> bool:
        try:
            is_held = all(map(is_, map(getitem, self._owners, self._keys), self._held))
        except KeyError:
            return False
        return is_held and [*map(_KIND, self._tensors)] == self._kinds

    def _list(self, groups: Sequence[Mapping[str, Any]], targets: list[Tensor]) -> _Bucket | None:
        """The lists of a bucket; None if some state is not there yet, or not as a step would have left it."""
        places = {target: place for place, target in enumerate(targets)}
        state: Mapping[Any, Any] = self.inner.state
        found: list[_Listed] = []
        held: list[tuple[Mapping[str, Any], str, Tensor]] = []
        for place, group in enumerate(groups):
            params, rule = sorted(group["params"], key=places.__getitem__), self._rules[place]
            if not params:
                continue
            if rule is None or any(param.is_complex() for param in params):
                return None
            states = [state.get(param, {}) for param in params]
            lists = [[one.get(key) for one in states] if key else [] for key in rule.keys]
            tensors = [*params, *(one for values in lists for one in values)]
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                return None
            taken = [places[param] for param in params]
            is_all = taken == list(range(len(targets)))
            found.append(_Listed(place, None if is_all else taken, params, lists, _are_uniform(tensors)))
            for key, values in zip(rule.keys, lists, strict=True):
                held += zip(states, repeat(key), values)
        if sum(len(listed.params) for listed in found) != len(targets):
            return None
        tensors = [*targets, *(tensor for *_, tensor in held)]
        self._owners += [owner for owner, *_ in held]
        self._keys += [key for _, key, _ in held]
        self._held += tensors[len(targets) :]
        self._tensors += tensors
        self._kinds += map(_KIND, tensors)
        return _Bucket(targets, [target.dtype for target in targets], found, [listed.place for listed in found])


def _rule_of(family: _Family, group: Mapping[str, Any]) -> _Rule | None:
    try:
        return family.rule_of(group)
    except (KeyError, TypeError, ValueError):  # of options that ``step()`` refuses
        return None


def _keys_in(rules: Sequence[_Rule | None]) -> list[tuple[str, ...] | None]:
    return [None if rule is None else rule.keys for rule in rules]


def _are_uniform(tensors: Sequence[Tensor]) -> bool:
    """True if tensors have one dtype and device; of one element, as counters of steps, they may be fp32."""
    first = tensors[0]
    return all(
        one.device == first.device and (one.dtype == first.dtype or (one.ndim == 0 and one.dtype == torch.float32))
        for one in tensors
    )
