"""A reducer in the place of DDP's own, which reduces gradients in the buckets of the plan: stage 2.

DDP's forward pass, its part of `Join` and torch's pipeline schedules tell ``ddp.reducer`` which backward passes are to
be reduced, and no others (torch 2.13.0). So a `PlannedReducer` that stands there learns it from them, and calls the
registered communication hook, once per bucket and in order, as DDP's reducer would. DDP's own is released, with its
memory; when this one is removed, DDP gets a new reducer. If anything else still refers to the old one, that stays idle:
its hooks return at once, unless somebody prepares it for a pass, in which it calls the hook with its own buckets.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.backward.planned_bucket import ForeignGradients, PlannedBucket
from ddp_zero.core.backward.scratch_bucket import ScratchBucket
from ddp_zero.core.comm.communicator import average_as_ddp
from ddp_zero.core.ddp.preconditions import gradients_of_dropped
from ddp_zero.core.ddp.reducer import (
    accumulating_node,
    ask_again,
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
)
from ddp_zero.core.ddp.registered_hook import RegisteredHook
from ddp_zero.core.ddp.used_parameters import UsedParameters, may_be_unused
from ddp_zero.core.local.compiler import never_compiled

_NONE: set[int] = set()


class PlannedReducer:
    """See the module docstring; DDP calls it as a `ReducerFace`.

    Args:
        ddp: the model.
        where: this rank's name in messages.
        before_pass: called before a pass that will be reduced; it may call `lay_out`.
        refuse_sparse: makes the error for a bucket with a sparse gradient.

    Attributes:
        ddp: returns the model, or None once it is gone.
        where: this rank's name in messages.
        params: the parameters that DDP reduces.
        missing_when_abandoned: the parameters that lacked a gradient when `abandon` ended the pass; None: no pass was
            abandoned.
        buckets: the plan's, and behind them buckets of parameters without an optimizer.
        has_begun: whether a gradient of a pass that is reduced has arrived, and some buckets are not full.
        is_prepared: whether the next backward pass, or the one under way, is reduced.
        is_learning: whether this is the first pass of a static graph.
        launching: held while buckets are reduced; one lock for all that stand in the place of a model's reducer.
        before, after: the reducers of other optimizers over the model; each reduces all its buckets before the next.
        users: which parameters have a gradient in the last pass.
        steps_by_bucket: whether the buckets of this iteration are stepped inside backward; set by the hook.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        where: str,
        before_pass: Callable[[], object],
        refuse_sparse: Callable[[list[Tensor]], Exception],
    ) -> None:
        self.buckets: list[PlannedBucket] = []
        self.ddp = weakref.ref(ddp)
        self.where, self.joined_message = where, None
        self._before_pass = before_pass
        self.refuse_sparse = refuse_sparse
        # ``param.grad`` shows DDP's bucket as soon as a gradient lands there, which divides it; else the average alone
        self._shows_buckets = gradients_are_views(ddp)
        self._abandon_factor = 1 / ddp.process_group.size() if self._shows_buckets else 1
        self.params = [param for _, param in in_buckets(ddp)]
        with trainable_for_now(self.params):
            self._nodes = {param: accumulating_node(param) for param in self.params}
        self._last, self._num = -1, 0  # the last bucket of the plan; the number of all
        self._foreign: Sequence[ForeignGradients] = ()
        self._handles: list[RemovableHandle] = []
        self.launching = threading.RLock()
        self.before: PlannedReducer | None = None
        self.after: PlannedReducer | None = None
        self._hook_place = -1  # among the model's communication hooks
        self._hook: tuple[Callable[[Any, Any], Any], Any] | None = None  # with its state, while a pass is reduced
        self._num_launched = 0
        self.is_prepared = self.has_begun = self.is_learning = False
        self._has_learned = False
        self._is_paused = False
        self.missing_when_abandoned: list[Tensor] | None = None  # not in an interrupted pass
        self.users = UsedParameters(self.params)
        self.steps_by_bucket = True
        self._order: list[int] = []  # of the last pass, until it is known
        self._notes_order = True
        self._fills_by_autograd = False  # in the last pass
        self._absent: set[Tensor] | None = None  # parameters that the pass will not reach

    # The plan

    def lay_out(self, buckets: Sequence[ScratchBucket], foreign: Sequence[ForeignGradients]) -> None:
        """Fill these buckets from now on, parameters without an optimizer last."""
        counts = {bucket.params[place]: n for bucket in self.buckets for place, n in bucket.expected_counts.items()}
        for handle in self._handles:
            handle.remove()
        for bucket in self.buckets:
            bucket.drop()
        self._last = len(buckets) - 1
        self._foreign = foreign
        planned = [PlannedBucket(self, one, index, index == self._last) for index, one in enumerate(buckets)]
        self.buckets = [*planned, *(PlannedBucket(self, one, keeps_grad=not self._shows_buckets) for one in foreign)]
        self._num = len(self.buckets)
        self._handles = []
        self._order, self._fills_by_autograd = [], False
        for bucket in self.buckets:
            bucket.expected_counts = {at: counts[param] for at, param in enumerate(bucket.params) if param in counts}
            for place, param in enumerate(bucket.params):
                self._handles.append(self._nodes[param].register_hook(partial(bucket.arrive, place)))

    # Its place

    @property
    def is_installed(self) -> bool:
        """True if it stands in the place of the model's reducer."""
        ddp = self.ddp()
        stand_in = None if ddp is None else stand_in_of(ddp)
        return stand_in is not None and self in stand_in.planned

    def install(self) -> None:
        """Take the place of the model's reducer; or one behind those that have taken it."""
        ddp = self.ddp()
        if ddp is None or self.is_installed:
            return
        stand_in = stand_in_of(ddp)
        if stand_in is None:
            stand_in = _StandIn(weakref.ref(reducer_of(ddp)))
            replace_reducer(ddp, stand_in)
        self._hook_place = last_hook(ddp)
        stand_in.put([*stand_in.planned, self])

    def remove(self) -> None:
        """Give the model its reducer back, unless others stand there, too."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        ddp = self.ddp()
        if ddp is None or not self.is_installed:
            return
        stand_in = stand_in_of(ddp)
        assert stand_in is not None, "this is installed"
        stand_in.put([one for one in stand_in.planned if one is not self])
        if stand_in.planned:
            return
        give_back_reducer(ddp, stand_in.own, self.params)

    # For DDP

    def check_finished(self) -> None:
        """Check that every bucket of the last pass was full.

        Raises:
            RuntimeError: naming parameters that got no gradient.
        """
        if not self.has_begun:
            return
        ddp = self.ddp()
        missing = self._missing()
        names = {} if ddp is None else {param: name for name, param in in_buckets(ddp)}
        first = f", and none of {names[missing[0]]!r}" if missing and missing[0] in names else ""
        raise RuntimeError(
            f"Expected gradients of all {len(self.params)} parameters in the last backward pass, got "
            f"{len(self.params) - len(missing)}{first} ({self.where}): gradients were not averaged. If a "
            "parameter is not used, wrap the model with find_unused_parameters=True, or freeze it before wrapping. If "
            "an exception has interrupted backward, wrap the module again, and call opt.reset() and opt.attach(model). "
            "[ZERO-301]"
        )

    def expect(self, outputs: Iterable[Tensor]) -> None:
        """Reduce the next backward pass.

        Args:
            outputs: of the forward pass, if parameters may be unused.
        """
        ddp = self.ddp()
        self._expect(by_autograd=True, only_counts=ddp is not None and has_static_graph(ddp) and not self._has_learned)
        if ddp is not None and finds_unused(ddp):
            find = partial(_find_unreached, weakref.ref(self))
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(find)

    def learn(self) -> None:
        """At the end of the first backward pass of a static graph: reduce everything."""
        ddp = self.ddp()
        if ddp is not None and not self.is_prepared:
            ask_again(ddp)  # the first pass was in no_sync()
        if not (self.is_learning and self.is_prepared):
            return
        if ddp is not None and not any(bucket.counts for bucket in self.buckets):
            ask_again(ddp)  # the pass was one of `torch.autograd.grad`
            return
        self.is_learning, self._has_learned = False, True
        for bucket in self.buckets:
            bucket.learn()
        self.bucket_is_full(None)

    def join(self, bucket: PlannedBucket) -> Future[Any]:
        """On a rank that has joined: take part in the reduction of a bucket, with zeros."""
        index = bucket.index()
        ddp = self.ddp()
        assert ddp is not None, "it calls this"
        if index == 0:
            self._before_pass()
            self.users.begin()
            if may_be_unused(ddp):
                self.users.unused.update(_first_of(self).users.unused_before())
        if index >= 0:
            # a layout of now: `before_pass` may have made others since the buckets were asked for
            bucket = self.buckets[index]
        bucket.fill_with_zeros()
        if index < 0:
            return average_as_ddp(ddp.process_group, bucket)  # type: ignore[arg-type]
        hook, state = registered_hook(ddp, self._hook_place)
        found: Future[Any] = hook(state, bucket)
        return found

    # A pass

    def landed(self) -> set[Tensor]:
        """The parameters whose gradients have left ``param.grad`` for a bucket, in a pass that is reduced."""
        return set(self.params).difference(self._missing()) if self.has_begun else set()

    def _missing(self) -> list[Tensor]:
        if self.missing_when_abandoned is not None:
            return self.missing_when_abandoned
        return [bucket.params[place] for bucket in self.buckets for place in bucket.awaited or ()]

    def begin(self) -> None:
        """The first gradient of a backward pass, or of one nested in it, is about to be accumulated."""
        if not self.is_prepared:
            return
        if self._is_paused:
            self._is_paused = False
            for bucket in self.buckets:
                bucket.resume()
        ddp = self.ddp()
        if self.has_begun or ddp is None or not any(map(will_run, self._nodes.values())):
            return
        self.has_begun = True
        if not finds_unused(ddp):
            return
        # unless an output's hook has done so: inside a reentrant checkpoint most parameters would seem unused
        self.find_unreached()
        absent = self._absent or set()
        for bucket in self.buckets:
            bucket.awaited = {place for place in bucket.awaited or () if bucket.params[place] not in absent}
        self.bucket_is_full(None)

    def end(self) -> None:
        """At the end of a backward pass."""
        if not self.is_prepared:
            for bucket in self.buckets:
                bucket.awaited = None
        elif self.has_begun:
            self._is_paused = True
            for bucket in self.buckets:
                bucket.pause()

    def find_unreached(self) -> None:
        """Find the parameters that the backward pass under way does not reach, once."""
        if self._absent is None and self.is_prepared:
            reached = {param for param, node in self._nodes.items() if will_run(node)}
            if reached:  # else it is a pass of `torch.autograd.grad`
                self._absent = set(self.params) - reached

    @property
    def is_launching(self) -> bool:
        """True if the reduction of some bucket of the pass was not started yet."""
        return self._num_launched < len(self.buckets)

    def bucket_is_full(self, bucket: PlannedBucket | None) -> None:
        """Reduce the buckets that are full, in order, up to the first that is not."""
        if self._notes_order and bucket is not None:
            self._order.append(bucket.position[0])  # -1 for others
        # one thread at a time, since an accelerator's backward pass has a thread of its own, and on every rank in this
        # order: the reductions of two buckets must not cross
        with self.launching:
            if self.before is not None and self.before.is_launching:
                return
            buckets, last, num = self.buckets, self._last, self._num
            while (place := self._num_launched) < num and buckets[place].awaited == _NONE:
                self._num_launched = place + 1
                bucket = buckets[place]
                bucket.copy_rest()
                if place >= last:
                    self._launch_end(place, bucket)
                    continue
                hook, state = self._hook or self._find_hook()
                hook(state, bucket)
                buckets[place + 1].has_scratch = True  # the hook has freed the scratch of the bucket before
            if self.after is not None and not self.is_launching:
                self.after.bucket_is_full(None)

    def _launch_end(self, place: int, bucket: PlannedBucket) -> None:
        """Reduce the last bucket of the plan, or one of other parameters, which come after it."""
        # before the hook: it ends the iteration with the last bucket, and may raise
        if self._num_launched == self._num:
            self.is_prepared = self.has_begun = False
        if place > self._last:
            ddp = self.ddp()
            assert ddp is not None, "it holds this"
            average = average_as_ddp(ddp.process_group, bucket)  # type: ignore[arg-type]
            self._foreign[place - self._last - 1].average = average
            return
        (hook, state), self._hook = self._hook or self._find_hook(), None
        hook(state, bucket)

    def _find_hook(self) -> tuple[Callable[[Any, Any], Any], Any]:
        ddp = self.ddp()
        if ddp is None:
            raise gradients_of_dropped(self.where)
        # for one pass: kept, it would be a cycle that holds the process group until the garbage collector runs
        hook, state = registered_hook(ddp, self._hook_place)
        self._hook = found = hook.without_place(state) if isinstance(hook, RegisteredHook) else (hook, state)
        return found

    def launch_order(self) -> list[int] | None:
        """The buckets in the order in which they became full in the last pass, those without a gradient last.

        Asked until it is known. Of the plan, if parameters may be unused: then ranks differ. None, on every rank alike,
        of a pass in which autograd did not fill the buckets: one that learns a static graph, or that DDP's reducer has
        begun.
        """
        ddp = self.ddp()
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
        ddp = self.ddp()
        if ddp is None or not may_be_unused(ddp):
            return None
        if self.users.anywhere is not None:
            return self.users.anywhere
        if self.before is not None:  # once for all optimizers of the model
            used = self.before.used_anywhere()
        else:
            used = self.users.count(ddp, self.users.unused.union(*(one.users.unused for one in _behind(self))))
        self.users.anywhere = used if has_static_graph(ddp) else None
        return used

    def abandon(self) -> None:
        """An exception has ended the pass: leave its gradients as DDP does, and take none of later passes."""
        if self.has_begun and self.missing_when_abandoned is None:
            self.missing_when_abandoned = self._missing()
        for bucket in self.buckets if self.has_begun and self._fills_by_autograd else ():
            bucket.abandon(self._abandon_factor)
        for foreign in self._foreign:
            foreign.abandon(self.users.unused if self._shows_buckets else None)
        self.is_prepared = self._is_paused = False
        for bucket in self.buckets:
            bucket.drop()

    def __del__(self) -> None:
        for bucket in self.buckets:  # nodes of the parameters hold them: they would go on to take gradients
            bucket.awaited = None

    def reset(self) -> None:
        """Drop the pass, and leave its gradients as DDP does."""
        self.abandon()
        self._num_launched, self._hook, self.missing_when_abandoned = 0, None, None
        self.has_begun = self.is_learning = False

    def take_over(self, bucket: GradBucket) -> Future[Any]:
        """Take the gradients of a bucket of DDP's reducer.

        DDP's reducer has got them since the pass began before this reducer took its place, or since somebody has kept a
        reference to DDP's and has prepared it.

        Raises:
            RuntimeError: if this reduces the pass, too.
        """
        if not self.is_prepared:  # the first bucket of the pass
            self._expect(by_autograd=False)
            self.has_begun = True
        elif self._fills_by_autograd or self.is_learning:
            raise RuntimeError(
                "Expected one reducer in a backward pass, got DDP's own besides stage 2's "
                f"({self.where}): a reference to ddp.reducer was kept from before the optimizer was built, "
                "and prepare_for_backward() called on it in a pass that DDP's forward pass has prepared already. Leave "
                "out that call. [ZERO-301]"
            )
        place_of = {param: (one, place) for one in self.buckets for place, param in enumerate(one.params)}
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            filled, place = place_of[param]
            filled.accept(place, None if param.grad is None else grad)
            assert filled.awaited is not None, "expected above"
            filled.awaited.discard(place)
        self.bucket_is_full(None)
        published: Future[Any] = Future()
        published.set_result(bucket.buffer())
        return published

    def _expect(self, by_autograd: bool, only_counts: bool = False) -> None:
        if self.has_begun:  # the last pass has not filled its buckets
            for bucket in self.buckets:
                bucket.drop()
        # ranks may communicate here, as in DDP's forward pass: a later moment differs from rank to rank
        self._before_pass()
        self.is_learning = only_counts
        self._fills_by_autograd = by_autograd and not only_counts
        self._num_launched, self._absent, self._is_paused = 0, None, False
        self.users.begin()
        self._order.clear()
        for bucket in self.buckets:
            bucket.expect(by_autograd, only_counts)
        for bucket in self.buckets[:1]:
            bucket.has_scratch = True
        self.is_prepared, self.has_begun, self.missing_when_abandoned = True, False, None


class ReducerFace:
    """A `PlannedReducer` by the names of DDP's reducer that DDP, its part of `Join` and pipeline schedules call."""

    def __init__(self, planned: PlannedReducer) -> None:
        self._planned = planned

    @never_compiled
    def prepare_for_forward(self) -> None:
        """Nothing is timed."""

    @never_compiled
    def _rebuild_buckets(self) -> bool:
        """Before a forward pass: check that the last reduction has ended. Returns False: buckets stay."""
        self._planned.check_finished()
        return False

    def _check_reducer_finalized(self) -> None:
        self._planned.check_finished()

    @never_compiled
    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        self._planned.expect(outputs)

    @never_compiled
    def _delay_all_reduce(self) -> None:
        self._planned.learn()

    @never_compiled
    def _set_forward_pass_work_handle(self, work: Any, _: bool) -> None:
        """Under `Join`: the message that this rank has not joined, which ranks count; averages divide by all."""
        self._planned.joined_message = work  # kept until the next one: Gloo would drop a message in flight with it

    def _get_local_used_map(self) -> Tensor:
        """On a rank that has joined: the sum over ranks of the last pass, to which DDP adds the others' flags.

        So a parameter that was used before still counts as used, and gets a gradient of zeros, as in DDP.
        """
        return _first_of(self._planned).users.counts

    def _push_all_rebuilt_params(self) -> None:
        """Nothing is rebuilt."""


