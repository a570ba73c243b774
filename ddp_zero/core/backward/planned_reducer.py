"""A reducer in the place of DDP's own, which reduces gradients in the buckets of the plan: stage 2.

DDP's forward pass, its part of `Join` and torch's pipeline schedules tell ``ddp.reducer`` which backward passes are to
be reduced, and no others (torch 2.13.0). So a `PlannedReducer` that stands there learns it from them, and calls the
registered communication hook, once per bucket and in order, as DDP's reducer would. That one is let go, and its memory
with it; with its place DDP gets a new one. Where anything has kept a reference to it, it sleeps in memory of its own:
its hooks return at once in passes that nobody has prepared it for. In others it calls the hook with buckets of its own.

A gradient is copied into its bucket's scratch when autograd has accumulated it, a small one together with the others of
its bucket, and leaves ``param.grad``. Buckets are reduced in the order of the plan, each once it is full. Several
optimizers over one model have a `PlannedReducer` each, whose buckets follow one another.

Facts that this file depends on besides:

1. A hook of the node that accumulates a gradient runs after users' hooks on the parameter, also for a gradient that is
   undefined. The node lives as long as somebody holds it.
2. In a static graph DDP asks, at the end of the first backward pass, for the reduction of everything. Only then is it
   known how often each gradient accumulates in a pass.
3. With ``find_unused_parameters`` DDP hands over the outputs of the forward pass. Their hooks run in the pass itself,
   not in one that a reentrant checkpoint has nested in it, where most parameters would seem unused.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.backward.owned_sums import ReducedSegment
from ddp_zero.core.backward.preconditions import gradients_of_dropped
from ddp_zero.core.backward.reducer import (
    accumulating_node,
    ask_again,
    backward_id,
    finds_unused,
    give_back_reducer,
    gradients_are_views,
    has_static_graph,
    in_buckets,
    last_hook,
    of_a_reducer_at_rest,
    reducer_of,
    registered_hook,
    replace_reducer,
    trainable_for_now,
    will_run,
    windows_in_bucket,
)
from ddp_zero.core.comm.communicator import average_as_ddp, sum_as_ddp
from ddp_zero.core.local.compiler import never_compiled

SMALL_BYTES = 16 << 10
"""A gradient of fewer bytes is copied together with the others of its bucket: a copy costs the host a microsecond."""


class OthersSpace:
    """The place of gradients that DDP reduces and the optimizer does not have: averaged as DDP does, whole everywhere.

    Args:
        params: of one dtype, on one device.

    Attributes:
        flat: their gradients in this pass, 1-D.
    """

    flat: Tensor

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.places = windows_in_bucket(params)

    def fill(self) -> list[Tensor]:
        """New memory for each pass, since averages are shown there. Returns windows of it for the parameters."""
        numel = sum(param.numel() for param in self.params)
        self.flat = torch.empty(numel, dtype=self.params[0].dtype, device=self.params[0].device)
        return [window.view(self.flat) for window in self.places.values()]

    def drop_filling(self) -> None:
        """Leave the memory."""


_NONE: set[int] = set()


class PlannedBucket:
    """One bucket while its gradients arrive; when it is full, the argument of a hook, as DDP's `GradBucket`.

    Args:
        reducer: reduces it once it is full.
        space: where gradients are put.
        index: of the bucket of the plan; -1 for gradients that the optimizer does not have.
        is_last: whether it is the last one of the plan.
        keeps: whether gradients stay in ``param.grad`` when they are taken.

    Attributes:
        place: its index, and whether it is the last.
        may_fill: whether the bucket before was launched, so that the scratch is free; gradients that arrive before stay
            in ``param.grad``.
        awaited: the places of gradients that are still to come; None while no pass is reduced.
        times: how often gradients accumulate in a pass, where not once; in a static graph.
        counts: how often they have, in the pass that learns it; else None.
    """

    def __init__(
        self,
        reducer: "PlannedReducer",
        space: ReducedSegment | OthersSpace,
        index: int = -1,
        is_last: bool = False,
        keeps: bool = False,
    ) -> None:
        # weakly: the nodes that accumulate gradients hold this, and a parameter would keep optimizer and groups alive
        self._reducer = weakref.ref(reducer)
        self.space, self.params = space, space.params
        self.place = index, is_last
        self.may_fill = False
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
    def planned_by(self) -> "PlannedReducer | None":
        """The reducer, unless it is gone."""
        return self._reducer()

    def index(self) -> int:
        return self.place[0]

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
        return self.place[1]

    # A pass

    def expect(self, listens: bool, learns: bool) -> None:
        """Expect the gradients of a pass.

        Args:
            listens: whether they come from autograd; else from a bucket of DDP's reducer.
            learns: whether they are only counted.
        """
        self.awaited = set(self._every)
        if self.times:
            self.awaited.difference_update(place for place, count in self.times.items() if not count)
        self._left = dict(self.times)
        self.counts, self._listens = Counter() if learns else None, listens
        self.may_fill = self.place[0] < 0
        self._windows, self._taken, self._given = [], set(), {}
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
        if self.may_fill and place in self._large:
            self.take(place, self.params[place].grad)
        awaited.discard(place)
        if not awaited and (reducer := self._reducer()) is not None:
            reducer.bucket_is_full(self)

    def _passes_over(self, place: int) -> bool:
        """True if this gradient does not count: it only tells of a static graph, or it will accumulate again."""
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
            raise reducer.accumulated_twice(self.params[place])

    def take(self, place: int, grad: Tensor | None) -> None:
        """Copy one gradient into the scratch; it leaves ``param.grad``."""
        if torch.is_grad_enabled():  # in backward only if it keeps a graph of itself
            with torch.no_grad():
                return self.take(place, grad)
        if grad is None or grad.layout is not torch.strided:
            self._take_none(place, grad)
        else:
            if not self._windows:
                self._windows = self.space.fill()
            self._windows[place].copy_(grad)
        self._taken.add(place)
        if self._moves:
            self.params[place].grad = None

    def give(self, place: int, grad: Tensor | None) -> None:
        """Take a gradient that DDP's own reducer has got, once the scratch is free for it."""
        self._given[place] = grad

    def complete(self) -> None:
        """Copy all gradients that were not taken so far."""
        params, taken, given = self.params, self._taken, self._given
        if taken != self._every:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self.complete()
            windows = self._windows or self._fill()
            places = [place for place in range(len(params)) if place not in taken]
            targets, grads = list[Tensor](), list[Tensor]()
            for place in places:
                grad = given[place] if place in given else params[place].grad
                if grad is None or grad.layout is not torch.strided:
                    self._take_none(place, grad)
                else:
                    targets.append(windows[place])
                    grads.append(grad)
            if grads:
                torch._foreach_copy_(targets, grads)
            # freed on the stream that has copied them: the allocator may hand their memory to backward's next kernel
            for place in places if self._moves else ():
                params[place].grad = None
            given.clear()
        self._taken = set()

    def _take_none(self, place: int, grad: Tensor | None) -> None:
        """Zeros for a parameter that has no gradient; a sparse one is refused."""
        reducer = self._reducer()
        if reducer is not None and grad is not None:
            raise reducer.refuse_sparse([self.params[place]])
        if reducer is not None:
            reducer.unused.add(self.params[place])
        (self._windows or self._fill())[place].zero_()

    def pause(self) -> None:
        """At the end of a backward pass that has left out gradients: show those that were taken, as DDP would."""
        for place in self._taken if self._moves else ():
            self.params[place].grad = self._windows[place]

    def resume(self) -> None:
        """At the begin of a further one."""
        for place in self._taken if self._moves else ():
            self.params[place].grad = None

    @torch.no_grad()
    def leave(self, factor: float) -> None:
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
        self._windows = self.space.fill()
        return self._windows


