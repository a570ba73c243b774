"""The averages of gradients, where they are, and what ``param.grad`` shows: the interface of a stage, and stage 1.

Stage 1 leaves gradients to DDP: every rank gets all of them, and the step borrows windows of the reduced bucket.
`partitioned.py` is stage 2.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.bucket_gradients import BucketGradients
from ddp_zero.core.backward.bucket_plan import BucketPlan
from ddp_zero.core.backward.ddp_buckets import DdpBuckets, ReducedBucket
from ddp_zero.core.backward.planned_reducer import PlannedReducer
from ddp_zero.core.backward.scratch_bucket import ReduceContext
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.recorder import Act
from ddp_zero.core.ddp.reducer import has_static_graph, is_finalized, rebuild_buckets
from ddp_zero.core.ddp.registered_hook import CommHook
from ddp_zero.core.local.parameters import GradientSource, PublishedGradients
from ddp_zero.core.step.rank_shard import Shard


class Gradients(GradientSource):
    """The gradients of one optimizer over a DDP model, in either stage. Methods stand in the order of an iteration.

    Args:
        split: of `BucketPlan`.

    Attributes:
        plan: the buckets.
        source: reduces their gradients in a backward pass, and tells which are full.
        context: has the buffers that buckets share, if they do.
        reach_joined: whether a rank that has joined gets the averages that it owns from the reduction itself.
        is_users: whether a hook of the user's reduces.
        shares_memory: whether buckets share buffers, so that a reduced bucket must free its own.
        is_idle: whether no pass has left anything since `drop_carried`: there is nothing to drop or reset then.
        carried: parameters whose gradient was taken out of ``param.grad``, to be added to the next sum.
    """

    source: DdpBuckets | PlannedReducer
    context: ReduceContext | None = None
    reach_joined = shares_memory = is_users = False
    is_idle = True
    carried: Collection[int] = ()

    def __init__(self, shard: Shard, ddp: DistributedDataParallel, split: bool) -> None:
        self._shard = shard
        self._ddp_reference = weakref.ref(ddp)  # its reducer holds the hook that holds this
        self.plan = BucketPlan(shard, ddp, split)

    @property
    @abstractmethod
    def buckets(self) -> Sequence[BucketGradients]:
        """The buckets of the plan, as they are reduced in each pass."""

    @property
    def is_static(self) -> bool:
        """True if every iteration uses the same parameters: a static graph."""
        ddp = self._ddp_reference()
        return ddp is not None and has_static_graph(ddp)

    @abstractmethod
    def follow_plan(self) -> None:
        """Follow the plan, which is now in force, from the next iteration on."""

    @abstractmethod
    def open(self, may_communicate: bool) -> None:
        """Open an iteration, at its first bucket: drop the last one, follow parameters that were frozen or moved.

        Args:
            may_communicate: False under Join; see `Binding.refresh`.
        """

    @abstractmethod
    def start_acts(self, place: int) -> list[Act]:
        """The start of the reduction of a bucket of the plan that is full, unless `source` has started it."""

    @abstractmethod
    def finish_reductions(self, has_joined: bool) -> None:
        """Finish every reduction, after the reducer, in an iteration that was not stepped in the hook.

        Owned gradients are in ``param.grad`` then, except on a rank that has joined.
        """

    @abstractmethod
    def publish(self, was_consumed: bool) -> None:
        """Close the iteration on this rank, and leave gradients for the user in ``param.grad``."""

    @abstractmethod
    def close_joined(self) -> None:
        """Close the iteration on a rank that has joined, which publishes nothing."""

    def put_in_order(self, in_join: bool) -> None:
        """See `BucketPlan.put_in_order`. Ranks may have joined, which take no part."""
        if self.plan.put_in_order(self.build_buckets_or_order(in_join)):
            self.follow_plan()

    @abstractmethod
    def build_buckets_or_order(self, in_join: bool) -> list[int] | None:
        """For `put_in_order`."""

    @abstractmethod
    def left_local(self) -> tuple[bool, Mapping[int, int]]:
        """True if a backward pass that was not reduced has left gradients of this rank alone, as far as is known.

        And `bit_sum_of` each gradient that such a pass has added to averages, by parameter.
        """

    @abstractmethod
    def editable(self, index: int) -> Tensor | None:
        """The tensor that the step will use for an owned gradient, to be changed in place; None if it has none."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the iteration without waiting for other ranks."""

    def check_complete(self) -> None:
        """At ``opt.step()``: check that no interrupted backward pass has left gradients out of ``param.grad``."""
        if self.carried:
            comm = self._shard.comm
            raise RuntimeError(
                "An interrupted backward pass has taken averaged gradients out of param.grad, so opt.step() cannot "
                f"use them ({comm.name(comm.group_rank)}). Call opt.zero_grad(), or opt.reset() and start the "
                "iteration again. [ZERO-308]"
            )

    @abstractmethod
    def drop_carried(self) -> None:
        """Forget gradients that the user has dropped, also those taken out of ``param.grad`` for the next sum."""

    @abstractmethod
    def check_none_on_owners_alone(self) -> None:
        """Before the optimizer leaves the model: RuntimeError if a gradient is on its owner alone."""

    @abstractmethod
    def detach(self) -> None:
        """Leave the model's parameters to a new hook."""


