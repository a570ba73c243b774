"""The inner optimizer: which classes can be sharded, and how one is built over a rank's parameters."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from ddp_zero.core.local.arguments import check_class
from ddp_zero.core.local.local_step import ParamGroup, localise_group
from ddp_zero.core.local.masters import SteppedTensors
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.offload.host import tensors_in

_FUSED_ON_HOST = (SGD, Adagrad, Adam, AdamW)


def check_can_be_sharded(optimizer_class: Callable[..., Optimizer]) -> None:
    """Refuse classes that need all parameters or sparse gradients.

    Raises:
        TypeError: if it cannot build an optimizer.
        NotImplementedError: for LBFGS and SparseAdam.
    """
    check_class(optimizer_class)
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
        raise NotImplementedError(
            "Expected an optimizer that treats parameters one by one, got LBFGS, which needs one flat view of all "
            "parameters and their history. Use LBFGS itself on every rank."
        )
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, SparseAdam):
        raise NotImplementedError(
            "Expected an optimizer for dense gradients, got SparseAdam. Use it unsharded for the sparse layers."
        )


def build_inner(
    optimizer_class: Callable[..., Optimizer],
    param_groups: list[ParamGroup],
    stepped: Mapping[torch.Tensor, torch.Tensor],
    defaults: dict[str, Any],
) -> Optimizer:
    """Build the optimizer over this rank's parameters: one group per exposed group, empty ones too.

    Args:
        optimizer_class: builds the optimizer.
        param_groups: the exposed groups.
        stepped: for each parameter that this rank owns, the tensor that is stepped for it.
        defaults: options for ``optimizer_class``.

    Raises:
        TypeError: if the result is not an optimizer, or the class does not know one of the options.
    """
    if any(param.device != one.device for param, one in stepped.items()):
        defaults = options_on_host(optimizer_class, defaults)
    inner = optimizer_class([localise_group(group, stepped) for group in param_groups], **defaults)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"Expected optimizer_class to build a torch.optim.Optimizer, got {type(inner).__name__}.")
    return inner


def check_epsilon(
    inner: Optimizer, groups: Sequence[ParamGroup], table: ParameterTable, stepped: SteppedTensors
) -> None:
    """Check that no group of Adafactor with parameters of several dtypes takes its epsilon from the first one.

    ``eps[0]`` of None, the default, means the resolution of the first parameter with a gradient, for the whole list
    that a step is given: here the parameters of one bucket, which have one dtype; unsharded, the whole group.

    Args:
        inner: any optimizer.
        groups: its groups with their options, in the order of the exposed groups.
        table: the parameters.
        stepped: the tensor that is stepped for each of them.

    Raises:
        ValueError: naming the group and two of its parameters.
    """
    if not isinstance(inner, Adafactor):
        return
    for position, group in enumerate(groups):
        members = [index for index, own in enumerate(table.groups) if own == position]
        dtypes = [stepped.dtype_of(index) for index in members]
        if group.get("eps", inner.defaults["eps"])[0] is not None or len(set(dtypes)) <= 1:
            continue
        first, other = members[0], next(i for i, dtype in zip(members, dtypes, strict=True) if dtype != dtypes[0])
        raise ValueError(
            f"Expected parameters of one dtype in group {position} of Adafactor with eps=(None, ...), got "
            f"{table.label(first)} of {stepped.dtype_of(first)} and {table.label(other)} of {stepped.dtype_of(other)}: "
            "for all of a group torch takes the resolution of the first. Put each dtype into a group of its own, pass "
            "a number, such as eps=(torch.finfo(torch.float32).eps, 1e-3), or step all in fp32 by master_weights=True."
        )


def rehearse_load(inner: Optimizer, state_dict: dict[str, Any]) -> None:
    """Check that a torch optimizer accepts a state dict, on stand-ins without memory; other classes are not checked.

    Args:
        inner: the optimizer; not changed.
        state_dict: with tensors on the meta device.

    Raises:
        ValueError: if it does not, with its error.
    """
    if not type(inner).__module__.startswith("torch.optim"):
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
        raise ValueError(f"Expected state that {type(inner).__name__} can load, got {shown}.") from error


def fresh_state(inner: Optimizer, stepped: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer's first step creates for a tensor, found by stepping zeros in its place.

    Args:
        inner: the optimizer; not changed.
        stepped: one of its tensors.
    """
    group = next(group for group in inner.param_groups if any(stepped is one for one in group["params"]))
    return _stepped_once(inner, group, torch.nn.Parameter(torch.zeros_like(stepped)))