class PlannedReducer:
    """See the module docstring; public methods whose names begin with an underscore are those that DDP calls.

    Args:
        ddp: the model.
        where: this rank's name in messages.
        before_pass: called before a pass that will be reduced; it may call `lay_out`.
        refuse_sparse: makes the error for a bucket with a sparse gradient.

    Attributes:
        has_begun: whether a gradient of a pass that is reduced has arrived, and some buckets are not full.
        is_prepared: whether the next backward pass, or the one under way, is reduced.
        is_learning: whether this is the first pass of a static graph.
        launching: held while buckets are reduced; one lock for all that stand in the place of a model's reducer.
        before, after: of other optimizers over the model; all buckets of one are reduced before those of the next.
        unused: the parameters without a gradient in the last pass on this rank; known where DDP looks for them.
        used: in a static graph, those with one on any rank, once that is known; else None.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        where: str,
        before_pass: Callable[[], object],
        refuse_sparse: Callable[[list[Tensor]], Exception],
    ) -> None:
        self._buckets: list[PlannedBucket] = []
        self._ddp = weakref.ref(ddp)
        self._where = where
        self._before_pass = before_pass
        self.refuse_sparse = refuse_sparse
        # ``param.grad`` shows DDP's bucket as soon as a gradient lands there, which divides it; else the average alone
        self._shows_buckets = gradients_are_views(ddp)
        self._left_factor = 1 / ddp.process_group.size() if self._shows_buckets else 1
        self._params = [param for _, param in in_buckets(ddp)]
        with trainable_for_now(self._params):
            self._nodes = {param: accumulating_node(param) for param in self._params}
        self._last, self._num = -1, 0  # the last bucket of the plan; how many there are with those of others
        self._averages: list[tuple[Any, Future[Any]]] = []  # of other parameters, in this pass
        self._handles: list[RemovableHandle] = []
        self.launching = threading.RLock()
        self.before: PlannedReducer | None = None
        self.after: PlannedReducer | None = None
        self._hook_place = -1  # among the model's communication hooks
        self._hook: tuple[Callable[[Any, Any], Any], Any] | None = None  # with its state, while a pass is reduced
        self._launched = 0
        self.is_prepared = self.has_begun = self.is_learning = False
        self._has_learned = False
        self._is_paused = False
        self._left: list[Tensor] | None = None  # not in an interrupted pass
        self.unused: set[Tensor] = set()
        self.used: set[Tensor] | None = None
        self._used_map: Tensor | None = None  # how many ranks have used each parameter in the last pass
        self._has_counted = False  # in this pass
        self._order: list[int] = []  # of the last pass, until it is known
        self._notes_order = True
        self._fills_by_autograd = False  # in the last pass
        self._absent: set[Tensor] | None = None  # parameters that the pass will not reach

    # The plan

    def lay_out(self, segments: Sequence[ReducedSegment], others: Sequence[OthersSpace]) -> None:
        """Fill these buckets from now on, the ones of other parameters last."""
        times = {bucket.params[place]: n for bucket in self._buckets for place, n in bucket.times.items()}
        for handle in self._handles:
            handle.remove()
        for bucket in self._buckets:
            bucket.drop()
        self._last = len(segments) - 1
        planned = [PlannedBucket(self, one, index, index == self._last) for index, one in enumerate(segments)]
        self._buckets = [*planned, *(PlannedBucket(self, one, keeps=not self._shows_buckets) for one in others)]
        self._num = len(self._buckets)
        self._handles = []
        self._order, self._fills_by_autograd = [], False
        for bucket in self._buckets:
            bucket.times = {at: times[param] for at, param in enumerate(bucket.params) if param in times}
            for place, param in enumerate(bucket.params):
                self._handles.append(self._nodes[param].register_hook(partial(bucket.arrive, place)))

    def taken_by_others(self) -> set[Tensor]:
        """The parameters of the model that this need not reduce, since other optimizers of stage 2 do.

        Parameters of DDP's that none of these optimizers has are left to the reducer of the first optimizer.
        """
        ddp = self._ddp()
        stand_in = None if ddp is None else stand_in_of(ddp)
        if stand_in is not None and stand_in.planned[0] is not self:
            return set(self._params)
        return {param for one in self._following() for bucket in one._buckets for param in bucket.params}

    def _following(self) -> "Iterator[PlannedReducer]":
        following = self.after
        while following is not None:
            yield following
            following = following.after

    # Its place

    @property
    def is_installed(self) -> bool:
        """True if it stands in the place of the model's reducer."""
        ddp = self._ddp()
        stand_in = None if ddp is None else stand_in_of(ddp)
        return stand_in is not None and self in stand_in.planned

    def install(self) -> None:
        """Take the place of the model's reducer; or one behind those that have taken it."""
        ddp = self._ddp()
        if ddp is None or self.is_installed:
            return
        stand_in = stand_in_of(ddp)
        if stand_in is None:
            stand_in = _StandIn()
            stand_in.own = replace_reducer(ddp, stand_in)
        self._hook_place = last_hook(ddp)
        stand_in.put([*stand_in.planned, self])

    def remove(self) -> None:
        """Give the model its reducer back, unless others stand there, too."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        ddp = self._ddp()
        if ddp is None or not self.is_installed:
            return
        stand_in = stand_in_of(ddp)
        assert stand_in is not None, "this is installed"
        stand_in.put([one for one in stand_in.planned if one is not self])
        if stand_in.planned:
            return
        give_back_reducer(ddp, stand_in.own, self._params)

    # Called by DDP

    @never_compiled
    def prepare_for_forward(self) -> None:
        """Nothing is timed."""

    @never_compiled
    def _rebuild_buckets(self) -> bool:
        """Before a forward pass: check that the last reduction has ended. Returns False: buckets stay."""
        self._check_reducer_finalized()
        return False

    def _check_reducer_finalized(self) -> None:
        """Check that every bucket of the last pass was full.

        Raises:
            RuntimeError: naming parameters that got no gradient.
        """
        if not self.has_begun:
            return
        ddp = self._ddp()
        missing = self._missing()
        names = {} if ddp is None else {param: name for name, param in in_buckets(ddp)}
        first = f", and none of {names[missing[0]]!r}" if missing and missing[0] in names else ""
        raise RuntimeError(
            f"Expected gradients of all {len(self._params)} parameters in the last backward pass, got "
            f"{len(self._params) - len(missing)}{first} ({self._where}): gradients were not averaged. If a "
            "parameter is not used, wrap the model with find_unused_parameters=True, or freeze it before wrapping. If "
            "an exception has interrupted backward, wrap the module again, and call opt.reset() and opt.attach(model). "
            "[ZERO-301]"
        )

    @never_compiled
    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Reduce the next backward pass.

        Args:
            outputs: of the forward pass, if parameters may be unused.
        """
        ddp = self._ddp()
        self._expect(listens=True, learns=ddp is not None and has_static_graph(ddp) and not self._has_learned)
        if ddp is not None and finds_unused(ddp):
            search = partial(_search, weakref.ref(self))
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(search)

    @never_compiled
    def _delay_all_reduce(self) -> None:
        """At the end of the first backward pass of a static graph: reduce everything."""
        ddp = self._ddp()
        if ddp is not None and not self.is_prepared:
            ask_again(ddp)  # the first pass was in no_sync()
        if not (self.is_learning and self.is_prepared):
            return
        if ddp is not None and not any(bucket.counts for bucket in self._buckets):
            ask_again(ddp)  # the pass was one of `torch.autograd.grad`
            return
        self.is_learning, self._has_learned = False, True
        for bucket in self._buckets:
            bucket.learn()
        self.bucket_is_full(None)

    @never_compiled
    def _set_forward_pass_work_handle(self, work: Any, _: bool) -> None:
        """Under `Join`: the message that this rank has not joined, which ranks count; averages divide by all."""
        self._joined = work

    def _get_zeros_like_grad_buckets(self) -> list[PlannedBucket]:
        """The buckets in which a rank that has joined takes part, in order; `_run_comm_hook` fills them."""
        return list(self._buckets)

    def _run_comm_hook(self, bucket: PlannedBucket) -> Future[Any]:
        """On a rank that has joined: take part in the reduction of a bucket, with zeros."""
        index = bucket.index()
        if index == 0:
            self._before_pass()
            self.unused.clear()
            self.unused.update(self._unused_here_when_joined())
        if index >= 0:
            # a layout of now: `before_pass` may have made others since the buckets were asked for
            bucket = self._buckets[index]
        bucket.fill_with_zeros()
        if index < 0:
            return self._average(bucket)
        ddp = self._ddp()
        assert ddp is not None, "it calls this"
        hook, state = registered_hook(ddp, self._hook_place)
        found: Future[Any] = hook(state, bucket)
        return found

    def _get_local_used_map(self) -> Tensor:
        """On a rank that has joined: the sum over ranks of the last pass, to which DDP adds the others' flags.

        So a parameter that was used before still counts as used, and gets a gradient of zeros, as in DDP.
        """
        if self.before is not None:
            return self.before._get_local_used_map()
        if self._used_map is None:
            self._used_map = self._flags(())
        return self._used_map

    def _unused_here_when_joined(self) -> set[Tensor]:
        ddp = self._ddp()
        if ddp is None or not (finds_unused(ddp) or has_static_graph(ddp)):
            return set()
        counts = self._get_local_used_map().tolist()
        return {param for param, count in zip(self._params, counts, strict=True) if not count}

    def _push_all_rebuilt_params(self) -> None:
        """Nothing is rebuilt."""

    # A pass

    def landed(self) -> set[Tensor]:
        """The parameters whose gradients have left ``param.grad`` in a pass that is reduced."""
        return set(self._params).difference(self._missing()) if self.has_begun else set()

    def _missing(self) -> list[Tensor]:
        if self._left is not None:
            return self._left
        return [bucket.params[place] for bucket in self._buckets for place in bucket.awaited or ()]

    def begin(self) -> None:
        """The first gradient of a backward pass, or of one nested in it, is about to be accumulated."""
        if not self.is_prepared:
            return
        if self._is_paused:
            self._is_paused = False
            for bucket in self._buckets:
                bucket.resume()
        ddp = self._ddp()
        if self.has_begun or ddp is None or not any(map(will_run, self._nodes.values())):
            return
        self.has_begun = True
        if not finds_unused(ddp):
            return
        # in the outermost pass: inside a reentrant checkpoint most parameters would seem unused
        self.search()
        absent = self._absent or set()
        for bucket in self._buckets:
            bucket.awaited = {place for place in bucket.awaited or () if bucket.params[place] not in absent}
        self.bucket_is_full(None)

    def end(self) -> None:
        """At the end of a backward pass."""
        if not self.is_prepared:
            for bucket in self._buckets:
                bucket.awaited = None
        elif self.has_begun:
            self._is_paused = True
            for bucket in self._buckets:
                bucket.pause()

    def search(self) -> None:
        """Find the parameters that the backward pass under way does not reach, once."""
        if self._absent is None and self.is_prepared:
            reached = {param for param, node in self._nodes.items() if will_run(node)}
            if reached:  # else it is a pass of `torch.autograd.grad`
                self._absent = set(self._params) - reached

    @property
    def is_launching(self) -> bool:
        """True if the reduction of some bucket of the pass was not started yet."""
        return self._launched < len(self._buckets)

    def bucket_is_full(self, bucket: PlannedBucket | None) -> None:
        """Reduce the buckets that are full, in order, up to the first that is not."""
        if bucket is not None and self._notes_order:
            self._order.append(bucket.place[0])  # -1 for others
        # one thread at a time, since an accelerator's backward pass has a thread of its own, and on every rank in this
        # order: the reductions of two buckets must not cross
        with self.launching:
            if self.before is not None and self.before.is_launching:
                return
            buckets, last, num = self._buckets, self._last, self._num
            while (place := self._launched) < num and buckets[place].awaited == _NONE:
                self._launched, bucket = place + 1, buckets[place]
                bucket.complete()
                # before the hook: it ends the iteration with the last bucket, and may raise
                if self._launched == num:
                    self.is_prepared = self.has_begun = False
                if place > last:
                    self._averages.append((bucket.space, self._average(bucket)))
                else:
                    hook, state = self._hook or self._find_hook()
                    if place == last:
                        self._hook = None
                    hook(state, bucket)
                    if place != last:
                        buckets[place + 1].may_fill = True  # the hook has freed the scratch of the bucket before
            if self.after is not None and not self.is_launching:
                self.after.bucket_is_full(None)

    def _find_hook(self) -> tuple[Callable[[Any, Any], Any], Any]:
        ddp = self._ddp()
        if ddp is None:
            raise gradients_of_dropped(self._where)
        # for one pass: kept, it would be a cycle that holds the process group until the garbage collector runs
        self._hook = found = registered_hook(ddp, self._hook_place)
        return found

    def publish_others(self, used: set[Tensor] | None) -> None:
        """At the end of backward: show the averages of parameters that the optimizer does not have.

        Args:
            used: the parameters that any rank has used; None: all.
        """
        for space, future in self._averages:
            # views of memory that no pool has: they stay in ``param.grad`` as long as the user wants
            averaged = future.wait()
            flat = averaged[0] if isinstance(averaged, list | tuple) else averaged
            for param, window in space.places.items():
                if used is None or param in used:
                    param.grad = window.view(flat)
        self._averages.clear()

    def launch_order(self) -> list[int] | None:
        """The buckets in the order in which they became full in the last pass, those without a gradient last.

        Asked until it is known. Of the plan, if parameters may be unused: then ranks differ. None, on every rank alike,
        of a pass in which autograd did not fill the buckets: one that learns a static graph, or that DDP's reducer has
        begun.
        """
        ddp = self._ddp()
        if ddp is None or finds_unused(ddp):
            self._notes_order = False
            return list(range(self._last + 1))
        # not asked of the number of full buckets: in a static graph ranks may use different parameters
        if not self._fills_by_autograd:
            return None
        self._notes_order = False
        filled = [index for index in self._order if index >= 0]
        return [*filled, *sorted(set(range(self._last + 1)).difference(filled))]

    def used_anywhere(self) -> set[Tensor] | None:
        """The parameters with a gradient on any rank in the last pass; None: all.

        A collective where DDP has one: if it looks for unused parameters, and once in a static graph.
        """
        ddp = self._ddp()
        if ddp is None or not (finds_unused(ddp) or has_static_graph(ddp)):
            return None
        if self.used is None:
            # once for all optimizers of the model
            used = self._find_used(ddp) if self.before is None else self.before.used_anywhere()
            self.used = used if has_static_graph(ddp) else None
            return used
        return self.used

    def _find_used(self, ddp: DistributedDataParallel) -> set[Tensor] | None:
        unused = self.unused.union(*(one.unused for one in self._following()))
        if not self._has_counted:
            self._has_counted = True
            self._used_map = self._flags([param for param in self._params if param not in unused])
            sum_as_ddp(ddp.process_group, self._used_map).wait()
        if finds_unused(ddp) and not unused:
            return None  # this rank has used all of them: the host need not wait for the others' answers
        assert self._used_map is not None, "summed above"
        return {param for param, count in zip(self._params, self._used_map.tolist(), strict=True) if count}

    def leave(self) -> None:
        """An exception has ended the pass: leave its gradients as DDP does, and take none of later passes."""
        if self.has_begun and self._left is None:
            self._left = self._missing()
        for bucket in self._buckets if self.has_begun and self._fills_by_autograd else ():
            bucket.leave(self._left_factor)
        for space, _ in self._averages if self._shows_buckets else ():  # maybe on their way still, as in DDP
            for param in set(space.places) - self.unused:
                param.grad = space.places[param].view(space.flat)
        self._averages.clear()
        self.is_prepared = self._is_paused = False
        for bucket in self._buckets:
            bucket.drop()

    def __del__(self) -> None:
        for bucket in self._buckets:  # nodes of the parameters hold them: they would go on to take gradients
            bucket.awaited = None

    def forget_left(self) -> None:
        """Before the first gradient of a pass: forget one that `leave` has ended. Others may train the parameters."""
        if self._left is not None:
            self.reset()

    def reset(self) -> None:
        """Drop the pass, and leave its gradients as DDP does."""
        self.leave()
        self._launched, self._hook, self._left = 0, None, None
        self.has_begun = self.is_learning = False

    def take_over(self, bucket: GradBucket) -> Future[Any]:
        """Take the gradients of a bucket of DDP's reducer.

        It has got them before this one was in its place, or whoever kept a reference to it has prepared it.

        Raises:
            RuntimeError: if this reduces the pass, too.
        """
        if not self.is_prepared:
            self._expect(listens=False)
            self.has_begun = True
        elif self._fills_by_autograd or self.is_learning:
            raise RuntimeError(
                "Expected one reducer in a backward pass, got DDP's own besides stage 2's "
                f"({self._where}): a reference to ddp.reducer was kept from before the optimizer was built, "
                "and prepare_for_backward() called on it in a pass that DDP's forward pass has prepared already. Leave "
                "out that call. [ZERO-301]"
            )
        place_of = {param: (one, place) for one in self._buckets for place, param in enumerate(one.params)}
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            filled, place = place_of[param]
            filled.give(place, None if param.grad is None else grad)
            assert filled.awaited is not None, "expected above"
            filled.awaited.discard(place)
        self.bucket_is_full(None)
        published: Future[Any] = Future()
        published.set_result(bucket.buffer())
        return published

    def accumulated_twice(self, param: Tensor) -> RuntimeError:
        """The error for a gradient that arrives again in the same pass."""
        ddp = self._ddp()
        names = {} if ddp is None else {one: name for name, one in in_buckets(ddp)}
        return RuntimeError(
            f"Expected one gradient of {names.get(param, 'a parameter')!r} in a backward pass, got two "
            f"({self._where}), as with reentrant checkpoints over shared parameters: its bucket is already "
            "being averaged. Use checkpoint(..., use_reentrant=False), or static_graph=True if every iteration uses "
            "the same parameters. [ZERO-301]"
        )

    def _expect(self, listens: bool, learns: bool = False) -> None:
        for bucket in self._buckets if self.has_begun else ():
            bucket.drop()
        # ranks may communicate here, as in DDP's forward pass: a later moment differs from rank to rank
        self._before_pass()
        self.is_learning, self._fills_by_autograd = learns, listens and not learns
        self._launched, self._absent, self._is_paused = 0, None, False
        self.unused.clear()
        self._has_counted = False
        self._order.clear()
        for bucket in self._buckets:
            bucket.expect(listens, learns)
        for bucket in self._buckets[:1]:
            bucket.may_fill = True
        self.is_prepared, self.has_begun, self._left = True, False, None

    def _average(self, bucket: PlannedBucket) -> Future[Any]:
        ddp = self._ddp()
        assert ddp is not None, "it holds this"
        found: Future[Any] = average_as_ddp(ddp.process_group, bucket)  # type: ignore[arg-type]
        return found

    def _flags(self, params: Iterable[Tensor]) -> Tensor:
        used = set(params)
        flags = [int(param in used) for param in self._params]
        return torch.tensor(flags, dtype=torch.int32).to(self._params[0].device, non_blocking=True)


