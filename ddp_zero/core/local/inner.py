"""The inner optimizer: which classes can be sharded, how it is built over a rank's parameters, and its step by bucket.

The inner optimizer knows nothing about buckets. Its ``param_groups`` are the groups of ``opt.optim``: one per
exposed group, with this rank's parameters only. To step a bucket, those lists are swapped for copies that hold the
bucket's parameters; `torch.optim.Optimizer.step` walks whatever ``self.param_groups`` holds.

Values outside per-parameter state must change once per step, however many buckets it has. Some
optimizers count steps in a group (``group["k"] += 1``), on themselves (``self.calls += 1``) or in state that belongs to
no parameter (``self.state["k"] += 1``), in numbers or tensors. So every bucket starts from the same options and the
same counters, and the values after the last bucket are kept.

Alternatives considered: one optimizer per bucket (breaks ``optim.state`` and classes that look at all groups); passing
only groups that have parameters (a plain optimizer also visits groups whose parameters have no gradient).
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ddp_zero.core.local.arguments import CannotBeShardedError, check_class
from ddp_zero.core.local.instances import Instance
from ddp_zero.core.local.loop_options import LoopOptions
from ddp_zero.core.local.mixed import CLASS_KEY, MixedOptimizer, Mixture, StepsWithPeers, class_for
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.local.step_hooks import is_wrapped_by_torch, local_step
from ddp_zero.core.local.step_lists import StepLists
from ddp_zero.core.plan.partition import GroupRank

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

elementwise_classes: set[type[Optimizer]] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam),
    *(optim.RAdam, optim.ASGD, optim.Rprop),
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer class steps each element by itself, for ``partition="elements"``; a decorator.

    Such a class computes no norm, mean, rank or shape-dependent factor of a parameter or its gradient, and keeps state
    that has the parameter's shape or does not depend on its elements. That is the caller's promise: parameters would
    silently differ from the unsharded optimizer's otherwise.

    Args:
        optimizer_class: of your own or of a library; returned as it is.

    Raises:
        TypeError: if it is not a class of optimizers.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"Expected a torch.optim.Optimizer class, got {optimizer_class!r:.80}. [ZERO-101]")
    elementwise_classes.add(optimizer_class)
    return optimizer_class


def is_elementwise(inner: Optimizer) -> bool:
    return type(inner) in elementwise_classes


def is_elementwise_class(optimizer_class: object) -> bool:
    """True if an argument is a class that steps each element by itself; False for functions that build optimizers."""
    return isinstance(optimizer_class, type) and optimizer_class in elementwise_classes


def may_be_cut(optimizer_class: object, group: Mapping[str, Any]) -> bool:
    return is_elementwise_class(class_for(optimizer_class, group))


def check_elementwise(inner: Optimizer) -> None:
    """Check that an optimizer, or some class of a mixed optimizer, steps each element by itself; else TypeError."""
    if isinstance(inner, MixedOptimizer) and any(map(is_elementwise, inner.suboptimizers.values())):
        return  # parameters of other classes stay whole
    if not is_elementwise(inner):
        names = ", ".join(sorted(known.__name__ for known in elementwise_classes))
        raise TypeError(
            f"partition='elements' needs an optimizer that steps each element by itself, got {type(inner).__name__}; "
            f"known are {names}. Use partition='parameters', or declare the class by ddp_zero.elementwise(...) if it "
            "is elementwise. [ZERO-113]"
        )
    held = [name for name, value in vars(inner).items() if isinstance(value, Optimizer)]
    if held:
        raise TypeError(
            "partition='elements' does not support an optimizer that wraps an optimizer, "
            f"{type(inner).__name__}.{held[0]}. Use partition='parameters'. [ZERO-113]"
        )


class SteppedTogether(Optimizer):
    """A class that needs all parameters of a rank in one step, not bucket by bucket, and may state their owners."""

    @classmethod
    def owner_of(cls, param: Tensor) -> GroupRank | None:
        """The rank that must own a parameter, or None if any may."""
        return None


ParamGroup = dict[str, Any]
Closure = Callable[[], Any]

PER_PARAMETER_KEYS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> ParamGroup:
    """A group without its parameters and names; their keys stay, as None: a state dict shows the order of keys."""
    options = {**group}
    options.update((key, None) for key in PER_PARAMETER_KEYS if key in options)
    return options


def copy_options(source: Mapping[str, Any], target: ParamGroup) -> None:
    """Make a group's options equal to those of the source, in the same order; its parameters and names stay."""
    own = {key: target[key] for key in PER_PARAMETER_KEYS if key in target}
    if [*source] == [*target]:  # as most often
        target.update(source)
        target.update(own)
        return
    options = {key: value for key, value in source.items() if key in own or key not in PER_PARAMETER_KEYS}
    target.clear()
    target.update(options | own)  # these keys get the places that they have in the source


