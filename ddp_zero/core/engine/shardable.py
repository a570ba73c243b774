"""Tests whether an optimizer class can be sharded: compares whole and sharded steps bit for bit."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.inner import (
    PER_PARAMETER_KEYS,
    LocalStep,
    ParamGroup,
    build_inner,
    check_can_be_sharded,
    options_of,
)
from ddp_zero.core.local.instances import Instance
from ddp_zero.core.local.mixed import CLASS_KEY, classes_in, name_of
from ddp_zero.core.local.step_hooks import local_step
from ddp_zero.core.plan.partition import partition_greedy
from ddp_zero.core.step.clipping import GROUP_LIMIT
from ddp_zero.core.step.coupling import values_in
from ddp_zero.values.tree import as_bytes

Shapes = Sequence[Sequence[int]]

_MATRICES: Shapes = [(16, 8), (5, 7), (8, 16), (9, 3), (3, 4), (12, 12), (2, 6)]
_ALL: Shapes = [*_MATRICES, (33,), (8,), (1,), (), (), (4, 3, 3, 2)]
_SIZES = (1.0, 1e-3, 30.0, 0.1, 1e-2, 300.0, 3.0)
"""Sizes of gradients, step by step: both below and above the usual limits of optimizers that clip by a global norm."""
_BUCKETS = 2
_FEW_STEPS = 4
_SEED = 20190910


def check_shardable(
    optimizer_class: Callable[..., Optimizer], *, steps: int = 12, shapes: Shapes | None = None, **options: Any
) -> None:
    """Check that an optimizer computes the same when each rank steps only some of the parameters.

    Steps random parameters with one instance of the class, and again with two and three instances that share them as
    ranks would, and compares all parameters after every step, bit for bit. Takes about a second, on the CPU; needs no
    process group and leaves global random states as they were.

    Results differ for optimizers that compute a value from all parameters (Prodigy and D-Adaptation: a step size; LAMB
    with a global gradient norm), and for those that draw random numbers from a global generator.

    Args:
        optimizer_class: the class, as for `ZeroRedundancyOptimizer`.
        steps: how many steps to compare; the sizes of gradients vary widely between steps.
        shapes: of the parameters, at least three. None: matrices, vectors, scalars and a 4-D tensor; only matrices if
            the class refuses the others.
        **options: for ``optimizer_class``, as in training: a coupling may depend on an option.

    Raises:
        NotImplementedError: if the class cannot be sharded, naming the step and the parameter that differ first; and
            for LBFGS and SparseAdam.
        ValueError: for fewer than one step or three shapes. Errors of the class for its options or shapes pass through.
    """
    if steps < 1:
        raise ValueError(f"Expected at least 1 step, got {steps}. [ZERO-103]")
    if shapes is not None and len(shapes) < 3:
        raise ValueError(f"Expected at least 3 shapes, one for each of up to 3 owners, got {len(shapes)}. [ZERO-103]")
    check_can_be_sharded(optimizer_class)
    try_class(optimizer_class, options, [{}], steps, [_ALL, _MATRICES] if shapes is None else [shapes])


def try_class(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    groups: Sequence[ParamGroup],
    steps: int,
    choices: Sequence[Shapes],
) -> None:
    """Check a class as `check_shardable`, with these groups' keys and the first choice of shapes that it can step."""
    with _keep_random_states():
        for place, shapes in enumerate(choices):
            trial = _Trial(optimizer_class, options, steps, shapes, groups)
            try:
                step_unsharded = trial.step_unsharded()
                break
            except Exception:
                if place == len(choices) - 1:
                    raise
        for owners in (2, 3):
            trial.compare(step_unsharded, owners)


def check_unknown_classes(
    optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any], groups: Sequence[ParamGroup]
) -> None:
    """`check_unknown` for each of the classes that an optimizer is built from, with the keys of its groups."""
    is_built = isinstance(optimizer_class, Instance)
    for place, kind in enumerate([optimizer_class] if is_built else classes_in(optimizer_class)):
        name = name_of(kind) if place else ""
        own = [group for group in groups if group.get(CLASS_KEY, "") == name]
        check_unknown(kind, {} if place else options, own)