def _behind(planned: PlannedReducer) -> Iterator[PlannedReducer]:
    following = planned.after
    while following is not None:
        yield following
        following = following.after


def _first_of(planned: PlannedReducer) -> PlannedReducer:
    """The first one of a model's."""
    return planned if planned.before is None else _first_of(planned.before)


class _StandIn:
    """Stands in the place of ``ddp.reducer`` in stage 2.

    Passes calls on to one or several `PlannedReducer`, all else to DDP's own.

    Args:
        own: a weak reference to DDP's own reducer, which lives as long as anything else refers to it.
    """

    def __init__(self, own: "weakref.ref[Any]") -> None:
        self.own = own
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
        if not hasattr(ReducerFace, name):
            own = self.own()
            return of_a_reducer_at_rest(name) if own is None else getattr(own, name)
        if len(self.planned) == 1:
            return getattr(ReducerFace(self.planned[0]), name)
        return partial(self._call_all, name)

    def _get_zeros_like_grad_buckets(self) -> list[PlannedBucket]:
        """The buckets in which a rank that has joined takes part, in order; `_run_comm_hook` fills them."""
        return [bucket for one in self.planned for bucket in one.buckets]

    def _run_comm_hook(self, bucket: PlannedBucket) -> Future[Any]:
        """On a rank that has joined: take part in the reduction of a bucket, with zeros."""
        assert bucket.planned_by is not None, "it stands here"
        return bucket.planned_by.join(bucket)

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
        # the first optimizer's last: it reduces parameters that no optimizer has
        return [getattr(ReducerFace(one), name)(*args) for one in reversed(self.planned)][-1]


def taken_by_others(planned: PlannedReducer) -> set[Tensor]:
    """The parameters of the model that the reducers of other optimizers of stage 2 reduce.

    The reducer of the first optimizer reduces parameters that no optimizer has, too.
    """
    ddp = planned.ddp()
    stand_in = None if ddp is None else stand_in_of(ddp)
    if stand_in is not None and stand_in.planned[0] is not planned:
        return set(planned.params)
    return {param for one in _behind(planned) for bucket in one.buckets for param in bucket.params}


def stand_in_of(ddp: DistributedDataParallel) -> _StandIn | None:
    """The object in the place of a model's reducer; None: its own is there."""
    found = reducer_of(ddp)
    return found if isinstance(found, _StandIn) else None


@never_compiled
def _find_unreached(reference: "weakref.ref[PlannedReducer]", _: Tensor) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.find_unreached()
