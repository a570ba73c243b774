"""Optimizers by the names of a DeepSpeed configuration: a class, its options, and the groups that it steps."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_zero.deepspeed.config.keys import ConfigError
from ddp_zero.deepspeed.config.sections import OptimizerSection
from ddp_zero.deepspeed.own_optimizers import ADAM_OPTIONS, MUON_OPTIONS, Lamb, Lion, MuonWithAdam, muon_groups

Groups = list[dict[str, Any]]

_WITHOUT_EFFECT = ("torch_adam", "fp32_optimizer_states", "set_grad_none")
"""Options that choose between DeepSpeed's own implementations."""

_VARIANT = re.compile("fused|foreach|deepspeed|cpu|onebit|8bit|_")
"""Parts of names that say how an optimizer is computed."""
_NEAR = 0.75
"""How similar a name must be for a hint, from 0 to 1."""

_ELSEWHERE = {"muadam": "mup.MuAdam", "muadamw": "mup.MuAdamW", "musgd": "mup.MuSGD"}
"""Names of classes of another library."""

_OWN: Mapping[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "lamb": Lamb,
    "muon": MuonWithAdam,
}


@dataclass(frozen=True)
class Choice:
    """What builds an optimizer.

    Attributes:
        optimizer_class: the class.
        options: its options.
        groups: what it steps.
    """

    optimizer_class: Callable[..., Optimizer]
    options: Mapping[str, Any]
    groups: Groups


def choose(section: OptimizerSection, groups: Groups, names: Mapping[nn.Parameter, str]) -> Choice:
    """The optimizer that a configuration names.

    Args:
        section: ``optimizer``.
        groups: parameter groups.
        names: of the parameters.

    Raises:
        ConfigError: for a class that does not exist, with the nearest name, or an option that it does not have.
    """
    options = {name: value for name, value in section.params.items() if name not in _WITHOUT_EFFECT}
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    kind = section.type.lower()
    if kind in ("adam", "adamw"):
        return _adam(kind, options, groups)
    if kind == "muon":
        return _muon(options, groups, names)
    found = _class(section.type)
    _check_options(found, options, section.type)
    return Choice(found, options, groups)


def _adam(kind: str, options: dict[str, Any], groups: Groups) -> Choice:
    is_decoupled = bool(options.pop("adam_w_mode", True)) or kind == "adamw"
    found = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    if options.pop("bias_correction", True) is not True:
        raise ConfigError(
            "Expected bias_correction = true in optimizer.params of Adam, got false, which torch's Adam does not have."
        )
    _check_options(found, options, "Adam")
    return Choice(found, {"weight_decay": 0.0, **options}, groups)  # AdamW of torch has another default


def _muon(options: dict[str, Any], groups: Groups, names: Mapping[nn.Parameter, str]) -> Choice:
    if options.pop("per_head_muon", False):
        raise ConfigError("Expected per_head_muon = false in optimizer.params of Muon, got true: leave it out.")
    own = {name: options.pop(name) for name in ("adam_w_mode",) if name in options}
    known = {*MUON_OPTIONS, *ADAM_OPTIONS, "muon_lr", "adam_lr"}
    for name in options:
        if name not in known:
            raise ConfigError(_unknown(name, known, "Muon"))
    return Choice(MuonWithAdam, own, muon_groups(groups, names, options))


def _class(name: str) -> Callable[..., Optimizer]:
    own = _OWN.get(name.lower())
    if own is not None:
        return own
    if name.lower() in _ELSEWHERE:
        raise ConfigError(
            f"Expected the full name of a class of another library in optimizer.type, got {name!r}. Install it, and "
            f"write {_ELSEWHERE[name.lower()]!r}."
        )
    found = getattr(torch.optim, name, None) if "." not in name else _imported(name)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = [*(one for one, value in vars(torch.optim).items() if isinstance(value, type)), "Lion", "Lamb"]
        bare = _VARIANT.sub("", name.lower())
        near = [one for one in known if one.lower() == bare] or get_close_matches(name, known, n=1, cutoff=_NEAR)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            "Expected optimizer.type to be a name of DeepSpeed, a class of torch.optim, or the full name of an "
            f"importable one, got {name!r}{hint}"
        )
    return found


def _imported(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"Expected an importable class in optimizer.type, got {name!r}: {error}.") from error


def _check_options(found: Callable[..., Optimizer], options: Mapping[str, Any], name: str) -> None:
    taken = inspect.signature(found).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for option in options:
        if option not in taken or option == "params":
            raise ConfigError(_unknown(option, taken, name))


def _unknown(option: str, known: Iterable[str], name: str) -> str:
    near = get_close_matches(option, list(known), n=1, cutoff=_NEAR)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"Expected an option of {name} in optimizer.params, got {option!r}{hint}"


def choice_of(optimizer: Optimizer) -> Choice:
    """What would build an optimizer that a user has built already, over the same groups."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters  # AdamW, for one, adds a default that it does not take
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return Choice(kind, options, optimizer.param_groups)


def as_groups(parameters: Iterable[Any] | None, module: nn.Module) -> Groups:
    """Parameter groups without frozen parameters, and without groups that are empty then.

    Args:
        parameters: parameters, named parameters or groups; None: all of the module.
        module: the model.

    Raises:
        ValueError: if none is left.
    """
    given: Sequence[Any] = list(module.parameters() if parameters is None else parameters)
    loose = [one[1] if isinstance(one, tuple) else one for one in given if not isinstance(one, Mapping)]
    groups = [dict(one, params=list(one["params"])) for one in given if isinstance(one, Mapping)]
    groups = [*groups, {"params": loose}] if loose else groups
    trained = [dict(group, params=[param for param in group["params"] if param.requires_grad]) for group in groups]
    found = [group for group in trained if group["params"]]
    if not found:
        raise ValueError("Expected parameters that require a gradient, got none.")
    return found
