"""One optimizer step over a shard: all buckets in one go, or bucket by bucket as backward delivers them.

A runner takes a bucket from its reduced gradient to its new parameters on all ranks: it lends the gradients to the
inner optimizer, steps this rank's segment and starts the segment's sync.
"""

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.core.comm.recorder import Act, note_failure, run_acts
from ddp_zero.core.local.copy_pipeline import StepInputs
from ddp_zero.core.local.parameters import AlignedGradients, GradientSource, Route, StepTargets
from ddp_zero.core.step.coupling import CouplingWatch
from ddp_zero.core.step.rank_shard import LocalBucket, Shard
from ddp_zero.core.step.record import StepRecord
from ddp_zero.core.step.state_changes import ON_HOST
from ddp_zero.error_codes import coded
from ddp_zero.values.tree import flatten_states


class LentGradients:
    """A context in which the targets of some parameters have the gradients of a step as their ``grad``.

    On exit, targets are copied to their parameters, rounded, and every ``grad`` is restored.
    """

    def __init__(self, targets: StepTargets, indices: tuple[int, ...], source: GradientSource) -> None:
        route = targets.route(indices)
        self._targets, self._route = targets, route
        self._replaced: list[tuple[Tensor, Tensor | None]] = []
        self._changed_in_place: list[Tensor] = []
        self._copied: list[int] = []
        with torch.no_grad():
            self._grads = _grads_of(targets, route, indices, source)

    def __enter__(self) -> None:
        targets, route = self._targets, self._route
        try:
            for target, grad in zip(route.targets, self._grads, strict=True):
                previous = target.grad
                if grad is not previous:
                    self._replaced.append((target, previous))
                    target.grad = grad
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        if route.in_place:
            pairs = zip(route.in_place, route.in_place_targets, strict=True)
            self._changed_in_place = [param for param, target in pairs if target.grad is not None]
        if route.copied:
            self._copied = [index for index in route.copied if targets[index].grad is not None]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                if self._copied:
                    self._targets.write_back(self._copied)
                if self._changed_in_place:
                    increment_version(self._changed_in_place)
        finally:
            for target, previous in self._replaced:
                target.grad = previous


def _grads_of(
    targets: StepTargets, route: Route, indices: tuple[int, ...], source: GradientSource
) -> list[Tensor | None]:
    """The gradients of parameters, in the dtypes of their targets; called with gradients off."""
    if not route.copied:
        return source.gradients(indices)
    return [
        targets.gradient(index, source) if is_master else source.gradient(index)
        for index, is_master in zip(indices, route.is_master, strict=True)
    ]


