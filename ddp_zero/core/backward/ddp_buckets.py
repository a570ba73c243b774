"""Stage 1's source of gradients: DDP's own buckets. Each covers buckets of the plan, or parts of them.

The buckets of the plan are decided before any backward pass. DDP's own are often the same; where they are not, as in
its first iteration, a bucket of the plan is full once DDP's have *covered* it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress
from operator import ne
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.bucket_gradients import BucketGradients, UsageCounts
from ddp_zero.core.backward.bucket_plan import BucketPlan
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.communicator import average_as_ddp, sum_as_ddp
from ddp_zero.core.comm.missing import name_missing_ranks
from ddp_zero.core.comm.recorder import Label
from ddp_zero.core.ddp.preconditions import sparse_gradient_error
from ddp_zero.core.ddp.reducer import (
    Window,
    finds_unused,
    gradients_are_views,
    has_static_graph,
    in_backward,
    place_of_bucket,
    rebuild_buckets,
    reduced_parameters,
    windows_in_bucket,
)
from ddp_zero.core.ddp.registered_hook import CommHook
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import not_awaiting_params


class ReducedBucket(BucketGradients):
    """One of DDP's buckets, whose averaged gradients are, or will be, in one tensor in DDP's order.

    Args:
        windows: where DDP lays the gradients of its parameters.
        own: where the elements lie that this rank steps, by index of the parameter.
        side: the stream that reads it.
        stays: whether the tensor is DDP's own, in each pass.
    """

    def __init__(
        self,
        index: int,
        windows: dict[Tensor, Window],
        own: dict[int, Window],
        shard: Shard,
        side: SideStream,
        *,
        stays: bool,
    ) -> None:
        self.params = list(windows)
        self.windows, self._own_windows, self._stays = windows, own, stays
        self._future: Future[Any] | None = None
        self._side = side
        self._reduced: Tensor | None = None
        self._address = 0  # of the tensor that there are views of
        self._views: dict[int, Tensor] = {}
        self._lists: dict[Sequence[int], list[Tensor | None]] = {}
        self.on_stream = side.running(self.params[0].device)
        self.waiting = shard.trace.label("wait_reduce", index)
        self.is_summed = False

    def start(self, future: Future[Any], doubtful: AbstractSet[int]) -> None:
        """Its reduction was started; for ``doubtful`` see the attribute."""
        self._future, self._reduced, self.is_summed = future, None, False
        self.doubtful, self.usage = doubtful, None

    def wait(self) -> None:
        """Block until the reduction has resolved."""
        if self.is_summed:
            return
        assert self._future is not None, "started before"
        reduced = self._future.wait()
        flat = reduced if isinstance(reduced, Tensor) else reduced[0]
        if flat.dtype != self.params[0].dtype:  # torch's fp16_compress_wrapper leaves that to DDP
            flat = flat.to(self.params[0].dtype)
        self._side.record_use(flat)
        if self.usage is not None:
            self.usage.wait()
        if (address := flat.data_ptr()) != self._address or not self._stays:
            self._views, self._lists, self._address = {}, {}, address
        self._reduced, self.is_summed = flat, True

    def gradient(self, index: int) -> Tensor | None:
        assert self._reduced is not None, "waited for first"
        if self.doubtful and self.is_unused(index):
            return None
        if index not in self._views:
            self._views[index] = self._own_windows[index].view(self._reduced)
        return self._views[index]

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        if self.doubtful:
            return super().gradients(indices)
        if indices not in self._lists:
            self._lists[indices] = super().gradients(indices)
        return self._lists[indices]

    def whole(self, param: Tensor) -> Tensor:
        assert self._reduced is not None, "waited for first"
        return self.windows[param].view(self._reduced)

    def release(self) -> None:
        """Leave the averaged gradients to DDP's reducer."""
        self._future = self._reduced = self.usage = None
        if not self._stays:
            self._views, self._lists = {}, {}


class _DdpUsageCounts(UsageCounts):
    """Counts for all parameters of one of DDP's buckets, by an all-reduce as DDP's.

    Args:
        held: for each parameter, whether this rank has a gradient.
        indices: of the parameters; -1 for one of another optimizer.
    """

    def __init__(self, group: ProcessGroup, held: Sequence[bool], indices: Sequence[int], device: torch.device) -> None:
        self._indices = indices
        self._counts = torch.tensor(held, dtype=torch.int32).to(device, non_blocking=True)
        self._work = sum_as_ddp(group, self._counts)

    def wait(self) -> None:
        self._work.wait()

    def unused(self) -> set[int]:
        return {index for index, is_used in zip(self._indices, self.are_used(), strict=True) if not is_used}

    def are_used(self) -> list[bool]:
        """For each parameter, whether any rank has a gradient. The host waits for an accelerator."""
        self.wait()
        return list(map(bool, self._counts.tolist()))


