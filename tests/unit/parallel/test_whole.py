"""Steps of whole matrices on their hosts, with ranks as threads of one process."""

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.costs import has_known_cost
from ddp_zero.core.local.inner import class_name, is_elementwise_class
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.parallel.whole import Cut, StateRoutes, gathering_class, number_of_part, places_for
from tests.multiproc.cases import ToyLAMB
from tests.unit.threads import Peer, on_threads


class Counting(ToyLAMB):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


def test_options_that_a_step_changes_change_on_every_rank() -> None:
    def body(peer: Peer) -> Any:
        param = nn.Parameter(torch.ones(4, 2))
        cut = Cut(cast(Communicator, peer), 0, GroupRank(1), (12, 2), "parameter 0", (4, 4, 4))
        made: Any = gathering_class(Counting, {number_of_part(param): cut})
        opt = made([param])
        for _ in range(2):
            param.grad = torch.ones(4, 2)
            opt.step()
        return opt.param_groups[0]["k"]

    assert on_threads(3, body) == [2, 2, 2]


def test_the_class_keeps_its_name_and_cost() -> None:
    made: Any = gathering_class(ToyLAMB, {})
    assert class_name(made([nn.Parameter(torch.ones(2))])) == class_name(ToyLAMB([nn.Parameter(torch.ones(2))]))
    assert not is_elementwise_class(gathering_class(SGD, {}))
    if hasattr(torch.optim, "Muon"):
        assert has_known_cost(gathering_class(torch.optim.Muon, {}))


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


def test_a_state_that_cannot_be_sent_to_its_host_is_refused_before_anything_is() -> None:
    table = ParameterTable([{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    for host, refused in ((1, False), (0, True)):

        def body(peer: Peer, host: int = host) -> None:
            cut = Cut(cast(Communicator, peer), 0, GroupRank(host), (4, 2), "parameter 0", (2, 2))
            StateRoutes({0: {"n": object()}} if peer.group_rank else {}, table, {0: cut}, [0]).check()

        found = on_threads(2, body)
        assert ("without pickle for parameter 0" in str(found[1])) is refused, found