def check_unknown(
    optimizer_class: Callable[..., Optimizer] | Instance,
    options: Mapping[str, Any],
    groups: Sequence[ParamGroup] = (),
) -> None:
    """As `check_shardable`, in a few steps, for a class that is not torch's; once for each class and its options.

    With the groups' own keys, if there are any, it is tried once more, in two orders of the parameters: a coupling may
    depend on a key. Groups whose keys differ in floats alone count as one, unless those are zero in one of them.

    Nothing is found out, and nothing is said, where the class cannot step such parameters with these options alone (it
    wants a closure or a model), where an option is more than numbers, texts and flags, or where a function builds the
    optimizer, which may do more than that. NotImplementedError if it cannot be sharded.
    """
    is_built = isinstance(optimizer_class, Instance)
    kind = optimizer_class.kind if isinstance(optimizer_class, Instance) else optimizer_class
    if not isinstance(kind, type) or kind.__module__.startswith("torch.optim."):
        return
    facts = optimizer_class.described_options() if isinstance(optimizer_class, Instance) else options
    if not _is_plain(facts):
        return
    with_keys = list({_kind_of(own): own for own in reversed([_own_keys(group) for group in groups]) if own}.values())
    orders: list[Sequence[Shapes]] = [[_ALL, _MATRICES], [_ALL[::-1], _MATRICES[::-1]]]
    trials: list[tuple[list[ParamGroup], Sequence[Shapes]]] = [([{}], orders[0])]
    trials += [(with_keys, order) for order in orders if with_keys]
    for keys, order in trials:
        key: tuple[type, str] = kind, repr((is_built, sorted(facts.items()), keys, order[0]))
        if key not in refusals:
            refusals[key] = None
            try:
                try_class(optimizer_class, dict(options), keys, _FEW_STEPS, order)
            except NotImplementedError as error:
                refusals[key] = str(error)
            except Exception as error:
                logger.debug("%s could not be tried: %s: %s", kind.__name__, type(error).__name__, error)
        if (refusal := refusals[key]) is not None:
            raise NotImplementedError(refusal)


class _PerParameter(list[Any]):
    """A value of a group that has an item for each of the group's parameters."""


def _own_keys(group: ParamGroup) -> ParamGroup:
    """The keys of a group that are the class's to read; none if a value is more than numbers, texts and flags."""
    own = {key: value for key, value in group.items() if key not in (*PER_PARAMETER_KEYS, CLASS_KEY, GROUP_LIMIT)}
    if not _is_plain(own):
        return {}
    number = max(3, len(group.get("params", ())))  # two may be betas
    by_place = {key: _PerParameter(one) for key, one in own.items() if isinstance(one, list) and len(one) == number}
    return {**own, **by_place}


def _kind_of(value: Any) -> Any:
    """The kind of a group's value: groups whose values have equal kinds are tried once."""
    if isinstance(value, Mapping):
        return tuple((key, _kind_of(one)) for key, one in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    return bool(value) if isinstance(value, float) else (type(value).__name__, value)


def _is_plain(option: Any) -> bool:
    if isinstance(option, Mapping):
        return all(map(_is_plain, option.values()))
    if isinstance(option, list | tuple):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, bool | int | float | str | torch.dtype)


refusals: dict[tuple[type, str], str | None] = {}
"""Answers of `check_unknown`, by class and options."""


