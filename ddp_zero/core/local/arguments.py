"""Checks of user arguments: their types, unknown options, and parameters in groups."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GroupMember, ProcessGroup
from torch.optim import Optimizer

from ddp_zero.options import PARALLEL_OPTIONS

_NOT_A_MEMBER = GroupMember.NON_GROUP_MEMBER

Grouping = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
"""Maps a parameter's name in the model and the parameter to its group's options; None: the class's defaults."""

PARALLEL_REMEDY = (
    "Call ddp_zero.shard_optimizer(model, AdamW, groups, mesh=..., data_parallel_dim=...), with groups as a list: it "
    "returns a ddp_zero.parallel.ParallelOptimizer."
)


def is_process_group(process_group: object) -> bool:
    """True for a process group, for None (the default group), and for the marker of a group without this process."""
    return process_group is None or isinstance(process_group, ProcessGroup) or process_group == _NOT_A_MEMBER


def check_group(process_group: object, argument: str = "process_group") -> None:
    """Check that an argument is a process group or None; TypeError if not."""
    if process_group is None or isinstance(process_group, ProcessGroup):
        return
    raise TypeError(
        f"Expected {argument} to be a torch.distributed.ProcessGroup or None, got {_text_of(process_group)}. Options "
        "are keywords: ZeroRedundancyOptimizer(params, AdamW, lr=1e-3). [ZERO-103]"
    )


def check_flags(**flags: object) -> None:
    """Check that options are True or False; TypeError naming the first that is not."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"Expected {name} to be True or False, got {_text_of(value)}. Options are keywords. [ZERO-103]"
            )


class NotAnOptimizerError(TypeError, ValueError):
    """A value that builds no optimizer; torch raises either type, by the kind of value."""


class MissingParametersError(ValueError, KeyError):
    """A group without parameters; torch raises ValueError when it shards, else KeyError."""

    __str__ = ValueError.__str__  # KeyError would quote the text


class CannotBeShardedError(NotImplementedError, ValueError):
    """A class that sharding does not support; torch raises ValueError for those that it does not."""


def check_class(optimizer_class: object) -> None:
    """Check that an argument can build an optimizer; TypeError if not."""
    if isinstance(optimizer_class, Optimizer):
        kind = type(optimizer_class).__name__
        raise TypeError(
            f"Expected optimizer_class to be a torch.optim.Optimizer class, got an instance of {kind}. Pass the class "
            f"and its options: {kind}, lr=... [ZERO-101]"
        )
    if optimizer_class is None:
        raise NotAnOptimizerError(
            "Expected optimizer_class to be a torch.optim.Optimizer class, got None. Pass the class and its options, "
            "as in ZeroRedundancyOptimizer(params, AdamW, lr=1e-3), or an optimizer that was built: "
            "ZeroRedundancyOptimizer(opt). [ZERO-101]"
        )
    builds_others = isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
    if not callable(optimizer_class) or builds_others:
        raise NotAnOptimizerError(
            f"Expected optimizer_class to be a torch.optim.Optimizer class, got {_text_of(optimizer_class)}. The order "
            "is: parameters, class, options. [ZERO-101]"
        )


def check_params(params: object) -> None:
    """Check that an argument is parameters or groups; TypeError if not, ValueError for a group without parameters."""
    is_one = isinstance(params, nn.Module | Optimizer | type | Tensor | Mapping | str)
    if is_one or not isinstance(params, Iterable):
        remedies: dict[Any, str] = {
            nn.Module: "Pass model.named_parameters().",
            Optimizer: "Pass its class, after the parameters, or leave the class out.",
            type: "The parameters come first.",
            Tensor: "Pass a list or another iterable.",
            Mapping: "Pass a list of groups; options of the class are keywords: lr=1e-3.",
            int | float: f"Options are keywords: lr={params}.",
        }
        remedy = next(
            (text for kind, text in remedies.items() if isinstance(params, kind)), "The parameters come first."
        )
        raise TypeError(f"Expected parameters or parameter groups, got {_text_of(params)}. {remedy} [ZERO-102]")
    for place, group in enumerate(params) if isinstance(params, list | tuple) else ():
        if isinstance(group, Mapping) and "params" not in group:
            raise MissingParametersError(
                f"Expected the parameters of group {place} under 'params', got a group with {sorted(map(str, group))}. "
                "Options for all groups are keywords beside the class. [ZERO-102]"
            )


def check_in_one_group(groups: object) -> None:
    """Check that no parameter is in two groups; ValueError naming it and both. Other faults are left to torch."""
    places: dict[int, int] = {}
    for place, group in enumerate(groups) if isinstance(groups, list | tuple) else ():
        given = group.get("params") if isinstance(group, Mapping) else None
        for one in given if isinstance(given, list | tuple) else ():
            name, param = one if isinstance(one, tuple) and len(one) == 2 else ("", one)
            first = places.setdefault(id(param), place)
            if first != place:
                shown = repr(name) if name else f"of shape {list(param.shape)}" if isinstance(param, Tensor) else ""
                raise ValueError(
                    f"Expected every parameter in one group, got the parameter {shown} in groups {first} and {place}. "
                    "Leave it out of one of them. [ZERO-108]"
                )


def named_params_in(params: object) -> list[tuple[str, Tensor]]:
    """The parameters in an optimizer's argument, with names as far as they have any."""
    named: list[tuple[str, Tensor]] = []
    for item in params if isinstance(params, Iterable) else ():
        if isinstance(item, Mapping):
            named += named_params_in(item["params"])
        elif isinstance(item, tuple):
            named.append((item[0], item[1]))
        else:
            named.append(("", item))
    return named


