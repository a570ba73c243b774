"""The corridor between DDP and the step: the only file that touches DDP's internals.

DDP calls the hook once per bucket, in index order, from the thread that runs backward. Each call, in order:

1. bucket 0 opens an iteration: choose its regime, the same on every rank;
2. tell the machine which bucket arrived; it says what to do and refuses what is out of order;
3. start the wrapped hook's reduction and return its future, so that the reducer publishes gradients as ever;
4. carry out the machine's actions: wait for a reduction, step, start a sync. Nothing runs in a future's callback.

*overlapped*: buckets are stepped inside backward, from the tensor in the reduction's future. *deferred*: the reducer
publishes the gradients first, which alone knows what no rank has used, and the step runs right after it, still inside
``backward()``. It does so in an engine callback queued by an engine callback: the reducer queues its own finalizer
after the hook for the last bucket returns, and the engine runs callbacks in the order in which they were queued.

On a rank that has joined (`torch.distributed.algorithms.Join`) there is no backward; DDP calls the hook with zeros.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.collectives import average_as_ddp
from ddp_zero.join import BorrowedGradients, serve_joined, share_options
from ddp_zero.memory_layout import is_dense
from ddp_zero.overlap import Action, AdoptLayout, FinishSyncs, OverlapMachine, Phase, StepBucket
from ddp_zero.plan import owners_by_bucket
from ddp_zero.sharded_step import ShardedStep
from ddp_zero.side_stream import SideStream
from ddp_zero.tracing import label, logger

CommHook = Callable[[Any, GradBucket], Future[Any]]


class OverlapHook:
    """A DDP communication hook that steps and syncs after the reduction of the hook it wraps.

    Args:
        sharded: the step.
        ddp: the model it must be registered on.
        wrapped: starts a bucket's reduction and returns a future of the averaged bucket; None: as DDP without a hook.
        split: whether a bucket is spread over ranks, or goes whole to one.
        lag: how many buckets the step stays behind the reduction; None: until the last bucket has arrived.
        joinable: the optimizer, which Join tells whether it is on.
    """

    def __init__(
        self,
        sharded: ShardedStep,
        ddp: DistributedDataParallel,
        wrapped: CommHook | None,
        split: bool,
        lag: int | None,
        joinable: Joinable,
    ) -> None:
        self.machine = OverlapMachine(lag, sharded.comm.name(sharded.comm.group_rank))
        self._sharded = sharded
        self._ddp_reference = weakref.ref(ddp)  # DDP's reducer holds the hook: a cycle that nothing could collect
        self._wrapped = wrapped if wrapped is not None else _ddps_own(ddp.process_group)
        self._table = sharded.table
        self._split = split
        self._joinable = weakref.ref(joinable)  # it holds the hook
        self._side = SideStream()
        self._arrived: list[tuple[list[Tensor], Future[Any]]] = []
        self._compositions: list[tuple[int, ...]] = []
        self._offsets: list[dict[int, int]] = []
        self._has_begun = False
        self._published: list[tuple[int, int, int]] = []  # parameter, place and version of its gradient: no reference
        self.may_be_replaced = False
        self._static_graph_has_unused: bool | None = None
        self.deferred_because: str | None = "no backward pass yet"

    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls; see the module docstring."""
        index, params = bucket.index(), bucket.parameters()
        if index == 0 and self.machine.phase is not Phase.RUNNING:
            self._open_iteration()
        matches = self._matches_plan(index, params, bucket.is_last())
        if not matches and bucket.buffer().layout is not torch.strided:
            raise self._sparse(params)
        if index == 0:
            self.deferred_because = self._reason_to_defer(params, matches)
        actions = self.machine.bucket_arrived(index, bucket.is_last(), matches, self.deferred_because is not None)
        with label("reduce", bucket=index):
            future = self._wrapped(state, bucket)
        self._arrived.append((params, future))
        self._carry_out(actions)
        if bucket.is_last() and _in_backward():
            _after_the_reducer(self._finish_backward)
        return future

    def check_joined(self) -> None:
        """The user calls ``opt.step()``: see that a step was taken, once, with the gradients as they are now.

        Raises:
            RuntimeError: if not, naming the parameter whose gradient was changed too late.
        """
        self.machine.step_called()
        for index, place, version in self._published:
            grad = self._sharded.table.params[index].grad
            if grad is not None and grad.data_ptr() == place and grad._version != version:
                raise RuntimeError(
                    f"Expected gradients as backward left them, since the step was taken inside it, got a changed one "
                    f"for {self._sharded.table.label(index)} (rank {self._sharded.comm.group_rank}). To clip, scale or "
                    "unscale gradients before the step, build the optimizer with overlap_with_ddp=False."
                )

    def step_joined(self) -> None:
        """On a rank that has joined, after DDP's own shadow: finish a deferred step with a peer's gradients."""
        if self.machine.phase is Phase.REDUCED:
            self._finish_deferred(has_joined=True)
        self.machine.step_shadowed()

    def reset(self) -> None:
        """Drop the iteration, after an exception in forward or backward; the hook may be replaced then."""
        self.machine.reset()
        self.may_be_replaced = True
        self._arrived.clear()
        self._published.clear()
        self._sharded.binding.sync.abandon()

    def describe(self) -> str:
        """The regime of the last iteration, and why, in a line."""
        regime = f"deferred to the end of backward: {self.deferred_because}" if self.deferred_because else "overlapped"
        return f"regime: {regime} ({self.machine.status.name}, {self.machine.phase.name})"

    # An iteration

    def _open_iteration(self) -> None:
        self._arrived.clear()
        self._published.clear()
        self.may_be_replaced = False
        self._has_begun = False
        self._sharded.refresh(may_talk=not self._join_is_on())

    def _matches_plan(self, index: int, params: list[Tensor], is_last: bool) -> bool:
        known = self._compositions
        if self._table is not self._sharded.table:
            return False
        return index < len(known) and known[index] == tuple(map(id, params)) and is_last == (index == len(known) - 1)

    def _reason_to_defer(self, params: list[Tensor], matches: bool) -> str | None:
        """Why this iteration cannot step as buckets arrive, or None; the same on every rank."""
        if not self._compositions:
            self._check_model(params)
            return "the first backward pass shows DDP's buckets"
        if not matches:
            return "DDP has rebuilt its buckets, or parameters were added"
        if self._ddp.static_graph:
            if self._static_graph_has_unused is not False:
                return "the static graph has parameters that no rank uses"
        elif self._ddp.find_unused_parameters:
            return "find_unused_parameters=True: only the reducer knows which gradients exist"
        if self._sharded.local_step.steps_whole:
            return "the optimizer wraps another one, which steps all its parameters at once"
        outside = self._sharded.binding.not_reduced()
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
        _, future = self._arrived[index]
        with self._side.running(self._device(index)):
            with label("wait_reduce", bucket=index):
                reduced = future.wait()
            reduced = reduced[0] if isinstance(reduced, list | tuple) else reduced
            self._side.keep(reduced)
            segment = sharded.binding.plan.buckets[index].segments[sharded.comm.group_rank]
            params = {param: sharded.table.params[param] for param in segment.params}
            published = [param.grad for param in params.values()]
            for place, param in params.items():
                param.grad = _gradient_in(reduced, param, self._offsets[index][place])
            try:
                sharded.step_bucket(index)
            finally:
                for param, grad in zip(params.values(), published, strict=True):
                    param.grad = grad  # the reducer insists on its own tensor

    def _begin(self) -> None:
        sharded = self._sharded
        if self._join_is_on():
            groups = sharded.param_groups
            share_options(sharded.comm, sharded.table, sharded.binding, groups, has_joined=not _in_backward())
        sharded.begin()
        self._has_begun = True

    def _finish_syncs(self) -> None:
        if not self._has_begun:
            self._begin()
        with self._side.running(self._device(0)):
            self._sharded.finish()
        self._side.join()

    def _finish_backward(self) -> None:
        """After the reducer has published the gradients."""
        if self.machine.phase is Phase.REDUCED:
            self._finish_deferred()
        grads = ((index, param.grad) for index, param in enumerate(self._sharded.table.params))
        self._published = [(index, grad.data_ptr(), grad._version) for index, grad in grads if grad is not None]
        self._arrived.clear()  # futures hold reduced buckets

    def _finish_deferred(self, has_joined: bool = False) -> None:
        """Step from published gradients, or on a rank that has joined from those that a peer sends."""
        for action in self.machine.backward_finished():
            if isinstance(action, AdoptLayout):
                self._adopt_layout()  # before gradients are lent: they go to the new owners
            else:
                self._step_all(has_joined)
        if self._ddp.static_graph and self._static_graph_has_unused is None:
            self._static_graph_has_unused = self._ask_for_unused(has_run=not has_joined)

    def _step_all(self, has_joined: bool) -> None:
        sharded = self._sharded
        lent = (sharded.comm, sharded.table, sharded.binding, sharded.param_groups)
        if has_joined:
            with BorrowedGradients(*lent):
                sharded.begin()
                sharded.run()
            return
        if self._join_is_on():
            serve_joined(*lent)
        sharded.begin()
        sharded.run()

    # The layout

    def _adopt_layout(self) -> None:
        """Plan for the buckets of this iteration. DDP's first layout is provisional, so owners stay as they are."""
        sharded, machine = self._sharded, self.machine
        index_of = sharded.table.index_of
        layout = [[index_of[param] for param in params if param in index_of] for params, _ in self._arrived]
        is_final = bool(self._compositions) or self._layout_never_changes()
        owners = list(sharded.binding.owners)
        if is_final:
            machine.buckets_rebuilt()
            sizes = [spec.nbytes for spec in sharded.binding.plan.specs]
            owners = owners_by_bucket(sizes, owners, sharded.comm.world_size, layout, self._split)
        logger.debug("adopting %s layout of %d buckets", "final" if is_final else "provisional", len(layout))
        sharded.adopt(layout, owners)
        self._table = sharded.table
        self._compositions = [tuple(map(id, params)) for params, _ in self._arrived]
        self._offsets = [_offsets(params, index_of) for params, _ in self._arrived]
        if is_final:
            machine.layout_adopted()

    def _layout_never_changes(self) -> bool:
        return bool(self._ddp.find_unused_parameters and not self._ddp.static_graph)

    def _ask_for_unused(self, has_run: bool) -> bool:
        """Whether the static graph has parameters that no rank uses; asked once, of the ranks that have run it."""
        reduced = {param for bucket in self._sharded.binding.layout or () for param in bucket}
        unused = has_run and any(self._sharded.table.params[param].grad is None for param in reduced)
        return any(flag for (flag,) in self._sharded.comm.all_gather_ints([int(unused)]))

    def _check_model(self, params: list[Tensor]) -> None:
        own = set(self._ddp.parameters())
        if any(param not in own for param in params):
            raise RuntimeError(
                "Expected the hook to be registered on the DDP model that it was built for, got a bucket with "
                "parameters of another one. Pass the same model to hook_with_zero_step() and call its "
                "register_comm_hook()."
            )

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ddp_reference()
        assert ddp is not None, "the model whose reducer calls the hook is alive"
        return ddp

    def _join_is_on(self) -> bool:
        joinable = self._joinable()
        return joinable is not None and joinable._join_config.enable

    def _sparse(self, params: list[Tensor]) -> NotImplementedError:
        table = self._sharded.table
        names = [table.label(table.index_of[param]) for param in params if param in table.index_of]
        return NotImplementedError(
            f"Expected dense gradients, got a sparse one for {', '.join(names) or 'a parameter of another optimizer'}. "
            "Build the layer with sparse=False."
        )

    def _device(self, index: int) -> torch.device:
        return self._arrived[index][0][0].device


