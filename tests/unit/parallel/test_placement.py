"""Parts of parameters in the whole model, and state dicts of members, put together and taken apart."""

import pytest
import torch

from ddp_zero.parallel.placement import CutSizes, home_of, local_parameter, read_cuts, whole_of
from ddp_zero.values.chunks import Chunk


def equal(dim: int, place: int, count: int, size: int) -> CutSizes:
    return CutSizes(dim, (size,) * count, place)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_the_parts_of_all_ranks_of_two_cuts_make_up_the_whole(dims: tuple[int, int]) -> None:
    outer, inner = 2, 3
    sizes = [(4, 6)[dims[0]] * (inner if dims[0] == dims[1] else 1), (4, 6)[dims[1]]]
    found = [
        whole_of((4, 6), (0, 0), [equal(dims[0], i, outer, sizes[0]), equal(dims[1], j, inner, sizes[1])])
        for i in range(outer)
        for j in range(inner)
    ]
    (shape,) = {shape for shape, _ in found}
    assert Chunk.fault(shape, [Chunk(begin, (4, 6)) for _, begin in found]) is None
    length = (4, 6)[dims[1]]
    assert [begin[dims[1]] for _, begin in found[:inner]] == [0, length, 2 * length], "inner parts adjoin"


GRID = torch.arange(8).reshape(2, 2, 2)
DIMS = ("pipeline", "data", "tensor")


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
def test_cuts_are_read_from_a_name_a_list_or_a_dict_of_dimensions(given: object, found: dict[str, int | None]) -> None:
    assert read_cuts(given, 0) == found


@pytest.mark.parametrize("given", [7, {"tensor": True}, {"tensor": 0.0}, [0], {0: "tensor"}])
def test_cuts_of_other_types_are_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"sharded_over= of parameter group 4 to name mesh dimensions"):
        read_cuts(given, 4)


def test_a_plain_parameter_is_cut_where_the_user_says_so() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    one = local_parameter(param, {"tensor": 1}, ["tensor", "expert"], "w")
    assert (one.param, one.source, one.given) == (param, None, param)
    assert one.cut_over == {"tensor"}
    assert one.restricted_to(["expert"]).cut_over == frozenset(), "along a dimension of one rank it is whole"
    one.fetch_gradient()
    assert param.grad is None
    with pytest.raises(ValueError, match=r"besides the data-parallel one, \['expert'\], got 'tensor'"):
        local_parameter(param, {"tensor": 1}, ["expert"], "w")


def test_the_place_of_a_single_cut_is_known_where_the_user_states_it() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))

    def cut(declared: dict[str, int | None]) -> tuple[str, int] | None:
        return local_parameter(param, declared, ["tensor", "context"], "w").single_cut()

    assert cut({"tensor": 0}) == ("tensor", 0)
    assert cut({"context": -1}) == ("context", 1)
    assert cut({}) is None
    assert cut({"tensor": None}) is None, "cut, and nobody has said where"
    assert cut({"tensor": 2}) is cut({"tensor": -3}) is None, "no such dimension"
    assert cut({"tensor": 0, "context": 1}) is None, "of two cuts, parts do not meet on one host"