def first_device(params: object) -> torch.device | None:
    """The device of the first parameter in any form of parameters or groups; None if there is none."""
    while not isinstance(params, torch.Tensor):
        if isinstance(params, Optimizer):
            params = params.param_groups
        elif isinstance(params, Mapping):
            params = params.get("params")
        elif isinstance(params, Sequence) and params and not isinstance(params, str):
            params = next((item for item in params if not isinstance(item, str)), None)
        else:
            return None
    return params.device


def check_known(options: Iterable[str], optimizer_class: Callable[..., Any], library: Iterable[str]) -> None:
    """Check that no option is a misspelt one of this library; TypeError with the closest, or whatever takes it."""
    known = parameters_of(optimizer_class)
    if known is None:
        return  # takes any, or its signature is not available
    for name in options:
        if name in PARALLEL_OPTIONS and name not in known:
            raise TypeError(
                f"Expected options of an optimizer whose ranks all hold the same parameters, got {name}=. "
                f"{PARALLEL_REMEDY} [ZERO-116]"
            )
        if name not in known:
            begun = [own for own in library if own.startswith(name)]
            nearest = begun or difflib.get_close_matches(name, [*library, *known], n=1, cutoff=0.7)
            if nearest and nearest[0] not in known:
                called = getattr(optimizer_class, "__name__", "the optimizer class")
                raise TypeError(
                    f"Expected an option of ddp_zero or of {called}, got {name!r}. Did you mean {nearest[0]!r}? "
                    "[ZERO-104]"
                )


def group_by_options(named: Iterable[tuple[str, nn.Parameter]], options_of: Grouping) -> list[dict[str, Any]]:
    """Group parameters, which keep their names, by options: equal options form a group, in order of first appearance.

    ``options_of`` gets a name as in the model, without a wrapper's prefix. TypeError naming the parameter for a result
    that is neither a dict of options nor None.
    """
    groups: list[tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]] = []
    for name, param in named:
        bare = name.removeprefix("module.")
        answer = options_of(bare, param)
        if not isinstance(answer, Mapping | None) or "params" in (answer or {}):
            raise TypeError(
                f"Expected a dict of options for the group of {bare!r}, or None for the class's own, got "
                f"{_text_of(answer)}. params= takes a list of groups, or a function of a name and a parameter. "
                "[ZERO-102]"
            )
        options = dict(answer or {})
        for known, members in groups:
            if known.keys() == options.keys() and all(is_same(value, options[key]) for key, value in known.items()):
                members.append((name, param))
                break
        else:
            groups.append((options, [(name, param)]))
    return [{"params": members, **options} for options, members in groups]


def is_same(value: Any, other: Any) -> bool:
    """True if two values of an option are equal; a tensor is equal to itself alone."""
    return value is other or (not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other))


def parameters_of(function: Callable[..., Any]) -> set[str] | None:
    """The keywords that a class or function takes; None if it takes any or has no signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def _text_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.dtype | str | int | float | complex | bool | None | list | tuple | dict):
        return f"{value!r:.80}"
    return f"an object of type {type(value).__name__}"


def own_options(constructor: Callable[..., Any]) -> list[str]:
    """The names of this library's own options, from the constructor that takes them."""
    names = inspect.signature(constructor).parameters
    return [name for name in names if name not in ("self", "params", "optimizer_class", "defaults")]
