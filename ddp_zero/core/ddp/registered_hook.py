"""Communication hooks as DDP keeps them: one of the user's, or of ours, and their place in copies of a model."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.comm.communicator import average_as_ddp
from ddp_zero.core.ddp.reducer import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_id,
    gradients_are_views,
    in_order_of_reducer,
    is_finalized,
    keep_hooks_in,
    params_of_buckets,
    ready_times,
    reduces_itself,
    registered_hooks,
)
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.weak_calls import WeakHook, tensors_in, weakly
from ddp_zero.core.step.decision import NonfiniteProbe

CommHook = Callable[[Any, GradBucket], Future[Any]]


@dataclass(frozen=True)
class HookOptions:
    """What a user asks of a hook; what is None is left to the library. `shard_optimizer` documents each."""

    hook: CommHook | None = None
    state: Any = None
    interleaved: bool | None = None
    shard_buckets: bool | None = None

    def after(self, earlier: "HookOptions") -> "HookOptions":
        """These options, and what is None as it was earlier: of a module that is wrapped again."""
        state = earlier.state if self.hook is None and self.state is None else self.state
        return HookOptions(
            earlier.hook if self.hook is None else self.hook,
            state,
            earlier.interleaved if self.interleaved is None else self.interleaved,
            earlier.shard_buckets if self.shard_buckets is None else self.shard_buckets,
        )


class RegisteredHook:
    """A communication hook in a place of a DDP model's, for which another one can be put there.

    DDP takes one hook in its life. An optimizer that leaves leaves the place to the next one; until that comes, the
    model trains as plain DDP. A copy of a DDP model has a reducer of its own, without a hook, and trains as plain DDP
    does, too; but it keeps the list of hooks that were registered on the original. One of this library reaches the
    optimizer and process groups, which can be neither copied nor pickled: in copies of the model its place is empty.

    DDP with a hook does not divide gradients as they land in its buckets: a hook that averages does, once a bucket is
    full. Where DDP shows its buckets in ``param.grad``, the others are divided when an exception has ended the pass.

    Args:
        hook: the hook; None in a copy.
        state: passed to it; None: the one that DDP passes.
        holder: whose hook it is; None: nobody's who may leave.
        averages: whether it reduces as DDP does without a hook.

    Attributes:
        is_copy: whether this is what a copy of the model has in place of the hook.
        is_free: whether its holder has left.
    """

    def __init__(
        self,
        hook: CommHook | None = None,
        state: Any = None,
        holder: "Holder | None" = None,
        *,
        averages: bool = False,
    ) -> None:
        self._hook, self._state, self.holder, self._averages = hook, state, holder, averages
        self._ddp: Callable[[], DistributedDataParallel | None] | None = None  # once it watches the model
        self._pass, self._num_launched = NO_BACKWARD, 0  # the backward pass under way, and its full buckets
        self._params: list[Tensor] = []  # whose gradients may have to be divided
        self._before: list[tuple[bool, int]] = []  # whether each had none when the pass began, and `ready_times`
        self._handles: list[RemovableHandle] = []  # of hooks of the model's parameters
        self.is_copy = hook is None
        self.is_free = False
        self.__name__ = self.__qualname__ = type(self).__qualname__  # DDP logs it

    @never_compiled
    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        assert self._hook is not None, "no reducer of a copy has it"
        self._num_launched += 1
        return self._hook(state if self._state is None else self._state, bucket)

    __call__ = on_bucket

    def without_place(self, state: Any) -> tuple[CommHook, Any]:
        """The hook itself, and its state, for one pass in which DDP's own reducer does not call it."""
        assert self._hook is not None, "no reducer of a copy has it"
        return self._hook, state if self._state is None else self._state

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RegisteredHook, ()

    def free(self, group: ProcessGroup) -> None:
        """Its holder leaves: reduce as DDP does without a hook."""
        self.holder, self._state, self.is_free, self._averages = None, None, True, True
        self._hook = lambda _, bucket: average_as_ddp(group, bucket)
        while self._handles:
            self._handles.pop().remove()

    def leave_if_dropped(self, ddp: DistributedDataParallel) -> None:
        """Before a forward pass with gradients: have a holder leave that was dropped, or raise as it does."""
        if self.holder is not None and self.holder.is_gone:
            self.holder.leave_dropped()
            self.free(ddp.process_group)

    def move_in(self, other: "RegisteredHook") -> None:
        """Be the other one, which is registered nowhere."""
        self._hook, self._state, self.holder, self.is_free = other.on_bucket, None, other.holder, False
        self._averages = other._averages

    # Passes that exceptions end

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Hear of backward passes of its model that an exception ends."""
        if self._ddp is None:
            self._ddp = weakref.ref(ddp)
            self._params = in_order_of_reducer(ddp) if gradients_are_views(ddp) else []
            ddp.register_forward_hook(WeakHook(self._after_forward))

    def _after_forward(self, ddp: DistributedDataParallel, _: Any, returned: Any) -> None:
        divides = self._averages and bool(self._params)
        if not (torch.is_grad_enabled() and (divides or self.holder is not None)):
            return
        begins = weakly(self._backward_begins)
        outputs = [output for output in tensors_in(returned) if output.grad_fn is not None]
        for output in outputs:
            output.register_hook(begins)
        if not outputs and not self._handles:  # they are in an object of a class of the user's
            params = [param for param in in_order_of_reducer(ddp) if param.requires_grad]
            self._handles = [param.register_hook(begins) for param in params]  # before its gradient is added up

    def _backward_begins(self, _: Tensor) -> None:
        if self._pass != backward_id():  # the first of the outputs, or parameters
            self._pass, self._num_launched = backward_id(), 0
            ddp = None if self._ddp is None else self._ddp()
            self._before = []
            if self._averages and self._params and ddp is not None and reduces_itself(ddp):
                bare = [param.grad is None for param in self._params]
                self._before = list(zip(bare, ready_times(ddp), strict=True))
            at_end_of_backward(bool, weakly(self._interrupted))

    @torch.no_grad()
    def _interrupted(self) -> None:
        if self.holder is not None:
            self.holder.interrupted()
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None or not (self._before and reduces_itself(ddp)) or is_finalized(ddp):
            return
        launched = params_of_buckets(ddp, self._num_launched)
        size = ddp.process_group.size()
        for param, (was_bare, before), now in zip(self._params, self._before, ready_times(ddp), strict=True):
            grad = param.grad
            if grad is None or now == before or param in launched:
                continue
            if was_bare:
                grad.mul_(1 / size)
            else:  # the pass has added to it
                grad.div_(size)


class Holder:
    """An optimizer whose hook a model has; it is not kept alive.

    Args:
        optimizer: it.
        leave: takes away its hook, and all that it has put into the model.
        leave_dropped: the same before a forward pass, once the optimizer was dropped.
        interrupted: called when an exception has ended a backward pass.
    """

    def __init__(
        self,
        optimizer: Any,
        leave: Callable[[], object],
        leave_dropped: Callable[[], object],
        interrupted: Callable[[], object] = bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.leave = leave
        self.leave_dropped = leave_dropped
        self.interrupted = interrupted

    @property
    def is_gone(self) -> bool:
        """True if the optimizer was dropped."""
        return self._optimizer() is None

    def params(self) -> list[Tensor]:
        """The optimizer's parameters; none once it is gone."""
        alive = self._optimizer()
        return [] if alive is None else [param for group in alive.param_groups for param in group["params"]]

    def __str__(self) -> str:
        alive = self._optimizer()
        kind = "an optimizer" if alive is None else type(alive.optim).__name__
        return f"{kind} over {len(self.params())} parameters"