def restrict_group(group: Mapping[str, Any], keep: Collection[Tensor]) -> ParamGroup:
    kept = [position for position, param in enumerate(group["params"]) if param in keep]
    return {
        key: [value[position] for position in kept] if key in PER_PARAMETER_KEYS else value
        for key, value in group.items()
    }


def local_group(group: ParamGroup, stepped: Mapping[Tensor, Tensor]) -> ParamGroup:
    """A copy of a user's group with the tensors that this rank steps, and their names."""
    local = restrict_group(group, stepped)
    local["params"] = [stepped[param] for param in local["params"]]
    return local


def groups_of(optimizer: Optimizer) -> Callable[[], list[ParamGroup]]:
    """A getter for an optimizer's current groups that does not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def groups() -> list[ParamGroup]:
        alive = reference()
        if alive is None:
            raise RuntimeError(
                "The optimizer whose hook this DDP model has was dropped. Keep it as long as the model trains, build "
                "another one of this library, or wrap the module in DistributedDataParallel again. For a plain "
                "optimizer, call opt.detach() before this one is dropped. [ZERO-208]"
            )
        return alive.param_groups

    return groups


def suboptimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and, if it is mixed, the optimizers of its classes."""
    return [optimizer, *(optimizer.suboptimizers.values() if isinstance(optimizer, MixedOptimizer) else ())]


def options_known_to(optimizer: Optimizer) -> frozenset[str]:
    return frozenset(name for part in suboptimizers_of(optimizer) for name in part.defaults)


