"""Buckets of stage 2 while their gradients arrive; see `planned_reducer.py`."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.scratch_bucket import ScratchBucket
from ddp_zero.core.ddp.preconditions import second_gradient_error
from ddp_zero.core.ddp.reducer import windows_in_bucket
from ddp_zero.core.ddp.used_parameters import UsedParameters
from ddp_zero.core.local.compiler import never_compiled

SMALL_BYTES = 16 << 10
"""A gradient of fewer bytes is copied together with the others of its bucket: a copy costs the host a microsecond."""


_grad_of, _layout_of = attrgetter("grad"), attrgetter("layout")
_STRIDED = {torch.strided}


class ForeignGradients:
    """A bucket of parameters that DDP reduces and no optimizer of stage 2 has: every rank gets all of its average.

    Args:
        params: its parameters, of one dtype and on one device.

    Attributes:
        flat: the gradients of this pass, 1-D.
        average: their average, in flight; None: not started.
    """

    flat: Tensor
    average: Future[Any] | None = None

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self._places = windows_in_bucket(params)

    def begin_filling(self) -> list[Tensor]:
        """Allocate ``flat``, in each pass anew, since ``param.grad`` shows it. Returns its windows."""
        numel = sum(param.numel() for param in self.params)
        self.flat = torch.empty(numel, dtype=self.params[0].dtype, device=self.params[0].device)
        return [window.view(self.flat) for window in self._places.values()]

    def drop_filling(self) -> None:
        """Leave the memory."""

    def publish(self, used: set[Tensor] | None) -> None:
        """At the end of backward: show the averages.

        Args:
            used: the parameters that any rank has used; None: all.
        """
        if self.average is None:
            return
        # views of memory that no pool has: they stay in ``param.grad`` as long as the user wants
        averaged = self.average.wait()
        self.average = None
        flat = averaged[0] if isinstance(averaged, list | tuple) else averaged
        for param, window in self._places.items():
            if used is None or param in used:
                param.grad = window.view(flat)

    def abandon(self, unused: set[Tensor] | None) -> None:
        """In an interrupted pass: forget an average, which may still be in flight, as in DDP.

        Args:
            unused: the parameters without a gradient; of the others it is shown. None: it is not.
        """
        if self.average is not None and unused is not None:
            for param in set(self._places) - unused:
                param.grad = self._places[param].view(self.flat)
        self.average = None


class BucketReducer(Protocol):
    """The part of a `PlannedReducer` that its buckets use."""

    ddp: weakref.ref[DistributedDataParallel]
    where: str
    users: UsedParameters
    refuse_sparse: Callable[[list[Tensor]], Exception]

    def bucket_is_full(self, bucket: "PlannedBucket | None") -> None: ...

    def join(self, bucket: "PlannedBucket") -> Future[Any]: ...


class PlannedBucket:
    """One bucket while its gradients arrive; when it is full, the argument of a hook, as DDP's `GradBucket`.

    Args:
        reducer: reduces it once it is full.
        space: where its gradients are copied to.
        index: of the bucket of the plan; -1 for `ForeignGradients`.
        is_last: whether it is the last one of the plan.
        keeps_grad: whether gradients stay in ``param.grad`` when they are copied.

    Attributes:
        position: its index, and whether it is the last.
        has_scratch: whether its scratch is free, since the bucket before was launched; gradients that arrive before
            that stay in ``param.grad``.
        awaited: the places of gradients that are still to come; None while no pass is reduced.
        expected_counts: how often gradients accumulate in a pass, where not once; in a static graph.
        counts: how often they have, in the pass that learns it; else None.
    """

    def __init__(
        self,
        reducer: "BucketReducer",
        space: ScratchBucket | ForeignGradients,
        index: int = -1,
        is_last: bool = False,
        keeps_grad: bool = False,
    ) -> None:
        # weakly: the nodes that accumulate gradients hold this, and a parameter would keep optimizer and groups alive
        self._reducer = weakref.ref(reducer)
        self.space, self.params = space, space.params
        self.position = index, is_last
        self.has_scratch = False
        self.awaited: set[int] | None = None
        self._is_filled_by_autograd, self._counts_arrivals = True, False
        self._keeps_grad, self._clears_grad = keeps_grad, not keeps_grad
        self.expected_counts: Mapping[int, int] = {}
        self.counts: Counter[int] | None = None
        self._remaining: dict[int, int] = {}  # of `expected_counts`, in this pass
        self._all_places = set(range(len(self.params)))
        self._large = frozenset(place for place, param in enumerate(self.params) if param.nbytes >= SMALL_BYTES)
        self._windows: list[Tensor] = []
        self._copied: set[int] = set()
        self._from_ddp: dict[int, Tensor | None] = {}  # gradients that DDP's reducer has got, by place

    # For hooks

    @property
    def planned_by(self) -> "BucketReducer | None":
        """The reducer, unless it is gone."""
        return self._reducer()

    def index(self) -> int:
        return self.position[0]

    def parameters(self) -> list[Tensor]:
        """Its parameters, in the order in which DDP would reduce them."""
        return self.params

    def buffer(self) -> Tensor:
        """This rank's gradients, 1-D, laid out by owner."""
        return self.space.flat

    def gradients(self) -> list[Tensor]:
        """Windows of the buffer in the shapes of the parameters."""
        return list(self._windows)

    def is_last(self) -> bool:
        return self.position[1]

    # A pass

    def expect(self, by_autograd: bool, only_counts: bool) -> None:
        """Expect the gradients of a pass.

        Args:
            by_autograd: whether they come from autograd; else from a bucket of DDP's reducer.
            only_counts: whether they are only counted, as in the first pass of a static graph.
        """
        self.awaited = set(self._all_places)
        self.has_scratch = self.position[0] < 0
        self._windows = []
        if by_autograd and not (only_counts or self.expected_counts or self._counts_arrivals):
            return
        self.awaited.difference_update(place for place, count in self.expected_counts.items() if not count)
        self._remaining = dict(self.expected_counts)
        self.counts = Counter() if only_counts else None
        self._is_filled_by_autograd = by_autograd
        self._counts_arrivals = bool(self._remaining) or only_counts or not by_autograd
        # DDP's own reducer requires its views to stay there until it has ended the pass
        self._clears_grad = by_autograd and not self._keeps_grad

    def learn(self) -> None:
        """At the end of a pass of which every gradient has arrived: note how often each has accumulated."""
        counts = self.counts or Counter()  # without any, no parameter is used
        self.expected_counts = {place: counts[place] for place in range(len(self.params)) if counts[place] != 1}
        self.counts, self.awaited = None, set()

    @never_compiled
    def arrive(self, place: int, *_: object) -> None:
        """A gradient was accumulated: called by autograd after each."""
        awaited = self.awaited
        if awaited is None or (self._counts_arrivals and self._passes_over(place)):
            return
        if place not in awaited:
            self._refuse_second(place)
        # copied before it counts: another thread of backward may find the bucket full right after
        if self.has_scratch and place in self._large:
            self.copy_in(place, self.params[place].grad)
        awaited.discard(place)
        if not awaited and (reducer := self._reducer()) is not None:
            reducer.bucket_is_full(self)

    def _passes_over(self, place: int) -> bool:
        """True if this gradient does not complete its parameter: a static graph is learnt, or more accumulates."""
        if not self._is_filled_by_autograd:
            return True
        if self.counts is not None:
            self.counts[place] += 1
            return True
        left = self._remaining.get(place, 1) - 1
        self._remaining[place] = left
        return left > 0

    def _refuse_second(self, place: int) -> None:
        reducer = self._reducer()
        if reducer is not None:
            raise second_gradient_error(reducer.ddp(), self.params[place], reducer.where)

    def copy_in(self, place: int, grad: Tensor | None) -> None:
        """Copy one gradient into the scratch; it leaves ``param.grad``."""
        if torch.is_grad_enabled():  # in backward only if it keeps a graph of itself
            with torch.no_grad():
                return self.copy_in(place, grad)
        if grad is None or grad.layout is not torch.strided:
            self._fill_zeros(place, grad)
        else:
            if not self._windows:
                self._windows = self.space.begin_filling()
            self._windows[place].copy_(grad)
        self._copied.add(place)
        if self._clears_grad:
            self.params[place].grad = None

    def accept(self, place: int, grad: Tensor | None) -> None:
        """Take a gradient that DDP's own reducer has got, once the scratch is free for it."""
        self._from_ddp[place] = grad

    def copy_rest(self) -> None:
        """Copy all gradients that were not taken so far."""
        if self._copied != self._all_places:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self.copy_rest()
            places = sorted(self._all_places - self._copied)
            windows = self._windows or self._fill()
            params = [*map(self.params.__getitem__, places)]
            grads = [*map(_grad_of, params)]
            try:
                is_plain = not self._from_ddp and {*map(_layout_of, grads)} == _STRIDED
            except AttributeError:  # some parameter has none
                is_plain = False
            if is_plain:
                torch._foreach_copy_([*map(windows.__getitem__, places)], grads)
            else:
                self._copy_one_by_one(places)
            # freed on the stream that has copied them: the allocator may hand their memory to backward's next kernel
            for param in params if self._clears_grad else ():
                param.grad = None
        self._copied = set()

    def _copy_one_by_one(self, places: list[int]) -> None:
        """Where DDP's reducer has got gradients, or some parameter has none that can be copied."""
        for place in places:
            grad = self._from_ddp[place] if place in self._from_ddp else self.params[place].grad
            if grad is None or grad.layout is not torch.strided:
                self._fill_zeros(place, grad)
            else:
                self._windows[place].copy_(grad)
        self._from_ddp.clear()

    def _fill_zeros(self, place: int, grad: Tensor | None) -> None:
        """Zeros for a parameter that has no gradient; a sparse one is refused."""
        reducer = self._reducer()
        if reducer is not None and grad is not None:
            raise reducer.refuse_sparse([self.params[place]])
        if reducer is not None:
            reducer.users.unused.add(self.params[place])
        (self._windows or self._fill())[place].zero_()

    def pause(self) -> None:
        """At the end of a backward pass that has left out gradients: show those that were taken, as DDP would."""
        for place in self._copied if self._clears_grad else ():
            self.params[place].grad = self._windows[place]

    def resume(self) -> None:
        """At the beginning of a further one."""
        for place in self._copied if self._clears_grad else ():
            self.params[place].grad = None

    @torch.no_grad()
    def abandon(self, factor: float) -> None:
        """Leave the gradients of an interrupted pass, which nothing will reduce, as DDP does: times a factor."""
        awaited = self._all_places if self.awaited is None else self.awaited
        for place, param in enumerate(self.params):
            grad = self._windows[place] if place in self._copied else param.grad
            if place not in awaited and grad is not None:
                param.grad = grad * factor  # a copy: the scratch goes back to its pool
        self.drop()

    def drop(self) -> None:
        """Forget the pass."""
        if self._windows:
            self.space.drop_filling()
        self._windows, self._copied, self._from_ddp, self.awaited, self.counts = [], set(), {}, None, None

    def fill_with_zeros(self) -> None:
        """For a rank that has joined."""
        self._fill()
        self.space.flat.zero_()

    def _fill(self) -> list[Tensor]:
        self._windows = self.space.begin_filling()
        return self._windows