class CoveredBucket(BucketGradients):
    """A bucket of the plan, whose gradients are in one of DDP's buckets, in several, or in a part of one.

    Args:
        params: the parameters of the plan's bucket.
        place: in the plan.

    Attributes:
        sources: DDP's buckets of this pass that have them.
    """

    def __init__(self, params: list[Tensor], place: int, shard: Shard, side: SideStream) -> None:
        self.params = params
        self.on_stream = side.running(params[0].device)
        self.waiting = shard.trace.label("wait_reduce", place)
        self.is_summed = False
        self.sources: list[BucketGradients] = []
        self._index_of = shard.table.index_of

    def wait(self) -> None:
        for source in self.sources:
            source.wait()
        self.is_summed = True

    def _source_of(self, index: int) -> BucketGradients:
        if len(self.sources) == 1:
            return self.sources[0]
        found = (one for one in self.sources if any(self._index_of.get(param) == index for param in one.params))
        return next(found)

    def gradient(self, index: int) -> Tensor | None:
        return self._source_of(index).gradient(index)

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        if len(self.sources) == 1:
            return self.sources[0].gradients(indices)
        return super().gradients(indices)

    def whole(self, param: Tensor) -> Tensor:
        return self._source_of(self._index_of[param]).whole(param)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        return self._source_of(index).in_accumulation_dtype(index)


class _Known(NamedTuple):
    """One of DDP's buckets as it was last seen.

    Attributes:
        bucket: its reduction in each pass.
        gradients: its own, as the step gets them.
        counts: how many of its parameters are in each bucket of the plan.
        label: of the start of its reduction.
    """

    bucket: ReducedBucket
    gradients: BucketGradients
    counts: list[tuple[int, int]]
    label: Label


