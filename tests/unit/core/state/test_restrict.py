import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ddp_zero.core.local.inner import ParamGroup, restrict_group
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.state import state_dicts as restrict
from ddp_zero.core.state.state_dicts import restrict_state_dict
from ddp_zero.core.step.state_order import StateOrder
from tests.unit.values.trees import assert_same

StateDict = dict[str, Any]
Groups = list[ParamGroup]

SHAPES = [(2, 3), (3,), (4, 2), (), (5,)]


class Outsider(Optimizer):
    """Not one of torch's; its states may have any shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})


def make_groups(seed: int = 0, names: bool = False, **options: Any) -> Groups:
    """Parameters 0 to 2 in one group, 3 and 4 in another, all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    groups: Any = [{"params": params[:3], **options}, {"params": params[3:], "lr": 0.25}]
    if names:
        groups[0]["params"] = [(f"a{index}", param) for index, param in enumerate(params[:3])]
        groups[1]["params"] = [(f"b{index}", param) for index, param in enumerate(params[3:])]
    return Optimizer(groups, {}).param_groups


def trained(optimizer_class: Callable[..., Optimizer], groups: Groups) -> StateDict:
    optimizer = optimizer_class(groups)
    optimizer.step()
    return optimizer.state_dict()


class Rank:
    """What one rank has: all parameters in exposed groups, an inner optimizer over those that it owns."""

    def __init__(
        self, owned: Sequence[int], optimizer_class: Callable[..., Optimizer] = Adam, names: bool = False
    ) -> None:
        self.groups = make_groups(seed=1, names=names)
        self.table = ParameterTable(self.groups)
        self.owned = {self.table.params[index] for index in owned}
        self.inner = optimizer_class([restrict_group(group, self.owned) for group in self.groups])

    def restrict(self, state_dict: StateDict) -> tuple[StateDict, list[int]]:
        stepped = StepTargets(self.table, has_masters=False)
        local, indices, _ = restrict_state_dict(state_dict, self.groups, self.table, self.inner, stepped)
        return local, indices


# What is kept


def test_a_rank_keeps_the_state_that_it_owns_under_ids_of_its_own() -> None:
    whole = trained(Adam, make_groups())
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


def test_groups_keep_their_options_in_the_order_saved() -> None:
    whole = trained(Adam, make_groups(betas=(0.5, 0.6)))
    local, _ = Rank([0, 4]).restrict(whole)
    for group, saved in zip(local["param_groups"], whole["param_groups"], strict=True):
        assert list(group) == list(saved)
        assert {**group, "params": None} == {**saved, "params": None}


def test_a_rank_that_owns_nothing_keeps_the_groups_and_no_state() -> None:
    whole = trained(Adam, make_groups())
    local, indices = Rank([]).restrict(whole)
    assert local["state"] == {}
    assert [(group["params"], group["lr"]) for group in local["param_groups"]] == [([], 1e-3), ([], 0.25)]
    assert indices == [0, 1, 2, 3, 4]


def test_names_are_those_of_the_parameters_kept() -> None:
    whole = trained(Adam, make_groups(names=True))
    local, _ = Rank([2, 0, 4], names=True).restrict(whole)
    assert [group["param_names"] for group in local["param_groups"]] == [["a0", "a2"], ["b1"]]


def test_ids_are_whatever_the_file_says_and_parameters_go_by_position() -> None:
    whole = trained(Adam, make_groups())
    renamed = copy.deepcopy(whole)
    renamed["param_groups"][0]["params"] = [30, 10, 20]
    renamed["param_groups"][1]["params"] = [7, 5]
    renamed["state"] = {saved: whole["state"][index] for saved, index in ((10, 1), (7, 3), (30, 0), (5, 4))}
    local, indices = Rank([1, 2, 3]).restrict(renamed)
    assert indices == [1, 3, 0, 4]
    assert_same(local["state"], {0: whole["state"][1], 2: whole["state"][3]})


def test_state_that_belongs_to_no_parameter_is_kept_by_everyone() -> None:
    whole = trained(Adam, make_groups())
    whole["state"]["shared"] = {"seen": torch.ones(2)}
    for owned in ([0, 3], []):
        local, indices = Rank(owned).restrict(whole)
        assert local["state"]["shared"]["seen"].tolist() == [1, 1]
        assert indices == [0, 1, 2, 3, 4]


def test_parameters_may_be_known_by_name_as_torchs_checkpoint_helpers_call_them() -> None:
    whole = trained(Adam, make_groups())
    expected, _ = Rank([0, 3]).restrict(copy.deepcopy(whole))
    named = copy.deepcopy(whole)
    for group in named["param_groups"]:
        group["params"] = [f"layer.{index}" for index in group["params"]]
    named["state"] = {f"layer.{index}": state for index, state in named["state"].items()}
    local, indices = Rank([0, 3]).restrict(named)
    assert_same(local, expected)
    assert indices == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("owned", [[0, 1, 2, 3, 4], [1, 3], []], ids=["all", "some", "none"])
