"""State dicts of several members as one, in which parameters are numbered in the order of all groups, or go by name.

Those by name, for `torch.distributed.checkpoint`, have the keys of torch's ``flatten_optimizer_state_dict``: one for
each state and each option of each parameter, so that the dicts of ranks with different parameters make up one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ddp_zero.core.local.inner import loaded_group
from ddp_zero.optimizer import ZeroRedundancyOptimizer, sharded_of, states_of
from ddp_zero.parallel.placement import Holdings

Places = Sequence[tuple[int, int]]
"""For each parameter group its member, and its position there."""


def merged(state_dicts: Sequence[dict[str, Any]], places: Places) -> dict[str, Any]:
    """The state dict over all groups; other entries, such as a loss scale, are the first member's."""
    groups: list[dict[str, Any]] = []
    numbers: dict[tuple[int, int], int] = {}
    for member, position in places:
        group = state_dicts[member]["param_groups"][position]
        for old in group["params"]:
            numbers[member, old] = len(numbers)
        groups.append({**group, "params": [numbers[member, old] for old in group["params"]]})
    state = {
        numbers.get((member, old), old): value
        for member, state_dict in enumerate(state_dicts)
        for old, value in state_dict["state"].items()
    }
    rest = {key: value for key, value in state_dicts[0].items() if key not in ("state", "param_groups")}
    order = sorted(state, key=lambda key: (isinstance(key, str), str(key) if isinstance(key, str) else key))
    return {"state": {key: state[key] for key in order}, "param_groups": groups, **rest}


def split(state_dict: dict[str, Any], places: Places) -> list[dict[str, Any]]:
    """The members' state dicts, of which `merged` makes one.

    Raises:
        ValueError: if it has another number of groups.
    """
    groups = state_dict["param_groups"]
    if len(groups) != len(places):
        raise ValueError(f"Expected a state dict of {len(places)} parameter groups, got {len(groups)}.")
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    parts = []
    for member in range(1 + max(one for one, _ in places)):
        own = [group for group, (one, _) in zip(groups, places, strict=True) if one == member]
        old = [number for group in own for number in group["params"]]
        new = {number: place for place, number in enumerate(old)}
        renumbered = [{**group, "params": [new[number] for number in group["params"]]} for group in own]
        state = {
            new.get(key, key): value for key, value in state_dict["state"].items() if key in new or isinstance(key, str)
        }
        parts.append({"state": state, "param_groups": renumbered, **rest})
    return parts


# By name

_STATE, _GROUPS, _REST = "state", "param_groups", "rest"


def pack(
    members: Sequence[ZeroRedundancyOptimizer], holdings: Holdings, model: nn.Module, init_missing: bool
) -> dict[str, Any]:
    """See `ParallelOptimizer.sharded_state_dict`."""
    part, found = holdings.part_of(model), dict[str, Any]()
    for member in members:
        packed, table = states_of(member).shard(part, init_missing), sharded_of(member).table
        param_of = dict(zip(part.names_of(table), table.params, strict=True))
        for name, state in packed.pop(_STATE).items():
            if name not in param_of:
                found[f"{_REST}.{name}"] = state  # belongs to no parameter
                continue
            for key, value in state.items():
                found[f"{_STATE}.{name}.{key}"] = holdings.as_distributed(param_of[name], value)
        for group in packed.pop(_GROUPS):
            for name in group.pop("params"):
                found.update({f"{_GROUPS}.{name}.{key}": value for key, value in group.items()})
        found.update({f"{_REST}.{key}": value for key, value in packed.items()})
    return found


def unpack(
    state_dict: Mapping[str, Any], members: Sequence[ZeroRedundancyOptimizer], holdings: Holdings, model: nn.Module
) -> list[dict[str, Any]]:
    """The state dict of each member by parameter index, from what `pack` returned with the same keys.

    Raises:
        ValueError: if options are missing, or differ in a group, naming the parameter.
    """
    part = holdings.part_of(model)
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for path, value in state_dict.items():
        kind, _, name = path.partition(".")
        if kind == _REST:
            rest[name] = value
            continue
        name, _, key = name.rpartition(".")
        local = value.to_local() if isinstance(value, DTensor) else value
        {_STATE: states, _GROUPS: options}.get(kind, {}).setdefault(name, {})[key] = local
    scale = {"loss_scale": rest.pop("loss_scale")} if "loss_scale" in rest else {}
    found = []
    for member in members:
        names = part.names_of(sharded_of(member).table)
        remaining = iter(names)
        groups = [
            _group([next(remaining) for _ in group["params"]], group, options, member.defaults)
            for group in member.param_groups
        ]
        own = {name: states[name] for name in names if name in states}
        nested = {"state": {**rest, **own}, "param_groups": groups, **scale}
        found.append(states_of(member).by_index(nested, part))
    return found


def _group(
    names: list[str], group: Mapping[str, Any], options: Mapping[str, dict[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    missing = next((name for name in names if name not in options), None)
    if missing is not None:
        raise ValueError(f"Expected options of {missing!r} in the state dict, got none.")
    other = next((name for name in names if options[name] != options[names[0]]), None)
    if other is not None:
        raise ValueError(
            f"Expected the same options for the parameters of a group, got others for {other!r} than for {names[0]!r}."
        )
    kept = {key: value for key, value in group.items() if key != "param_names"}
    return {**(loaded_group(kept, options[names[0]], defaults) if names else kept), "params": names}
