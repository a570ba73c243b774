"""Where the reducer writes gradients in stage 2: all of DDP's buckets in the few scratches of one pool.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_zero.core.backward.owned_sums import ReduceContext, ScratchLayout
from ddp_zero.core.backward.reducer import BucketViews, NewBucket, ddp_takes, windows_in_bucket
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.memory import FreedMemory
from ddp_zero.core.plan.buckets import ROOMS, SCRATCHES, bucket_mb, gradient_buffers

_MIB = 1 << 20
_BUFFERS = SCRATCHES + ROOMS
_LEAST_REST = 4  # times the buffers' bytes: a model that is smaller would be slowed down by more than a percent


class BucketMemory:
    """The reducer's buckets and the scratches that they are pointed at.

    The views of DDP's first buckets are seen only when their gradients are ready. Each bucket is then moved out of the
    reducer's own memory (`take`); at the end of backward the reducer puts its view into ``param.grad``, and if that is
    not where it was moved, the reducer does not follow its views (`capture`). A parameter that no rank has used by then
    is captured once one does; until then its view keeps the bucket's own memory alive. When DDP is made to build its
    final buckets, all views are seen, and no memory is ever allocated for them (`lay_out`).

    Attributes:
        layouts: of the plan's buckets; empty until DDP's buckets are known.
        lent: the scratches of buckets that are being filled, by bucket.
        follows: whether the reducer writes where its views point. If not, its own memory is freed after backward.
    """

    def __init__(self, workshop: ReduceContext) -> None:
        self.layouts: list[ScratchLayout] = []
        self.follows = True
        self._workshop = workshop
        self._views: dict[int, BucketViews] = {}  # by bucket, once captured
        self.lent: dict[int, Tensor] = {}
        self._buffers: dict[int, Tensor] = {}  # the reducer's own, of this iteration
        self._moved: list[tuple[BucketViews, list[Tensor]]] = []  # in this iteration, with the gradients taken out
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._heap = FreedMemory()

    # Before gradients land

    def prepare(self) -> None:
        """Restore freed memory of the reducer before a backward pass that will be reduced."""
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        self._freed.clear()

    def point(self, index: int) -> None:
        """Make the reducer write a bucket into a scratch, unless it does already."""
        if index in self.lent or index not in self._views or not self.follows:
            return
        layout, views = self.layouts[index], self._views[index]
        scratch = self._workshop.scratches.lend(layout.nbytes, layout.device, like=views.scratch)
        if views.scratch is not scratch:
            views.point_at(layout.flat(scratch), scratch)
        self.lent[index] = scratch

    def give_back_unfilled(self) -> None:
        """After a backward pass that DDP does not reduce: take back scratches into which no gradient was written."""
        for index, scratch in list(self.lent.items()):
            views = self._views[index]
            if not any(param.grad is not None and views.is_view(param, param.grad) for param in views.windows):
                del self.lent[index]
                self._workshop.scratches.give_back(scratch)

    # When a bucket is full

    def note_buffer(self, index: int, buffer: Tensor | None) -> None:
        """Note the buffer that DDP hands out for a bucket; a new one means that DDP has rebuilt its buckets.

        None on a rank that has joined: DDP stands in for it with zeros.
        """
        if buffer is None:
            return
        self._buffers[index] = buffer
        views = self._views.get(index)
        if views is not None and views.buffer is not buffer:
            self._forget_views()

    def take(self, layout: ScratchLayout, buffer: Tensor | None) -> Tensor:
        """The scratch with a bucket's gradients; the caller gives it back.

        Args:
            layout: where gradients must lie; not that of ``layouts`` if the plan does not have the bucket.
            buffer: see `note_buffer`.
        """
        views = self._views.get(layout.index)
        if views is None or views.buffer is not buffer:
            self.note_buffer(layout.index, buffer)
        elif buffer is not None:
            self._buffers[layout.index] = buffer
        is_joined = buffer is None
        landed = self.lent.pop(layout.index, None)
        is_planned = layout.index < len(self.layouts) and self.layouts[layout.index] is layout
        if landed is not None and is_planned:
            if views is None or views.windows is not layout.windows or not views.hold_all_gradients():
                self._complete(layout, layout.flat(landed))
            return landed
        if landed is None and not is_joined:
            self._check_prepared(layout)
        scratch = self.copy(layout, is_joined)
        if not is_joined and self.follows and not (is_planned and layout.index in self._views):
            self._move(layout, scratch)
        if landed is not None:
            self._workshop.scratches.give_back(landed)
        return scratch

    def is_in_own_memory(self, index: int) -> bool:
        """Whether the reducer has written a bucket into memory of its own, of which no view was captured."""
        return index not in self._views

    def copy(self, layout: ScratchLayout, is_joined: bool) -> Tensor:
        """A scratch with a copy of a bucket's gradients, or of some of them; the caller gives it back."""
        scratch = self._workshop.scratches.lend(layout.nbytes, layout.device)
        for param, window in layout.windows.items():
            _fill(window.view(layout.flat(scratch)), None if is_joined else param.grad)
        return scratch

    def _complete(self, layout: ScratchLayout, flat: Tensor) -> None:
        """Add to a scratch what the reducer has not written there: zeros, gradients in views not captured so far."""
        views = self._views[layout.index]
        start, size = flat.data_ptr(), flat.element_size()
        for param, window in layout.windows.items():
            grad = param.grad
            if grad is not None and (grad.data_ptr() == start + window.offset * size or not param.numel()):
                continue
            _fill(window.view(flat), grad)
            if grad is not None and views.is_captured(param):
                self._give_up()
            elif grad is not None:
                views.capture(param, grad)

    def _check_prepared(self, layout: ScratchLayout) -> None:
        """Check that no gradient has landed in a scratch that was given back, where it may have been overwritten since.

        Raises:
            RuntimeError: naming the parameter.
        """
        if layout.index not in self._views or not self.follows:
            return
        views, table = self._views[layout.index], self._workshop.sharded.table
        for param in layout.windows:
            if param.grad is not None and param.numel() and views.is_captured(param):
                raise RuntimeError(
                    f"Expected backward() outside ddp.no_sync() where forward was, got a gradient of "
                    f"{table.label(table.index_of[param])} in memory that was not prepared "
                    f"({self._workshop.where}). Run forward and backward in the same context."
                )

    def _move(self, layout: ScratchLayout, scratch: Tensor) -> None:
        """Capture a full bucket's views and point them at the scratch, which has its gradients already."""
        earlier = self._views.get(layout.index)
        views = BucketViews(self._buffers[layout.index], layout.windows, earlier.captured if earlier else None)
        found = {param: param.grad for param in layout.windows if param.grad is not None}
        for param, grad in found.items():
            views.capture(param, grad)
        views.point_at(layout.flat(scratch), scratch)
        for param in found:
            param.grad = None  # the reducer will set it to what it takes for its view
        self._views[layout.index] = views
        self._moved.append((views, list(found)))
        if earlier is None:
            self._heap.add(layout.nbytes)

    # After backward

    def capture(self) -> None:
        """After the reducer, which has put its views into ``param.grad``: capture those not seen before."""
        for views, params in self._moved:
            self._check_follows(views, params)
        self._moved.clear()
        if not self._buffers:
            return
        if not self.follows:
            self._note_own_memory()
            return
        for index, views in self._views.items():
            if index in self._buffers and not views.are_complete:
                for param in views.windows:
                    if param.grad is not None:
                        views.capture(param, param.grad)

    def _check_follows(self, views: BucketViews, params: Sequence[Tensor]) -> None:
        """Check that the reducer has found its views where they were moved; if not, give up sharing scratches."""
        for param in params:
            if param.grad is None:
                param.grad = views.captured[param]  # from an earlier pass: the reducer leaves what is unused alone
            elif param.numel() and param.grad.data_ptr() != views.window(param).data_ptr():
                self._give_up()
                return

    def _give_up(self) -> None:
        if self.follows:
            logger.warning(
                "DDP's reducer does not write gradients where its views point; its buckets are freed after backward "
                "instead of being shared (%s)",
                self._workshop.where,
            )
        self.follows = False

    def lay_out(self, layouts: list[ScratchLayout], built: Sequence[NewBucket]) -> None:
        """Follow a plan from the next iteration on.

        Args:
            layouts: of its buckets.
            built: the buckets that the reducer has just built for it, or none if it keeps its own.
        """
        self.layouts = layouts
        self._buffers.clear()  # gradients of this iteration were captured, and may be published in other memory now
        if built or not all(self._is_of_same_bucket(index) for index in self._views):
            self._forget_views()
        for index, bucket in enumerate(built):
            if bucket.views:
                self._views[index] = BucketViews(bucket.buffer, windows_in_bucket(bucket.params), bucket.views)

    def _forget_views(self) -> None:
        """The reducer has replaced its buckets."""
        for scratch in self.lent.values():
            self._workshop.scratches.give_back(scratch)
        self.lent.clear()
        self._views.clear()
        self._freed.clear()

    def end_iteration(self, buckets: int, is_in_flight: bool) -> None:
        """Give back what the iteration's buckets, from the first on, still hold; idle buffers need no pages then.

        To touch pages again takes about 0.5 ms per MiB. So buffers that are large beside the model keep theirs.

        Args:
            buckets: how many have arrived.
            is_in_flight: whether peers may still read what was lent, since the iteration was given up.
        """
        for index in range(buckets):
            scratch = self.lent.pop(index, None)
            if scratch is not None:
                self._workshop.scratches.give_back(scratch)
        layouts = self.layouts
        if self.follows and any(
            index >= len(layouts) or views.windows is not layouts[index].windows for index, views in self._views.items()
        ):
            self._workshop.furnish(self.layouts)
            self._park()
        for storage, _ in self._freed:
            storage.resize_(0)
        self._buffers.clear()
        pools = (self._workshop.scratches, self._workshop.rooms)
        for pool in pools:
            pool.trim()
        held = sum(pool.statistics.held_bytes for pool in pools)
        if not is_in_flight and _LEAST_REST * held <= sum(layout.nbytes for layout in self.layouts):
            for pool in pools:
                pool.rest()

    def reset(self) -> None:
        """Start with new scratches: peers may still write into those that were in flight."""
        self.lent.clear()
        self._buffers.clear()
        self._moved.clear()
        self._workshop.furnish(self.layouts)

    def is_view(self, param: Tensor, grad: Tensor) -> bool:
        """Whether a gradient is the reducer's view of it."""
        return any(views.is_view(param, grad) for views in self._views.values())

    def describe(self) -> str:
        """The memory that the buckets have needed, in words."""
        scratches, rooms = self._workshop.scratches.statistics, self._workshop.rooms.statistics
        how = "shared by DDP's buckets" if self.follows else "beside DDP's buckets, which are freed after backward"
        most = scratches.most_bytes + rooms.most_bytes
        return (
            f"gradients: at most {scratches.most_lent} scratch buffers {how}, {rooms.most_lent} to receive into, "
            f"{most:,} bytes in all{self._advice()}"
        )

    def _advice(self) -> str:
        """How much smaller buckets would save at most, in words: DDP overfills a bucket by up to one parameter."""
        sizes = [param.nbytes for layout in self.layouts for param in layout.params]
        largest = max((layout.nbytes for layout in self.layouts), default=0)
        cap = bucket_mb(sizes, self._workshop.comm.world_size, cuts=self._workshop.sharded.binding.cuts)
        saved = gradient_buffers(largest - max(int(cap * _MIB), *sizes, 0)) if sizes else 0
        if saved < _MIB:
            return ""
        option = f"bucket_cap_mb_list=[{cap:.3g}]" if ddp_takes("bucket_cap_mb_list") else f"bucket_cap_mb={cap:.3g}"
        advice = f"DistributedDataParallel({option}) would save up to {saved:,}"
        return f", by formula {_BUFFERS} x {largest:,}; {advice}"

    def _is_of_same_bucket(self, index: int) -> bool:
        return index < len(self.layouts) and self._views[index].windows.keys() == self.layouts[index].windows.keys()

    def _park(self) -> None:
        """Point each bucket at the same scratch until its next iteration, so that none has memory of its own."""
        for index, layout in enumerate(self.layouts):
            if index not in self._views:
                continue
            views = BucketViews(self._views[index].buffer, layout.windows, self._views[index].captured)
            self._views[index] = views
            scratch = self._workshop.scratches.lend(layout.nbytes, layout.device)
            views.point_at(layout.flat(scratch), scratch)
            self._workshop.scratches.give_back(scratch)

    def _note_own_memory(self) -> None:
        """Note the memory of a reducer that does not follow its views: it can be freed between backward passes."""
        if self._freed:
            return
        grads = [param.grad for layout in self.layouts for param in layout.params]
        storages = [grad.untyped_storage() for grad in grads if grad is not None and grad.numel()]
        self._freed = [
            (storage, storage.nbytes()) for storage in {storage.data_ptr(): storage for storage in storages}.values()
        ]


def _fill(window: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        window.zero_()
    else:
        window.copy_(grad)