class WholeGradients(Gradients):
    """Stage 1: the wrapped hook reduces, DDP publishes, every rank keeps all gradients.

    Args:
        split: of `BucketPlan`.
        wrapped, side, shown: of `DdpBuckets`.
    """

    source: DdpBuckets

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        split: bool,
        wrapped: CommHook | None,
        side: SideStream,
        shown: Callable[[ReducedBucket], BucketGradients] = lambda bucket: bucket,
    ) -> None:
        if is_finalized(ddp):
            # after a pass before the optimizer; whoever has kept its reducer may run no forward pass, in which DDP does
            rebuild_buckets(ddp)
        super().__init__(shard, ddp, split)
        self.source = DdpBuckets(shard, ddp, wrapped, side, self.plan, shown)
        self.is_users = self.source.is_users
        self._bound: object = shard.buckets  # those that are followed

    @property
    def buckets(self) -> Sequence[BucketGradients]:
        return self.source.covered

    def follow_plan(self) -> None:
        self.source.follow_plan()
        self._bound = self._shard.buckets

    def open(self, may_communicate: bool) -> None:
        if may_communicate:
            self.plan.follow_added()
        self._shard.refresh(may_communicate, held=self._held())
        if self._bound is not self._shard.buckets:  # other owners
            self.follow_plan()
        self.source.open()

    def _held(self) -> Collection[int]:
        """Parameters whose gradient was taken out of ``param.grad``."""
        return ()

    def start_acts(self, place: int) -> list[Act]:
        return []

    def finish_reductions(self, has_joined: bool) -> None:
        """DDP has published them."""

    def publish(self, was_consumed: bool) -> None:
        self.source.end(was_consumed)

    def close_joined(self) -> None:
        self.source.drop()

    def build_buckets_or_order(self, in_join: bool) -> list[int] | None:
        return self.source.build_buckets_or_order(in_join)

    def left_local(self) -> tuple[bool, Mapping[int, int]]:
        return False, {}

    def gradient(self, index: int) -> Tensor | None:
        """The owned elements of ``param.grad``, after backward."""
        grad = self._shard.table.params[index].grad
        return None if grad is None else self._shard.targets.owned_elements(index, grad)

    @property
    def whole_gradients(self) -> GradientSource | None:
        return PublishedGradients(self._shard.table.params)

    def editable(self, index: int) -> Tensor | None:
        return owned_alias(self._shard, index)

    def reset(self) -> None:
        self.source.reset()

    def drop_carried(self) -> None:
        """None are carried."""

    def check_none_on_owners_alone(self) -> None:
        """Every rank has all of them."""

    def detach(self) -> None:
        self.source.detach()


@torch.no_grad()
def owned_alias(shard: Shard, index: int) -> Tensor | None:
    """The owned elements of a gradient that every rank has, with a version counter of their own; see `OwnedEdits`."""
    shard.targets.lay_out_gradient(index)
    grad = shard.table.params[index].grad
    return None if grad is None else shard.targets.owned_elements(index, grad.data)