def state_like(inner: Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """The state that a step creates for a tensor of this shape, without memory where the class can step without.

    Args:
        inner: the optimizer; not changed.
        group: options of the group that the tensor would be in.
        like: determines shape, strides and dtype; may be on the meta device.

    Raises:
        Exception: whatever a class raises that cannot step zeros.
    """
    plain = {key: False for key in ("foreach", "fused", "capturable") if group.get(key)}  # of the same state
    try:
        meta = torch.nn.Parameter(torch.empty_like(like, device="meta"))
        return _stepped_once(inner, {**group, **plain}, meta)
    except Exception:
        return _stepped_once(inner, group, torch.nn.Parameter(torch.zeros_like(like, device="cpu")))


def _stepped_once(inner: Optimizer, group: Mapping[str, Any], stand_in: torch.Tensor) -> dict[str, Any]:
    stand_in.grad = torch.zeros_like(stand_in)
    scratch = copy.copy(inner)
    scratch.state = defaultdict(dict)
    scratch.param_groups = [{**group, "params": [stand_in]}]
    scratch.step()
    return dict(scratch.state[stand_in])


def reserve_room(
    inner: Optimizer,
    stepped: SteppedTensors,
    table: ParameterTable,
    owned: Iterable[tuple[int, slice | None]],
    *,
    has_copies: bool = True,
) -> None:
    """Where room is limited: allocate it for the states of parameters before they are stepped.

    Classes that hold another optimizer, or cannot step zeros, get theirs when their states exist.

    Args:
        inner: the optimizer.
        stepped: what it steps.
        table: the parameters.
        owned: parameters, and the part of each that this rank owns.
        has_copies: whether masters and copies of them exist already.

    Raises:
        RuntimeError: if there is no room.
    """
    if not stepped.residence.keeps or any(isinstance(value, Optimizer) for value in vars(inner).values()):
        return
    known: dict[Any, list[torch.Tensor]] = {}
    likes: list[torch.Tensor] = []
    for index, part in owned:
        like = stepped.like(index, part)
        key = (table.groups[index], like.shape, like.stride(), like.dtype)
        if key not in known:
            with contextlib.suppress(Exception):
                known[key] = list(tensors_in(state_like(inner, inner.param_groups[table.groups[index]], like)))
        likes += known.get(key, [])
        if stepped.is_copied(index) and not has_copies:
            likes.append(like)
    stepped.residence.reserve(likes)


def options_on_host(optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for an optimizer that is stepped on the host instead of an accelerator: fused, unless they say how.

    Args:
        optimizer_class: builds the optimizer.
        options: the user's for all groups.
    """
    says_how = any(options.get(name) is not None for name in ("fused", "foreach")) or any(
        options.get(name) for name in ("capturable", "differentiable")
    )
    return dict(options) if says_how or optimizer_class not in _FUSED_ON_HOST else {**options, "fused": True}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def loaded_group(group: Mapping[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group after a load of saved options.

    As with torch's ``load_state_dict``, an option that the group has gained since it was saved is gone. One that the
    class has gained since keeps its value.

    Args:
        group: as it is.
        options: as saved.
        defaults: of the class.
    """
    gained = group_options(group).keys() - options.keys() - defaults.keys()
    return {**{key: value for key, value in group.items() if key not in gained}, **options}


def class_name(inner: Optimizer) -> str:
    """The name of the class that steps, the same with and without sharding."""
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def other_state(inner: Optimizer) -> dict[str, Any]:
    """State that belongs to no parameter."""
    state: Mapping[Any, Any] = inner.state
    return {key: value for key, value in state.items() if isinstance(key, str)}