def suboptimizer_for(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    return optimizer.suboptimizers[group.get(CLASS_KEY, "")] if isinstance(optimizer, MixedOptimizer) else optimizer


_COUNTS = {bool, int, float, type(None)}
_PLAIN = {*_COUNTS, str, tuple}  # none is a tensor
_BY_SCALER = "_step_supports_amp_scaling"


def steps_by_scaler(optimizer: Optimizer) -> bool:
    """True if a `GradScaler` lets the optimizer divide and skip in its step, as it lets torch's fused classes."""
    stepping = optimizer.suboptimizers.values() if isinstance(optimizer, MixedOptimizer) else [optimizer]
    return all(getattr(part, _BY_SCALER, False) for part in stepping)


class LocalStep:
    """Steps an inner optimizer bucket by bucket, `begin` to `end`, as if it were one step.

    Args:
        inner: the optimizer over this rank's parameters, one group per exposed group.
        exposed: returns the user's current groups, whose options the inner groups mirror.

    Attributes:
        options: the options of the exposed groups as the loop has set them.
        after_bucket: called after each bucket's step with the bucket, its groups, and indices of the stepped groups.
        loss: the loss of this step's closure, or None.
        result: the result of the last bucket's step, or None.
        lists: steps buckets in place of `step` where possible; `begin` then returns the result of the step.
        steps_whole: True if a step of the inner optimizer steps all its parameters, whatever its ``param_groups`` hold,
            because it wraps an optimizer that holds them, or needs them in one step. Then the first bucket's step is
            the whole step.
    """

    def __init__(self, inner: Optimizer, exposed: Callable[[], list[ParamGroup]]) -> None:
        self.inner = inner
        self._exposed = exposed
        self.after_bucket: Callable[[int, list[ParamGroup], list[int]], None] | None = None
        self._parts = suboptimizers_of(inner)
        self.options = LoopOptions(options_known_to(inner))
        wraps = any(isinstance(value, Optimizer) for value in vars(inner).values())
        self.steps_whole = wraps or any(isinstance(part, SteppedTogether) for part in self._parts)
        self._groups_of_bucket: dict[int, list[ParamGroup]] = {}
        self._groups_stepped: list[list[ParamGroup]] = []  # the groups of each bucket stepped so far
        self._options: list[ParamGroup] = []  # of each group at the beginning of the step
        self._given: list[list[Any]] = []  # the values in each group of the user's then
        self.changed_within = ""  # an option that the loop has set while the last step was taken, for a message
        self._plain_counters: list[dict[Any, Any]] = []  # attributes of each optimizer in ``_parts``, likewise
        self._shared_counters: dict[Any, Any] = {}  # in state that belongs to no parameter, likewise
        self._sizes: tuple[list[int], int] = ([], 0)  # numbers of attributes and of states, before new counters
        self._counter_keys: list[Any] = []  # keys of states that belong to no parameter
        self._known_states = -1  # number of states when ``_counter_keys`` was computed
        self._counters: list[tuple[Tensor, Tensor]] = []  # tensors that count, and copies of them
        self.loss: Any = None
        self.result: Any = None
        self._kwargs: Mapping[str, Any] = {}
        self._has_closure = False
        self._step = _unwrapped_step(inner)
        self.lists = StepLists(inner, {})

    def bind(self, params_of_bucket: Mapping[int, Collection[Tensor]]) -> None:
        """Set which parameters of each bucket this rank owns; buckets without any may be left out."""
        self._groups_of_bucket = {
            bucket: [restrict_group(group, params) for group in self.inner.param_groups]
            for bucket, params in params_of_bucket.items()
        }
        self.lists = StepLists(self.inner, self._groups_of_bucket)

    def reassign(self, stepped: Mapping[Tensor, Tensor]) -> None:
        """Change which parameters this rank owns; the caller moves their state and then calls `bind`."""
        for exposed, group in zip(self._exposed(), self.inner.param_groups, strict=True):
            owned = local_group(exposed, stepped)
            for key in PER_PARAMETER_KEYS:
                if key in group:
                    group[key][:] = owned[key]  # in place: a wrapped optimizer may hold the same list

    def begin(self, closure: Closure | None) -> Any:
        """Evaluate the closure, if any, to return its result; save the options and counters that buckets start from."""
        self._has_closure = closure is not None
        self.loss = self.result = None
        if closure is not None:
            with torch.enable_grad():
                self.loss = closure()
        self._groups_stepped = []
        self._step = _unwrapped_step(self.inner)
        exposed = self._exposed()
        self.options.note_changes_of_loop(exposed)
        self.mirror_to_inner()
        self._options = [options_of(group) for group in exposed]
        self._given = [[*group.values()] for group in exposed]
        self._plain_counters = [_counters_in(vars(part)) for part in self._parts]
        state = self.inner.state
        if len(state) != self._known_states:  # it takes long to check all states
            self._counter_keys = [k for k in state if not isinstance(k, Tensor)]
            self._known_states = len(state)
        self._shared_counters = _counters_in({key: state[key] for key in self._counter_keys if key in state})
        self._counters = self._clone_counters()
        self._sizes = [len(vars(part)) for part in self._parts], len(state)
        if not self.steps_whole:
            self.lists.begin()
        return self.loss

    @contextmanager
    def with_kwargs(self, options: Mapping[str, Any]) -> Iterator[None]:
        """A context within a step: its buckets are stepped by ``optimizer.step()`` with these keyword arguments."""
        self._kwargs, self.lists.may_step = options, False
        try:
            yield
        finally:
            self._kwargs = {}

    def step(self, bucket: int) -> Any:
        """Step this rank's parameters of one bucket, if it owns any there.

        RuntimeError if the inner optimizer evaluates the closure more than once in a step, or has stepped parameters
        of other buckets.
        """
        groups = self._groups_of_bucket.get(bucket)
        if self.steps_whole:
            groups = None if groups is None or self._groups_stepped else self.inner.param_groups
        if groups is None:
            return None
        others = [] if self.steps_whole or self._groups_stepped else self._versions_outside(bucket)
        self.result = result = self._step_groups(groups)
        if self.after_bucket is not None:
            self.after_bucket(bucket, groups, _with_gradient(groups))
        for param, version in others:
            if param._version != version:
                raise RuntimeError(
                    f"{type(self.inner).__name__} changed a parameter of shape {list(param.shape)} that is not in its "
                    "param_groups. An optimizer that keeps a list of parameters of its own cannot be sharded by "
                    "bucket; keep the optimizer it wraps, if any, in an attribute. [ZERO-111]"
                )
        return result

    def give_up(self, bucket: int) -> None:
        """Called in place of `step` after an error of this rank; see `StepsWithPeers`."""
        inner = self.inner
        if bucket not in self._groups_of_bucket or self.is_done or not isinstance(inner, StepsWithPeers):
            return
        whole = inner.param_groups
        inner.param_groups = whole if self.steps_whole else self._groups_of_bucket[bucket]
        try:
            inner.give_up()
        finally:
            inner.param_groups = whole

    @property
    def is_done(self) -> bool:
        return self.steps_whole and bool(self._groups_stepped)

    @property
    def has_stepped_nothing(self) -> bool:
        """True if this rank owned nothing of the buckets that were stepped so far."""
        return not (self._groups_stepped or self.lists.has_stepped)

    def step_empty(self) -> None:
        """On a rank that owned nothing in this step: step empty groups, so that options change as on all ranks."""
        if self.has_stepped_nothing:
            self._step_groups([restrict_group(group, ()) for group in self.inner.param_groups])

    def end(self) -> None:
        """End the step: copy the options it left to the inner and the exposed groups; see `step_empty`."""
        self.step_empty()
        if self._groups_stepped:
            for position, group in enumerate(self.inner.param_groups):
                copies = [groups[position] for groups in self._groups_stepped]
                source = next((copy for copy in reversed(copies) if copy["params"]), copies[-1])
                if source is not group:
                    copy_options(source, group)
        self.changed_within = ""
        for place, (given, exposed) in enumerate(zip(self._given, self._exposed(), strict=True)):
            if not all(map(is_, given, exposed.values())):
                self._keep_changes_within(place, exposed)
        self.mirror_to_exposed()

    def _keep_changes_within(self, place: int, exposed: ParamGroup) -> None:
        """Note options that code run by backward has set since `begin`, which the next step takes."""
        before = self._options[place]
        for key, value in exposed.items():
            if key not in PER_PARAMETER_KEYS and (key not in before or value is not before[key]):
                self.inner.param_groups[place][key] = value
                self.changed_within = f"{key!r} of parameter group {place} to {value!r}"

    def mirror_to_inner(self) -> None:
        """Copy the options that the user set on the exposed groups to the inner groups."""
        for group, exposed in zip(self.inner.param_groups, self._exposed(), strict=True):
            copy_options(exposed, group)

    def mirror_to_exposed(self) -> None:
        """Copy the options that the inner optimizer set to the exposed groups."""
        for group, exposed in zip(self.inner.param_groups, self._exposed(), strict=True):
            copy_options(group, exposed)
        self.options.note_changes_of_step(self._exposed())

    def _step_groups(self, groups: list[ParamGroup]) -> Any:
        """Call the inner optimizer's ``step`` with these groups in place of its own, as for a single bucket."""
        inner = self.inner
        whole = inner.param_groups
        if groups is not whole:
            for group, options in zip(groups, self._options, strict=True):
                copy_options(options, group)
        for part, counters in zip(self._parts, self._plain_counters, strict=True):
            vars(part).update(counters)
        if self._groups_stepped:
            self._restore_counters()
        step = self._step
        inner.param_groups = groups
        try:
            self._groups_stepped.append(groups)
            if self._has_closure:
                return step(closure=_closure_of_known_loss(self.loss), **self._kwargs)
            return step(**self._kwargs)
        finally:
            inner.param_groups = whole

    def _restore_counters(self) -> None:
        """Before a further bucket: options and counters are those with which the step has begun."""
        state = self.inner.state
        attributes = [len(vars(part)) for part in self._parts]
        # only while states are created: it takes long to check all of them
        if (attributes, len(state)) != self._sizes:
            for part, counters in zip(self._parts, self._plain_counters, strict=True):
                _drop_new_counters(vars(part), counters)
            _drop_new_counters(state, self._shared_counters)
            state.update(self._shared_counters)
            self._sizes = [len(vars(part)) for part in self._parts], len(state)
        elif self._shared_counters:
            state.update(self._shared_counters)
        for tensor, before in self._counters:
            tensor.copy_(before)

    def _versions_outside(self, bucket: int) -> list[tuple[Tensor, int]]:
        """The owned parameters that a step of this bucket must not change, with their versions."""
        return [
            (param, param._version)
            for other, groups in self._groups_of_bucket.items()
            if other != bucket
            for group in groups
            for param in group["params"]
        ]

    def _clone_counters(self) -> list[tuple[Tensor, Tensor]]:
        """The one-element tensors outside per-parameter state, which a step may change in place, with copies."""
        holders: list[Mapping[Any, Any]] = [*self._plain_counters, self._shared_counters, *self._options]
        values = [*chain.from_iterable(holder.values() for holder in holders)]
        if _PLAIN.issuperset(map(type, values)):
            return []
        tensors = {id(v): v for v in values if isinstance(v, Tensor)}
        counters = (tensor for tensor in tensors.values() if tensor.numel() == 1 and not tensor.requires_grad)
        return [(tensor, tensor.detach().clone()) for tensor in counters]


def _with_gradient(groups: Sequence[ParamGroup]) -> list[int]:
    return [place for place, group in enumerate(groups) if any(param.grad is not None for param in group["params"])]


def _unwrapped_step(inner: Optimizer) -> Callable[..., Any]:
    """An optimizer's ``step`` for a bucket, without torch's wrapper where the wrapper has no effect.

    The wrapper is a profiler's range with hooks before and after the step; global hooks see the user's optimizer only,
    see `step_hooks`.
    """
    has_effect = (
        torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or inner._optimizer_step_pre_hooks
        or inner._optimizer_step_post_hooks
    )
    if has_effect or not is_wrapped_by_torch(inner):
        return local_step(inner)
    step: Any = type(inner).step
    return partial(step.__wrapped__, inner)


def _counters_in(holder: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of a mapping that may count steps, by key; a step may replace a tensor or change it in place."""
    return {
        k: v
        for k, v in holder.items()
        if (type(k) is str or not isinstance(k, Tensor)) and (type(v) in _COUNTS or isinstance(v, Tensor))
    }


def _drop_new_counters(holder: MutableMapping[Any, Any], known: Mapping[Any, Any]) -> None:
    """Delete counters that the step of a different bucket created."""
    for name in _counters_in(holder):
        if name not in known:
            del holder[name]


def _closure_of_known_loss(loss: Any) -> Closure:
    """A closure for the inner optimizer that returns the loss of the user's closure; it may be called once."""
    calls = 0

    def evaluated() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                "The optimizer evaluated the closure a second time in one step. Optimizers that search along a "
                "direction (LBFGS, SAM) need all parameters on every rank and cannot be sharded. [ZERO-111]"
            )
        return loss

    return evaluated


_FUSED_ON_HOST = (optim.Adagrad, optim.Adam, optim.AdamW)  # not SGD, which skips elements of 16 bits (torch 2.13.0)


def check_can_be_sharded(optimizer_class: Callable[..., Optimizer]) -> None:
    """Refuse LBFGS and SparseAdam by NotImplementedError, and whatever cannot build an optimizer by TypeError."""
    check_class(optimizer_class)
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.LBFGS):
        raise CannotBeShardedError(
            "LBFGS cannot be sharded: it needs one flat view of all parameters and their history. Use LBFGS itself on "
            "every rank. [ZERO-111]"
        )
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.SparseAdam):
        raise CannotBeShardedError(
            "SparseAdam cannot be sharded: sharding needs dense gradients. Use it unsharded for the sparse layers. "
            "[ZERO-110]"
        )


