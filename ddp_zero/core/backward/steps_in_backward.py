"""The steps that a backward pass takes: bucket by bucket, by programs, or all at its end."""

from collections.abc import Callable, Sequence
from operator import is_

from torch import Tensor

from ddp_zero.core.backward.bucket_gradients import BucketGradients
from ddp_zero.core.backward.ddp_buckets import DdpBuckets
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.overlap_machine import OverlapMachine, Regime
from ddp_zero.core.backward.program import Program, compile_pass
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.ddp.reducer import in_backward
from ddp_zero.core.ddp.unaveraged import check_hook, check_unreduced
from ddp_zero.core.local.parameters import GradientSource, ParameterTable
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.coupling import is_checked_step
from ddp_zero.core.step.join import borrow_gradients, serve_joined, share_options
from ddp_zero.core.step.runner import StepRunner


class StepsInBackward:
    """Takes the steps of one optimizer inside backward passes.

    Args:
        side: the stream that the step runs on.
        in_join: whether ranks may have run out of inputs.
        refused: called where ranks find that a hook has not averaged, before anything was stepped.

    Attributes:
        programs: of the buckets of the plan in this pass.
        num_full: how many of these buckets are full; 0 once the pass is closed.
        has_begun: whether a step by bucket has begun.
    """

    def __init__(
        self,
        runner: StepRunner,
        gradients: Gradients,
        machine: OverlapMachine,
        side: SideStream,
        in_join: Callable[[], bool],
        refused: Callable[[], object],
    ) -> None:
        self._runner, self._shard = runner, runner.shard
        self._gradients, self._machine, self._side = gradients, machine, side
        self._in_join, self._refused = in_join, refused
        self.programs: list[Program] = []
        self.num_full, self.has_begun = 0, False
        self._compiled: dict[tuple[Regime, bool], list[Program]] = {}  # by whether a profiler shows them
        self._compiled_for: tuple[object, ...] = ()  # the plan and options that they hold
        self._learnt: ParameterTable | None = None  # whose unused parameters are known, in a static graph

    def open(self) -> None:
        """Forget the pass before."""
        self.programs, self.num_full, self.has_begun = [], 0, False

    def begin(self, regime: Regime) -> None:
        """A pass begins whose regime is known."""
        shard, gradients = self._shard, self._gradients
        bound = gradients.buckets, shard.buckets, shard.sync  # replaced, never changed, when the plan changes
        if not (self._compiled_for and all(map(is_, bound, self._compiled_for))):
            self._compiled, self._compiled_for = {}, bound
        key = regime, shard.trace.is_profiling()
        if key not in self._compiled:
            begin = weakly(self._begin_step)  # a cycle would hold the process group
            self._compiled[key] = compile_pass(gradients, self._runner, self._machine, regime, begin)
        self.programs = self._compiled[key]

    @property
    def full(self) -> Sequence[BucketGradients]:
        """The buckets of the plan that are full in this pass."""
        return self._gradients.buckets[: self.num_full]

    @property
    def learns_unused(self) -> bool:
        """True if the pass is the first of a static graph, which tells the unused parameters."""
        return self._learnt is not self._shard.table and self._gradients.is_static

    # By bucket

    def _begin_step(self, due: range) -> None:
        """Before these buckets are stepped."""
        self._check_hook(self._gradients.buckets[due.start : due.stop])
        if self.has_begun:
            return
        if self._in_join():
            # a collective before the first bucket's: joined ranks take part in it, in this order
            share_options(self._shard, has_joined=not in_backward())
        self._runner.begin()
        self.has_begun = True

    def end(self) -> None:
        """After the last bucket: finish the syncs, so that no half-updated parameter is visible after backward."""
        with self.full[0].on_stream:
            self._runner.end()
        # the user's stream reads parameters from here on; the host does not wait
        with self._shard.trace.label("join_streams"):
            self._side.join()

    # At the end of backward

    def finish(self, regime: Regime, has_joined: bool = False) -> None:
        """Finish a pass that was not stepped by bucket, once gradients are published; step if it is deferred.

        Args:
            regime: of the pass.
            has_joined: whether this rank has joined: its gradients are a peer's.
        """
        if regime is Regime.DEFERRED and not self._in_join():
            check_unreduced(self._shard)
        if regime is Regime.DEFERRED or self._in_join():
            self._check_hook(self.full)
        # waits for every reduction first: a step must not read a sum that peers still write
        self._gradients.finish_reductions(has_joined)
        if self._machine.backward_finished():
            self._step_all(has_joined)
        if self.learns_unused:
            if isinstance(self._gradients.source, DdpBuckets):  # the other reducer has learnt it
                self._gradients.source.learn_unused(has_joined)
            self._learnt = self._shard.table

    def _step_all(self, has_joined: bool) -> None:
        source: GradientSource = self._gradients
        if has_joined:
            source = self.borrow()
        elif self._in_join():
            serve_joined(self._shard, self._gradients.reach_joined)
        self._runner.begin()
        self._runner.run(source)

    def borrow(self) -> GradientSource:
        """On a rank that has joined: the gradients of a peer."""
        return borrow_gradients(self._shard, self._reduced_gradient, are_whole=not self._gradients.reach_joined)

    def _reduced_gradient(self, index: int) -> Tensor:
        """The gradient that the reduction has left on this rank for an owned parameter."""
        param = self._shard.table.params[index]
        found = next(one for one in self.full if any(param is member for member in one.params)).gradient(index)
        assert found is not None, "a rank that still trains says so"
        return found

    def _check_hook(self, buckets: Sequence[BucketGradients]) -> None:
        """In some steps, before any of these buckets: have ranks compare gradients that a user's hook has reduced."""
        if not (self._gradients.is_users and is_checked_step(self._runner.next_number)):
            return
        for bucket in buckets:
            with bucket.on_stream, bucket.waiting:
                bucket.wait()
        try:
            check_hook(self._shard, [(param, bucket.whole(param)) for bucket in buckets for param in bucket.params])
        except RuntimeError:
            self._refused()  # no step was taken
            raise
