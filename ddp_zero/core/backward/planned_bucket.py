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
        keeps: whether gradients stay in ``param.grad`` when they are copied.

    Attributes:
        position: its index, and whether it is the last.
        has_scratch: whether its scratch is free, since the bucket before was launched; gradients that arrive before
            that stay in ``param.grad``.
        awaited: the places of gradients that are still to come; None while no pass is reduced.
        times: how often gradients accumulate in a pass, where not once; in a static graph.
        counts: how often they have, in the pass that learns it; else None.
    """

    def __init__(
        self,
        reducer: "BucketReducer",
        space: ScratchBucket | ForeignGradients,
        index: int = -1,
        is_last: bool = False,
        keeps: bool = False,
    ) -> None:
        # weakly: the nodes that accumulate gradients hold this, and a parameter would keep optimizer and groups alive
        self._reducer = weakref.ref(reducer)
        self.space, self.params = space, space.params
        self.position = index, is_last
        self.has_scratch = False
        self.awaited: set[int] | None = None
        self._listens, self._is_special = True, False
        self._keeps, self._moves = keeps, not keeps
        self.times: Mapping[int, int] = {}
        self.counts: Counter[int] | None = None
        self._left: dict[int, int] = {}  # of `times`, in this pass
        self._every = set(range(len(self.params)))
        self._large = frozenset(place for place, param in enumerate(self.params) if param.nbytes >= SMALL_BYTES)
        self._windows: list[Tensor] = []
        self._taken: set[int] = set()
        self._given: dict[int, Tensor | None] = {}  # by DDP's reducer, not taken yet

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

    def expect(self, listens: bool, learns: bool) -> None:
        """Expect the gradients of a pass.

        Args:
            listens: whether they come from autograd; else from a bucket of DDP's reducer.
            learns: whether they are only counted.
        """
        self.awaited = set(self._every)
        self.has_scratch = self.position[0] < 0
        self._windows = []
        if listens and not (learns or self.times or self._is_special):
            return
        self.awaited.difference_update(place for place, count in self.times.items() if not count)
        self._left = dict(self.times)
        self.counts = Counter() if learns else None
        self._listens = listens
        self._is_special = bool(self._left) or learns or not listens
        # DDP's own reducer requires its views to stay there until it has ended the pass
        self._moves = listens and not self._keeps

    def learn(self) -> None:
        """At the end of a pass of which every gradient has arrived: note how often each has accumulated."""
        counts = self.counts or Counter()
        self.times = {place: counts[place] for place in range(len(self.params)) if counts[place] != 1}
        self.counts, self.awaited = None, set()

    @never_compiled
    def arrive(self, place: int, *_: object) -> None:
        """A gradient was accumulated: called by autograd after each."""
        awaited = self.awaited
        if awaited is None or (self._is_special and self._passes_over(place)):
            return
        if place not in awaited:
            self._refuse_second(place)
        # copied before it counts: another thread of backward may find the bucket full right after
        if self.has_scratch and place in self._large:
            self.take(place, self.params[place].grad)
        awaited.discard(place)
        if not awaited and (reducer := self._reducer()) is not None:
            reducer.bucket_is_full(self)

    def _passes_over(self, place: int) -> bool:
        """True if this gradient does not complete its parameter: a static graph is learnt, or more accumulates."""
        if not self._listens:
            return True
        if self.counts is not None:
            self.counts[place] += 1
            return True
        left = self._left.get(place, 1) - 1
        self._left[place] = left
        return left > 0

    def _refuse_second(self, place: int) -> None:
        reducer = self._reducer()
        if reducer is not None:
            raise second_gradient_error(reducer.ddp(), self.params[place], reducer.where)

    def take(self, place: int, grad: Tensor | None) -> None:
        """Copy one gradient into the scratch; it leaves ``param.grad``."""
        if torch.is_grad_enabled():  # in backward only if it keeps a graph of itself
            with torch.no_grad():
                return self.take(place, grad)
        if grad is None or grad.layout is not torch.strided:
            self._take_none(place, grad)
        else:
            if not self._windows:
                self._windows = self.space.begin_filling()
            self._windows[place].copy_(grad)
        self._taken.add(place)
        if self._moves:
            self.params[place].grad = None

    def give(self, place: int, grad: Tensor | None) -> None:
        """Take a gradient that DDP's own reducer has got, once the scratch is free for it."""
        self._given[place] = grad

    def complete(self) -> None:
        """Copy all gradients that were not taken so far."""
        if self._taken != self._every:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self.complete()
            places = sorted(self._every - self._taken)
            windows = self._windows or self._fill()
            params = [*map(self.params.__getitem__, places)]
            grads = [*map(_grad_of, params)]
            try:
                is_plain = not self._given and {*map(_layout_of, grads)} == _STRIDED
            except AttributeError:  # some parameter has none
                is_plain = False
            if is_plain:
                torch._foreach_copy_([*map(windows.__getitem__, places)], grads)
            else:
                self._complete_one_by_one(places)
            # freed on the stream that has copied them: the allocator may hand their memory to backward's next kernel
            for param in params if self._moves else ():
                param.grad = None
        self._taken = set()

    def _complete_one_by_one(self, places: list[int]) -> None:
        """Where DDP's reducer has got gradients, or some parameter has none that can be copied."""
        for place in places:
            grad = self._given[place] if place in self._given else self.params[place].grad
            if grad is None or grad.layout is not torch.strided:
                self._take_none(place, grad)
            else:
                self._windows[place].copy_(grad)
        self._given.clear()

    def _take_none(self, place: int, grad: Tensor | None) -> None:
        """Zeros for a parameter that has no gradient; a sparse one is refused."""
        reducer = self._reducer()
        if reducer is not None and grad is not None:
            raise reducer.refuse_sparse([self.params[place]])
        if reducer is not None:
            reducer.users.unused.add(self.params[place])
        (self._windows or self._fill())[place].zero_()

    def pause(self) -> None:
        """At the end of a backward pass that has left out gradients: show those that were taken, as DDP would."""
        for place in self._taken if self._moves else ():
            self.params[place].grad = self._windows[place]

    def resume(self) -> None:
        """At the beginning of a further one."""
        for place in self._taken if self._moves else ():
            self.params[place].grad = None

    @torch.no_grad()
    def abandon(self, factor: float) -> None:
        """Leave the gradients of an interrupted pass, which nothing will reduce, as DDP does: times a factor."""
        awaited = self._every if self.awaited is None else self.awaited
        for place, param in enumerate(self.params):
            grad = self._windows[place] if place in self._taken else param.grad
            if place not in awaited and grad is not None:
                param.grad = grad * factor  # a copy: the scratch goes back to its pool
        self.drop()

    def drop(self) -> None:
        """Forget the pass."""
        if self._windows:
            self.space.drop_filling()
        self._windows, self._taken, self._given, self.awaited, self.counts = [], set(), {}, None, None

    def fill_with_zeros(self) -> None:
        """For a rank that has joined."""
        self._fill()
        self.space.flat.zero_()

    def _fill(self) -> list[Tensor]:
        self._windows = self.space.begin_filling()
        return self._windows
