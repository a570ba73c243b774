import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ddp_zero.core.local.inner import ParamGroup, restrict_group
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.state.state_dicts import restrict_state_dict
from ddp_zero.core.step.state_order import StateOrder
from tests.unit.values.trees import assert_same

StateDict = dict[str, Any]
Groups = list[ParamGroup]

SHAPES = [(2, 3), (3,), (4, 2), (), (5,)]


def make_groups(seed: int = 0) -> Groups:
    """Parameters 0 to 2 in one group, 3 and 4 in another, all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    groups: Any = [{"params": params[:3]}, {"params": params[3:], "lr": 0.25}]
    return Optimizer(groups, {}).param_groups


def trained() -> StateDict:
    optimizer = Adam(make_groups())
    optimizer.step()
    return optimizer.state_dict()


class Rank:
    """What one rank has: all parameters in exposed groups, an inner optimizer over those that it owns."""

    def __init__(self, owned: Sequence[int]) -> None:
        self.groups = make_groups(seed=1)
        self.table = ParameterTable(self.groups)
        self.owned = {self.table.params[index] for index in owned}
        self.inner = Adam([restrict_group(group, self.owned) for group in self.groups])

    def restrict(self, state_dict: StateDict) -> tuple[StateDict, list[int]]:
        stepped = StepTargets(self.table, has_masters=False)
        local, indices, _ = restrict_state_dict(state_dict, self.groups, self.table, self.inner, stepped)
        return local, indices


# What is kept


def test_a_rank_keeps_the_state_that_it_owns_under_ids_of_its_own() -> None:
    whole = trained()
    rank = Rank([1, 2, 4])
    local, indices = rank.restrict(whole)
    assert list(local["state"]) == [0, 1, 2]
    assert [group["params"] for group in local["param_groups"]] == [[0, 1], [2]]
    assert indices == [0, 1, 2, 3, 4]
    assert_same(list(local["state"].values()), [whole["state"][index] for index in (1, 2, 4)])

    rank.inner.load_state_dict(local)
    for index, param in enumerate(rank.table.params):
        assert (param in rank.inner.state) is (index in (1, 2, 4))
        if param in rank.inner.state:
            assert torch.equal(rank.inner.state[param]["exp_avg"], whole["state"][index]["exp_avg"])
    assert [group["lr"] for group in rank.inner.param_groups] == [1e-3, 0.25]


def test_restrict_matches_parameters_by_position_with_any_ids() -> None:
    whole = trained()
    renamed = copy.deepcopy(whole)
    renamed["param_groups"][0]["params"] = [30, 10, 20]
    renamed["param_groups"][1]["params"] = [7, 5]
    renamed["state"] = {saved: whole["state"][index] for saved, index in ((10, 1), (7, 3), (30, 0), (5, 4))}
    local, indices = Rank([1, 2, 3]).restrict(renamed)
    assert indices == [1, 3, 0, 4]
    assert_same(local["state"], {0: whole["state"][1], 2: whole["state"][3]})


# What does not fit


GONE = object()


def spoil(whole: StateDict, path: Sequence[Any], value: Any) -> None:
    """Put a value at a path in a state dict, or take away what is there."""
    *way, last = path
    inside: Any = whole
    for key in way:
        inside = inside[key]
    if value is GONE:
        del inside[last]
    elif isinstance(inside, list):
        inside[last : last + 1] = [value]
    else:
        inside[last] = value


MISFITS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no state": (("state",), GONE, r"'state' and 'param_groups', got no 'state'\."),
    "no groups": (("param_groups",), GONE, r"'state' and 'param_groups', got no 'param_groups'\."),
    "no params": (("param_groups", 1, "params"), GONE, r"group 1"),
    "a group missing": (("param_groups", 1), GONE, r"2 parameter groups, got 1\."),
    "a group too many": (("param_groups", 2), {"params": []}, r"2 parameter groups, got 3\."),
    "a parameter missing": (("param_groups", 1, "params", 1), GONE, r"2 parameters in group 1 of .*, got 1\."),
    "a name missing": (("param_groups", 1, "param_names"), ["b0"], r"group 1"),
    "a stray state": (("state", 5), {}, r"state for parameters 0 to 4, got state for 5\."),
    "a state that torch's own has not kept": (
        *(("state", 4), None),
        r"a dict as the state of parameter 4 \(group 1, shape \[5\]\), got NoneType\.",
    ),
    "another shape": (
        *(("state", 2, "exp_avg_sq"), torch.ones(2, 4)),
        r"'exp_avg_sq' of parameter 2 \(group 0, shape \[4, 2\]\) to fit its shape, got shape \[2, 4\]\.",
    ),
    "other dimensions": (
        *(("state", 4, "exp_avg"), torch.ones(5, 1)),
        r"'exp_avg' of parameter 4 \(group 1, shape \[5\]\) to fit its shape, got shape \[5, 1\]\.",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("owned", [[0, 1, 2, 3, 4], []], ids=["all", "none"])
def test_a_misfit_is_refused_on_every_rank_naming_it(name: str, owned: list[int]) -> None:
    path, value, message = MISFITS[name]
    whole = trained()
    Rank(owned).restrict(whole)
    spoil(whole, path, value)
    with pytest.raises(ValueError, match=message):
        Rank(owned).restrict(whole)


# The order of states


owners_of_five = st.lists(st.integers(0, 2), min_size=5, max_size=5)


@given(
    owners=owners_of_five,
    steps=st.lists(st.sets(st.integers(0, 4)), max_size=6),
    loads=st.sets(st.integers(0, 5)),
    moves=st.dictionaries(st.integers(0, 5), owners_of_five),
)
def test_births_of_all_ranks_sort_into_the_unsharded_order(
    owners: list[int], steps: list[set[int]], loads: set[int], moves: dict[int, list[int]]
) -> None:
    groups = make_groups()
    table = ParameterTable(groups)
    plain = SGD(groups, lr=0.1, momentum=0.9)
    states: list[dict[Tensor, Any]] = [{}, {}, {}]
    orders = [StateOrder() for _ in states]

    def unsharded() -> list[int]:
        return [table.index_of[param] for param in plain.state]

    for number, with_gradient in enumerate(steps):
        for index, (old, new) in enumerate(zip(owners, moves.get(number, owners), strict=True)):
            param = table.params[index]
            if old != new and param in states[old]:
                states[new][param] = states[old].pop(param)
                orders[new].insert(param, orders[old].pop(param))
        owners = moves.get(number, owners)
        for index, param in enumerate(table.params):
            param.grad = torch.zeros_like(param) if index in with_gradient else None
        plain.step()
        for rank, state in enumerate(states):
            state.update({table.params[i]: {} for i in sorted(with_gradient) if owners[i] == rank})
            orders[rank].after_step(state, table.index_of.__getitem__)
        if number in loads:  # saved and loaded again, the last state first
            whole = plain.state_dict()
            whole["state"] = dict(reversed(whole["state"].items()))
            plain.load_state_dict(whole)
            for rank, state in enumerate(states):
                orders[rank].follow_load([table.params[index] for index in whole["state"]], state)

    born = [
        (orders[owners[i]].births_of({i: table.params[i]})[i], i)
        for i in range(5)
        if table.params[i] in states[owners[i]]
    ]
    assert [index for _, index in sorted(born)] == unsharded()
    for order, state in zip(orders, states, strict=True):
        own = [param for param in plain.state if param in state]
        assert list(map(id, order.sort(state))) == list(map(id, own))
