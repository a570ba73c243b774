"""Steps of whole matrices on their hosts, with ranks as threads of one process."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from threading import Barrier, Thread
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.costs import has_known_cost
from ddp_zero.core.local.inner import class_name, is_elementwise_class
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.parallel.whole import Cut, StateRoutes, mark, meeting_class, places_for
from tests import HANG
from tests.multiproc.cases import ToyLAMB


class Room:
    """Where the threads of a test exchange values."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = Barrier(ranks, timeout=HANG)
        self.values: list[Any] = [None] * ranks
        self.sent = 0
        self.trees: dict[tuple[int, int], Queue[Any]] = {}

    def tube(self, source: int, to: int) -> "Queue[Any]":
        return self.trees.setdefault((source, to), Queue())


class Peer:
    """A rank of a `Room`, with the calls of a communicator that are made here."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.group_rank, self.world_size = room, GroupRank(rank), room.ranks

    def peers(self) -> list[GroupRank]:
        return [GroupRank(rank) for rank in range(self.world_size) if rank != self.group_rank]

    def name(self, rank: GroupRank) -> str:
        return f"rank {rank}"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        self.room.values[self.group_rank] = list(values)
        self.room.barrier.wait()
        every = list(self.room.values)
        self.room.barrier.wait()
        return every

    def swap(
        self,
        sent: Mapping[GroupRank, Sequence[Tensor]],
        received: Mapping[GroupRank, Sequence[Tensor]],
        device: torch.device,
        what: str,
    ) -> None:
        self.room.values[self.group_rank] = sent
        self.room.barrier.wait()
        for peer, rooms in received.items():
            given = self.room.values[peer][self.group_rank]
            assert [one.numel() for one in given] == [one.numel() for one in rooms]
            for one, other in zip(rooms, given, strict=True):
                one.copy_(other)
        self.room.barrier.wait()
        if self.group_rank == 0:
            self.room.sent += sum(one.nbytes for _, by_peer in self._all() for ones in by_peer.values() for one in ones)
        self.room.barrier.wait()

    def send_tree(self, tree: Any, to: GroupRank) -> None:
        self.room.tube(self.group_rank, to).put(tree)

    def receive_tree(self, source: GroupRank, device: torch.device) -> Any:
        return self.room.tube(source, self.group_rank).get(timeout=HANG)

    def _all(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.room.values))


def on_threads(ranks: int, body: Callable[[Peer], Any]) -> tuple[list[Any], Room]:
    """Each rank's result, or its error."""
    room = Room(ranks)
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = body(Peer(room, rank))
        except Exception as error:
            found[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    return found, room


SHAPES = [((12, 8), 0), ((8, 12), 1), ((24, 4), 0), ((5,), None)]
KINDS: list[tuple[Any, dict[str, Any]]] = [(ToyLAMB, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9})]
if hasattr(torch.optim, "Muon"):
    KINDS.append((torch.optim.Muon, {"lr": 0.1}))


def whole_parameters(matrices_only: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape, _ in SHAPES if len(shape) > 1 or not matrices_only]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(param.shape, generator=generator) for param in params]


def part_of(value: Tensor, place: int, peer: Peer) -> Tensor:
    dim = SHAPES[place][1]
    return value.clone() if dim is None else value.chunk(peer.world_size, dim=dim)[peer.group_rank].clone()