class _StandIn:
    """The object in the place of DDP's reducer: one or several `PlannedReducer`, and the reducer for all else.

    It holds the `PlannedReducer`, and whoever holds a reference to the reducer keeps that.

    Attributes:
        own: the reducer, while anything else refers to it.
    """

    own: "weakref.ref[Any]"

    def __init__(self) -> None:
        self.planned: list[PlannedReducer] = []
        self._launching = threading.RLock()  # of this model alone: a reduction may wait for other ranks

    def put(self, planned: "list[PlannedReducer]") -> None:
        """Have these stand there, in this order."""
        for one in self.planned:
            one.before = one.after = None
        for one in planned:
            one.launching = self._launching
        for one, following in pairwise(planned):
            one.after, following.before = following, one
        self.planned = planned

    @never_compiled
    def __getattr__(self, name: str) -> Any:
        if not hasattr(PlannedReducer, name):
            own = self.own()
            return of_a_reducer_at_rest(name) if own is None else getattr(own, name)
        if len(self.planned) == 1:
            return getattr(self.planned[0], name)
        return partial(self._call_all, name)

    def _get_zeros_like_grad_buckets(self) -> list[PlannedBucket]:
        return [bucket for one in self.planned for bucket in one._get_zeros_like_grad_buckets()]

    def _run_comm_hook(self, bucket: PlannedBucket) -> Future[Any]:
        assert bucket.planned_by is not None, "it stands here"
        return bucket.planned_by._run_comm_hook(bucket)

    def landed(self) -> set[Tensor]:
        """See `PlannedReducer.landed`."""
        return {param for one in self.planned for param in one.landed()}

    def _call_all(self, name: str, *args: Any) -> Any:
        if not self.planned:
            raise RuntimeError(
                f"Expected {name}() of the reducer that the DDP model has now, got that of an earlier one, whose "
                "optimizer has left the model: it would reduce nothing. Take ddp.reducer where it is used, not before "
                "optimizers are built. [ZERO-301]"
            )
        # the first one last: it takes what the others leave
        return [getattr(one, name)(*args) for one in reversed(self.planned)][-1]


def stand_in_of(ddp: DistributedDataParallel) -> _StandIn | None:
    """The object in the place of a model's reducer; None: its own is there."""
    found = reducer_of(ddp)
    return found if isinstance(found, _StandIn) else None


@never_compiled
def _search(reference: "weakref.ref[PlannedReducer]", _: Tensor) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.search()


def first_gradient_hook(arrives: Callable[[], object], begun: Sequence[int]) -> Callable[[Tensor | None], None]:
    """A tensor hook of many parameters, which acts at the first of their gradients in a backward pass.

    Args:
        arrives: called then.
        begun: the backward pass in which it was last called, see `backward_id`.
    """

    @never_compiled
    def hook(_: Tensor | None) -> None:
        if begun[0] != backward_id():  # runs once per parameter: nothing more than this is done for most
            arrives()

    return hook
