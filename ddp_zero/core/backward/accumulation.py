"""Stage 1 with ``accumulate_in_fp32``: averages of several backward passes add up as in stage 2, on every rank.

DDP adds a pass to what is in ``param.grad``, in its dtype, and averages that. So what earlier passes have left there is
taken out when a backward pass begins, and added to the new average once that has arrived: in fp32 for fp16 and bf16.
"""

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.gradients import BucketGradients, CommHook, ReducedBucket, WholeGradients
from ddp_zero.core.backward.owned_sums import ReduceContext, ReduceOptions
from ddp_zero.core.backward.reducer import at_end_of_backward, backward_id, on_gradient, reduced_parameters, will_reduce
from ddp_zero.core.backward.side_stream import SideStream
from ddp_zero.core.backward.visible_gradients import VisibleGradients
from ddp_zero.core.local.placeholders import untouched
from ddp_zero.core.step.sharded_step import ShardedStep


class SummedBucket:
    """A reduced bucket plus the sums of earlier passes.

    Args:
        bucket: the average of this pass.
        carried: sums of earlier passes, by parameter index; not modified.
        sharded: knows the optimizer's parameters.
    """

    def __init__(self, bucket: ReducedBucket, carried: Mapping[int, Tensor], sharded: ShardedStep) -> None:
        self.params = bucket.params
        self.on_stream, self.is_summed = bucket.on_stream, False
        self.wait = bucket.wait
        self.release = bucket.release
        self._bucket = bucket
        self._carried = carried
        self._params = sharded.table.params

    def gradient(self, index: int) -> Tensor:
        """The sum, rounded to the parameter's dtype."""
        exact = self.exact(index)
        return self._bucket.gradient(index) if exact is None else exact.to(self._params[index].dtype)

    def exact(self, index: int) -> Tensor | None:
        """The sum in its own dtype, or None if nothing was added."""
        carried = self._carried.get(index)
        return None if carried is None else carried + self._bucket.gradient(index)


class SummedGradients(WholeGradients):
    """See the module docstring.

    Args:
        sharded: the step.
        ddp: the model.
        wrapped: see `WholeGradients`.
        side: the stream that the step runs on.
        passes: knows which forward passes are reduced.
    """

    def __init__(
        self,
        sharded: ShardedStep,
        ddp: DistributedDataParallel,
        wrapped: CommHook | None,
        side: SideStream,
        passes: ForwardPasses,
    ) -> None:
        super().__init__(sharded, ddp, wrapped, side)
        self._passes = passes
        self._ddp_reference = weakref.ref(ddp)  # its reducer holds the hook that holds this
        workshop = ReduceContext(sharded, side, ReduceOptions())
        self._carried = workshop.carried
        self._visible = VisibleGradients(workshop)
        self._backward = -1
        self._reduces = False
        params = [param for _, param in reduced_parameters(ddp)]
        begin = partial(_on_gradient, weakref.ref(self))  # a parameter holds its hooks
        self._hooks = [on_gradient(param, begin) for param in params]
        self._summed = [sharded.table.index_of[param] for param in params if param in sharded.table.index_of]

    def held(self) -> Collection[int]:
        """The sums that are added to the averages of this pass."""
        return self._carried

    def start(
        self, state: Any, bucket: GradBucket, index: int, is_planned: bool
    ) -> tuple[Future[Any], BucketGradients]:
        """Start the wrapped reduction."""
        self._reduces = True
        future, arrival = super().start(state, bucket, index, is_planned)
        assert isinstance(arrival, ReducedBucket), "what stage 1 starts"
        return future, SummedBucket(arrival, self._carried, self._sharded)

    @torch.no_grad()
    def lend_all(self, has_joined: bool) -> None:
        """Show the sums in ``param.grad``."""
        params = self._sharded.table.params
        for index, carried in {} if has_joined else list(self._carried.items()):
            grad = params[index].grad
            total = carried if grad is None else carried + grad
            shown = total.to(params[index].dtype) if grad is None else grad.copy_(total)
            self._visible.show(index, shown, total if total.dtype != shown.dtype else None)
        self._visible.forget_taken()

    def show(self, was_consumed: bool) -> None:
        """Show the sums, and remember that they are averages."""
        super().show(was_consumed)
        with untouched():
            self.lend_all(has_joined=False)
            for index in self._summed:
                self._visible.leave(index, is_owned=True)
        self._reduces = False

    def close(self) -> None:
        """Close the iteration."""
        self._visible.forget_taken()
        self._reduces = False

    def exact(self, index: int) -> Tensor | None:
        """The sum that ``param.grad`` shows, unless users have changed it."""
        grad = self._sharded.table.params[index].grad
        return None if grad is None else self._visible.exact(grad)

    def editable(self, index: int) -> Tensor | None:
        """The sum, where the step uses that, or what ``param.grad`` shows."""
        held = self._visible.editable(index)
        if held is None or held is self._sharded.table.params[index].grad:
            return super().editable(index)
        return self._sharded.stepped.own_part(index, held)

    def reset(self) -> None:
        """Drop the iteration."""
        self.close()

    def drop_carried(self) -> None:
        """Forget what was shown, and what was taken out."""
        self._visible.forget_all()

    def detach(self) -> None:
        """Take the tensor hooks off the parameters; gradients stay."""
        for hook in self._hooks:
            hook.remove()
        self._visible.forget_all()

    def begin_backward(self) -> None:
        """At the first gradient of a pass, before it is accumulated: take out what earlier passes have left."""
        backward, ddp = backward_id(), self._ddp_reference()
        if backward != self._backward and ddp is not None:
            self._backward = backward
            at_end_of_backward(self._end_backward)
            self._visible.take_out(will_reduce(ddp) or self._passes.is_scheduled, _is_no_view)

    def _end_backward(self) -> None:
        """If DDP does not reduce this pass after all, restore ``param.grad`` and add what the pass has added."""
        self._backward = -1
        if not (self._reduces or self._passes.is_scheduled):
            self._visible.put_back(_is_no_view)


def _on_gradient(reference: "weakref.ref[SummedGradients]", grad: Tensor | None) -> None:
    gradients = reference()
    if gradients is not None:
        gradients.begin_backward()


def _is_no_view(param: Tensor, grad: Tensor) -> bool:
    """False: what was shown counts as ours, even in memory of the reducer."""
    return False
