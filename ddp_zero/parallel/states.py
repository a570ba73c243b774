"""State dicts of several members as one, in which parameters are numbered in the order of all groups."""

from collections.abc import Sequence
from typing import Any

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
