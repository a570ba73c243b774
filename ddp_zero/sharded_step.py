"""One optimizer step over a plan: all buckets in one go, or bucket by bucket as backward delivers them."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.optim import Optimizer

from ddp_zero.binding import Binding
from ddp_zero.checkpoint import State, StateOrder, migrate_state
from ddp_zero.collectives import Communicator
from ddp_zero.local_step import LocalStep, ParamGroup
from ddp_zero.parameters import ParameterTable
from ddp_zero.partition import GroupRank
from ddp_zero.tracing import label


class ShardedStep:
    """What a rank steps and syncs, and in which order.

    `begin`, then `step_bucket` for every bucket in plan order, then `finish`; or `run` for all of it.

    Args:
        comm: the group.
        table: the parameters.
        binding: the plan, attached to them.
        inner: the optimizer over this rank's parameters.
        exposed: the optimizer that the user sees, with all parameters; only its groups are read.

    Attributes:
        snapshot: the whole state as it is now, if it was gathered on this rank; dropped when anything changes.
        order: in which order states were created.
    """

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        binding: Binding,
        inner: Optimizer,
        exposed: Optimizer,
    ) -> None:
        self.comm = comm
        self.table = table
        self.binding = binding
        self.inner = inner
        self._exposed_groups = _groups_of(exposed)
        self.local_step = LocalStep(inner, self._exposed_groups)
        self.order = StateOrder()
        self.snapshot: State | None = None

    # A step

    def run(self, **kwargs: Any) -> Any:
        """Step and sync every bucket, after `begin`. Returns what the inner optimizer did for the last one."""
        result = None
        for bucket in self.binding.plan.buckets:
            result = self.step_bucket(bucket.index, **kwargs)
        self.finish(**kwargs)
        return result

    def begin(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and start a step; any earlier one that was not finished is forgotten.

        Raises:
            RuntimeError: if the parameters in the exposed groups are not those that are sharded.
        """
        self.snapshot = None
        self.table.check_groups(self.param_groups)
        return self.local_step.begin(closure)

    def step_bucket(self, index: int, **kwargs: Any) -> Any:
        """Step what this rank owns of a bucket and start its sync."""
        try:
            with label("local_step", bucket=index):
                result = self.local_step.step(index, **kwargs)
            self.binding.sync.start(self.binding.plan.buckets[index])
        except BaseException:
            self.binding.sync.abandon()
            raise
        return result

    def finish(self, **kwargs: Any) -> None:
        """Wait for all syncs, show the options that the step left, note the states that it created."""
        try:
            self.binding.sync.finish()
        except BaseException:
            self.binding.sync.abandon()
            raise
        self.local_step.finish(**kwargs)
        self.order.after_step(self.inner.state, self.table)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The exposed groups."""
        return self._exposed_groups()

    # Changes of what is stepped

    def refresh(self, may_talk: bool = True, held: Collection[int] = ()) -> None:
        """Plan again if a parameter was moved, frozen or unfrozen since the last step; see `Binding.refresh`."""
        if self.binding.refresh(may_talk, held):
            self.local_step.bind(self.binding.owned_of_bucket())

    def adopt(self, layout: Sequence[Sequence[int]], owners: list[GroupRank], moves_later: bool) -> None:
        """Take over a layout of buckets, and move state to its new owners. A collective.

        Args:
            layout: parameter indices of each DDP bucket.
            owners: one per parameter.
            moves_later: see `Binding.adopt`.

        Raises:
            TypeError: if a state that has to move cannot travel, naming the parameter; RuntimeError on other ranks.
        """
        self.binding.sync.finish()  # buckets that this iteration has stepped already: their memory is about to move
        migrate_state(self.comm, self.table, self.inner.state, self.order, self.binding.owners, owners)
        self.binding.adopt(layout, owners, moves_later)
        self.local_step.own({self.table.params[index] for index in self.binding.owned()})
        self.local_step.bind(self.binding.owned_of_bucket())

    def loaded(self, indices: Sequence[int]) -> None:
        """The inner optimizer has loaded a state dict with states of these parameters, in this order."""
        self.snapshot = None
        self.local_step.mirror_to_exposed()
        self.local_step.bind(self.binding.owned_of_bucket())
        self.order.loaded(indices, self.table, self.inner.state)

    def extend(self, table: ParameterTable, binding: Binding) -> None:
        """Take over parameters that were added; those that were there keep their index and their owner."""
        self.snapshot = None
        self.table = table
        self.binding = binding
        self.order.note_new(self.inner.state, table)
        self.local_step.bind(binding.owned_of_bucket())


def _groups_of(optimizer: Optimizer) -> Callable[[], list[ParamGroup]]:
    """Its groups as they are when asked, held weakly: in a cycle, only the garbage collector could free a group."""
    reference = weakref.ref(optimizer)

    def groups() -> list[ParamGroup]:
        alive = reference()
        assert alive is not None, "an optimizer that steps is alive"
        return alive.param_groups

    return groups
