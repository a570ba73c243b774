"""Drives one inner optimizer of any class over this rank's parameters, one bucket at a time.

The inner optimizer knows nothing about buckets. Its ``param_groups`` are what the user sees in ``opt.optim``: one per
exposed group, with this rank's parameters only. To step a bucket, those lists are swapped for copies that hold the
bucket's parameters; `torch.optim.Optimizer.step` walks whatever ``self.param_groups`` holds.

What a step changes outside per-parameter state must change once per step, however many buckets there are. Some
optimizers count steps in a group (``group["k"] += 1``), on themselves (``self.calls += 1``) or in state that belongs to
no parameter (``self.state["k"] += 1``), in numbers or tensors. So every bucket starts from the same options and the
same counters, and the values after the last bucket are kept.

Alternatives considered: one optimizer per bucket (breaks ``optim.state`` and classes that look at all groups); passing
only groups that have parameters (a plain optimizer also visits groups whose parameters have no gradient).
"""

import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ParamGroup = dict[str, Any]
Closure = Callable[[], Any]

PER_PARAMETER_KEYS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> ParamGroup:
    """A group without its parameters and names; their keys keep their places, since a state dict shows the order."""
    return {key: None if key in PER_PARAMETER_KEYS else value for key, value in group.items()}


def copy_options(source: Mapping[str, Any], target: ParamGroup) -> None:
    """Make a group's options equal to those of the source, in the same order; its parameters and names stay."""
    own = {key: target[key] for key in PER_PARAMETER_KEYS if key in target}
    options = {key: value for key, value in source.items() if key in own or key not in PER_PARAMETER_KEYS}
    target.clear()
    target.update(options | own)  # own values keep the places that these keys have in the source


def restrict_group(group: Mapping[str, Any], keep: Collection[Tensor]) -> ParamGroup:
    """A copy of a group with only some of its parameters, and their names if present."""
    kept = [position for position, param in enumerate(group["params"]) if param in keep]
    return {
        key: [value[position] for position in kept] if key in PER_PARAMETER_KEYS else value
        for key, value in group.items()
    }


def localise_group(group: ParamGroup, stepped: Mapping[Tensor, Tensor]) -> ParamGroup:
    """A copy of a user's group with the tensors stepped on this rank, names included."""
    local = restrict_group(group, stepped)
    local["params"] = [stepped[param] for param in local["params"]]
    return local


def groups_of(optimizer: Optimizer) -> Callable[[], list[ParamGroup]]:
    """A getter for the current groups, without a cycle that only the garbage collector could free."""
    reference = weakref.ref(optimizer)

    def groups() -> list[ParamGroup]:
        alive = reference()
        assert alive is not None, "an optimizer that steps is alive"
        return alive.param_groups

    return groups