def watching(watch: NonfiniteProbe, group: ProcessGroup, wrapped: CommHook | None) -> CommHook:
    """A hook that checks gradients before the wrapped hook averages them, or DDP's own reduction without one."""

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        if watch.is_on:
            watch.screen(bucket.parameters(), bucket.buffer())
        return average_as_ddp(group, bucket) if wrapped is None else wrapped(state, bucket)

    return hook


def held_hooks(ddp: DistributedDataParallel) -> list[RegisteredHook]:
    """The hooks of optimizers that a model has."""
    return [hook for hook in registered_hooks(ddp) if isinstance(hook, RegisteredHook) and hook.holder is not None]


class _HooksOfModel(list[tuple[Any, Any]]):
    """The hooks that are registered on a model, with their states."""

    def append(self, entry: tuple[Any, Any]) -> None:
        """Called by DDP for a hook of the user's, before its reducer refuses a second one without a remedy."""
        if any(isinstance(hook, RegisteredHook) and not hook.is_copy for hook, _ in self):
            raise ValueError(
                "This DDP model has the communication hook of an optimizer, which may have left, and DDP registers "
                "one in its life. Pass yours as hook= to shard_optimizer() or opt.attach(); or, without the "
                "optimizer, wrap the module again and register it on the new DDP model. [ZERO-206]"
            )
        super().append(entry)


def register(ddp: DistributedDataParallel, hook: RegisteredHook) -> RegisteredHook:
    """Register a hook on a model that has none, or whose hook's holder has left. Returns the one that is there now."""
    free = free_place(ddp)
    if free is None:
        ddp.register_comm_hook(None, hook)
        keep_hooks_in(ddp, _HooksOfModel)
        return hook
    free.move_in(hook)
    return free


def free_place(ddp: DistributedDataParallel) -> RegisteredHook | None:
    """The place that a holder has left; None: there is none."""
    return next((one for one in registered_hooks(ddp) if isinstance(one, RegisteredHook) and one.is_free), None)


def has_hook(ddp: DistributedDataParallel) -> bool:
    """True if a communication hook is registered on a model, and not only on one that it was copied from."""
    return not all(isinstance(one, RegisteredHook) and (one.is_copy or one.is_free) for one in registered_hooks(ddp))


_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_UNFIT = {
    "debugging_hooks": "leaves every rank its own gradients",
    "post_localSGD_hook": "leaves every rank, or group of ranks, its own gradients after its first iterations",
    "ddp_zero_hook": "steps an optimizer",
    "optimizer_overlap_hooks": "steps an optimizer",
}
"""Torch's hooks that cannot work here, by the file that has them."""


def check_averages(hook: CommHook) -> None:
    """NotImplementedError for a hook of torch's, or one around it, that does not average gradients or does more."""
    for function in _functions_in(hook):
        file = getattr(function, "__module__", None) or ""
        if (does := _UNFIT.get(file.removeprefix(_HOOKS_OF_TORCH))) is not None:
            name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
            raise NotImplementedError(
                f"Expected a communication hook that averages gradients over all ranks, got torch's {name}, which "
                f"{does}. Pass hook=None, or one that averages in every iteration, as allreduce_hook, "
                "bf16_compress_hook and powerSGD_hook; if it is registered on a DDP model, wrap the module again "
                "without it. [ZERO-217]"
            )


def _functions_in(hook: Any) -> list[Any]:
    """A hook, and the functions that it is made from: in a `functools.partial`, or enclosed as by torch's wrappers."""
    found = list[Any]()
    left = [hook]
    while left:
        one = left.pop()
        while isinstance(one, partial):
            one = one.func
        if not callable(one) or any(one is known for known in found):
            continue
        found.append(one)
        for cell in getattr(one, "__closure__", None) or ():
            with suppress(ValueError):  # not assigned yet
                left.append(cell.cell_contents)
    return found
