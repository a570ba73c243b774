"""Communication hooks as DDP keeps them: one of the user's, or of ours, and their place in copies of a model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.reducer import registered_hooks
from ddp_zero.core.comm.communicator import average_as_ddp
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.step.decision import NonfiniteProbe

CommHook = Callable[[Any, GradBucket], Future[Any]]


class RegisteredHook:
    """A communication hook that copies and pickles of its DDP model leave behind.

    A copy of a DDP model has a reducer of its own, without a hook, and trains as plain DDP does; but it keeps the list
    of hooks that were registered on the original. One of this library reaches the optimizer and process groups, which
    can be neither copied nor pickled.

    Args:
        hook: the hook; None in a copy.
        state: passed to it.

    Attributes:
        is_copy: whether this is what a copy of the model has in place of the hook.
    """

    def __init__(self, hook: CommHook | None = None, state: Any = None) -> None:
        self._hook, self._state = hook, state
        self.is_copy = hook is None
        self.__name__ = self.__qualname__ = type(self).__qualname__  # DDP logs it

    @never_compiled
    def on_bucket(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        assert self._hook is not None, "no reducer of a copy has it"
        return self._hook(self._state, bucket)

    __call__ = on_bucket

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RegisteredHook, ()


def watching(watch: NonfiniteProbe, group: ProcessGroup, wrapped: CommHook | None) -> CommHook:
    """A hook that checks gradients before the wrapped hook averages them, or DDP's own reduction without one."""

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        if watch.is_on:
            watch.screen(bucket.parameters(), bucket.buffer())
        return average_as_ddp(group, bucket) if wrapped is None else wrapped(state, bucket)

    return RegisteredHook(hook)


def has_hook(ddp: DistributedDataParallel) -> bool:
    """True if a communication hook is registered on a model, and not only on one that it was copied from."""
    # a hook of the optimizer's is a method
    return any(not getattr(getattr(hook, "__self__", hook), "is_copy", False) for hook in registered_hooks(ddp))