def build_inner(
    optimizer_class: Callable[..., Optimizer],
    param_groups: list[ParamGroup],
    targets: Mapping[torch.Tensor, torch.Tensor],
    defaults: dict[str, Any],
) -> Optimizer:
    """Build the inner optimizer over the targets of this rank's parameters, a group for each of ``param_groups``.

    ``targets`` has the tensor that is stepped for each parameter of this rank; a group without any stays, empty.
    TypeError if the class builds no optimizer of torch.
    """
    groups = [local_group(group, targets) for group in param_groups]
    given_defaults = defaults
    if any(param.device != target.device for param, target in targets.items()):
        if isinstance(optimizer_class, Instance):
            groups = [options_on_host(optimizer_class.kind, group) for group in groups]
        else:
            kind = optimizer_class.default if isinstance(optimizer_class, Mixture) else optimizer_class
            defaults = options_on_host(kind, defaults)
    inner = optimizer_class(groups, **defaults)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"Expected optimizer_class to build a torch.optim.Optimizer, got {type(inner).__name__}. Pass a "
            "class of torch.optim, or a function that returns such an optimizer. [ZERO-101]"
        )
    if (
        defaults is not given_defaults and defaults != given_defaults
    ):  # a scaler would not leave its work to the unsharded optimizer
        vars(inner.suboptimizers[""] if isinstance(inner, MixedOptimizer) else inner).pop(_BY_SCALER, None)
    return inner