def test_the_callers_state_dict_is_not_touched_and_its_groups_are_not_shared(owned: list[int]) -> None:
    whole = trained(Adam, make_groups(lr=torch.tensor(0.5), names=True))
    whole["state"]["shared"] = {"seen": [torch.ones(2)]}
    before = copy.deepcopy(whole)
    local, _ = Rank(owned, names=True).restrict(whole)
    assert_same(whole, before)

    for group in local["param_groups"]:
        group["late"] = 1
        group["params"].append(9)
        group["param_names"].append("late")
    assert_same(whole, before)


def test_the_states_of_other_optimizers_may_have_any_shape() -> None:
    whole = trained(Adam, make_groups())
    whole["state"] = {index: {"codes": torch.ones(17, 2)} for index in range(5)}
    local, _ = Rank([0, 3], Outsider).restrict(whole)
    assert [state["codes"].shape for state in local["state"].values()] == [(17, 2), (17, 2)]


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
    whole = trained(Adam, make_groups())
    Rank(owned).restrict(whole)
    spoil(whole, path, value)
    with pytest.raises(ValueError, match=message):
        Rank(owned).restrict(whole)


# The order of states


owners_of_five = st.lists(st.integers(0, 2), min_size=5, max_size=5)


@settings(deadline=None)
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
                orders[new].take(param, orders[old].give(param))
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

    born = [(orders[owners[i]].of(table.params[i]), i) for i in range(5) if table.params[i] in states[owners[i]]]
    assert [index for _, index in sorted(born)] == unsharded()
    for order, state in zip(orders, states, strict=True):
        own = [param for param in plain.state if param in state]
        assert list(map(id, order.sort(state))) == list(map(id, own))


def test_states_made_at_construction_come_before_those_of_the_first_step() -> None:
    table = ParameterTable(make_groups())
    order = StateOrder()
    order.note_new({table.params[3]: {}, "shared": {}}, table.index_of.__getitem__)
    order.after_step({table.params[3]: {}, "shared": {}, table.params[0]: {}}, table.index_of.__getitem__)
    assert [order.of(table.params[index]) for index in (3, 0)] == [(0, 3), (1, 0)]


def test_a_sorted_state_is_another_dict_of_the_same_values_with_those_of_no_parameter_first() -> None:
    table = ParameterTable(make_groups())
    order = StateOrder()
    first: dict[Any, Any] = {table.params[4]: {"n": 4}, "shared": {"n": 9}}
    order.after_step(first, table.index_of.__getitem__)
    state = {table.params[3]: {"n": 3}, table.params[1]: {"n": 1}, **first, "late": {"n": 8}}
    order.after_step(state, table.index_of.__getitem__)
    keys = list(map(id, state))
    assert [value["n"] for value in order.sort(state).values()] == [9, 8, 4, 1, 3]
    assert all(value is state[key] for key, value in order.sort(state).items())
    assert list(map(id, state)) == keys


def test_a_state_that_was_taken_keeps_its_birth_and_one_that_was_given_away_is_born_anew() -> None:
    table = ParameterTable(make_groups())
    giver, taker = StateOrder(), StateOrder()
    moved = table.params[2]
    giver.after_step({moved: {}}, table.index_of.__getitem__)
    taker.after_step({}, table.index_of.__getitem__)
    birth = giver.give(moved)
    assert birth == (1, 2)
    assert giver.of(moved, 2) == (1, 2)
    taker.take(moved, birth)
    for order in (giver, taker):
        order.after_step({moved: {}}, table.index_of.__getitem__)
    assert (taker.of(moved), giver.of(moved)) == ((1, 2), (2, 2))


def test_a_state_born_as_another_is_dropped_is_noticed() -> None:
    table = ParameterTable(make_groups())
    order = StateOrder()
    order.after_step({table.params[0]: {}}, table.index_of.__getitem__)
    order.after_step({table.params[1]: {}}, table.index_of.__getitem__)
    assert order.of(table.params[1]) == (2, 1)


def test_groups_that_share_a_tensor_share_one_again_when_a_file_has_given_each_a_copy() -> None:
    shared, own = torch.tensor(0.5), torch.tensor(0.5)
    exposed = [{"lr": shared}, {"lr": shared}, {"lr": own}, {"lr": shared}]
    loaded = [{"lr": torch.tensor(0.25)} for _ in range(3)] + [{"lr": torch.tensor(0.125)}]
    restrict.share_as_before(loaded, exposed)
    assert loaded[0]["lr"] is loaded[1]["lr"]
    assert loaded[2]["lr"] is not loaded[0]["lr"]
    assert [group["lr"].item() for group in loaded] == [0.25, 0.25, 0.25, 0.125]
