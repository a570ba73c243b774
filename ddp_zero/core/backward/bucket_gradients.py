"""The gradients of a bucket while they are reduced, whoever reduces them."""

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager

from torch import Tensor

from ddp_zero.core.comm.recorder import Label
from ddp_zero.core.local.parameters import GradientSource


class UsageCounts(ABC):
    """How many ranks have a gradient of each parameter of a bucket: in flight, then there.

    A collective, with the bucket's: a sum of zeros does not tell whether any rank has used a parameter.
    """

    @abstractmethod
    def wait(self) -> None:
        """Block until they have arrived, on an accelerator this stream."""

    @abstractmethod
    def unused(self) -> set[int]:
        """The parameters of which no rank has a gradient, by index. The host waits for an accelerator."""


class BucketGradients(GradientSource):
    """The gradients of a bucket: waited for, read by the step, then kept or released; in each pass again."""

    params: list[Tensor]
    on_stream: AbstractContextManager[object]
    """In which it is waited for and stepped: a stream with backward's kernels must not wait for a reduction."""
    waiting: Label
    """The label of `wait`."""
    starts_early = False
    """Whether its reduction is started before that of the bucket before has ended."""
    doubtful: AbstractSet[int] = frozenset()
    """Parameters without a gradient on this rank, neither of this pass nor of earlier ones, by index."""
    usage: UsageCounts | None = None
    """Tells which of these gradients other ranks have used; None: no rank has used any of them."""

    @abstractmethod
    def wait(self) -> None:
        """Block until its averaged gradients have arrived, within `on_stream` and `waiting`."""

    def whole(self, param: Tensor) -> Tensor:
        """All of a parameter's averaged gradient, after `wait`; in stage 1, where every rank has it."""
        raise NotImplementedError("in stage 2")

    def is_unused(self, index: int) -> bool:
        """True if no rank has a gradient of a parameter, and earlier passes have left none."""
        if self.doubtful and self.usage is not None:
            self.doubtful = self.doubtful & self.usage.unused()
            self.usage = None
        return index in self.doubtful

    def keep(self) -> None:
        """Once `wait` has returned: keep its gradients for a later step, and free what buckets share."""

    def release(self) -> None:
        """Free its gradients, after the step has used them. DDP's reducer keeps its own."""
