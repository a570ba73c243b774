"""The choice of ``partition="auto"``: a table of settings on plain values."""

from dataclasses import replace
from typing import Any

import pytest

from ddp_zero.core.plan.partitions import Setting, choose_partition

NATIVE = Setting("AdamW", is_elementwise=True, world_size=8, exchange="native")


@pytest.mark.parametrize(
    ("changed", "expected", "why"),
    [
        ({}, "elements", "one reduce-scatter and one all-gather"),
        ({"stage": 2}, "elements", "one reduce-scatter and one all-gather"),
        ({"world_size": 2}, "elements", "one reduce-scatter and one all-gather"),
        ({"exchange": "ring"}, "elements", "a ring of 8 ranks is as slow as its largest segment"),
        ({"exchange": "direct", "world_size": 2}, "elements", "no rank waits"),
        ({"exchange": "direct", "is_small": True}, "parameters", "less than 1 MiB"),
        ({"exchange": "broadcast"}, "parameters", "owner by owner"),
        ({"is_elementwise": False, "optimizer": "Muon"}, "parameters", "Muon is not known to step each element"),
        ({"world_size": 1}, "parameters", "a single rank"),
        ({"are_dense": False}, "parameters", "gaps or overlaps"),
        ({"rounds_alike": False}, "parameters", "round an element of a part"),
        ({"clips": True}, "elements", "one reduce-scatter"),  # stage 1: one rank takes the norm of a whole gradient
        ({"clips": True, "stage": 2}, "parameters", "last bits"),
        ({"overlaps": False}, "elements", "one reduce-scatter"),
        ({"overlaps": False, "stage": 2}, "parameters", "looked at before the step"),
        ({"exchange": "ring", "clips": True, "stage": 2}, "parameters", "last bits"),
    ],
)
def test_choose_partition_cuts_where_it_shortens_a_step_and_says_why(
    changed: dict[str, Any], expected: str, why: str
) -> None:
    found = choose_partition(replace(NATIVE, **changed))
    assert found.name == expected
    assert found.cuts is (expected == "elements")
    assert why in found.why


def test_of_several_reasons_for_whole_parameters_the_first_is_given() -> None:
    everything = replace(NATIVE, is_elementwise=False, world_size=1, are_dense=False, is_small=True)
    assert "not known" in choose_partition(everything).why
