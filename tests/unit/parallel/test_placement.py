"""Parts of parameters in the whole model, and state dicts of members, put together and taken apart."""

from typing import Any

import pytest
import torch

from ddp_zero.core.plan.boxes import Box, fault
from ddp_zero.parallel.placement import held, home_of, merged, read_cuts, split, whole_of

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


def test_parts_of_one_cut_make_up_the_whole() -> None:
    assert whole_of((2, 5), (0, 0), [(0, 3, 4)]) == ((8, 5), (6, 0))
    assert whole_of((2, 5), (0, 0), []) == ((2, 5), (0, 0))
    assert whole_of((7,), (0,), [(0, 0, 1)]) == ((7,), (0,))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_the_parts_of_all_ranks_of_two_cuts_make_up_the_whole(dims: tuple[int, int]) -> None:
    outer, inner = 2, 3
    found = [
        whole_of((4, 6), (0, 0), [(dims[0], i, outer), (dims[1], j, inner)]) for i in range(outer) for j in range(inner)
    ]
    (shape,) = {shape for shape, _ in found}
    assert fault(shape, [Box(begin, (4, 6)) for _, begin in found]) is None
    length = (4, 6)[dims[1]]
    assert [begin[dims[1]] for _, begin in found[:inner]] == [0, length, 2 * length], "inner parts adjoin"


def test_a_part_of_a_part_lies_within_it() -> None:
    assert whole_of((4, 6), (2, 0), [(0, 1, 2)]) == ((8, 6), (6, 0)), "a distributed tensor that is cut once more"


GRID = torch.arange(8).reshape(2, 2, 2)
DIMS = ("pipeline", "data", "tensor")


def test_homes_are_ranks_without_a_mesh() -> None:
    assert home_of([3, 1], None, (), ()) == home_of([1, 3], None, (), ()) == "ranks [1, 3]"


def test_with_a_mesh_homes_are_places_along_the_dimensions_that_matter() -> None:
    dense = home_of([0, 2], GRID, DIMS, ["data", "pipeline"])
    assert dense == "data, pipeline [[0, 0], [1, 0]]"
    assert home_of([1, 3], GRID, DIMS, ["data", "pipeline"]) == dense, "tensor parallel ranks hold parts of one value"
    assert home_of([4, 6], GRID, DIMS, ["data", "pipeline"]) != dense, "the other stage has values of its own"
    assert home_of([0], GRID, DIMS, ["data"]) != home_of([2], GRID, DIMS, ["data"]), "experts"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("tensor", {"tensor": None}),
        (["tensor", "expert"], {"tensor": None, "expert": None}),
        ({"tensor": 1}, {"tensor": 1}),
        ((), {}),
    ],
)
def test_cuts_are_names_or_dimensions(given: object, found: dict[str, int | None]) -> None:
    assert read_cuts(given, 0) == found


@pytest.mark.parametrize("given", [7, {"tensor": True}, {"tensor": 0.0}, [0], {0: "tensor"}])
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"sharded_over= of parameter group 4 to name mesh dimensions"):
        read_cuts(given, 4)


def test_a_plain_parameter_is_cut_where_the_user_says_so() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    one = held(param, {"tensor": 1}, ["tensor", "expert"], "w")
    assert (one.param, one.source, one.given) == (param, None, param)
    assert one.cut_over == {"tensor"}
    assert one.along(["expert"]).cut_over == frozenset(), "along a dimension of one rank it is whole"
    one.bring_gradient()
    assert param.grad is None
    with pytest.raises(ValueError, match=r"besides the data-parallel one, \['expert'\], got 'tensor'"):
        held(param, {"tensor": 1}, ["expert"], "w")
