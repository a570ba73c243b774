"""Parts of parameters in the whole model, and state dicts of members, put together and taken apart."""

import math
from typing import Any

import pytest
import torch

from ddp_zero.parallel.placement import CutSizes, Held, Holdings, holding_of, home_of, merge, read_cuts, split, whole_of
from ddp_zero.values.chunks import Chunk

DENSE: dict[str, Any] = {
    "state": {0: "a", 1: "b", 2: "c"},
    "param_groups": [{"lr": 1, "params": [0]}, {"lr": 3, "params": [1, 2]}],
    "loss_scale": {"value": 4.0},
}
EXPERTS: dict[str, Any] = {"state": {0: "x", 1: "y"}, "param_groups": [{"lr": 2, "params": [0, 1]}]}
PLACES = [(0, 0), (1, 0), (0, 1)]


def test_parameters_are_numbered_in_the_order_of_all_groups() -> None:
    found = merge([DENSE, EXPERTS], PLACES)
    assert found["state"] == {0: "a", 1: "x", 2: "y", 3: "b", 4: "c"}
    assert [(group["lr"], group["params"]) for group in found["param_groups"]] == [(1, [0]), (2, [1, 2]), (3, [3, 4])]
    assert found["loss_scale"] == {"value": 4.0}


def test_what_was_put_together_comes_apart() -> None:
    dense, experts = split(merge([DENSE, EXPERTS], PLACES), PLACES)
    assert dense == DENSE
    assert experts == {**EXPERTS, "loss_scale": {"value": 4.0}}


def test_another_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="3 parameter groups, got 2"):
        split(DENSE, PLACES)


def equal(dim: int, place: int, count: int, size: int) -> CutSizes:
    return CutSizes(dim, (size,) * count, place)


def test_parts_of_one_cut_make_up_the_whole() -> None:
    assert whole_of((2, 5), (0, 0), [equal(0, 3, 4, 2)]) == ((8, 5), (6, 0))
    assert whole_of((2, 5), (0, 0), []) == ((2, 5), (0, 0))
    assert whole_of((7,), (0,), [equal(0, 0, 1, 7)]) == ((7,), (0,))
    assert whole_of((2, 5), (0, 0), [CutSizes(1, (3, 5, 0, 1), 1)]) == ((2, 9), (0, 3))


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


def test_a_part_of_a_part_lies_within_it() -> None:
    assert whole_of((4, 6), (2, 0), [equal(0, 1, 2, 4)]) == ((8, 6), (6, 0)), "a distributed tensor, cut once more"


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
    one = holding_of(param, {"tensor": 1}, ["tensor", "expert"], "w")
    assert (one.param, one.source, one.given) == (param, None, param)
    assert one.cut_over == {"tensor"}
    assert one.along(["expert"]).cut_over == frozenset(), "along a dimension of one rank it is whole"
    one.bring_gradient()
    assert param.grad is None
    with pytest.raises(ValueError, match=r"besides the data-parallel one, \['expert'\], got 'tensor'"):
        holding_of(param, {"tensor": 1}, ["expert"], "w")


def test_the_place_of_a_single_cut_is_known_where_the_user_states_it() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))

    def cut(declared: dict[str, int | None]) -> tuple[str, int] | None:
        return holding_of(param, declared, ["tensor", "context"], "w").single_cut()

    assert cut({"tensor": 0}) == ("tensor", 0)
    assert cut({"context": -1}) == ("context", 1)
    assert cut({}) is None
    assert cut({"tensor": None}) is None, "cut, and nobody has said where"
    assert cut({"tensor": 2}) is cut({"tensor": -3}) is None, "no such dimension"
    assert cut({"tensor": 0, "context": 1}) is None, "of two cuts, parts do not meet on one host"