def trained(peer: Peer, kind: Any, options: dict[str, Any], steps: int) -> tuple[list[Tensor], Optimizer]:
    """This rank's parameters after some steps; the third one has no gradient in the second step."""
    wholes = whole_parameters(kind.__name__ == "Muon")
    params = [nn.Parameter(part_of(one.detach(), place, peer)) for place, one in enumerate(wholes)]
    cuts = {
        mark(param): Cut(
            cast(Communicator, peer),
            dim,
            GroupRank(place % peer.world_size),
            SHAPES[place][0],
            f"parameter {place}",
            (SHAPES[place][0][dim] // peer.world_size,) * peer.world_size,
        )
        for place, (param, (_, dim)) in enumerate(zip(params, SHAPES, strict=False))
        if dim is not None
    }
    made: Any = meeting_class(kind, cuts)
    opt: Optimizer = made(params, **options)
    for step in range(steps):
        for place, (param, grad) in enumerate(zip(params, gradients(wholes, step), strict=True)):
            param.grad = None if (step, place) == (1, 2) else part_of(grad, place, peer)
        opt.step()
    return [param.detach() for param in params], opt


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_have_the_bits_of_whole_parameters(kind: Any, options: dict[str, Any], ranks: int) -> None:
    wholes = whole_parameters(kind.__name__ == "Muon")
    start = [one.detach().clone() for one in wholes]
    plain = kind(wholes, **options)
    for step in range(3):
        for place, (param, grad) in enumerate(zip(wholes, gradients(wholes, step), strict=True)):
            param.grad = None if (step, place) == (1, 2) else grad
        plain.step()
    found, room = on_threads(ranks, lambda peer: trained(peer, kind, options, 3))
    for rank, outcome in enumerate(found):
        assert not isinstance(outcome, Exception), outcome
        for place, (mine, whole) in enumerate(zip(outcome[0], wholes, strict=True)):
            assert torch.equal(mine, part_of(whole.detach(), place, Peer(room, rank)))
    assert all(not torch.equal(*pair) for pair in zip(start, wholes, strict=True))
    hosted = Counter(
        place for _, opt in found for place, param in enumerate(opt.param_groups[0]["params"]) if opt.state.get(param)
    )
    assert all(
        hosted[place] == (1 if dim is not None else ranks) for place, (_, dim) in enumerate(SHAPES[: len(wholes)])
    )
    nbytes = [whole.nbytes * (3 if place != 2 else 2) for place, whole in enumerate(wholes) if whole.ndim > 1]
    assert room.sent == 3 * (ranks - 1) * sum(nbytes) // ranks


class Counting(ToyLAMB):
    """Counts in the group, and fails on wholes of 96 elements in the second step."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if self.fails and group["k"] == 2 and any(param.numel() == 96 for param in group["params"]):
                raise ValueError("singular")
        super().step(closure)


class Fails(Counting):
    """Fails."""

    fails = True


def test_options_that_a_step_changes_change_on_every_rank() -> None:
    found, _ = on_threads(3, lambda peer: trained(peer, Counting, {}, 2)[1].param_groups[0]["k"])
    assert found == [2, 2, 2]


def test_an_error_of_a_host_is_raised_on_every_rank() -> None:
    found, _ = on_threads(2, lambda peer: trained(peer, Fails, {}, 2))
    assert all(isinstance(one, Exception) for one in found)
    assert any("singular" in str(one) for one in found)
    assert all("singular" in str(one) or "ZERO-319" in str(one) for one in found)


def test_gradients_on_some_ranks_only_are_refused_on_all() -> None:
    def body(peer: Peer) -> None:
        param = nn.Parameter(torch.ones(4, 2))
        cut = Cut(cast(Communicator, peer), 0, GroupRank(0), (8, 2), "parameter 0", (4, 4))
        made: Any = meeting_class(ToyLAMB, {mark(param): cut})
        opt = made([param])
        param.grad = torch.ones(4, 2) if peer.group_rank else None
        opt.step()

    found, _ = on_threads(2, body)
    assert all("ZERO-816" in str(one) for one in found), found


def test_the_class_keeps_its_name_and_cost() -> None:
    made: Any = meeting_class(ToyLAMB, {})
    assert class_name(made([nn.Parameter(torch.ones(2))])) == class_name(ToyLAMB([nn.Parameter(torch.ones(2))]))
    assert not is_elementwise_class(meeting_class(SGD, {}))
    if hasattr(torch.optim, "Muon"):
        assert has_known_cost(meeting_class(torch.optim.Muon, {}))


@pytest.mark.parametrize(("data_ranks", "parts"), [(2, 2), (4, 2), (3, 4), (1, 8)])
def test_hosts_share_the_work_whichever_data_parallel_rank_owns_the_parts(data_ranks: int, parts: int) -> None:
    """Owners are dealt in the same order, so each has hosts of all numbers."""
    wholes: list[Any] = [(SGD, (8, 8), {}) for _ in range(2 * data_ranks * parts)]
    hosts = [host for _, host in places_for(wholes, None, data_ranks, parts, 1.25)]
    pairs = Counter((place % data_ranks, host) for place, host in enumerate(hosts))
    assert set(pairs.values()) == {2}
    assert len(pairs) == data_ranks * parts


@pytest.mark.parametrize(("data_ranks", "parts"), [(2, 2), (4, 2), (3, 4), (1, 8)])
def test_owners_and_hosts_are_dealt_together_within_a_bound_on_bytes(data_ranks: int, parts: int) -> None:
    ranks = data_ranks * parts
    even: list[Any] = [(SGD, (8, 8), {}) for _ in range(2 * ranks)]
    found = Counter(places_for(even, [256] * len(even), data_ranks, parts, 1.25))
    assert found == {(owner, host): 2 for owner in range(data_ranks) for host in range(parts)}
    if hasattr(torch.optim, "Muon"):
        # of little cost, and many bytes: no pair gets more than the bound allows
        flat: list[Any] = [(torch.optim.Muon, (1, 4096), {}), (torch.optim.Muon, (64, 64), {})] * (4 * ranks)
        held: Counter[Any] = Counter()
        for pair in places_for(flat, [4 * 4096] * len(flat), data_ranks, parts, 1.25):
            held[pair] += 4 * 4096
        assert max(held.values()) <= 1.25 * 4 * 4096 * len(flat) / ranks


@pytest.mark.parametrize("sizes", [(7, 5), (0, 12), (1, 0, 11)])
def test_parts_of_any_sizes_have_the_bits_of_the_whole_and_send_nothing_but_it(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(12, 3, generator=generator), torch.randn(3, 12, 3, generator=generator)
    for host in range(len(sizes)):

        def body(peer: Peer, host: int = host) -> Tensor:
            param = nn.Parameter(start.split(sizes)[peer.group_rank].clone())
            cut = Cut(cast(Communicator, peer), 0, GroupRank(host), (12, 3), "parameter 0", sizes, GroupRank(0))
            made: Any = meeting_class(ToyLAMB, {mark(param): cut})
            assert made.owner_of(param) == 0
            assert made.owner_of(nn.Parameter(torch.ones(1))) is None
            opt = made([param], lr=0.1)
            for grad in grads:
                param.grad = grad.split(sizes)[peer.group_rank].clone()
                opt.step()
            return param.detach()

        whole = nn.Parameter(start.clone())
        plain = ToyLAMB([whole], lr=0.1)
        for grad in grads:
            whole.grad = grad
            plain.step()
        found, room = on_threads(len(sizes), body)
        assert torch.equal(torch.cat(found), whole.detach())
        assert not torch.equal(whole.detach(), start)
        assert room.sent == 3 * len(grads) * 4 * 3 * (12 - sizes[host])


# States that a state dict has on another rank than the host


def table_of(count: int) -> ParameterTable:
    return ParameterTable([{"params": [nn.Parameter(torch.zeros(2, 2)) for _ in range(count)]}])


def checked(peer: Peer, states: dict[Any, Any], hosts: Sequence[int], owned: Sequence[int]) -> StateRoutes:
    cuts = {
        index: Cut(cast(Communicator, peer), 0, GroupRank(host), (4, 2), f"parameter {index}", (2, 2))
        for index, host in enumerate(hosts)
    }
    routes = StateRoutes(states, table_of(len(hosts)), cuts, owned)
    routes.check()
    return routes


def routed(peer: Peer, *given: Any) -> dict[Any, Any]:
    return checked(peer, *given).carry_out()


def test_states_go_to_hosts_and_masters_of_parts_stay() -> None:
    """Rank 0 has the states of 0, 1 and 3; hosts are 0, 1 and 1; nobody has a state of 2, and this rank not of 3."""

    def body(peer: Peer) -> dict[Any, Any]:
        master = torch.full((2, 2), float(peer.group_rank))
        mine: dict[Any, Any] = {index: {"master_weight": master} for index in range(4)}
        if peer.group_rank == 0:
            for index in (0, 1, 3):
                mine[index] = {"n": index, "m": torch.full((4, 2), float(index)), **mine[index]}
        return routed(peer, {**mine, 9: {"kept": True}, "other": 3}, [0, 1, 1, 1], [0, 1, 2])

    (first, second), _ = on_threads(2, body)
    assert [list(first), list(second)] == [[0, 1, 2, 3, 9, "other"]] * 2
    assert {index: sorted(first[index]) for index in range(4)} == {
        0: ["m", "master_weight", "n"],
        1: ["master_weight"],
        2: ["master_weight"],
        3: ["master_weight"],
    }
    assert (second[1]["n"], float(second[1]["m"][0, 0]), float(second[1]["master_weight"][0, 0])) == (1, 1.0, 1.0)
    assert [sorted(second[index]) for index in (0, 2, 3)] == [["master_weight"]] * 3, "3 is not owned here"


def test_a_state_of_two_ranks_is_refused_on_both() -> None:
    found, _ = on_threads(2, lambda peer: routed(peer, {0: {"n": peer.group_rank}}, [0], [0]))
    assert all("got rank 0 and rank 1. Load on each rank" in str(one) for one in found), found


def test_a_state_that_cannot_be_sent_is_refused_before_anything_is() -> None:
    unsendable = {0: {"n": object()}}
    for host, refused in ((1, False), (0, True)):

        def body(peer: Peer, host: int = host) -> StateRoutes:
            return checked(peer, unsendable if peer.group_rank else {}, [host], [0])

        found, _ = on_threads(2, body)
        assert ("without pickle for parameter 0" in str(found[1])) is refused, found


def test_states_where_they_belong_are_left_alone() -> None:
    found, room = on_threads(2, lambda peer: routed(peer, {0: {"n": 1}} if peer.group_rank else {}, [1], [0]))
    assert found == [{}, {0: {"n": 1}}]
    assert room.trees == {}
