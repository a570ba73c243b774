"""The averaging of gradients and the place of the averages: the interface of a stage, and stage 1.

Stage 1 leaves gradients to DDP: every rank gets all of them, and the step borrows windows of the reduced bucket.
`partitioned.py` is stage 2.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.reducer import (
    NewBucket,
    Window,
    gradients_are_views,
    rebuild_buckets,
    reduced_parameters,
    windows_in_bucket,
)
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.communicator import average_as_ddp
from ddp_zero.core.comm.missing import name_missing
from ddp_zero.core.local.parameters import GradientSource, ParameterTable
from ddp_zero.core.local.placeholders import untouched
from ddp_zero.core.step.decision import NonfiniteProbe
from ddp_zero.core.step.rank_shard import Shard

CommHook = Callable[[Any, GradBucket], Future[Any]]


class BucketGradients(GradientSource):
    """A bucket whose reduction was started in this iteration."""

    params: list[Tensor]
    on_stream: AbstractContextManager[object]
    """In which it is stepped."""
    is_summed: bool
    """True once `wait` has returned."""

    @abstractmethod
    def wait(self) -> None:
        """Block until its averaged gradients have arrived."""

    @abstractmethod
    def gradient(self, index: int) -> Tensor:
        """The averaged gradient of a parameter that this rank owns, in the parameter's shape and dtype."""

    @abstractmethod
    def release(self) -> None:
        """Free its gradients, after the step has used them."""


class ReducedBucket(BucketGradients):
    """A bucket whose averaged gradients are, or will be, in one tensor in DDP's order.

    Args:
        windows: the bucket's parameters, and where DDP lays their gradients.
        side: the stream that reads it.
    """

    def __init__(
        self, index: int, windows: Mapping[Tensor, Window], future: Future[Any], shard: Shard, side: SideStream
    ) -> None:
        self.params = list(windows)
        self._index = index
        self._windows = windows
        self._future = future
        self._shard = shard
        self._side = side
        self._reduced: Tensor | None = None
        self.on_stream = side.running(self.params[0].device)
        self.is_summed = False

    def wait(self) -> None:
        """Block until the reduction has resolved."""
        if self._reduced is None:
            with self._shard.trace.label("wait_reduce", self._index):
                reduced = self._future.wait()
            self._reduced = reduced[0] if isinstance(reduced, list | tuple) else reduced
            self._side.keep(self._reduced)
            self.is_summed = True

    def gradient(self, index: int) -> Tensor:
        """A window of the reduced bucket."""
        assert self._reduced is not None, "waited for first"
        return self._windows[self._shard.table.params[index]].view(self._reduced)

    def release(self) -> None:
        """The reducer still needs it."""