@pytest.mark.parametrize(("at", "found"), [(0, (8, 3)), (1, (2, 12))])
def test_the_shape_of_a_whole_parameter_differs_along_the_cut_only(at: int, found: tuple[int, int]) -> None:
    one = holding_of(torch.nn.Parameter(torch.zeros(2, 3)), {"tensor": at}, ["tensor"], "w")
    assert one.shape_with(at, found[at]) == found
    assert one.shape_with(at, (2, 3)[at]) == (2, 3)


class Distributed:
    """A distributed tensor of one rank, and its gradient, of which ``part`` is here."""

    def __init__(self, part: torch.Tensor, placements: str = "cut", grad: Any = None) -> None:
        self.part, self.placements, self.grad = part, placements, grad
        self.requires_grad = True

    def to_local(self) -> torch.Tensor:
        return self.part

    def redistribute(self, placements: str) -> "Distributed":
        return Distributed(2 * self.part, placements)  # such as the sum over ranks


def distributed(grad: Any) -> tuple[Held, Any]:
    source: Any = Distributed(torch.zeros(2), grad=grad)
    return Held(torch.nn.Parameter(torch.zeros(2)), source, frozenset(["tensor"]), {}, "w"), source


class Mesh:
    """Sizes and this rank's coordinates of a mesh; a dimension of it is a mesh."""

    def __init__(self, places: dict[str, tuple[int, int]]) -> None:
        self._places = places
        self.mesh_dim_names = tuple(places)
        self.mesh = torch.arange(math.prod(self.size(dim) for dim in places)).reshape(
            [self.size(dim) for dim in places]
        )

    def __getitem__(self, dim: str) -> "Mesh":
        return Mesh({dim: self._places[dim]})

    def get_local_rank(self, dim: str) -> int:
        return self._places[dim][0]

    def size(self, dim: str | None = None) -> int:
        return self._places[dim or self.mesh_dim_names[0]][1]


def placed(declared: dict[str, int | None], monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[int, ...], Chunk | None]:
    """Where a 2 x 3 part on the second rank of each of three dimensions belongs."""
    monkeypatch.setattr("ddp_zero.parallel.placement.get_process_group_ranks", lambda group: group)
    mesh: Any = Mesh({"data": (1, 2), "outer": (1, 3), "inner": (1, 4)})
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 3)})
    one = holding_of(model["w"], declared, ["outer", "inner"], "parameter w")
    ranks: Any = [5, 17]
    cuts: list[CutSizes] = []
    sizes = [2, 3]
    for dim, count in (("inner", 4), ("outer", 3)):
        at = declared.get(dim)
        if at is not None and -2 <= at < 2:
            cuts.insert(0, CutSizes(at % 2, (sizes[at],) * count, 1))
            sizes[at] *= count
    part = Holdings([(ranks, [one])], ranks, mesh, ["data"], {"w": "layers.4.w"}, {one.param: cuts}).part_of(model)
    ((name, found),) = part.statement({}).entries.items()
    assert name == "layers.4.w"
    assert found.home == "data [[0], [1]]", "whoever has a part of it"
    assert found.shape is not None
    return tuple(found.shape), found.chunk


def test_a_part_is_at_its_place_in_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed({}, monkeypatch) == ((2, 3), Chunk((0, 0), (2, 3)))
    assert placed({"outer": 0}, monkeypatch) == ((6, 3), Chunk((2, 0), (2, 3)))
    assert placed({"inner": -1}, monkeypatch) == ((2, 12), Chunk((0, 3), (2, 3)))
    assert placed({"inner": 1, "outer": 0}, monkeypatch) == ((6, 12), Chunk((2, 3), (2, 3)))
    assert placed({"inner": 0, "outer": 0}, monkeypatch) == ((24, 3), Chunk((10, 0), (2, 3))), "inner parts adjoin"


@pytest.mark.parametrize("dim", [None, 2, -3])
def test_a_cut_without_a_place_is_refused_when_places_are_asked_for(
    dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=rf"sharded_over=\{{'inner': .*for parameter w of shape \[2, 3\], got {dim}"):
        placed({"inner": dim}, monkeypatch)