def check_epsilon(inner: Optimizer, groups: Sequence[ParamGroup], table: ParameterTable, targets: StepTargets) -> None:
    """Refuse a group of Adafactor with parameters of several dtypes that takes its epsilon from the first; ValueError.

    ``eps[0]`` of None, the default, means the resolution of the first parameter with a gradient, for the whole list
    that a step is given: here the parameters of one bucket, which have one dtype; unsharded, the whole group.
    """
    for position, group in enumerate(groups):
        if not isinstance(suboptimizer_for(inner, group), optim.Adafactor):
            continue
        members = [index for index, own in enumerate(table.groups) if own == position]
        dtypes = [targets.dtype_of(index) for index in members]
        if group.get("eps", suboptimizer_for(inner, group).defaults["eps"])[0] is not None or len(set(dtypes)) <= 1:
            continue
        first = members[0]
        other = next(i for i, dtype in zip(members, dtypes, strict=True) if dtype != dtypes[0])
        raise ValueError(
            f"Expected parameters of one dtype in group {position} of Adafactor with eps=(None, ...), got "
            f"{table.label(first)} of {targets.dtype_of(first)} and {table.label(other)} of {targets.dtype_of(other)}: "
            "for all of a group torch takes the resolution of the first. Put each dtype into a group of its own, pass "
            "a number, such as eps=(torch.finfo(torch.float32).eps, 1e-3), or step all in fp32 by "
            "master_weights=True. [ZERO-105]"
        )