class Gradients(GradientSource):
    """Stage 1: the wrapped hook reduces, DDP publishes, every rank keeps all gradients.

    `PartitionedGradients` overrides the steps that differ in stage 2. Methods stand in the order of an iteration.

    Args:
        wrapped: starts a bucket's reduction and returns a future of the averaged bucket; None: as DDP without a hook.
        side: the stream that the step runs on.
    """

    reach_joined = False
    """True if a rank that has joined gets its averaged gradients from the reduction itself."""
    is_idle = True
    """True if no pass has left anything since `drop_carried`: there is nothing to drop or reset then."""

    def __init__(self, shard: Shard, ddp: DistributedDataParallel, wrapped: CommHook | None, side: SideStream) -> None:
        group = ddp.process_group
        self._shard = shard
        self._wrapped = wrapped if wrapped is not None else lambda _, bucket: average_as_ddp(group, bucket)
        self._is_users, self._group = wrapped is not None, group
        self._side = side
        self._windows: dict[int, dict[Tensor, Window]] = {}  # of each bucket when it was first seen
        self._formats = MemoryFormats(ddp)
        self._views = PublishedViews(shard.table) if gradients_are_views(ddp) else None
        self._is_planned = False

    def open(self) -> None:
        """Open an iteration, and drop the buckets of the last one."""

    def carried_sums(self) -> Collection[int]:
        """Parameters whose gradient was taken out of ``param.grad``, to be added to the next sum."""
        return ()

    def carried_zeros(self) -> Collection[int]:
        """Parameters whose gradient of zeros was taken out for this pass."""
        return ()

    def start(
        self, state: Any, bucket: GradBucket, index: int, is_planned: bool
    ) -> tuple[Future[Any], BucketGradients]:
        """Start the reduction of a bucket.

        Args:
            state: the state that the hook was registered with.
            bucket: the argument of a DDP hook.
            index: the bucket's, which DDP does not always report.
            is_planned: whether this and every earlier bucket of the iteration are the plan's.

        Returns:
            The future for the reducer, and the bucket for the step.
        """
        future = self._wrapped(state, bucket)
        if self._is_users and bucket.buffer().device.type == "cpu":
            future = name_missing(self._group, index, future)
        params = bucket.parameters()
        self._is_planned = is_planned
        windows = self._windows.get(index)
        if windows is None or list(map(id, windows)) != list(map(id, params)):
            windows = self._windows[index] = windows_in_bucket(params)
        return future, ReducedBucket(index, windows, future, self._shard, self._side)

    def settle(self) -> None:
        """End of one hook call: copy out sums that no step has used yet and free their scratch."""

    def lend_all(self, has_joined: bool) -> None:
        """Finish every reduction, after the reducer, in an iteration that was not stepped in the hook.

        Owned gradients are in ``param.grad`` then, except on a rank that has joined.
        """

    def show(self, was_consumed: bool) -> None:
        """Close the iteration on this rank, and leave gradients for the user in ``param.grad``."""
        if self._views is not None and self._is_planned:
            self._views.note()

    def close(self) -> None:
        """Close the iteration on a rank that has joined, which publishes nothing."""

    def rebuild(self, ddp: DistributedDataParallel) -> list[NewBucket]:
        """Have DDP build its final buckets; see `rebuild_buckets`. A collective."""
        return rebuild_buckets(ddp)

    def follow_plan(self, built: Sequence[NewBucket], publishes: bool) -> None:
        """Follow the plan, which is now in force, from the next iteration on. A collective.

        Args:
            built: the buckets that DDP has just built, if the plan is for them; else none: it is for this iteration's.
            publishes: whether ``param.grad`` holds the gradients of this iteration.
        """
        # by the strides of now: they may change before the next pass, in which the buckets are first seen
        self._windows |= {index: windows_in_bucket(bucket.params) for index, bucket in enumerate(built)}
        self._formats.buckets_built()
        if self._views is not None:
            self._views.forget()

    def fits_plan(self) -> bool:
        """True if buckets can be reduced for the plan that is in force; whole ones fit any."""
        return True

    def why_refuse(self) -> str | None:
        """The message of an error, if DDP's buckets do not hold the gradients of autograd; else None."""
        return self._formats.why_refuse() or (None if self._views is None else self._views.why_refuse())

    def has_local(self) -> bool:
        """True if a backward pass that was not reduced has left gradients of this rank alone, as far as is known."""
        return False

    def local_marks(self) -> Mapping[int, int]:
        """`mark_of` each gradient that a pass without reduction has added to averages, by parameter."""
        return {}

    def gradient(self, index: int) -> Tensor | None:
        """The content of ``param.grad`` of an owned parameter, after backward."""
        return self._shard.table.params[index].grad

    def editable(self, index: int) -> Tensor | None:
        """The tensor that the step will use for an owned gradient, to be changed in place; None if it has none."""
        return owned_alias(self._shard, index)

    def reset(self) -> None:
        """Drop the iteration without waiting for other ranks."""

    def drop_carried(self) -> None:
        """Forget gradients that the user has dropped, also those taken out of ``param.grad`` for the next sum."""

    def detach(self) -> None:
        """Leave the model's parameters to a new hook."""

    def describe(self) -> list[str]:
        """Lines for ``opt.explain()``."""
        return []

    def buffer_bytes(self) -> tuple[int, int]:
        """Bytes of buffers that buckets share, now and at most."""
        return 0, 0


@torch.no_grad()
def owned_alias(shard: Shard, index: int) -> Tensor | None:
    """This rank's part of a gradient that every rank has, with a version counter of its own; see `OwnedEdits`."""
    param = shard.table.params[index]
    if param.grad is None:
        return None
    if shard.stepped.part(index) is not None and param.grad.stride() != param.stride():
        param.grad = torch.empty_like(param).copy_(param.grad)  # else the part would be one of a copy
    return shard.stepped.own_part(index, param.grad.data)