class StepRunner:
    """Takes the steps of a shard.

    Call `begin`, the `acts` of each bucket in plan order, `end` and `raise_errors`; or `begin` and `run`, which does
    the rest.

    The state counts as changing from the first parameter that this rank steps, not from the beginning of the step: the
    first gradient needs all ranks, and until then a peer may still ask for the state of the last step.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._weak_self = weakref.proxy(self)  # for acts, which the runner holds: a cycle would keep the process group
        self.last_step: StepRecord | None = None
        # whether gradients are lent at addresses that DDP with the plain optimizer would not show, and the inner
        # optimizer does more than arithmetic on single elements, whose bits may depend on them
        self.aligns_gradients = False
        # a context that may hold errors of steps back until ranks with other parameters know of them
        self.catching: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._coupling = CouplingWatch(shard.everyone, shard.local_step)
        self._step_all: Callable[[GradientSource], object] = bool  # runs the acts of all buckets
        self._bound: tuple[object, ...] = ()  # what ``_step_all`` is for: buckets, syncs, whether a profiler is on
        self._compares_options = False  # whether `CouplingWatch` checks this step
        self._new_states: list[Tensor] = []  # keys of states that steps have created since the last record
        self._changing_on: set[tuple[torch.device, ...]] = set()  # devices on which this step changes the state
        self._is_on_cuda = any(param.device.type == "cuda" for param in shard.table.params)
        self._sharing_errors = shard.trace.label("share_errors")

    def run(self, source: GradientSource, **kwargs: Any) -> Any:
        """Step and sync every bucket, after `begin`. Returns the inner optimizer's result for the last bucket.

        Args:
            source: has the gradients.
            **kwargs: for ``optimizer.step()``.
        """
        shard, local_step = self.shard, self.shard.local_step
        bound = shard.buckets, shard.sync, shard.trace.is_profiling()
        if not (self._bound and all(map(is_, bound, self._bound))):
            acts = chain.from_iterable(self.acts(place) for place in range(len(shard.buckets)))
            self._step_all = shard.trace.sequence(acts)
            self._bound = bound
        with local_step.with_kwargs(kwargs) if kwargs else nullcontext():
            try:
                with torch.no_grad() if local_step.lists.may_step else nullcontext():  # once, not per bucket
                    self._step_all(source)
            except BaseException:
                shard.abandon()
                raise
            self.end()
        self.raise_errors()
        return local_step.result

    def begin(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and begin a step; an unfinished earlier step is forgotten.

        Raises RuntimeError as `Shard.check_ready`, or if a parameter that this rank owns is no longer its rounded
        master; NotImplementedError while a CUDA graph is captured.
        """
        shard = self.shard
        shard.snapshot = None
        # parameters of the last step may still arrive into the memory that this step writes
        shard.pending_syncs.complete()
        number = shard.comm.round + 1
        if self._is_on_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "CUDA graphs do not support a sharded step: in each step Python decides which buffers buckets lie in "
                "and what ranks agree on, which a replay would skip. Capture forward passes alone, or use the plain "
                "optimizer. [ZERO-124]"
            )
        shard.masters.follow_model()
        self._compares_options = number >= self._coupling.next_step
        if self._compares_options:
            self._coupling.step_begins(number)
        shard.check_ready()
        shard.changes.announce()
        self._changing_on.clear()
        result = shard.local_step.begin(closure)
        shard.targets.follow_routes()
        return result

    def acts(self, index: int) -> list[Act]:
        """The acts that step this rank's segment of a bucket and start its sync; each takes the gradient source.

        If the local step raises and ranks can report it to each other (see `StepErrors`), this rank steps nothing more
        in this step and sends its parameters as they are; `raise_errors` follows `end`.
        """
        own = self.shard.buckets[index]
        step: list[Act] = [(own.label, partial(StepRunner.step_bucket, self._weak_self, own))]
        # also after an error of this rank: peers have posted receives for this bucket and would wait for ever
        return [*step[: len(own.indices)], *self.shard.sync.acts(index)]

    def step_bucket(self, own: LocalBucket, source: GradientSource) -> None:
        """Step this rank's segment, within its label; see `acts`."""
        shard = self.shard
        local_step, indices, index = shard.local_step, own.indices, own.bucket.index
        if shard.binding.sync.errors.has_local_error:
            local_step.give_up(index)
            return
        if local_step.lists.may_step and torch.is_grad_enabled():
            with torch.no_grad():
                return self.step_bucket(own, source)
        try:
            if own.devices not in self._changing_on:
                self._begin_change(own.devices)
            if self.aligns_gradients:
                source = AlignedGradients(source)
            targets = shard.targets
            found: list[int] = []
            if local_step.lists.may_step:
                route = targets.routes[indices] if indices in targets.routes else targets.route(indices)
                grads = _grads_of(targets, route, indices, source) if route.copied else source.gradients(indices)
                found = local_step.lists.step(index, route.targets, grads)
            if not found:
                # gradients are views of a scratch buffer that another bucket will fill: nothing may keep them
                with LentGradients(targets, indices, source):
                    local_step.step(index)
                return
            if local_step.after_bucket is not None:
                local_step.after_bucket(index, local_step.inner.param_groups, found)
            if route.copied:
                targets.write_back_route(route)
            if route.in_place:
                # backward may still need the old values: fused kernels and views count no version
                increment_version(route.in_place)
        except BaseException as error:
            self._fail(error, own)

    def _fail(self, error: BaseException, own: LocalBucket) -> None:
        """Note the error of a local step, to be raised once ranks know of it, or raise it now; see `acts`."""
        shard = self.shard
        if isinstance(error, Exception):
            error = self._explained(error, own)
            note_failure(error)
            if shard.binding.sync.errors.note(error):
                return
            for later in shard.buckets[own.bucket.index + 1 :]:
                shard.local_step.give_up(later.bucket.index)
        shard.abandon()
        raise error.with_traceback(error.__traceback__) from error.__cause__

    def _explained(self, error: Exception, own: LocalBucket) -> Exception:
        """An error of a local step, or one that names a state which the loop has set in a wrong shape, if there is."""
        shard, stepped = self.shard, self.shard.targets
        if not type(shard.inner).__module__.startswith("torch.optim"):
            return error
        states = ((index, shard.inner_state.get(stepped[index], {})) for index in own.indices)
        misfits = (shard.table.misfit(index, state, stepped.part(index)) for index, state in states)
        misfit = next(filter(None, misfits), "")
        if misfit:
            explained = RuntimeError(
                f"{misfit} Set it in the shape that it had, as torch.zeros_like(opt.state[param][key]) has, or set all "
                "of opt.state[param], which takes tensors in the parameter's shape, on every rank. [ZERO-604]"
            )
            explained.__cause__ = error
            return explained
        return error

    def _begin_change(self, devices: tuple[torch.device, ...]) -> None:
        self.shard.order.has_initial_state = False
        self.shard.changes.begin(devices)
        self._changing_on.add(devices)

    def _try_locally(self, step: Callable[[], Any]) -> Any:
        """Do this rank's part of a step, unless an earlier part has failed."""
        errors = self.shard.sync.errors
        if errors.has_local_error:
            return None
        try:
            return step()
        except Exception as error:
            if not errors.note(error):
                raise
            return None

    def end(self) -> None:
        """Finish the syncs, expose the options that the step changed, note the states that it created.

        Raises RuntimeError if a peer has gone or the group's time-out passed.
        """
        shard, local_step, errors = self.shard, self.shard.local_step, self.shard.sync.errors
        try:
            # the work of all buckets, on the stream that stepped them
            if shard.changes.is_under_way:
                shard.changes.note_work(shard.binding.accelerators)
            # options must change alike on a rank that owns nothing: peers compare options
            if local_step.has_stepped_nothing:
                self._try_locally(local_step.step_empty)
            has_failed = errors.has_local_error
            # collective, on every rank: an error of this rank is shared by it, and raised only in `raise_errors`
            shard.end_syncs()
        except BaseException:
            self.shard.abandon()
            raise
        # a rank that has stepped nothing begins its change only now: until all others had, one could wait for its state
        shard.order.has_initial_state = False
        shard.changes.begin(shard.binding.accelerators or ON_HOST)
        # a rank whose step has failed must not expose options that its peers do not have
        if not has_failed:
            local_step.end()
        shard.masters.note_versions()
        self._new_states += shard.order.after_step(shard.inner_state, shard.targets.index_of)
        if self._compares_options:
            self._coupling.step_ends(has_failed)
        # after the last write to the state, on this rank's thread and in the queues noted above
        shard.changes.end()

    def raise_errors(self) -> None:
        """After `end`: raise on every rank if a local step has failed on any, or if ranks hold different options.

        A collective in steps whose options are compared. See `ParameterSync.raise_errors` and `CouplingWatch`.
        """
        with self.catching(), self._sharing_errors:
            try:
                if self._compares_options:
                    self._coupling.check()
            finally:
                self.shard.sync.raise_errors(own_at_once=self.catching is not nullcontext)

    @property
    def next_number(self) -> int:
        """The number of the next step; the same on every rank."""
        return 1 if self.last_step is None else self.last_step.number + 1

    def record_step(self, record: StepRecord) -> None:
        """Number the record of a step that was taken or skipped, and keep it as `last_step`."""
        self.last_step = replace(record, number=self.next_number)
        if not record.stepped:
            self.shard.changes.decline()
        self.shard.trace.step_ended(perf_counter_ns(), record.stepped)
        if self._new_states:
            self._warn_if_unsavable()

    def _warn_if_unsavable(self) -> None:
        """Warn once of a state that cannot be saved, as soon as a step has created it."""
        shard = self.shard
        keys, self._new_states = self._new_states, []
        new = {shard.targets.index_of(key): shard.inner_state[key] for key in keys if key in shard.inner_state}
        try:
            flatten_states(new, shard.table.label)
        except TypeError as error:
            warnings.warn(coded(f"No save can hold this. {error}", "[ZERO-611]"), stacklevel=2)


