"""Join over a mesh, with peers that send what a test says: how progress is compared, and when an iteration begins."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join, _JoinConfig

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.parallel import join
from ddp_zero.parallel.join import ParallelJoin, PeersUnderJoin, Progress, ties_of, unite

TRAINING, STEPPING, JOINED, DONE = Progress


class Dim:
    """The ranks along a dimension of the mesh, this rank among them, of which each sends what a test says.

    Args:
        rank: this rank's place.
        ints: for each message, the numbers of all ranks; ``...`` for those of this rank.
        texts: the same of texts.
    """

    def __init__(self, rank: int, *ints: Sequence[Any], texts: Sequence[Any] = ()) -> None:
        self.group_rank, self.sent = rank, list[list[int]]()
        self._ints, self._texts = list(ints), texts

    def all_gather_ints(self, mine: list[int]) -> list[list[int]]:
        self.sent.append(mine)
        return [mine if one is ... else one for one in self._ints.pop(0)]

    def all_gather_text(self, mine: str) -> list[str]:
        return [mine if one is ... else json.dumps(one) for one in self._texts]

    def global_rank(self, rank: int) -> int:
        return 10 * rank


def check(mine: Progress, *dims: Dim, ties: Sequence[Sequence[int]] = (), counts: bool = False) -> PeersUnderJoin:
    peers = PeersUnderJoin(cast(Sequence[Communicator], dims), ties, counts)
    peers.check(mine)
    return peers


# Progress


def test_data_parallel_ranks_alone_compare_nothing() -> None:
    alone = Dim(0)
    peers = check(TRAINING, alone)
    assert alone.sent == []
    assert not peers.are_there


def test_ranks_that_have_joined_are_counted_where_averages_leave_them_out() -> None:
    data = Dim(0, [..., [0, JOINED], [0, DONE], [0, TRAINING]])
    assert check(TRAINING, data, counts=True).num_joined == 2
    assert data.sent == [[0, TRAINING]]


def test_ranks_in_a_run_of_a_schedule_and_in_the_step_differ() -> None:
    data = Dim(0, [..., [0, TRAINING]], texts=[..., ["1 0"]])
    with pytest.raises(RuntimeError, match=r"after as many runs of a schedule\. \[ZERO-312\]"):
        check(STEPPING, data, counts=True)


# Ranks that leave together


def members_of(*stated: list[list[int]]) -> Any:
    return [SimpleNamespace(stated=one, describe=lambda: "parameter group 1") for one in stated]


def test_experts_of_a_mesh_tie_those_at_one_place_and_dense_parameters_and_shared_embeddings_tie_none() -> None:
    everyone, ranks = [[0, 1, 2, 3]] * 4, [0, 1, 2, 3]
    assert ties_of(members_of(everyone), ranks) == []
    assert ties_of(members_of(everyone, [[0, 2], [1, 3], [0, 2], [1, 3]]), ranks) == [[0, 1], [2, 3]]
    both_ends = [[10, 11, 20, 21]] * 2
    assert ties_of(members_of([[10, 20]] * 2, both_ends), [10, 20]) == []
    crossed = members_of([[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert ties_of(crossed, ranks) == [[0, 1, 2, 3]]
    assert unite([[0, 1], [2, 3], [4, 5], [3, 4]]) == [[0, 1], [2, 3, 4, 5]]


def test_experts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"got \[1, 3\] in parameter group 1.*ZERO-812"):
        ties_of(members_of([[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]]), [0, 1, 2, 3])


def test_a_difference_along_one_dimension_is_carried_through_the_next_ones() -> None:
    data, tensor = Dim(0, [..., [0, 0]], texts=[...]), Dim(0, [..., [1, 1]], texts=[...])
    other = Dim(1, [[0, 0], ...], texts=[...])
    with pytest.raises(RuntimeError, match="ZERO-312"):
        check(TRAINING, data, tensor, other)
    assert (tensor.sent, other.sent, data.sent) == ([[0, 0]], [[0, 1]], [[1, 0]])


def test_a_difference_elsewhere_raises_here_and_all_ranks_are_named_in_order() -> None:
    """This rank's place agrees; of the other place, rank 2 has joined and rank 3 trains."""
    data = Dim(0, [..., [1, 0]], texts=[..., ["2 1", "3 0"]])
    with pytest.raises(RuntimeError, match=r"got global ranks 2 that have joined and 0, 1, 3 that still train"):
        check(TRAINING, data, Dim(0, [..., [0, 0]], texts=[..., ["1 0"]]))
    data = Dim(0, [..., [1, 2]], texts=[..., ["10 1", "9 1"]])
    with pytest.raises(RuntimeError, match=r"got global ranks 0, 1, 9, 10 that have joined and none that still train"):
        check(JOINED, data, Dim(0, [..., [2, 2]], texts=[..., ["1 1"]]))


# Iterations without a DDP model


class Peers:
    are_there = True

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def check(self, mine: Progress) -> Progress:
        self._events.append(mine.name)
        return mine


class Joining:
    """A stand-in for the optimizer."""

    joins = True
    _join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=True)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[ParallelJoin, Any, nn.Module, list[str]]:
    """Join over a model, and what it does."""
    events: list[str] = []
    monkeypatch.setattr(join, "engine_of", lambda zero: zero)
    monkeypatch.setattr(Join, "notify_join_context", lambda _: events.append("notify"))

    zero = SimpleNamespace(averages_reach_joined=False, watch_shadows=lambda: bool)
    model = nn.Linear(1, 1)
    member: Any = SimpleNamespace(ddp=None, averages=object(), zero=zero)
    opt: Any = Joining()  # which the library refers to weakly
    peers: Any = Peers(events)
    found = ParallelJoin(opt, model, [member], peers, lambda: events.append("step"), is_piped=False)
    assert zero.averages_reach_joined
    return found, opt, model, events


def test_an_iteration_begins_once_before_the_first_forward_pass_or_in_the_step(begun: Any) -> None:
    one, _opt, model, events = begun
    for forwards in (1, 3, 0):
        events.clear()
        for _ in range(forwards):
            model(torch.ones(1))
        one.before_step()
        assert events == ["notify", "TRAINING"]


def test_forward_passes_without_gradients_are_no_iterations(begun: Any) -> None:
    _one, _opt, model, events = begun
    with torch.no_grad():
        model(torch.ones(1))
    assert events == []