class RegisteredHook:
    """A communication hook that copies and pickles of its DDP model leave behind.

    A copy of a DDP model has a reducer of its own, without a hook, and trains as plain DDP does; but it keeps the list
    of hooks that were registered on the original. One of this library reaches the optimizer and process groups, which
    can be neither copied nor pickled.

    Args:
        hook: the hook; None in a copy.
        state: passed to it.

    Attributes:
        is_copy: whether this is what a copy of the model has in place of the hook.
    """

    def __init__(self, hook: CommHook | None = None, state: Any = None) -> None:
        self._hook, self._state = hook, state
        self.is_copy = hook is None
        self.__name__ = self.__qualname__ = type(self).__qualname__  # DDP logs it

    def on_bucket(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        """Call the hook."""
        assert self._hook is not None, "no reducer of a copy has it"
        return self._hook(self._state, bucket)

    __call__ = on_bucket

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RegisteredHook, ()


def watching(watch: NonfiniteProbe, group: ProcessGroup, wrapped: CommHook | None) -> CommHook:
    """A hook that checks gradients before the wrapped hook averages them, or DDP's own reduction without one."""

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        if watch.is_on:
            watch.screen(bucket.parameters(), bucket.buffer())
        return average_as_ddp(group, bucket) if wrapped is None else wrapped(state, bucket)

    return RegisteredHook(hook)


class MemoryFormats:
    """The strides of parameters when DDP built its buckets, by which it lays out gradients.

    Without ``gradient_as_bucket_view``, DDP writes gradients into a bucket by those strides and reads averages out of
    it by the parameters' own. If they have changed since, the elements of a gradient are mixed up (seen with torch
    2.13.0, also without a hook).
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._params = [] if gradients_are_views(ddp) else reduced_parameters(ddp)
        self.buckets_built()

    def buckets_built(self) -> None:
        """DDP's buckets have the strides of now."""
        with untouched():
            self._strides = [(name, param, param.stride()) for name, param in self._params]

    def why_refuse(self) -> str | None:
        """The message of an error, if a parameter has other strides now; else None."""
        with untouched():
            found = next(
                ((name, before, param.stride()) for name, param, before in self._strides if param.stride() != before),
                None,
            )
        if found is None:
            return None
        name, before, now = found
        return (
            f"Expected {name} with strides {list(before)}, by which DDP has laid out its buckets, got {list(now)}, as "
            "after model.to(memory_format=...): DDP would mix up the elements of its gradient. Build "
            "DistributedDataParallel with gradient_as_bucket_view=True, or change memory formats before it is built. "
            "[ZERO-321]"
        )


class PublishedViews:
    """The reducer's views of its buckets, which ``gradient_as_bucket_view`` publishes in ``param.grad``.

    ``model.to(memory_format=...)``, as any write to ``param.grad.data``, points the reducer's own view elsewhere: from
    then on autograd writes gradients there, and DDP reduces stale values in the bucket (seen with torch 2.13.0, also
    without a hook).
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._views: list[tuple[int, Tensor, int]] = []  # parameter, view, and its address

    def note(self) -> None:
        """Note the views, unless that was done; called when DDP has published gradients."""
        if not self._views:
            found = [(index, param.grad) for index, param in enumerate(self._table.params)]
            self._views = [(index, grad, grad.data_ptr()) for index, grad in found if grad is not None]

    def forget(self) -> None:
        """DDP has built other buckets."""
        self._views = []

    def why_refuse(self) -> str | None:
        """The message of an error, if a view is elsewhere now; else None."""
        for index, view, address in self._views:
            if view.data_ptr() != address:
                return (
                    f"Expected the gradient of {self._table.label(index)} in DDP's bucket, found it in other memory, "
                    "as after model.to(memory_format=...) while there were gradients: DDP would average stale values "
                    "of the bucket. Call opt.zero_grad() before model.to(...). To go on now, wrap the model again, "
                    "and call opt.reset() and opt.attach(model). [ZERO-321]"
                )
        return None
