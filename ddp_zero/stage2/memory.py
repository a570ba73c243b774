"""Where the reducer writes gradients in stage 2: all of DDP's buckets in the few scratches of one pool.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_zero.backward.reducer import BucketViews, Window, windows_in_bucket
from ddp_zero.comm.tracing import logger
from ddp_zero.heap import return_freed_memory
from ddp_zero.plan.buckets import bucket_mb
from ddp_zero.stage2.bucket import ScratchLayout, Workshop

_MIB = 1 << 20
_BUFFERS = 3  # one being filled, one being reduced, one to receive into


class BucketMemory:
    """The reducer's buckets and the scratches that they are pointed at.

    A bucket's views are seen only when its gradients are ready. In the iteration that shows DDP's final layout each
    bucket is moved out of the reducer's own memory when it is full (`move_out`); at the end of backward the reducer
    puts its view into ``param.grad``, and if that is not where it was moved, the reducer does not follow its views
    (`capture`). A parameter that no rank has used by then is captured once one does; until then its view keeps the
    bucket's own memory alive.

    Args:
        workshop: lends scratches.

    Attributes:
        layouts: of the plan's buckets; empty until DDP's buckets are known.
        follows: whether the reducer writes where its views point. If not, its own memory is freed after backward.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.layouts: list[ScratchLayout] = []
        self.follows = True
        self._workshop = workshop
        self._views: dict[int, BucketViews] = {}  # by bucket, once captured
        self._lent: dict[int, Tensor] = {}  # scratches of buckets that are being filled
        self._buffers: dict[int, Tensor] = {}  # the reducer's own, of this iteration
        self._moved: list[BucketViews] = []  # in this iteration
        self._emptied: list[Tensor] = []  # memory of whole buckets that were moved, needed until the iteration ends
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._freed_bytes = 0  # of whole buckets, for good

    # Before gradients land

    def prepare(self) -> None:
        """Restore freed memory of the reducer before a backward pass that will be reduced.

        What whole buckets needed goes back to the system only here: the first steps keep copies of gradients until they
        are zeroed.
        """
        return_freed_memory(self._freed_bytes)
        self._freed_bytes = 0
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        self._freed.clear()

    def point(self, index: int) -> None:
        """Make the reducer write a bucket into a scratch, unless it does already."""
        if index in self._lent or index not in self._views or not self.follows:
            return
        layout, views = self.layouts[index], self._views[index]
        scratch = self._workshop.scratches.lend(layout.nbytes, layout.device, like=views.scratch)
        self._workshop.side.wait_for(scratch)
        views.point_at(layout.flat(scratch), scratch)
        self._lent[index] = scratch

    def give_back_unfilled(self) -> None:
        """After a backward pass that DDP does not reduce: take back scratches into which no gradient was written."""
        for index, scratch in list(self._lent.items()):
            views = self._views[index]
            if not any(param.grad is not None and views.is_view(param, param.grad) for param in views.windows):
                del self._lent[index]
                self._workshop.give_back(scratch)

    # When a bucket is full

    def note_buffer(self, index: int, buffer: Tensor) -> None:
        """Note the buffer that DDP hands out for a bucket; a new one means that DDP has rebuilt its buckets."""
        self._buffers[index] = buffer
        if index in self._views and not self._views[index].are_of(buffer):
            for scratch in self._lent.values():
                self._workshop.give_back(scratch)
            self._lent.clear()
            self._views.clear()

    def take(self, index: int, is_joined: bool) -> Tensor:
        """The scratch with a bucket's gradients; the caller gives it back.

        Args:
            index: the bucket.
            is_joined: whether this rank has joined, and has no gradients.
        """
        layout = self.layouts[index]
        scratch = self._lent.pop(index, None)
        has_landed = scratch is not None
        if scratch is None:
            scratch = self._workshop.scratches.lend(layout.nbytes, layout.device)
            self._workshop.side.wait_for(scratch)
        if is_joined:
            layout.flat(scratch).zero_()
        else:
            self._collect(layout, layout.flat(scratch), has_landed)
            if index not in self._views and self.follows:
                self._move(index, self._buffers[index], layout.windows, layout.flat(scratch), scratch)
        return scratch

    def move_out(self, index: int, params: Sequence[Tensor], buffer: Tensor) -> BucketViews | None:
        """Move a full bucket out of the reducer's own memory, in DDP's order, unless it was; returns its views."""
        if index in self._views or not self.follows:
            return self.collect_whole(index, buffer)
        moved = buffer.clone()
        self._emptied.append(moved)
        return self._move(index, buffer, windows_in_bucket(params), moved, moved)

    def collect_whole(self, index: int, buffer: Tensor) -> BucketViews | None:
        """Copy all of a bucket into its buffer; returns the views if it is not in DDP's order there, else None."""
        views = self._views.get(index) if self.follows else None
        if views is not None:
            # Averages stay where they are until the iteration ends. Views that still point into the same scratch would
            # set them to zero for unused parameters.
            for other in range(index, len(self.layouts)):
                self.point(other)
            self._collect(self.layouts[index], buffer, has_landed=True)
        return views

    def _collect(self, layout: ScratchLayout, flat: Tensor, has_landed: bool) -> None:
        """Copy every gradient of the bucket into its scratch, unless it is there already."""
        views = self._views.get(layout.index)
        start, size = flat.data_ptr(), flat.element_size()
        for param, window in layout.windows.items():
            grad = param.grad
            if grad is None:
                window.view(flat).zero_()
            elif not has_landed or (grad.data_ptr() != start + window.offset * size and param.numel()):
                window.view(flat).copy_(grad)
                if views is not None and self.follows:
                    self._note_elsewhere(views, param, grad, has_landed)

    def _note_elsewhere(self, views: BucketViews, param: Tensor, grad: Tensor, has_landed: bool) -> None:
        """Handle a gradient elsewhere: in a new view, in memory given back, or since the reducer follows no views.

        Raises:
            RuntimeError: if it may have been overwritten since.
        """
        if not views.is_captured(param):
            if has_landed:
                views.capture(param, grad)
        elif has_landed:
            self._give_up()
        else:
            table = self._workshop.sharded.table
            raise RuntimeError(
                f"Expected backward() outside ddp.no_sync() where forward was, got a gradient of "
                f"{table.label(table.index_of[param])} in memory that was not prepared "
                f"({self._workshop.where}). Run forward and backward in the same context."
            )

    def _move(
        self, index: int, buffer: Tensor, windows: Mapping[Tensor, Window], flat: Tensor, scratch: Tensor
    ) -> BucketViews:
        """Capture a full bucket's views and point them at memory that has its gradients already."""
        views = BucketViews(buffer, windows)
        for param in windows:
            if param.grad is not None:
                views.capture(param, param.grad)
        views.point_at(flat, scratch)
        for param in windows:
            param.grad = None  # the reducer will set it to what it takes for its view
        self._views[index] = views
        self._moved.append(views)
        return views

    # After backward

    def capture(self) -> None:
        """After the reducer, which has put its views into ``param.grad``: capture those not seen before."""
        for views in self._moved:
            self._check_follows(views)
        self._moved.clear()
        if not self.follows:
            self._note_own_memory()
            return
        for index, views in self._views.items():
            if index in self._buffers and not views.are_complete:
                for param in views.windows:
                    if param.grad is not None:
                        views.capture(param, param.grad)

    def _check_follows(self, views: BucketViews) -> None:
        """Check that the reducer has found its views where they were moved; if not, give up sharing scratches."""
        for param, view in views.captured():
            if param.grad is None:
                param.grad = view  # from an earlier pass, unused in this one: the reducer leaves it alone
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

    def end_iteration(self, buckets: int) -> None:
        """Give back what the iteration's buckets, from the first on, still hold."""
        for index in range(buckets):
            scratch = self._lent.pop(index, None)
            if scratch is not None:
                self._workshop.give_back(scratch)
        if self.follows and any(self._has_other_layout(index) for index in self._views):
            self._workshop.furnish(self.layouts)
            self._park()
            self._freed_bytes += sum(moved.nbytes for moved in self._emptied)
            for moved in self._emptied:
                moved.untyped_storage().resize_(0)  # the reducer holds views of it until the end of the next iteration
        self._emptied.clear()
        for storage, _ in self._freed:
            storage.resize_(0)
        self._buffers.clear()
        self._workshop.scratches.trim()
        self._workshop.rooms.trim()

    def reset(self) -> None:
        """Start with new scratches: peers may still write into those that were in flight."""
        self._lent.clear()
        self._buffers.clear()
        self._moved.clear()
        self._emptied.clear()
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
        cap = bucket_mb(sizes, self._workshop.comm.world_size)
        saved = _BUFFERS * (largest - max(int(cap * _MIB), *sizes, 0)) if sizes else 0
        if saved < _MIB:
            return ""
        advice = f"DistributedDataParallel(bucket_cap_mb={cap:.3g}) would save up to {saved:,}"
        return f", by formula {_BUFFERS} x {largest:,}; {advice}"

    def _has_other_layout(self, index: int) -> bool:
        return index < len(self.layouts) and self._views[index].windows is not self.layouts[index].windows

    def _park(self) -> None:
        """Point each bucket at the same scratch until its next iteration, so that none has memory of its own."""
        for index, layout in enumerate(self.layouts):
            if index not in self._views:
                continue
            views = BucketViews(self._views[index].buffer, layout.windows, self._views[index])
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
