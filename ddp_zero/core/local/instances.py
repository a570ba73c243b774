"""Takes over optimizers that were built already, as by a factory, to shard them.

An instance has all that a sharded optimizer needs: its class, its groups with their options, attributes of its own and
its state. Constructors differ in what they take and keep, so optimizers like it are made without calling them: they get
its attributes and defaults, and groups that carry every option.

Afterwards the instance forwards to the sharded optimizer. Learning-rate schedulers that were built over it write to
the groups that are stepped. What would step, save or load its own parameters a second time raises.

Alternatives considered: ``type(instance)(groups, **instance.defaults)`` (AdamW does not take a default that it adds,
and what a class keeps in attributes would silently be the constructor's default).
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.arguments import check_class, check_known, check_params, named_params_in
from ddp_zero.core.local.memory import bit_sum_of
from ddp_zero.core.local.mixed import ParamGroup, read_classes
from ddp_zero.values.tree import flatten

_PATCHED = {"step", "_opt_called", "grad_scale", "found_inf"}
"""Attributes that schedulers and `GradScaler` leave on an instance."""
_DEPTH = 3


@cache
def _attributes_of_all() -> set[str]:
    return {*vars(Optimizer([{"params": []}], {})), *_PATCHED}


def _hooks() -> list[str]:
    return [name for name in _attributes_of_all() if name.endswith("_hooks")]


class Instance:
    """A user's optimizer that is handed over, unchanged until `retire`. Calling it builds a like optimizer over groups.

    RuntimeError for an optimizer that was handed over before.
    """

    def __init__(self, given: Optimizer) -> None:
        self.kind = type(given)
        self.__name__, self.__qualname__ = self.kind.__name__, self.kind.__qualname__
        if isinstance(given, _HandedOver):
            given._refuse("shard_optimizer()")
        self._given: Optimizer | None = given
        self._id = id(given)
        self._attributes = {name: value for name, value in vars(given).items() if name not in _attributes_of_all()}
        self.defaults = given.defaults
        self.groups = given.param_groups
        self.state: Mapping[Any, Any] = given.state
        self._params = [param for group in self.groups for param in group["params"]]

    def check_can_be_copied(self) -> None:
        """Check that only groups lead to parameters, so that an optimizer like it may step others; TypeError if not."""
        given = self._given
        assert given is not None, "an instance is checked before it is handed over"
        own = set(map(id, self._params))
        for name, value in self._attributes.items():
            for one in _values_within(value):
                if isinstance(one, Optimizer) or id(one) in own:
                    what = "an optimizer" if isinstance(one, Optimizer) else "parameters"
                    raise TypeError(
                        f"Expected an optimizer with parameters in its groups alone, got {self.__name__} with {what} "
                        f"in {name!r}, which a shard of it would step as well. Pass a function that builds it: "
                        "shard_optimizer(ddp, lambda params, **options: ...). [ZERO-130]"
                    )
        for hooks in _hooks():
            for hook in vars(given)[hooks].values():
                if getattr(hook, "__self__", None) is given:
                    raise TypeError(
                        f"Expected an optimizer without hooks that are methods of its own, got {self.__name__} with "
                        f"{hook.__name__!r} in {hooks!r}. Pass its class and options. [ZERO-130]"
                    )

    def check_params(self, params: object) -> None:
        """Check that parameters given beside the instance are its own; ValueError if not, TypeError for groups."""
        if params is None or params is self.groups:
            return
        if not callable(params):
            check_params(params)
        given_ones: Iterable[object] = params if isinstance(params, Iterable) else ()
        if callable(params) or any(isinstance(one, Mapping) for one in given_ones):
            raise TypeError(
                f"Expected a {self.__name__} that is handed over alone, which has groups of its own, got groups beside "
                "it. Leave them out. [ZERO-130]"
            )
        given = [id(param) for _, param in named_params_in(params)]
        if set(given) == set(map(id, self._params)):
            return
        raise ValueError(
            f"Expected the {len(self._params)} parameters of the {self.__name__} that is handed over, got "
            f"{len(given)} of which it has {len(set(given) & set(map(id, self._params)))}. Leave the parameters out: "
            "the optimizer has its groups. [ZERO-130]"
        )

    def __call__(self, groups: Sequence[ParamGroup], **options: Any) -> Optimizer:
        """An optimizer like the instance over these groups, without state; ``options`` are defaults."""
        made = self.kind.__new__(self.kind)
        memo: dict[int, Any] = {id(param): param for param in self._params} | {self._id: made}
        vars(made).update({name: _try_copy(value, memo) for name, value in self._attributes.items()})
        Optimizer.__init__(made, groups, {**self.defaults, **options})
        return made

    def described_options(self) -> dict[str, Any]:
        return {**self.defaults, **self._attributes}

    def digest(self) -> str:
        """A digest of the state, by position of the parameter: equal on ranks with equal states."""
        index_of_id = {id(param): index for index, param in enumerate(self._params)}
        entries = []
        for key, state in self.state.items():
            try:
                text, tensors = flatten(state)
            except TypeError:  # it cannot travel; names have to do
                text = ",".join(map(str, state))
                tensors = []
            name = index_of_id.get(id(key), str(key)) if isinstance(key, Tensor) else key
            entries.append((name, text, [bit_sum_of(tensor) for tensor in tensors]))
        return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]

    def retire(self, new_owner: Optimizer) -> None:
        """Make the instance forward to the optimizer that has taken it over; that optimizer gets its hooks."""
        # the new owner holds this object, and the instance holds the new owner
        given, self._given, self.state = self._given, None, {}
        assert given is not None, "an instance is handed over once"
        for hooks in _hooks():
            vars(new_owner)[hooks] = vars(given)[hooks]  # the same dict: handles remove hooks from it
        for name in ("param_groups", "state", *_PATCHED):
            vars(given).pop(name, None)
        vars(given)["_new_owner"] = new_owner
        if self.kind not in _handed_over_classes:
            _handed_over_classes[self.kind] = type(f"HandedOver{self.__name__}", (_HandedOver, self.kind), {})
        given.__class__ = _handed_over_classes[self.kind]


class _HandedOver:
    """Base of the classes of instances that were handed over: it forwards groups and state to the new owner."""

    _new_owner: Optimizer
    _opt_called = True  # schedulers ask whether it has stepped

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self._new_owner.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:
        return self._new_owner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._new_owner.zero_grad(set_to_none)

    def step(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("step()")

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers count its steps no more

    def state_dict(self) -> NoReturn:
        self._refuse("state_dict()")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        self._refuse("load_state_dict()")

    def add_param_group(self, param_group: Any) -> NoReturn:
        self._refuse("add_param_group()")

    def _refuse(self, called: str) -> NoReturn:
        raise RuntimeError(
            f"The {type(self).__mro__[2].__name__} was handed over to a sharded optimizer, which has its groups and "
            f"state: it has no {called}. Use what shard_optimizer or ZeroRedundancyOptimizer has returned. [ZERO-131]"
        )


_handed_over_classes: dict[type[Optimizer], type[Optimizer]] = {}
"""The classes of instances that were handed over, by their original class."""


Build = Callable[..., Optimizer]


def read_arguments(
    params: Any, optimizer_class: Any, defaults: Mapping[str, Any], library: Iterable[str]
) -> tuple[Any, Build, Build, Instance | None]:
    """Read parameters and a class, or an instance in the place of either; ``library`` names this library's options.

    Returns:
        Parameters or groups without classes; the class, or what stands for several; what builds the inner optimizer;
        and the instance that is handed over.

    Raises:
        TypeError: for arguments of the wrong type, options that the class does not have, or options beside an instance.
        ValueError: for other parameters than the instance's.
    """
    instance = instance_in(params, optimizer_class)
    if instance is None:
        check_params(params)
        check_class(optimizer_class)
        check_known(defaults, optimizer_class, library)
        groups, kind = read_classes(params, optimizer_class)
        return groups, kind, kind, None
    check_known(defaults, instance.kind, library)
    if defaults:
        raise TypeError(
            f"Expected a {instance.__name__} that is handed over with its own options, got {', '.join(defaults)} "
            "beside it. Set options in its param_groups, or pass the class with all options. [ZERO-130]"
        )
    instance.check_params(None if isinstance(params, Optimizer) else params)
    return instance.groups, instance.kind, instance, instance


def instance_in(params: object, optimizer_class: object) -> Instance | None:
    """The instance among a constructor's first two arguments, if there is one."""
    if isinstance(optimizer_class, Instance):
        return optimizer_class
    if isinstance(optimizer_class, Optimizer):
        return Instance(optimizer_class)
    return Instance(params) if isinstance(params, Optimizer) and optimizer_class is None else None


@torch.no_grad()
def state_for(state: Any, param: Tensor, stepped: Tensor) -> Any:
    """A parameter's state for its step target, in the target's dtype and memory.

    As in torch's loads, a state in the parameter's dtype gets the target's dtype; a counter stays on its device.
    """
    if isinstance(state, Tensor):
        follows = state.dim() > 0 and state.dtype == param.dtype
        is_counter = state.dim() == 0 and stepped.device.type != "cpu"
        return state.to(
            device=state.device if is_counter else stepped.device, dtype=stepped.dtype if follows else state.dtype
        )
    if isinstance(state, Mapping):
        return {key: state_for(value, param, stepped) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(state_for(value, param, stepped) for value in state)
    return state


def _try_copy(value: Any, memo: dict[int, Any]) -> Any:
    with suppress(Exception):  # a process group, a lock: shared
        return copy.deepcopy(value, memo)
    return value


def _values_within(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """A value and, if it is a container, the values in it."""
    yield value
    if depth and isinstance(value, Mapping):
        for pair in value.items():
            yield from _values_within(pair, depth)
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _values_within(item, depth - 1)
