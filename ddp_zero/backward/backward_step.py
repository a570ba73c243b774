"""The step that a backward pass takes: bucket by bucket from reduced gradients, or all at once when they are published.

`hook.py` decides when. On an accelerator the step runs on a stream of its own.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from ddp_zero.backward.gradients import Arrival, Gradients
from ddp_zero.backward.reducer import in_backward
from ddp_zero.backward.side_stream import SideStream
from ddp_zero.comm.tracing import label
from ddp_zero.local.masters import GradientSource
from ddp_zero.step.join import borrow_gradients, serve_joined, share_options
from ddp_zero.step.sharded_step import ShardedStep


class BackwardStep:
    """Steps with the gradients of one backward pass.

    Args:
        sharded: the step.
        gradients: where averaged gradients are.
        side: the stream that the step runs on.
        joinable: the optimizer, on which Join sets whether it is active.

    Attributes:
        arrived: the buckets whose reduction this backward pass has started, in order.
        has_begun: whether a step by bucket has begun in this backward pass.
    """

    def __init__(self, sharded: ShardedStep, gradients: Gradients, side: SideStream, joinable: Joinable) -> None:
        self._sharded = sharded
        self._gradients = gradients
        self._side = side
        self._joinable = weakref.ref(joinable)  # it holds the hook that holds this
        self.arrived: list[Arrival] = []
        self.has_begun = False

    def open(self) -> None:
        """Forget the buckets of the last backward pass; a new one begins."""
        self.arrived.clear()
        self.has_begun = False

    def step_bucket(self, index: int) -> None:
        """Wait for a bucket's gradients, step what this rank owns of it, start its sync."""
        self._begin()
        arrival, sharded = self.arrived[index], self._sharded
        with self._side.running(arrival.params[0].device):
            with label("wait_reduce", bucket=index):
                arrival.wait()
            sharded.step_bucket(index, arrival)
        arrival.release()

    def finish(self) -> None:
        """Finish the syncs, after every bucket was stepped."""
        self._begin()
        with self._side.running(self.arrived[0].params[0].device):
            self._sharded.finish()
        self._side.join()

    def step_all(self, has_joined: bool) -> None:
        """Step from published gradients, or from a peer's on a rank that has joined."""
        sharded = self._sharded
        source: GradientSource = self._gradients
        if has_joined:
            source = borrow_gradients(sharded, self.reduced_gradient)
        elif self.join_is_on():
            serve_joined(sharded, self._gradients.reach_joined)
        sharded.begin()
        sharded.run(source)

    def reduced_gradient(self, index: int) -> Tensor:
        """What the reduction left on this rank for a parameter that it owns."""
        param = self._sharded.table.params[index]
        return next(one for one in self.arrived if any(param is member for member in one.params)).gradient(index)

    def layout(self) -> list[list[int]]:
        """The optimizer's parameters in each bucket, by index."""
        index_of = self._sharded.table.index_of
        return [[index_of[param] for param in one.params if param in index_of] for one in self.arrived]

    def compositions(self) -> list[tuple[int, ...]]:
        """The parameters of each bucket, by ``id``."""
        return [tuple(map(id, one.params)) for one in self.arrived]

    def sizes(self) -> Sequence[int]:
        """How many parameters each bucket has."""
        return [len(one.params) for one in self.arrived]

    def join_is_on(self) -> bool:
        """Whether ranks may have run out of inputs."""
        joinable = self._joinable()
        return joinable is not None and joinable._join_config.enable

    def _begin(self) -> None:
        if not self.has_begun:
            if self.join_is_on():
                share_options(self._sharded, has_joined=not in_backward())
            self._sharded.begin()
            self.has_begun = True
