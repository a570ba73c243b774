"""Several optimizer classes behind one inner optimizer: Muon for matrices, AdamW for the rest.

A parameter group may name its class as ``optimizer_class``. The groups of one class are stepped by one instance of it,
as in a plain loop with one optimizer per class. `MixedOptimizer` is an optimizer over all groups whose step lends each
instance its groups, as they are at the moment, and the one state dictionary. So whatever looks at an optimizer (steps
by bucket, state dicts, loads, offload) sees groups and states as of one class.

In groups the class is a name, since state dicts are saved.
"""

import copy
import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.arguments import check_params, is_same
from ddp_zero.core.local.step_hooks import local_step

CLASS_KEY = "optimizer_class"
"""The key of a parameter group that names the group's class; a class when given, a name afterwards."""

ParamGroup = dict[str, Any]


class Mixture:
    """Builds a `MixedOptimizer` as a class would, from ``classes`` by name and a ``default`` for other groups."""

    def __init__(self, default: Callable[..., Optimizer], classes: Mapping[str, type[Optimizer]]) -> None:
        self.default = default
        self.classes = dict(classes)
        names = [_short(default), *(one.__name__ for one in self.classes.values())]
        self.__name__ = "+".join(names)
        self.__qualname__ = "+".join([name_of(default), *sorted(self.classes)])
        self._kind = type(self.__name__, (MixedOptimizer,), {})  # so that messages name the classes

    def __call__(self, groups: Sequence[ParamGroup], **defaults: Any) -> "MixedOptimizer":
        """The optimizer over these groups; ``defaults`` are options of the default class."""
        built: MixedOptimizer = self._kind(groups, self, defaults)
        return built

    def build(self, name: str, groups: list[ParamGroup], defaults: Mapping[str, Any]) -> Optimizer:
        """Build the optimizer of one class over its groups, which may be none; the default class has the empty name."""
        kind = self.classes.get(name, self.default)
        options = _for_constructor(kind, groups) if name else defaults
        suboptimizer = kind(groups or [{"params": []}], **options)
        if name:
            _check_taken(kind, groups, suboptimizer, options)
        wrapped = next((key for key, value in vars(suboptimizer).items() if isinstance(value, Optimizer)), None)
        has_own_form = type(suboptimizer).state_dict is not Optimizer.state_dict
        if wrapped is not None or has_own_form:
            complaint = (
                f"keeps an optimizer as {wrapped!r}" if wrapped is not None else "has state dicts of its own form"
            )
            raise NotImplementedError(
                f"Expected optimizer classes that can share one step, got {_short(kind)}, which {complaint}. Shard its "
                "parameters by an optimizer of their own. [ZERO-128]"
            )
        if not groups:
            suboptimizer.param_groups.clear()
        return suboptimizer


class StepsWithPeers(Optimizer):
    """Base of classes whose steps exchange messages with ranks that hold other parts of the same parameters."""

    def give_up(self) -> None:
        """Called in place of a step that this rank cannot take: tell the ranks that wait for it. A collective."""