class OffloadedRunner(StepRunner):
    """Steps a shard on the host: each bucket once its gradients have been copied there."""

    def acts(self, index: int) -> list[Act]:
        """A single act, which steps and syncs the buckets that have been copied by then; the last act, all others."""
        return [(None, partial(OffloadedRunner._step_arrived, self._weak_self, index))]

    def _step_arrived(self, index: int, source: GradientSource) -> None:
        shard, placement = self.shard, self.shard.targets.placement
        members = (param for segment in shard.buckets[index].bucket.segments for param in segment.params)
        device = next((shard.table.params[param].device for param in members), torch.device("cpu"))
        arrived = placement.submit(index, device, source, partial(self._inputs, index, source))
        # the gradients of the bucket that steps the whole shard are all gradients
        if index == len(shard.buckets) - 1 or shard.local_step.steps_whole:
            arrived = chain(arrived, placement.drain())
        for place, copied in arrived:
            if (own := shard.buckets[place]).indices:
                with own.label:
                    self.step_bucket(own, copied)
            run_acts(shard.sync.acts(place), source)

    def _inputs(self, index: int, source: GradientSource) -> list[StepInputs]:
        """The tensors to copy for the step of a bucket; none after an error of this rank."""
        indices = self.shard.buckets[index].indices
        inputs: list[StepInputs] = self._try_locally(lambda: self.shard.targets.step_inputs(indices, source)) or []
        return inputs


def build_runner(shard: Shard) -> StepRunner:
    placement = shard.targets.placement
    return OffloadedRunner(shard) if placement.offloads else StepRunner(shard)