def check_has_no_hook(overlaps: bool, hook: OverlapHook | None) -> None:
    """See that an optimizer can be given a hook.

    Raises:
        ValueError: if it was not built for overlap, or has a hook that was not reset.
    """
    if not overlaps:
        raise ValueError("Expected an optimizer built with overlap_with_ddp=True, got one that steps in step().")
    if hook is not None and not hook.may_be_replaced:
        raise ValueError("Expected an optimizer without a hook, got one that has one. Build one hook per optimizer.")


def check_model(ddp: DistributedDataParallel, sharded: ShardedStep) -> None:
    """See that an optimizer can be stepped by the hook of a model.

    Raises:
        TypeError: if it is no DDP model.
        ValueError: if optimizer and model share no parameter, or not the same ranks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}.")
    if not any(param in sharded.table.index_of for param in ddp.parameters()):
        raise ValueError("Expected an optimizer over the parameters of this DDP model, got none in common.")
    if not sharded.comm.has_same_ranks(ddp.process_group):
        raise ValueError(
            "Expected the optimizer and the DDP model on the same ranks, got different process groups. Pass "
            "process_group=ddp.process_group to the optimizer."
        )


def _ddps_own(group: ProcessGroup) -> CommHook:
    return lambda _, bucket: average_as_ddp(group, bucket)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _after_the_reducer(callback: Callable[[], None]) -> None:
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def _offsets(params: list[Tensor], index_of: dict[Tensor, int]) -> dict[int, int]:
    """Where each of our parameters starts in DDP's bucket, in elements; DDP lays them end to end."""
    offsets, start = {}, 0
    for param in params:
        if param in index_of:
            offsets[index_of[param]] = start
        start += param.numel()
    return offsets


def _gradient_in(reduced: Tensor, param: Tensor, offset: int) -> Tensor:
    """A parameter's window of a reduced bucket, laid out as DDP does: with its own strides if they are dense."""
    if is_dense(param.shape, param.stride()):
        return reduced.as_strided(param.shape, param.stride(), int(reduced.storage_offset()) + offset)
    return reduced[offset : offset + param.numel()].view(param.shape)