class MixedOptimizer(StepsWithPeers):
    """One optimizer over the groups of several classes; see the module docstring.

    ``suboptimizers`` has one optimizer per class, by the class's name; the default's is empty. NotImplementedError
    for a class that keeps an optimizer inside, or state dicts of its own form.
    """

    def __init__(self, groups: Sequence[ParamGroup], mixture: Mixture, defaults: Mapping[str, Any]) -> None:
        self.mixture = mixture
        self.suboptimizers: dict[str, Optimizer] = {}
        for name in dict.fromkeys(["", *(group.get(CLASS_KEY, "") for group in groups)]):
            own = [group for group in groups if group.get(CLASS_KEY, "") == name]
            self.suboptimizers[name] = mixture.build(name, own, defaults)
        remaining = {name: iter(part.param_groups) for name, part in self.suboptimizers.items()}
        in_order = [next(remaining[group.get(CLASS_KEY, "")]) for group in groups]
        states = defaultdict(
            dict, {key: state for part in self.suboptimizers.values() for key, state in part.state.items()}
        )
        # sets these attributes; torch's constructor would add each group once more
        Optimizer.__setstate__(self, {"defaults": {}, "state": states, "param_groups": in_order})
        self.defaults = self.suboptimizers[""].defaults
        self._assign_groups_and_state()

    def add_param_group(self, param_group: ParamGroup) -> None:
        name = param_group.get(CLASS_KEY, "")
        self._assign_groups_and_state()
        self.suboptimizers[name].add_param_group(param_group)
        self.param_groups.append(self.suboptimizers[name].param_groups[-1])
        self.state.update(self.suboptimizers[name].state)
        self._assign_groups_and_state()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the groups of each class by its instance; NotImplementedError if one keeps state of no parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._assign_groups_and_state()
        waiting = deque(part for part in self.suboptimizers.values() if part.param_groups)
        try:
            while waiting:
                local_step(waiting.popleft())(**kwargs)
        except Exception:
            _give_up(waiting)
            raise
        stray = next((key for key in self.state if not isinstance(key, Tensor)), None)
        if stray is not None:
            raise NotImplementedError(
                f"Expected state of parameters only from {type(self).__name__}, got {stray!r}, which belongs to none. "
                "Shard the parameters of the class that keeps it by an optimizer of their own. [ZERO-128]"
            )
        return loss

    def give_up(self) -> None:
        self._assign_groups_and_state()
        _give_up(part for part in self.suboptimizers.values() if part.param_groups)

    def _assign_groups_and_state(self) -> None:
        """Give each suboptimizer its groups, as they are now, and the shared state."""
        for name, part in self.suboptimizers.items():
            part.param_groups = self._groups_of(name)
            part.state = self.state

    def _assign_own_states(self) -> None:
        """Give each suboptimizer its groups and a state of its own parameters alone, which its class can read."""
        for name, part in self.suboptimizers.items():
            part.param_groups = self._groups_of(name)
            part.state = self._state_of(name)

    def _groups_of(self, name: str) -> list[ParamGroup]:
        return [group for group in self.param_groups if group.get(CLASS_KEY, "") == name]

    def _state_of(self, name: str) -> defaultdict[Tensor, Any]:
        own = {param for group in self._groups_of(name) for param in group["params"]}
        return defaultdict(dict, {param: state for param, state in self.state.items() if param in own})

    # Copies, loads and methods of the classes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict by the method of each class; ValueError for other groups, or groups of other classes."""
        names = [group.get(CLASS_KEY, "") for group in self.param_groups]
        saved = [group.get(CLASS_KEY, "") for group in state_dict["param_groups"]]
        if names != saved:
            raise ValueError(f"Expected parameter groups of the classes {names}, got {saved}. [ZERO-604]")
        self._assign_groups_and_state()
        loaded: dict[Any, Any] = {}
        for name, part in self.suboptimizers.items():
            groups = [group for group in state_dict["param_groups"] if group.get(CLASS_KEY, "") == name]
            held = {saved_id for group in groups for saved_id in group["params"]}
            states = {saved_id: state for saved_id, state in state_dict["state"].items() if saved_id in held}
            part.load_state_dict({**state_dict, "state": states, "param_groups": groups})
            loaded.update(part.state)
        remaining = {name: iter(part.param_groups) for name, part in self.suboptimizers.items()}
        self.param_groups = [next(remaining[name]) for name in names]
        self.state = defaultdict(dict, loaded)
        self._assign_groups_and_state()

    # A class may look into the states that its copies are given: they get no other class's, and steps lend all again

    def __getstate__(self) -> dict[str, Any]:
        self._assign_own_states()
        return {**super().__getstate__(), "mixture": self.mixture, "suboptimizers": self.suboptimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, part in self.suboptimizers.items():
            part.__setstate__({"state": self._state_of(name), "param_groups": self._groups_of(name)})

    def __copy__(self) -> "MixedOptimizer":
        self._assign_own_states()
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self))
        clone.suboptimizers = {name: copy.copy(part) for name, part in self.suboptimizers.items()}
        return clone

    def __getattr__(self, name: str) -> Any:
        """A public attribute of the classes; a method is called on every instance that has it."""
        parts = vars(self).get("suboptimizers", {}).values()
        found = [getattr(part, name) for part in parts if not name.startswith("_") and hasattr(part, name)]
        if not found:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not all(callable(one) for one in found):
            return found[0]

        def call(optimizer: "MixedOptimizer", *args: Any, **kwargs: Any) -> Any:
            optimizer._assign_groups_and_state()
            return [method(*args, **kwargs) for method in found][-1]

        call.__name__ = name
        return MethodType(call, self)