class DdpBuckets:
    """DDP's buckets, as they are reduced by the wrapped hook, and the buckets of the plan that are full with them.

    Args:
        wrapped: starts a bucket's reduction and returns a future of the averaged bucket; None: as DDP without a hook.
        side: the stream that the step runs on.
        shown: the gradients of one of DDP's buckets, for the step.

    Attributes:
        is_users: whether a hook of the user's reduces.
        covered: the buckets of the plan.
        steps_by_bucket: whether the buckets of this iteration are stepped inside backward; set by the hook.
    """

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        wrapped: CommHook | None,
        side: SideStream,
        plan: BucketPlan,
        shown: Callable[[ReducedBucket], BucketGradients],
    ) -> None:
        self._shard, self._side, self._plan, self._shown = shard, side, plan, shown
        self._group = group = ddp.process_group
        self._ddp_reference = weakref.ref(ddp)  # its reducer holds the hook that holds this
        self._wrapped = wrapped if wrapped is not None else lambda _, bucket: average_as_ddp(group, bucket)
        self.is_users = wrapped is not None
        self.steps_by_bucket = True
        self._known: dict[int, _Known] = {}  # DDP's buckets, by index
        self._missing: list[int] = []  # how many gradients each bucket of the plan still lacks; then 1, for none
        self._num_covered = 0  # from the first on
        self._has_started = False  # a bucket, since the last `drop`
        self._order: list[int] = []  # in which they were covered
        self._sizes: list[int] = []  # of DDP's buckets in this iteration
        self._places = PlacesInBuckets(ddp, shard.table)
        self._num_passes = 0
        self._finds_unused = finds_unused(ddp)
        self._usage: dict[int, _DdpUsageCounts] = {}  # of the last pass that has asked, by index of DDP's bucket
        self._unused_on_this_rank: list[Tensor] = []  # in this pass
        self._left_out: AbstractSet[int] = frozenset()  # the parameters that no rank uses, in a static graph
        self._is_final = self._finds_unused  # whether DDP keeps its buckets from now on
        self.follow_plan()

    def follow_plan(self) -> None:
        """Follow the plan, which is now in force, from the next iteration on."""
        members = enumerate(self._plan.members)
        self.covered = [CoveredBucket(one, place, self._shard, self._side) for place, one in members]
        self._known = {index: self._place(index, known.bucket.windows) for index, known in self._known.items()}

    def open(self) -> None:
        """Open an iteration."""
        if self._has_started:
            self.drop()
        self._missing = [*map(len, self._plan.members), 1]
        self._num_covered, self._order, self._sizes = 0, [], []
        self._unused_on_this_rank = []

    def drop(self) -> None:
        """Drop the buckets of a pass."""
        for known in self._known.values():
            known.bucket.release()
        for covered in self.covered:
            covered.sources, covered.is_summed = [], False
        self._has_started = False

    def end(self, was_consumed: bool) -> None:
        """After the reducer has published the gradients of a pass."""
        if self._is_final:
            self._places.note_published()
        if was_consumed:
            with not_awaiting_params():
                # stepped, but for those that no rank has used: a graph over these is still good
                increment_version([param for param in self._unused_on_this_rank if param.grad is not None])
        self.drop()

    def reset(self) -> None:
        """Drop the iteration without waiting for other ranks."""
        self._sizes = []
        self.drop()

    def detach(self) -> None:
        """Leave the model to another hook."""
        self._known.clear()  # they hold views of DDP's buckets

    def place_of(self, bucket: Any) -> tuple[int, bool]:
        """A bucket's index in its pass, and whether it is the last one.

        Raises:
            NotImplementedError: for a sparse gradient.
        """
        if bucket.buffer().layout is not torch.strided:
            raise sparse_gradient_error(self._shard.table, bucket.parameters())
        if not self._num_passes and (ddp := self._ddp_reference()) is not None and has_static_graph(ddp):
            return place_of_bucket(ddp, bucket, self._sizes)
        return bucket.index(), bucket.is_last()

    def start(self, state: Any, bucket: Any, index: int) -> tuple[Future[Any], Sequence[int]]:
        """Start the reduction of a bucket.

        Args:
            state: the state that the hook was registered with.
            bucket: the argument of a DDP hook.
            index: from `place_of`.

        Returns:
            The future for the reducer, and the buckets of the plan that are complete with it, in order.
        """
        self._has_started = True
        known = self._known[index] if self._is_final and index in self._known else self._look(bucket, index)
        with known.label:
            future = self._wrapped(state, bucket)
            if self.is_users and bucket.buffer().device.type == "cpu":
                future = name_missing_ranks(self._group, index, future)
        known.bucket.start(future, self._left_out)
        if self._finds_unused and (self.steps_by_bucket or index not in self._usage):
            known.bucket.doubtful = frozenset()
            self._count_usage(known.bucket, index, bucket.buffer().device)
        return future, self._cover(known)

    def _look(self, bucket: Any, index: int) -> _Known:
        """One of DDP's buckets, which DDP may build anew."""
        params = bucket.parameters()
        known = self._known.get(index)
        self._sizes.append(len(params))
        if known is None or list(map(id, known.bucket.params)) != list(map(id, params)):
            known = self._known[index] = self._place(index, windows_in_bucket(params))
        return known

    def _count_usage(self, bucket: ReducedBucket, index: int, device: torch.device) -> None:
        """Have ranks count which parameters of one of DDP's buckets they have used. A collective."""
        params, index_of = bucket.params, self._shard.table.index_of
        if in_backward():
            held = [param.grad is not None for param in params]
            self._unused_on_this_rank += [param for param, is_held in zip(params, held, strict=True) if not is_held]
        else:
            # as DDP on a rank that has joined, which adds the answer of its last pass
            held = self._usage[index].are_used() if index in self._usage else [False] * len(params)
        indices = [index_of.get(param, -1) for param in params]
        bucket.usage = self._usage[index] = _DdpUsageCounts(self._group, held, indices, device)
        if self.steps_by_bucket:
            lacking = {place for place, is_held in zip(indices, held, strict=True) if not is_held}
            bucket.doubtful = set(filter(self._shard.binding.owns, lacking))

    def _place(self, index: int, windows: dict[Tensor, Window]) -> _Known:
        """The places in the plan of one of DDP's buckets, which keeps the strides with which it was built."""
        index_of, part = self._shard.table.index_of, self._shard.targets.part
        held = [(index_of[param], window) for param, window in windows.items() if param in index_of]
        own = {place: window.of_part(part(place)) for place, window in held}
        counts = Counter(self._plan.bucket_of[param] for param in windows if param in self._plan.bucket_of)
        bucket = ReducedBucket(index, windows, own, self._shard, self._side, stays=not self.is_users)
        return _Known(bucket, self._shown(bucket), list(counts.items()), self._shard.trace.label("reduce", index))

    def _cover(self, known: _Known) -> range:
        """Note the gradients of one of DDP's buckets. Returns the buckets of the plan that are complete now."""
        missing, first = self._missing, self._num_covered
        for place, count in known.counts:
            self.covered[place].sources.append(known.gradients)
            missing[place] -= count
            if not missing[place]:
                self._order.append(place)
        num_covered = first
        while not missing[num_covered]:
            num_covered += 1
        self._num_covered = num_covered
        return range(first, num_covered)

    def build_buckets_or_order(self, in_join: bool) -> list[int] | None:
        """The buckets of the plan in the order in which they became full; None: not known yet, on any rank.

        Has DDP build its final buckets now, if it is to build any; a collective then. In the next forward pass it would
        be too late: pipeline schedules call that while gradients are there.
        """
        ddp = self._ddp_reference()
        self._sizes = []
        self._num_passes += 1
        if self._is_final:
            return None if in_join else self._order
        if ddp is not None and not in_join and self._num_passes > has_static_graph(ddp):
            # now: strides may change before the next pass, in which the buckets are first seen
            # none if they are built already, perhaps for another optimizer: they are looked at in the next pass then
            built = enumerate(rebuild_buckets(ddp))
            self._known = {index: self._place(index, windows_in_bucket(params)) for index, params in built}
            self._is_final = True
            self._places.note_built()
        return None

    def learn_unused(self, has_joined: bool) -> None:
        """After the first pass of a static graph: note which parameters no rank uses. A collective."""
        missing = [int(param.grad is None and not has_joined) for param in self._shard.table.params]
        every = self._shard.everyone.all_gather_ints(missing)
        self._left_out = {index for index, flags in enumerate(zip(*every, strict=True)) if any(flags)}

    def reason_to_refuse(self) -> str | None:
        """The message of an error, if DDP's buckets do not hold the gradients of autograd; else None."""
        return self._places.reason_to_refuse()


