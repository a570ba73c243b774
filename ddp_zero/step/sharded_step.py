"""One optimizer step over a plan: all buckets in one go, or bucket by bucket as backward delivers them."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.tracing import label
from ddp_zero.local.local_step import LocalStep, ParamGroup
from ddp_zero.local.masters import GradientSource, SteppedTensors
from ddp_zero.local.parameters import ParameterTable
from ddp_zero.plan.partition import GroupRank
from ddp_zero.step.binding import Binding
from ddp_zero.step.coupling import CouplingWatch
from ddp_zero.step.record import StepRecord
from ddp_zero.step.state_order import State, StateOrder, migrate_state


class ShardedStep:
    """What a rank steps and syncs, and in which order.

    `begin`, `step_bucket` for every bucket in plan order, `finish`, `raise_errors`; or `begin` and `run`.

    Args:
        comm: the group.
        table: the parameters.
        binding: the plan, attached to them.
        inner: the optimizer over this rank's parameters.
        exposed: the optimizer that the user sees, with all parameters; only its groups are read.
        stepped: what the inner optimizer holds for each parameter.

    Attributes:
        last_step: what became of the last one.
        leaves_syncs: whether a sync that can may outlast its step: a model makes sure that its forward passes wait.
        coupling: notices an optimizer that computes something from all parameters.
        snapshot: the whole state as it is now, if it was gathered on this rank; dropped when anything changes.
        order: in which order states were created.
        norm_order: all parameters, by index, in the order in which norms of their gradients add up.
    """

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        binding: Binding,
        inner: Optimizer,
        exposed: Optimizer,
        stepped: SteppedTensors,
    ) -> None:
        self.comm = comm
        self.table = table
        self.binding = binding
        self.inner = inner
        self.stepped = stepped
        self.last_step: StepRecord | None = None
        self.leaves_syncs = False
        self._exposed_groups = _groups_of(exposed)
        self.coupling = CouplingWatch(comm, inner)
        self.local_step = LocalStep(inner, self._exposed_groups, self.coupling.note)
        self.order = StateOrder()
        self.norm_order: Sequence[int] = range(len(table))
        self.snapshot: State | None = None
        self._model: weakref.ref[nn.Module] | None = None

    # A step

    def run(self, source: GradientSource, **kwargs: Any) -> Any:
        """Step and sync every bucket, after `begin`. Returns what the inner optimizer did for the last one."""
        result = None
        for bucket in self.binding.plan.buckets:
            result = self.step_bucket(bucket.index, source, **kwargs)
        self.finish(**kwargs)
        self.raise_errors()
        return result

    def begin(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and start a step; any earlier one that was not finished is forgotten.

        Raises:
            RuntimeError: if the parameters in the exposed groups are not those that are sharded, or if one that this
                rank owns is not its rounded master any more.
        """
        self.snapshot = None
        self.binding.sync.complete()
        self.table.check_groups(self.param_groups)
        self.stepped.follow_model()
        self.check_masters()
        self.coupling.begin(self.comm.round + 1)
        return self.local_step.begin(closure)

    def step_bucket(self, index: int, source: GradientSource, **kwargs: Any) -> Any:
        """Step what this rank owns of a bucket and start its sync.

        Where the local step raises, this rank steps nothing more in this step and sends what it has, if ranks can tell
        each other (see `StepErrors`); `raise_errors` follows `finish`.
        """
        self.order.is_at_birth = False

        def step() -> Any:
            with label("local_step", bucket=index), self.stepped.lent(self._stepped_with(index), source):
                return self.local_step.step(index, **kwargs)

        try:
            result = self._try_locally(step)
            self.binding.sync.start(self.binding.plan.buckets[index])
        except BaseException:
            self.binding.sync.abandon()
            raise
        return result

    def finish(self, **kwargs: Any) -> None:
        """End the syncs, show the options that the step left, note the states that it created.

        Raises:
            RuntimeError: if a peer has gone or the group's time-out passed.
        """
        sync = self.binding.sync
        try:
            self._try_locally(lambda: self.local_step.step_empty(**kwargs))
            has_failed = sync.errors.has_own
            self.end_syncs()
        except BaseException:
            sync.abandon()
            raise
        if not has_failed:
            self.local_step.finish(**kwargs)
        self.coupling.end(has_failed)
        self.order.after_step(self.inner.state, self.stepped.index_of)
        self.stepped.note_versions()

    def raise_errors(self) -> None:
        """After `finish`: raise on every rank if a local step has failed on any, or if ranks hold different options.

        A collective in steps whose options are compared. See `ParameterSync.raise_errors` and `CouplingWatch`.
        """
        try:
            if self.coupling.check():
                self.local_step.mirror_to_exposed()
        finally:
            self.binding.sync.raise_errors()

    def _try_locally(self, step: Callable[[], Any]) -> Any:
        """Do this rank's part of a step, unless an earlier part has failed."""
        errors = self.binding.sync.errors
        if errors.has_own:
            return None
        try:
            return step()
        except Exception as error:
            if not errors.note(error):
                raise
            return None

    def end_syncs(self) -> None:
        """All buckets were sent: have them, unless whoever uses a parameter waits for it."""
        self.binding.sync.finish()
        if not self.leaves_syncs:
            self.binding.sync.complete()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The exposed groups."""
        return self._exposed_groups()

    def _stepped_with(self, index: int) -> Sequence[int]:
        """The parameters of this rank that the local step of a bucket may change."""
        if self.local_step.steps_whole:
            return () if self.local_step.is_done else self.binding.owned()
        return self.binding.plan.buckets[index].segments[self.comm.group_rank].params

    def check_masters(self) -> None:
        """If somebody may have written to low-precision parameters, see that they are their rounded masters.

        Raises:
            RuntimeError: naming the first that is not.
        """
        complaint = self.wrong_master()
        if complaint is not None:
            raise RuntimeError(complaint)

    def wrong_master(self) -> str | None:
        """What `check_masters` would say. Asks nobody: ranks may write on their own, and put everything back."""
        if not self.stepped.have_changed():
            return None
        diverged = self.stepped.diverged()
        if diverged:
            return (
                f"Expected {self.table.label(diverged[0])} to be its fp32 master weight rounded, got another value: it "
                "was written to since the last step, which the next would undo "
                f"({self.comm.name(self.comm.group_rank)}). "
                "Call opt.refresh_master_weights() after writing to the model's parameters, as after loading them."
            )
        self.stepped.note_versions()
        return None

    def has_unused(self, has_run: bool) -> bool:
        """Whether DDP's buckets have parameters without a gradient, on a rank that has run the model. A collective."""
        reduced = {param for bucket in self.binding.layout or () for param in bucket}
        unused = has_run and any(self.table.params[param].grad is None for param in reduced)
        return any(flag for (flag,) in self.comm.all_gather_ints([int(unused)]))

    # Changes of what is stepped

    def refresh(self, may_talk: bool = True, held: Collection[int] = ()) -> None:
        """Plan again if a parameter was moved, frozen or unfrozen since the last step; see `Binding.refresh`."""
        if self.binding.refresh(may_talk, held):
            self._bind()

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
        self.binding.sync.raise_errors()
        migrate_state(self.comm, self.table, self.inner.state, self.order, self.stepped, self.binding.owners, owners)
        self.binding.adopt(layout, owners, moves_later)
        self.local_step.own(self.stepped.own(self.binding.owned()))
        self._bind()

    def loaded(self, indices: Sequence[int]) -> None:
        """The inner optimizer has loaded a state dict with states of these parameters, in this order."""
        self.snapshot = None
        self.local_step.mirror_to_exposed()
        self._bind()
        self.order.loaded([self.stepped[index] for index in indices], self.inner.state)
        self.stepped.note_versions()

    def extend(self, table: ParameterTable, binding: Binding) -> None:
        """Take over parameters that were added; those that were there keep their index and their owner."""
        self.snapshot = None
        self.table = table
        self.binding = binding
        self.order.note_new(self.inner.state, self.stepped.index_of)
        self._order_norms()
        self._bind()

    def follow_order_of(self, model: nn.Module) -> None:
        """From now on norms add up as those of ``model.parameters()``; parameters that it does not have come last."""
        self._model = weakref.ref(model)
        self._order_norms()

    def _order_norms(self) -> None:
        model, index_of = None if self._model is None else self._model(), self.table.index_of
        if model is not None:
            self.norm_order = [index_of[param] for param in model.parameters() if param in index_of]
        self.norm_order = list(dict.fromkeys([*self.norm_order, *range(len(self.table))]))

    def _bind(self) -> None:
        stepped, index_of = self.stepped, self.table.index_of
        self.local_step.bind(
            {
                bucket: {stepped[index_of[param]] for param in params}
                for bucket, params in self.binding.owned_of_bucket().items()
            }
        )


def _groups_of(optimizer: Optimizer) -> Callable[[], list[ParamGroup]]:
    """Its groups as they are when asked, held weakly: in a cycle, only the garbage collector could free a group."""
    reference = weakref.ref(optimizer)

    def groups() -> list[ParamGroup]:
        alive = reference()
        assert alive is not None, "an optimizer that steps is alive"
        return alive.param_groups

    return groups