def _for_constructor(kind: Callable[..., Optimizer], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Options that all groups of a class share, as its constructor takes them: some classes keep them to themselves."""
    known = [name for name in _keywords_of(kind) if all(name in group for group in groups)]
    shared = {name: [group[name] for group in groups] for name in known}
    return {name: found[0] for name, found in shared.items() if all(is_same(one, found[0]) for one in found)}


def _check_taken(
    kind: Callable[..., Optimizer], groups: Sequence[ParamGroup], part: Optimizer, options: Mapping[str, Any]
) -> None:
    """Check that the class reads options from groups where these differ; TypeError if not."""
    for name in _keywords_of(kind):
        if name not in options and name not in part.defaults and any(name in group for group in groups):
            raise TypeError(
                f"Expected {name!r} to be the same in all groups of {_short(kind)}, which takes it for all of its "
                "parameters, got different values, or groups without it. [ZERO-128]"
            )


def _keywords_of(kind: Callable[..., Optimizer]) -> list[str]:
    found = inspect.signature(kind).parameters.values()
    return [one.name for one in found if one.kind is not one.VAR_KEYWORD and one.name != "params"]


def class_for(optimizer_class: object, group: Mapping[str, Any]) -> object:
    if isinstance(optimizer_class, Mixture):
        return optimizer_class.classes.get(group.get(CLASS_KEY, ""), optimizer_class.default)
    return optimizer_class


def classes_in(optimizer_class: Callable[..., Optimizer]) -> list[Callable[..., Optimizer]]:
    """The classes that step, the one of groups without a class of their own first."""
    if isinstance(optimizer_class, Mixture):
        return [optimizer_class.default, *optimizer_class.classes.values()]
    return [optimizer_class]


def name_of(optimizer_class: object) -> str:
    module, name = (getattr(optimizer_class, key, None) for key in ("__module__", "__qualname__"))
    return repr(optimizer_class) if name is None else f"{module}.{name}"


def read_classes(params: Any, default: Callable[..., Optimizer]) -> tuple[Any, Callable[..., Optimizer]]:
    """Take classes out of a copy of the groups, which get their names instead; returns it and the optimizer's builder.

    ``default`` is the class of groups that name none. TypeError for a value that is no class, or for two of one name.
    """
    if not isinstance(params, list | tuple) or not any(isinstance(one, Mapping) and CLASS_KEY in one for one in params):
        return params, default
    classes: dict[str, type[Optimizer]] = {}
    groups = []
    for place, given in enumerate(params):
        group = dict(given)
        kind = group.pop(CLASS_KEY, None)
        if kind is not None and kind is not default:
            name = name_of_group_class(kind, place)
            if classes.setdefault(name, kind) is not kind:
                raise TypeError(
                    f"Expected classes with different names, got two named {name}. "
                    "Give one of them another name, by a subclass. [ZERO-101]"
                )
            group[CLASS_KEY] = name
        groups.append(group)
    return groups, Mixture(default, classes) if classes else default


def _give_up(parts: Iterable[Optimizer]) -> None:
    """Tell the peers of suboptimizers that exchange messages in a step that none will be taken."""
    for part in parts:
        if isinstance(part, StepsWithPeers):
            part.give_up()


def with_class(
    exposed: Optimizer, inner: Optimizer, param_group: ParamGroup, add: Callable[[ParamGroup], None]
) -> None:
    """Add a group to the exposed optimizer by ``add``, with defaults of its class; ValueError or TypeError if wrong."""
    check_params([param_group])
    if not isinstance(param_group, dict) or CLASS_KEY not in param_group:
        add(param_group)
        return
    group = dict(param_group)
    kind = group.pop(CLASS_KEY)
    part = inner
    if not isinstance(inner, MixedOptimizer) or kind is not inner.mixture.default:
        name = name_of_group_class(kind, len(exposed.param_groups))
        known = inner.mixture.classes if isinstance(inner, MixedOptimizer) else {name_of(type(inner)): type(inner)}
        if known.get(name) is not kind:
            raise TypeError(
                f"Expected {CLASS_KEY} of an added group to be one that this optimizer was built with, "
                f"{type(inner).__name__}, got {name}. Build the optimizer with a group of each class. [ZERO-101]"
            )
        if isinstance(inner, MixedOptimizer):
            group[CLASS_KEY], part = name, inner.suboptimizers[name]
    defaults = exposed.defaults
    exposed.defaults = part.defaults
    try:
        add(group)
    finally:
        exposed.defaults = defaults


def name_of_group_class(kind: object, place: int) -> str:
    """The name of the class that a group is given; TypeError if it is no optimizer class."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(
            f"Expected {CLASS_KEY} of parameter group {place} to be a torch.optim.Optimizer class, got {kind!r:.80}. "
            "Options of the class are options of the group. [ZERO-101]"
        )
    return name_of(kind)


def _short(optimizer_class: object) -> str:
    return getattr(optimizer_class, "__name__", repr(optimizer_class))