class PlacesInBuckets:
    """The places at which gradients are expected in DDP's buckets, beside those at which they are.

    Without ``gradient_as_bucket_view``, DDP writes gradients into a bucket by the strides that parameters had when it
    built the bucket, and reads averages out of it by the parameters' own. If they have changed since, the elements of a
    gradient are mixed up. With it, DDP publishes its views of the buckets in ``param.grad``, and any write to
    ``param.grad.data`` points the view elsewhere: from then on autograd writes gradients there, and DDP reduces stale
    values. ``model.to(memory_format=...)`` does both (seen with torch 2.13.0, also without a hook).
    """

    def __init__(self, ddp: DistributedDataParallel, table: ParameterTable) -> None:
        self._are_views = gradients_are_views(ddp)
        self._table = table
        self._params = [] if self._are_views else reduced_parameters(ddp)
        self.note_built()

    def note_built(self) -> None:
        """DDP has built its buckets."""
        self._viewed: list[int] = []  # parameters
        self._views: list[Tensor] = []  # of these
        self._addresses: list[int] = []  # of the views
        with not_awaiting_params():
            self._strides = [(name, param, param.stride()) for name, param in self._params]

    def note_published(self) -> None:
        """DDP has published gradients, in buckets that it keeps from now on."""
        if self._are_views and not self._views:
            found = [(index, param.grad) for index, param in enumerate(self._table.params)]
            self._viewed = [index for index, grad in found if grad is not None]
            self._views = [grad for _, grad in found if grad is not None]
            self._addresses = [*map(Tensor.data_ptr, self._views)]

    def reason_to_refuse(self) -> str | None:
        """The message of an error, if a gradient is not at the place that DDP expects; else None."""
        now = [*map(Tensor.data_ptr, self._views)]
        if now != self._addresses:
            moved = map(ne, now, self._addresses)
            return (
                f"Expected the gradient of {self._table.label(next(compress(self._viewed, moved)))} in DDP's bucket, "
                "found it in other memory, as after model.to(memory_format=...) while there were gradients: DDP would "
                "average stale values of the bucket. Call opt.zero_grad() before model.to(...). To go on now, wrap the "
                "model again, and call opt.reset() and opt.attach(model). [ZERO-321]"
            )
        with not_awaiting_params():
            for name, param, before in self._strides:
                if (strides := param.stride()) != before:
                    return (
                        f"Expected {name} with strides {list(before)}, by which DDP has laid out its buckets, got "
                        f"{list(strides)}, as after model.to(memory_format=...): DDP would mix up the elements of its "
                        "gradient. Change memory formats before DistributedDataParallel is built. To go on now, wrap "
                        "the model again, and call opt.reset(), opt.zero_grad() and opt.attach(model). [ZERO-321]"
                    )
        return None
