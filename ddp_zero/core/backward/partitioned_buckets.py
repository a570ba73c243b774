"""Stage 2's buckets of the plan: which reducer fills them, when they are reduced, and the memory that they share.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import filterfalse
from operator import attrgetter

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.bucket_plan import BucketPlan
from ddp_zero.core.backward.planned_bucket import ForeignGradients
from ddp_zero.core.backward.planned_reducer import PlannedReducer, taken_by_others
from ddp_zero.core.backward.scratch_bucket import (
    KEPT,
    RELEASED,
    SUMMED,
    OwnedUsageCounts,
    ReduceContext,
    ScratchBucket,
    ScratchLayout,
)
from ddp_zero.core.backward.visible_gradients import VisibleGradients
from ddp_zero.core.comm.recorder import Act
from ddp_zero.core.ddp.preconditions import sparse_gradient_error
from ddp_zero.core.ddp.reducer import finds_unused
from ddp_zero.core.local.memory import return_freed_memory
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.plan.buckets import CAP_BYTES, ddp_layout

_LEAST_REST = 4  # times the buffers' bytes: a model that is smaller would be slowed down by more than a percent

_IS_STARTED, _PROGRESS = attrgetter("is_started"), attrgetter("progress")


class PartitionedBuckets:
    """The buckets of the plan, reduced to their owners.

    Args:
        visible: what ``param.grad`` shows.
        in_join: whether ranks may have run out of inputs.

    Attributes:
        scratch_buckets: the buckets, as they are reduced in each pass.
        indices: the parameters of all of them.
        planned_reducer: stands in the place of DDP's.
        used: parameters that any rank has used in this pass; None: all.
    """

    def __init__(
        self,
        context: ReduceContext,
        ddp: DistributedDataParallel,
        plan: BucketPlan,
        visible: VisibleGradients,
        in_join: Callable[[], bool],
    ) -> None:
        self._context, self._shard = context, context.shard
        self._plan, self._visible, self._in_join = plan, visible, in_join
        self.used: set[Tensor] | None = None
        self._first_sums: int | None = None  # bytes of the first pass's sums that were not freed yet
        self._finds_unused = finds_unused(ddp)
        self.planned_reducer = PlannedReducer(
            ddp,
            context.where,
            weakly(self._before_pass),
            lambda params: sparse_gradient_error(context.shard.table, params),
        )
        self.follow_plan()

    # The plan

    def follow_plan(self) -> None:
        """Lay out scratches for the plan's buckets; from the next pass on, gradients land in them."""
        shard, buckets, reducer = self._shard, self._shard.plan.buckets, self.planned_reducer
        context = self._context
        assign_memory = weakly(self._assign_memory)
        without = reducer.users.unused
        layouts = [
            ScratchLayout(members, buckets[place], shard, context.side)
            for place, members in enumerate(self._plan.members)
        ]
        self.scratch_buckets = [ScratchBucket(context, one, assign_memory, without) for one in layouts]
        self.indices = [index for bucket in self.scratch_buckets for index in bucket.indices]
        self._nbytes = sum(bucket.layout.nbytes for bucket in self.scratch_buckets)  # of gradients
        context.drop_memory()
        self._taken_by_others = taken_by_others(reducer)  # parameters that other optimizers of stage 2 have
        self._foreign = self._foreign_gradients()
        reducer.lay_out(self.scratch_buckets, self._foreign)
        self._digest = shard.binding.digest
        self._visible.follow_owners(shard.binding.owned_parts())

    def _foreign_gradients(self) -> list[ForeignGradients]:
        """Parameters that DDP reduces and no optimizer of stage 2 has, in buckets by DDP's rule."""
        plan = self._plan
        taken = {*plan.bucket_of, *self._taken_by_others}
        foreign = [param for param in plan.reduced if param not in taken]
        kinds = [f"{param.device}/{param.dtype}" for param in foreign]
        layout = ddp_layout([param.nbytes for param in foreign], kinds, plan.given_caps or (CAP_BYTES,))
        return [ForeignGradients([foreign[place] for place in bucket]) for bucket in layout]

    def _assign_memory(self) -> None:
        self._context.assign_memory(self.scratch_buckets)

    def _before_pass(self) -> None:
        """Before a pass that is reduced, where ranks may communicate: follow parameters that were frozen or moved."""
        may_communicate = not self._in_join()
        if may_communicate:
            self._plan.follow_added()
        self._shard.refresh(may_communicate, held=self._visible.taken())
        # another optimizer of the model may have come, gone or grown
        if self._digest != self._shard.binding.digest or self._taken_by_others != taken_by_others(self.planned_reducer):
            self.follow_plan()
        if self._context.is_in_use:
            self._context.drop_memory()

    # A pass

    def start_acts(self, place: int, is_static: bool) -> list[Act]:
        """The start of the reduction of a bucket that is full; in a static graph parameters may be unused."""
        start: Callable[[], object] = self.scratch_buckets[place].start
        if self._finds_unused or is_static:
            start = partial(weakly(self._start_asking), place)
        return [(self._shard.trace.label("reduce", place), start)]

    def _start_asking(self, place: int) -> None:
        """Start a reduction where parameters may be unused on this rank, and used on others."""
        bucket = self.scratch_buckets[place]
        unused = self.planned_reducer.users.unused
        is_asked = self._finds_unused and self.planned_reducer.steps_by_bucket
        bucket.usage = OwnedUsageCounts(self._context, bucket.layout, unused) if is_asked else None
        is_doubted = unused and self.planned_reducer.steps_by_bucket
        bucket.doubtful = self._doubtful(bucket.owned) if is_doubted else frozenset()
        bucket.start()

    def _doubtful(self, owned: Sequence[int]) -> AbstractSet[int]:
        """The owned parameters of a full bucket that have no gradient, as far as this rank knows."""
        params, unused, used = (
            self._shard.table.params,
            self.planned_reducer.users.unused,
            self.planned_reducer.users.anywhere,
        )
        if not self._finds_unused and used is None:
            return frozenset()
        without = [index for index in owned if params[index] in unused and params[index] not in (used or ())]
        return set(filterfalse(self._visible.was_taken, without))

    def started(self) -> list[ScratchBucket]:
        """The buckets whose reduction the iteration has started."""
        return [*filter(_IS_STARTED, self.scratch_buckets)]  # without a loop in Python: it is asked several times

    def finish(self) -> list[ScratchBucket]:
        """Finish every reduction; the buckets keep their sums, for the user's stream."""
        buckets = self.started()
        for bucket in buckets:
            if bucket.progress >= KEPT:
                continue
            with bucket.on_stream:
                if bucket.progress < SUMMED:
                    with bucket.waiting:
                        bucket.wait()
                bucket.keep()
        if self._first_sums is None:
            self._first_sums = sum(bucket.nbytes for bucket in buckets)
        self._context.side.join()  # from here on sums are read on the user's stream: shown, handed over, stepped
        return buckets

    def publish_foreign(self) -> None:
        """At the end of backward: show the averages of parameters that the optimizer does not have."""
        for foreign in self._foreign:
            foreign.publish(self.used)

    def has_gradient(self, index: int) -> bool:
        """True if any rank has used a parameter, or earlier passes have left a gradient of it."""
        used = self.used
        return used is None or self._shard.table.params[index] in used or self._visible.was_taken(index)

    def end(self) -> None:
        """Close the iteration."""
        started = self.started()
        held = {*map(_PROGRESS, started)} - {RELEASED}
        is_in_flight = any(one < SUMMED for one in held)
        if held:  # seldom: most buckets were released in the pass
            for bucket in started:
                if bucket.progress != RELEASED:
                    with bucket.on_stream:
                        bucket.release()
        self._rest(is_in_flight)
        self.forget()

    def forget(self) -> None:
        """Forget the buckets of the iteration."""
        self.used = None
        for bucket in self.started():
            bucket.is_started = False

    def _rest(self, is_in_flight: bool) -> None:
        """Give back the pages of idle buffers.

        To touch pages again takes about 0.5 ms per MiB. So buffers that are large beside the model keep theirs.

        Args:
            is_in_flight: whether peers may still read lent buffers, since the iteration was given up.
        """
        # pages are dropped only when no peer can read them: a message in flight would send zeros
        if not is_in_flight and _LEAST_REST * self._context.nbytes <= self._nbytes:
            for buffer in (*self._context.scratches, *self._context.receives):
                buffer.rest()

    def return_first_sums(self) -> None:
        """Once the sums of the first pass are free: the first step waits for them all, later ones may keep none."""
        if self._first_sums and not self._context.carried:
            return_freed_memory(self._first_sums)
            self._first_sums = 0