class _Trial:
    """Steps one class over the same random parameters and gradients, unsharded and by several owners."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        options: dict[str, Any],
        steps: int,
        shapes: Shapes,
        keys: Sequence[ParamGroup],
    ) -> None:
        self._class = optimizer_class
        self._options = options
        self._steps = steps
        self._shapes = shapes
        self._keys = keys

    def step_unsharded(self) -> list["_Snapshot"]:
        """The snapshots after each step of one instance over all parameters."""
        params = self._params()
        torch.manual_seed(_SEED)
        optimizer = self._build(self._groups(params), {param: param for param in params})
        moments = []
        for step in range(self._steps):
            self._set_gradients(params, step)
            local_step(optimizer)()
            moments.append(_Snapshot(params, optimizer.param_groups))
        return moments

    def compare(self, expected: Sequence["_Snapshot"], owners: int) -> None:
        """Step with as many instances as owners; NotImplementedError if anything differs or cannot be stepped."""
        params = self._params()
        torch.manual_seed(_SEED)
        try:
            owner_of = partition_greedy([param.nbytes for param in params], owners)
            owned = [[params[index] for index, owner in enumerate(owner_of) if owner == rank] for rank in range(owners)]
            parts = [_Owner(self._build, self._groups(params), mine) for mine in owned]
            for step, moment in enumerate(expected):
                self._set_gradients(params, step)
                for part in parts:
                    part.step()
                for part in parts:
                    difference = moment.difference(params, part.groups)
                    if difference is not None:
                        raise self._refusal(f"{difference} after step {step + 1}, stepped by {owners} owners")
        except NotImplementedError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {error}, when stepped by {owners} owners"
            raise self._refusal(found) from error

    def _refusal(self, found: str) -> NotImplementedError:
        name = getattr(self._class, "__name__", repr(self._class))
        return NotImplementedError(
            f"Expected an optimizer that treats parameters one by one, got different results of {name} if each rank "
            f"steps only some of them: {found}. Use {name} unsharded on every rank, or without the option that makes "
            "it compute something from all parameters. [ZERO-112]"
        )

    def _build(self, groups: list[ParamGroup], stepped: dict[Tensor, Tensor]) -> Optimizer:
        optimizer = build_inner(self._class, groups, stepped, copy.deepcopy(self._options))
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # type: ignore[attr-defined]  # schedule-free classes
        return optimizer

    def _params(self) -> list[Parameter]:
        generator = torch.Generator().manual_seed(_SEED)
        shapes = [tuple(shape) for shape in self._shapes] * len(self._keys)
        return [Parameter(torch.randn(shape, generator=generator, device="cpu")) for shape in shapes]

    def _groups(self, params: Sequence[Parameter]) -> list[ParamGroup]:
        groups = copy.deepcopy(list(self._keys))
        count = len(self._shapes)
        for place, group in enumerate(groups):
            for key, value in group.items():
                if isinstance(value, _PerParameter):
                    group[key] = list(islice(cycle(value), count))
            group["params"] = list(params[place * count : (place + 1) * count])
        return groups

    def _set_gradients(self, params: Sequence[Parameter], step: int) -> None:
        generator = torch.Generator().manual_seed(_SEED + 1 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, device="cpu") * _SIZES[step % len(_SIZES)]


class _Owner:
    """One owner of parameters: exposes all groups, and steps its own parameters in two buckets."""

    def __init__(
        self,
        build: Callable[[list[ParamGroup], dict[Tensor, Tensor]], Optimizer],
        groups: list[ParamGroup],
        owned: Sequence[Parameter],
    ) -> None:
        self.groups = Optimizer(groups, {}).param_groups
        self._local = LocalStep(build(self.groups, {param: param for param in owned}), lambda: self.groups)
        self._local.mirror_to_exposed()
        self._local.bind({bucket: set(owned[bucket::_BUCKETS]) for bucket in range(min(_BUCKETS, len(owned)))})

    def step(self) -> None:
        self._local.begin(None)
        for bucket in range(_BUCKETS):
            self._local.step(bucket)
        self._local.end()


class _Snapshot:
    """The parameters and the floats in the groups after a step."""

    def __init__(self, params: Sequence[Tensor], groups: Sequence[ParamGroup]) -> None:
        self._params = [param.detach().clone() for param in params]
        self._options = [values_in(options_of(group)) for group in groups]

    def difference(self, params: Sequence[Tensor], groups: Sequence[ParamGroup]) -> str | None:
        for index, (expected, param) in enumerate(zip(self._params, params, strict=True)):
            if not torch.equal(as_bytes(expected), as_bytes(param.detach())):
                largest = (expected.double() - param.detach().double()).abs().max().item()
                return f"parameter {index} of shape {list(param.shape)} differs by up to {largest:.3g}"
        for before, group in zip(self._options, groups, strict=True):
            for name, value in values_in(options_of(group)).items():
                if before.get(name, value) != value:
                    return f"option {name!r} of the group is {value} instead of {before[name]}"
        return None


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Restore the random generators that the optimizer may draw from."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
