"""Checks of options that move state or delay parameters."""

from typing import Any
from unittest import mock

import torch

from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.mesh_twins import MeshTwins


class Flights:
    """Notes after each step of a `ParallelOptimizer` how many buckets of each member are on their way."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        step = ParallelOptimizer.step

        def noted(opt: ParallelOptimizer, *args: Any) -> Any:
            result = step(opt, *args)
            self.seen.append([len(internals.syncs_in_flight(member)) for member in opt.members])
            return result

        self.noting = mock.patch.object(ParallelOptimizer, "step", noted)

    def check(self, members: int) -> None:
        """After the last step parameters of every member were on their way."""
        assert len(self.seen[-1]) == members
        assert all(self.seen[-1]), self.seen


def check_state(twins: MeshTwins) -> None:
    """State dicts are those of the state beside the parameters, and load again."""
    state = twins.opt.state_dict()
    twins.opt.load_state_dict(state)
    torch.distributed.barrier()
    again = twins.opt.state_dict()
    for number, one in state["state"].items():
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][number][key])), (number, key)
    torch.distributed.barrier()