class LocalStep:
    """Steps an inner optimizer bucket by bucket, `begin` to `end`, as if it were one step.

    Args:
        inner: the optimizer over this rank's parameters, one group per exposed group.
        exposed: the groups that the user sees now, whose options the inner ones mirror.

    Attributes:
        note: called after each bucket's step with the bucket and the groups that were stepped for it, or None.
        steps_whole: True if a step of the inner optimizer steps all its parameters, whatever its ``param_groups`` hold,
            because it wraps an optimizer that holds them. Then the first bucket's step is the whole step.
    """

    def __init__(
        self,
        inner: Optimizer,
        exposed: Callable[[], list[ParamGroup]],
    ) -> None:
        self._inner = inner
        self._exposed = exposed
        self.note: Callable[[int, list[ParamGroup]], None] | None = None
        self.steps_whole = any(isinstance(value, Optimizer) for value in vars(inner).values())
        self._groups_of_bucket: dict[int, list[ParamGroup]] = {}
        self._groups_after: list[list[ParamGroup]] = []
        self._options: list[ParamGroup] = []
        self._plain_counters: dict[Any, Any] = {}
        self._shared_counters: dict[Any, Any] = {}
        self._sizes = (0, 0)  # numbers of attributes, and of states, that are known not to hold new counters
        self._counters: list[tuple[Tensor, Tensor]] = []
        self._loss: Any = None
        self._has_closure = False

    def bind(self, params_of_bucket: Mapping[int, Collection[Tensor]]) -> None:
        """Set which parameters of each bucket this rank owns; buckets without any may be left out."""
        self._groups_of_bucket = {
            bucket: [restrict_group(group, params) for group in self._inner.param_groups]
            for bucket, params in params_of_bucket.items()
        }

    def own(self, stepped: Mapping[Tensor, Tensor]) -> None:
        """Change which parameters this rank owns; the caller moves their state and then calls `bind`.

        Args:
            stepped: for each owned parameter the tensor that the inner optimizer steps for it.
        """
        for exposed, group in zip(self._exposed(), self._inner.param_groups, strict=True):
            owned = restrict_group(exposed, stepped)
            owned["params"] = [stepped[param] for param in owned["params"]]
            for key in PER_PARAMETER_KEYS:
                if key in group:
                    group[key][:] = owned[key]  # in place: a wrapped optimizer may hold the same list

    def begin(self, closure: Closure | None) -> Any:
        """Evaluate the closure, if any, and save what every bucket starts from. Returns the closure's result."""
        self._has_closure = closure is not None
        self._loss = None
        if closure is not None:
            with torch.enable_grad():
                self._loss = closure()
        self._groups_after = []
        self.mirror_to_inner()
        self._options = [options_of(group) for group in self._exposed()]
        self._plain_counters = _counters_in(vars(self._inner))
        self._shared_counters = _counters_in(self._inner.state)
        self._counters = self._clone_counters()
        self._sizes = len(vars(self._inner)), len(self._inner.state)
        return self._loss

    def step(self, bucket: int, **kwargs: Any) -> Any:
        """Step this rank's parameters of one bucket, if it owns any there.

        Returns:
            What the inner optimizer's ``step`` returned, or None.

        Raises:
            RuntimeError: if the inner optimizer evaluates the closure more than once in a step, or stepped parameters
                that it was not given.
        """
        if bucket not in self._groups_of_bucket or self.is_done:
            return None
        groups = self._inner.param_groups if self.steps_whole else self._groups_of_bucket[bucket]
        others = [] if self.steps_whole or self._groups_after else self._versions_outside(bucket)
        result = self._step_groups(groups, kwargs)
        if self.note is not None:
            self.note(bucket, groups)
        for param, version in others:
            if param._version != version:
                raise RuntimeError(
                    f"Expected {type(self._inner).__name__} to step the parameters in its param_groups, got a change "
                    f"of another one, of shape {list(param.shape)}. An optimizer that keeps a list of parameters of "
                    "its own cannot be sharded by bucket; keep the optimizer it wraps, if any, in an attribute."
                )
        return result

    @property
    def is_done(self) -> bool:
        """True if the current step has already stepped everything; see ``steps_whole``."""
        return self.steps_whole and bool(self._groups_after)

    def step_empty(self, **kwargs: Any) -> None:
        """On a rank that owned nothing in this step: step empty groups, so that options change as on all ranks."""
        if not self._groups_after:
            self._step_groups([restrict_group(group, ()) for group in self._inner.param_groups], kwargs)

    def end(self, **kwargs: Any) -> None:
        """End the step: copy the options it left to the inner and the exposed groups; see `step_empty`."""
        self.step_empty(**kwargs)
        for position, group in enumerate(self._inner.param_groups):
            copies = [groups[position] for groups in self._groups_after]
            source = next((copy for copy in reversed(copies) if copy["params"]), copies[-1])
            if source is not group:
                copy_options(source, group)
        self.mirror_to_exposed()

    def mirror_to_inner(self) -> None:
        """Copy the options that the user set on the exposed groups to the inner ones."""
        for group, exposed in zip(self._inner.param_groups, self._exposed(), strict=True):
            copy_options(exposed, group)

    def mirror_to_exposed(self) -> None:
        """Copy the options that the inner optimizer set to the exposed groups."""
        for group, exposed in zip(self._inner.param_groups, self._exposed(), strict=True):
            copy_options(group, exposed)

    def _step_groups(self, groups: list[ParamGroup], kwargs: Mapping[str, Any]) -> Any:
        inner = self._inner
        whole = inner.param_groups
        if groups is not whole:
            for group, options in zip(groups, self._options, strict=True):
                if list(group) == list(options):  # then the order stays
                    group.update({key: options[key] for key in options if key not in PER_PARAMETER_KEYS})
                else:
                    copy_options(options, group)
        vars(inner).update(self._plain_counters)
        if self._groups_after:
            self._restore_counters()
        inner.param_groups = groups
        try:
            self._groups_after.append(groups)
            if self._has_closure:
                return inner.step(closure=_once(self._loss), **kwargs)
            return inner.step(**kwargs)
        finally:
            inner.param_groups = whole

    def _restore_counters(self) -> None:
        """Before a further bucket: options and counters are those with which the step has begun."""
        attributes, state = vars(self._inner), self._inner.state
        known_attributes, known_states = self._sizes
        if len(attributes) != known_attributes:
            _drop_new_counters(attributes, self._plain_counters)
        if len(state) != known_states:  # after the first step it is, and a look at all states takes long
            _drop_new_counters(state, self._shared_counters)
        state.update(self._shared_counters)
        for tensor, before in self._counters:
            tensor.copy_(before)
        self._sizes = len(attributes), len(state)

    def _versions_outside(self, bucket: int) -> list[tuple[Tensor, int]]:
        """Owned parameters that a step of this bucket must not change, and the version of each."""
        return [
            (param, param._version)
            for other, groups in self._groups_of_bucket.items()
            if other != bucket
            for group in groups
            for param in group["params"]
        ]

    def _clone_counters(self) -> list[tuple[Tensor, Tensor]]:
        """One-element tensors outside per-parameter state, which a step may change in place, and their values now."""
        holders: list[Mapping[Any, Any]] = [self._plain_counters, self._shared_counters, *self._options]
        tensors = {id(v): v for holder in holders for v in holder.values() if isinstance(v, Tensor)}
        counters = (tensor for tensor in tensors.values() if tensor.numel() == 1 and not tensor.requires_grad)
        return [(tensor, tensor.detach().clone()) for tensor in counters]


def _counters_in(holder: Mapping[Any, Any]) -> dict[Any, Any]:
    """Values that may count steps, by name; a step may replace a tensor or change it in place."""
    plain = (bool, int, float, type(None))
    return {
        k: v for k, v in holder.items() if not isinstance(k, Tensor) and (type(v) in plain or isinstance(v, Tensor))
    }


def _drop_new_counters(holder: MutableMapping[Any, Any], known: Mapping[Any, Any]) -> None:
    """Delete counters that the step of a different bucket created."""
    for name in _counters_in(holder):
        if name not in known:
            del holder[name]


def _once(loss: Any) -> Closure:
    """A closure for the inner optimizer that returns the loss of the user's closure, already evaluated, once."""
    calls = 0

    def evaluated() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                "Expected the optimizer to evaluate the closure once per step, got a second evaluation. Optimizers "
                "that search along a direction (LBFGS, SAM) need all parameters on every rank and cannot be sharded."
            )
        return loss

    return evaluated
