"""The corridor between DDP and the step.

DDP calls the hook once per bucket, in index order, from the thread that runs backward. Each call, in order:

1. bucket 0 opens an iteration: choose its regime, the same on every rank;
2. tell the machine which bucket arrived; it says what to do and refuses what is out of order;
3. start the wrapped hook's reduction and return its future, so that the reducer publishes gradients as ever;
4. carry out the machine's actions: wait for a reduction, step, start a sync. Nothing runs in a future's callback.

*overlapped*: buckets are stepped inside backward, from the tensor in the reduction's future. *deferred*: the reducer
publishes the gradients first, which alone knows what no rank has used, and the step runs right after it, still inside
``backward()``. It does so in an engine callback queued by an engine callback: the reducer queues its own finalizer
after the hook for the last bucket returns, and the engine runs callbacks in the order in which they were queued. Where
the step *waits*, the hook only reduces and ``opt.step()`` takes it.

On a rank that has joined (`torch.distributed.algorithms.Join`) there is no backward; DDP calls the hook with zeros.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.admission import check_bucket_of, sparse_gradient
from ddp_zero.gradients import Arrival, Gradients
from ddp_zero.join import BorrowedGradients, serve_joined, share_options
from ddp_zero.overlap import Action, AdoptLayout, FinishSyncs, OverlapMachine, Phase, Regime, StepAll, StepBucket
from ddp_zero.plan import owners_by_bucket
from ddp_zero.published import PublishedGradients
from ddp_zero.reducer import after_the_reducer, finds_unused, has_static_graph, in_backward
from ddp_zero.sharded_step import ShardedStep
from ddp_zero.side_stream import SideStream
from ddp_zero.step_record import StepRecord, StepRegime
from ddp_zero.take_back import StepMemory
from ddp_zero.tracing import label, logger
from ddp_zero.watch import LocalWatch


class OverlapHook:
    """A DDP communication hook that steps and syncs after gradients were reduced.

    Args:
        sharded: the step.
        ddp: the model it must be registered on.
        gradients: reduces them, and says where they rest.
        side: the stream that the step runs on.
        split: whether a bucket is spread over ranks, or goes whole to one.
        lag: how many buckets the step stays behind the reduction; None: until the last bucket has arrived.
        joinable: the optimizer, which Join tells whether it is on.
        overlaps: whether the user asked for steps inside backward.
        why_wait: why the hook only reduces and the step waits for ``opt.step()``, or None; the same on every rank.
        watch: looks at each bucket before it is averaged.

    Attributes:
        accumulates: whether backward passes only reduce for now, whatever ``why_wait`` says.
        memory: of the very first step, as long as it may be taken back.
        published: gradients as backward left them after a step inside it.
        exact: what ``param.grad`` shows of an owned parameter, in the dtype of its sum, where that is another one.
    """

    def __init__(
        self,
        sharded: ShardedStep,
        ddp: DistributedDataParallel,
        gradients: Gradients,
        side: SideStream,
        *,
        split: bool,
        lag: int | None,
        joinable: Joinable,
        overlaps: bool,
        why_wait: Callable[[], str | None],
        watch: LocalWatch,
    ) -> None:
        self.machine = OverlapMachine(lag, sharded.comm.name(sharded.comm.group_rank))
        self.accumulates = False
        self._sharded = sharded
        self._ddp_reference = weakref.ref(ddp)  # DDP's reducer holds the hook: a cycle that nothing could collect
        self._gradients = gradients
        self.exact = gradients.exact
        self._table = sharded.table
        self._split = split
        self._joinable = weakref.ref(joinable)  # it holds the hook
        self._overlaps = overlaps
        self._why_wait = why_wait
        self._watch = watch
        self.memory: StepMemory | None = None
        self.published = PublishedGradients(sharded)
        self._side = side
        self._arrived: list[Arrival] = []
        self._compositions: list[tuple[int, ...]] = []
        self._matching = 0
        self._has_begun = False
        self._has_accumulated = False
        self.may_be_replaced = False
        self._static_graph_has_unused: bool | None = None
        self.deferred_because: str | None = "no backward pass yet"

    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls; see the module docstring."""
        index, params, is_last = bucket.index(), bucket.parameters(), bucket.is_last()
        if index == 0 and self.machine.phase is not Phase.RUNNING:
            self._open_iteration()
        matches = self._matching == index and self._matches_plan(index, params, is_last)
        if not matches and bucket.buffer().layout is not torch.strided:
            raise sparse_gradient(self._table, params)
        if index == 0:
            self.deferred_because = self._reason_to_defer(params, matches)
        actions = self.machine.bucket_arrived(index, is_last, matches, self._regime())
        self._matching += matches
        self._watch.note(params, bucket.buffer())
        with label("reduce", bucket=index):
            future, arrival = self._gradients.start(state, bucket, matches)
        self._arrived.append(arrival)
        self._carry_out(actions)
        self._gradients.settle()
        if is_last and in_backward():
            after_the_reducer(self._finish_backward)
        return future

    def check_joined(self) -> None:
        """The user calls ``opt.step()``: see that a step was taken, once, with the gradients as they are now.

        Raises:
            RuntimeError: if not, naming the parameter whose gradient was changed too late.
        """
        self.machine.step_called()
        self.keep_step()
        self.published.check_unchanged()

    def take_back(self) -> None:
        """The first step was too early: undo it, and let its gradients wait. A collective."""
        assert self.memory is not None, "asked before"
        self.memory.take_back()
        self.memory = None
        self.machine.taken_back()

    def keep_step(self) -> None:
        """The first step will not be taken back."""
        if self.memory is not None:
            self.memory = None
            self._watch.is_on = self._why_wait() is not None
            self._watch.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether averaged gradients wait for ``opt.step()``."""
        return self.machine.phase is Phase.WAITING

    def step_joined(self, take: Callable[[], object]) -> None:
        """On a rank that has joined, after DDP's own shadow: finish the iteration with a peer's gradients.

        Args:
            take: takes a step that has waited for all gradients.
        """
        if self.machine.phase is Phase.REDUCED:
            self._finish_deferred(has_joined=True)
        if self.is_waiting:
            with BorrowedGradients(self._sharded, self._reduced_gradient):
                take()
        elif self.machine.phase is Phase.STEPPED:
            self._record()
        self.machine.step_shadowed()
        self._gradients.close()
        self._arrived.clear()

    def reset(self) -> None:
        """Drop the iteration, after an exception in forward or backward; the hook may be replaced then."""
        self.machine.reset()
        self.may_be_replaced = True
        self._arrived.clear()
        self._gradients.reset()
        self._watch.clear()
        self.memory = None
        self._sharded.binding.sync.abandon()

    def check_complete(self) -> None:
        """The user takes the step: see that no interrupted backward pass has left gradients out of ``param.grad``.

        Raises:
            RuntimeError: if one has.
        """
        if self._gradients.held():
            raise RuntimeError(
                f"Expected all averaged gradients in param.grad at opt.step(), got some that an interrupted backward "
                f"pass has taken out ({self.machine.where}). Call opt.zero_grad(), or opt.reset() and start anew."
            )

    def drop_carried(self) -> None:
        """The user has dropped the gradients."""
        self._gradients.drop_carried()
        self._watch.clear()
        self.machine.gradients_dropped()

    def detach(self) -> None:
        """Another hook takes over."""
        self._gradients.detach()

    def describe(self) -> list[str]:
        """The regime of the last iteration, and why; what the gradients need."""
        until = "opt.step()" if self._regime() is Regime.REDUCE_ONLY else "the end of backward"
        regime = f"deferred to {until}: {self.deferred_because}" if self.deferred_because else "overlapped"
        line = f"regime: {regime} ({self.machine.status.name}, {self.machine.phase.name})"
        return [line, *self._gradients.describe()]

    # An iteration

    def _open_iteration(self) -> None:
        adds_up, self._has_accumulated = self.accumulates or self._has_accumulated, self.accumulates
        if self._overlaps and self.is_waiting and not (adds_up or self.machine.user_calls_step):
            warnings.warn(
                f"Expected opt.step(), for which the step waits ({self._why_wait()}), before the second backward "
                "pass, got none. To add up gradients, use opt.accumulate() or ddp.no_sync().",
                stacklevel=2,
            )
        self._arrived.clear()
        self.published.forget()
        self.keep_step()  # nobody has objected
        self._gradients.open(self._layout_is_final())
        self.may_be_replaced = False
        self._matching = 0
        self._has_begun = False
        self._sharded.refresh(not self._join_is_on(), held=self._gradients.held())
        if self._join_is_on() and self._gradients.held():
            raise RuntimeError(
                "Expected zero_grad() before every backward pass under Join with stage=2, got averaged gradients of an "
                f"earlier one ({self.machine.where}): a rank that has joined cannot add to its own."
            )

    def _matches_plan(self, index: int, params: list[Tensor], is_last: bool) -> bool:
        known = self._compositions
        if self._table is not self._sharded.table or not self._gradients.fits_plan():
            return False
        return index < len(known) and known[index] == tuple(map(id, params)) and is_last == (index == len(known) - 1)

    def _reason_to_defer(self, params: list[Tensor], matches: bool) -> str | None:
        """Why this iteration cannot step as buckets arrive, or None; the same on every rank."""
        if not self._compositions:
            check_bucket_of(self._ddp, params)
            return "the first backward pass shows DDP's buckets"
        if not matches:
            return "DDP has rebuilt its buckets, or parameters were added, frozen or unfrozen"
        waits = self._why_wait()
        if waits is not None:
            return waits
        if self.accumulates:
            return "opt.accumulate() leaves the step to a later backward pass"
        if not self._sharded.has_stepped_inside:
            return "the first step of all, which may be taken back"
        if has_static_graph(self._ddp):
            if self._static_graph_has_unused is not False:
                return "the static graph has parameters that no rank uses"
        elif finds_unused(self._ddp):
            return "find_unused_parameters=True: only the reducer knows which gradients exist"
        if self._sharded.local_step.steps_whole:
            return "the optimizer wraps another one, which steps all its parameters at once"
        outside = self._sharded.binding.not_reduced
        if outside is not None:
            return f"{self._sharded.table.label(outside)} is in none of DDP's buckets"
        return None

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, StepBucket):
                self._step_bucket(action.bucket)
            elif isinstance(action, AdoptLayout):
                self._adopt_layout()
            elif isinstance(action, FinishSyncs):
                self._finish_syncs()

    def _step_bucket(self, index: int) -> None:
        sharded = self._sharded
        if not self._has_begun:
            self._begin()
        arrival = self._arrived[index]
        with self._side.running(arrival.params[0].device):
            with label("wait_reduce", bucket=index):
                arrival.wait()
            segment = sharded.binding.plan.buckets[index].segments[sharded.comm.group_rank]
            params = {param: sharded.table.params[param] for param in segment.params}
            published = [param.grad for param in params.values()]
            for place, param in params.items():
                param.grad = arrival.gradient(place)
            try:
                sharded.step_bucket(index, arrival.exact)
            finally:
                for param, grad in zip(params.values(), published, strict=True):
                    param.grad = grad  # the reducer insists on its own tensor
        arrival.release()

    def _begin(self) -> None:
        if self._join_is_on():
            share_options(self._sharded, has_joined=not in_backward())
        self._sharded.begin()
        self._has_begun = True

    def _finish_syncs(self) -> None:
        if not self._has_begun:
            self._begin()
        with self._side.running(self._arrived[0].params[0].device):
            self._sharded.finish()
        self._side.join()

    def _finish_backward(self) -> None:
        """After the reducer has published the gradients."""
        if self.machine.phase is Phase.REDUCED:
            self._finish_deferred()
        self._gradients.publish(was_consumed=self._has_begun and self.deferred_because is None)
        self._arrived.clear()  # they hold reduced buckets
        self._sharded.binding.settle()
        if self.machine.phase is Phase.STEPPED:
            self._record()
            self.published.note()

    def _record(self) -> None:
        """A step was taken inside backward."""
        regime = StepRegime.OVERLAPPED if self.deferred_because is None else StepRegime.DEFERRED
        self._sharded.last_step = StepRecord(stepped=True, regime=regime, deferred_because=self.deferred_because)
        self._sharded.has_stepped_inside = True
        if self.memory is None:
            self._watch.clear()

    def _finish_deferred(self, has_joined: bool = False) -> None:
        """Step from published gradients, or on a rank that has joined from those that a peer sends."""
        self._gradients.lend_all(has_joined)
        for action in self.machine.backward_finished():
            if isinstance(action, AdoptLayout):
                self._adopt_layout()  # before gradients are lent: they go to the new owners
            elif isinstance(action, StepAll):
                is_first = not (self._sharded.has_stepped_inside or self._join_is_on())
                self.memory = StepMemory(self._sharded) if is_first else None
                self._step_all(has_joined)
                if self.memory is not None:
                    self.memory.step_was_taken()
        if has_static_graph(self._ddp) and self._static_graph_has_unused is None:
            self._static_graph_has_unused = self._sharded.has_unused(has_run=not has_joined)

    def _step_all(self, has_joined: bool) -> None:
        sharded = self._sharded
        if has_joined:
            with BorrowedGradients(self._sharded, self._reduced_gradient):
                sharded.begin()
                sharded.run(self._gradients.exact)
            return
        if self._join_is_on():
            serve_joined(sharded, self._gradients.reach_joined)
        sharded.begin()
        sharded.run(self._gradients.exact)

    def _reduced_gradient(self, index: int) -> Tensor:
        """What the reduction left on this rank for a parameter that it owns."""
        param = self._sharded.table.params[index]
        return next(one for one in self._arrived if any(param is member for member in one.params)).gradient(index)

    # The layout

    def _adopt_layout(self) -> None:
        """Plan for the buckets of this iteration. DDP's first layout is provisional, so owners stay as they are."""
        sharded, machine = self._sharded, self.machine
        index_of = sharded.table.index_of
        layout = [[index_of[param] for param in one.params if param in index_of] for one in self._arrived]
        is_final = self._layout_is_final()
        owners = list(sharded.binding.owners)
        if is_final:
            machine.buckets_rebuilt()
            sizes = [spec.nbytes for spec in sharded.binding.plan.specs]
            owners = owners_by_bucket(sizes, owners, sharded.comm.world_size, layout, self._split, self._matching)
        logger.debug("adopting %s layout of %d buckets", "final" if is_final else "provisional", len(layout))
        sharded.adopt(layout, owners, moves_later=is_final)
        self._table = sharded.table
        self._compositions = [tuple(map(id, one.params)) for one in self._arrived]
        if is_final:
            machine.layout_adopted()
            self._gradients.adopted()

    def _layout_is_final(self) -> bool:
        return bool(self._compositions) or finds_unused(self._ddp)

    def _regime(self) -> Regime:
        if self.accumulates or self._why_wait() is not None:
            return Regime.REDUCE_ONLY
        return Regime.OVERLAPPED if self.deferred_because is None else Regime.DEFERRED

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ddp_reference()
        assert ddp is not None, "the model whose reducer calls the hook is alive"
        return ddp

    def _join_is_on(self) -> bool:
        joinable = self._joinable()
        return joinable is not None and joinable._join_config.enable
