"""One backward pass: how it steps, which buckets have arrived, and the step that it takes.

The step is taken bucket by bucket from reduced gradients, or all at once when they are published; `hook.py` decides
when. On an accelerator it runs on a stream of its own.
"""

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from ddp_zero.core.backward.gradients import BucketGradients, Gradients
from ddp_zero.core.backward.reducer import in_backward
from ddp_zero.core.backward.regime import Choice, Regime
from ddp_zero.core.backward.side_stream import SideStream
from ddp_zero.core.local.parameters import GradientSource
from ddp_zero.core.step.join import borrow_gradients, serve_joined, share_options
from ddp_zero.core.step.sharded_step import ShardedStep


class Iteration:
    """A backward pass whose gradients are reduced.

    Args:
        sharded: the step.
        gradients: where averaged gradients are.
        side: the stream that the step runs on.
        joins: whether ranks may have run out of inputs.

    Attributes:
        choice: how it steps, and why; chosen at its first bucket.
        arrived: the buckets whose reduction it has started, in order; empty once it is closed.
        fits: whether all that it depends on besides DDP's buckets is as the plan expects.
        matching: how many of them, from the first on, are the plan's.
        has_begun: whether a step by bucket has begun.
    """

    def __init__(self, sharded: ShardedStep, gradients: Gradients, side: SideStream, joins: Callable[[], bool]) -> None:
        self._sharded = sharded
        self._gradients = gradients
        self._side = side
        self._joins = joins
        self.choice = Choice(Regime.DEFERRED, "no backward pass yet")
        self.arrived: list[BucketGradients] = []
        self.fits = False
        self.matching = 0
        self.has_begun = False

    def close(self) -> None:
        """Let go of reduced buckets."""
        self.arrived.clear()

    def step_bucket(self, index: int) -> None:
        """Wait for a bucket's gradients, step what this rank owns of it, start its sync."""
        if not self.has_begun:
            self._begin()
        arrival = self.arrived[index]
        with arrival.on_stream:
            if not arrival.is_summed:
                arrival.wait()
            self._sharded.step_bucket(index, arrival)
        arrival.release()

    def end_step(self) -> None:
        """Finish the syncs, after every bucket was stepped."""
        if not self.has_begun:
            self._begin()
        with self.arrived[0].on_stream:
            self._sharded.end()
        with self._sharded.trace.label("join_streams"):
            self._side.join()

    def step_all(self, has_joined: bool) -> None:
        """Step from published gradients, or from a peer's on a rank that has joined."""
        sharded = self._sharded
        source: GradientSource = self._gradients
        if has_joined:
            source = borrow_gradients(sharded, self.reduced_gradient)
        elif self._joins():
            serve_joined(sharded, self._gradients.reach_joined)
        sharded.begin()
        sharded.run(source)

    def reduced_gradient(self, index: int) -> Tensor:
        """What the reduction left on this rank for a parameter that it owns."""
        param = self._sharded.table.params[index]
        return next(one for one in self.arrived if any(param is member for member in one.params)).gradient(index)

    def sizes(self) -> Sequence[int]:
        """How many parameters each bucket has."""
        return [len(one.params) for one in self.arrived]

    def _begin(self) -> None:
        if self._joins():
            share_options(self._sharded, has_joined=not in_backward())
        self._sharded.begin()
        self._sharded.changes.begin()
        self.has_begun = True


def asks_whether_it_joins(joinable: Joinable) -> Callable[[], bool]:
    """A function that returns whether ranks may have run out of inputs.

    It refers to nothing that holds the hook, so that no cycle keeps the process group alive.
    """
    reference = weakref.ref(joinable)

    def joins() -> bool:
        alive = reference()
        return alive is not None and bool(alive._join_config.enable)

    return joins
