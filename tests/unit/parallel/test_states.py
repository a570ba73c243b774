"""State dicts of members, put together and taken apart."""

from typing import Any

import pytest

from ddp_zero.parallel.states import merged, split

DENSE: dict[str, Any] = {
    "state": {0: "a", 1: "b", 2: "c"},
    "param_groups": [{"lr": 1, "params": [0]}, {"lr": 3, "params": [1, 2]}],
    "loss_scale": {"value": 4.0},
}
EXPERTS: dict[str, Any] = {"state": {0: "x", 1: "y"}, "param_groups": [{"lr": 2, "params": [0, 1]}]}
PLACES = [(0, 0), (1, 0), (0, 1)]


def test_parameters_are_numbered_in_the_order_of_all_groups() -> None:
    found = merged([DENSE, EXPERTS], PLACES)
    assert found["state"] == {0: "a", 1: "x", 2: "y", 3: "b", 4: "c"}
    assert [(group["lr"], group["params"]) for group in found["param_groups"]] == [(1, [0]), (2, [1, 2]), (3, [3, 4])]
    assert found["loss_scale"] == {"value": 4.0}


def test_what_was_put_together_comes_apart() -> None:
    dense, experts = split(merged([DENSE, EXPERTS], PLACES), PLACES)
    assert dense == DENSE
    assert experts == {**EXPERTS, "loss_scale": {"value": 4.0}}


def test_another_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="3 parameter groups, got 2"):
        split(DENSE, PLACES)