def rehearse_load(inner: Optimizer, state_dict: dict[str, Any]) -> None:
    """Check that an optimizer of torch accepts a state dict, on stand-ins without memory; ValueError if it does not."""
    own = [part for part in suboptimizers_of(inner) if not isinstance(part, MixedOptimizer)]
    if not all(type(part).__module__.startswith("torch.optim") for part in own):
        return
    scratch = copy.copy(inner)
    scratch.state = defaultdict(dict)
    scratch.param_groups = [
        {**group, "params": [torch.empty_like(param, device="meta") for param in group["params"]]}
        for group in inner.param_groups
    ]
    try:
        scratch.load_state_dict(state_dict)
    except Exception as error:
        shown = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"Expected state that {type(inner).__name__} can load, got {shown}. Pass what an optimizer of this class "
            "has saved. [ZERO-604]"
        ) from error


def fresh_state(inner: Optimizer, stepped: torch.Tensor, shape: Sequence[int] | None = None) -> dict[str, Any]:
    """The state that a first step would create for a tensor, or for a tensor of this shape; changes nothing."""
    group = next(group for group in inner.param_groups if any(stepped is param for param in group["params"]))
    zeros = torch.zeros_like(stepped) if shape is None else stepped.new_zeros(tuple(shape))
    return _step_once(inner, group, torch.nn.Parameter(zeros))


def state_like(inner: Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """The state that a first step would create for a tensor like this, on the meta device if the class can step there.

    The shape, strides and dtype of ``like`` count. The optimizer is not changed. Raises the error of a class that
    cannot step zeros.
    """
    plain = {key: False for key in ("foreach", "fused", "capturable") if group.get(key)}  # of the same state
    try:
        meta = torch.nn.Parameter(torch.empty_like(like, device="meta"))
        return _step_once(inner, {**group, **plain}, meta)
    except Exception:
        return _step_once(inner, group, torch.nn.Parameter(torch.zeros_like(like, device="cpu")))


def _step_once(inner: Optimizer, group: Mapping[str, Any], stand_in: torch.Tensor) -> dict[str, Any]:
    stand_in.grad = torch.zeros_like(stand_in)
    scratch = copy.copy(inner)
    scratch.state = defaultdict(dict)
    scratch.param_groups = [{**group, "params": [stand_in]}]
    local_step(scratch)()
    return dict(scratch.state[stand_in])


def options_on_host(optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for an optimizer that is stepped on the host: fused, unless they choose an implementation."""
    is_chosen = any(options.get(name) is not None for name in ("fused", "foreach")) or any(
        options.get(name) for name in ("capturable", "differentiable")
    )
    return dict(options) if is_chosen or optimizer_class not in _FUSED_ON_HOST else {**options, "fused": True}


def class_name(inner: Optimizer) -> str:
    """The name of the class that steps, the same with and without sharding."""
    if isinstance(inner, MixedOptimizer):
        return inner.mixture.__qualname__
    return f"{type(inner).__module__}.{type(inner).__qualname__}"
