"""The shard of one rank: its parameters, the plan over them, the tensors that it steps and their optimizer state.

A `Shard` is data and its changes: new owners, new buckets, loaded state, more parameters. `core.step.runner` steps it.

Owners are decided once, when parameters are added, and never change: a trained parameter's state stays where it is.
Which parameters are sent, and in which bucket, depends on which of them a step can change (*active* parameters). The
plan is made again when a parameter is frozen or unfrozen, but not when a gradient is dropped: ranks may drop a gradient
at different times. A frozen parameter for which no rank had a gradient at that moment is *dormant*: it has an owner but
is not sent until it is trainable or gets a gradient.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.comm.parameter_sync import ParameterSync, PendingSyncs
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.recorder import Label
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.inner import LocalStep, ParamGroup, check_elementwise, groups_of
from ddp_zero.core.local.memory import LARGE_BYTES, BitSums, SummedMemory, return_freed_memory
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.local.placement import state_bytes
from ddp_zero.core.local.storage import PackedStorage, ViewStorage, give_own_storage
from ddp_zero.core.plan.ownership import Pieces, home, is_cut, parts_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import Bucket, Layout, Ownership, ParameterSpec, Partition, ShardPlan
from ddp_zero.core.step.state_changes import StateChanges
from ddp_zero.core.step.state_moves import agree_on_moves, migrate_state
from ddp_zero.core.step.state_order import State, StateOrder
from ddp_zero.values.parts import check_can_be_cut, run_of
from ddp_zero.values.placeholders import not_awaiting_params, on_this_rank
from ddp_zero.values.shapes import Part, is_dense

BUCKET_CAP_BYTES = 25 << 20
_WHOLE = WholeParameters()
_REQUIRES_GRAD, _INDEX = attrgetter("requires_grad"), attrgetter("index")


class Binding:
    """A plan and the parameters that it covers; notices when the user has moved or frozen them.

    Raises ValueError for a parameter that cannot be cut, if the partition cuts any.

    Args:
        ranks: the ranks that share the parameters.
        table: the parameters.
        as_views: whether parameters become views of the buckets' flat memory.
        syncs_in_forward: whether stepped parameters may be received as late as in the next forward pass.
        partition: decides the owners.
        earlier: the binding of a table that begins with the same parameters, which keep their owners and buckets.
    """

    plan: ShardPlan
    sync: ParameterSync  # sends and receives its buckets
    accelerators: Sequence[torch.device]  # the devices of the parameters other than the CPU
    # differs if owners, buckets or the parameters in them differ, or the order in memory of parameters that may be cut
    digest: int
    not_reduced: Sequence[int]  # the active parameters in none of the DDP buckets that the plan follows

    def __init__(
        self,
        ranks: Ranks,
        table: ParameterTable,
        as_views: bool,
        syncs_in_forward: bool = False,
        partition: Partition = _WHOLE,
        earlier: "Binding | None" = None,
    ) -> None:
        self._ranks = ranks
        self._comm = ranks.shard
        self.partition = partition
        self._table = table
        self._as_views = as_views
        self._syncs_in_forward = syncs_in_forward
        # parameter indices of each DDP bucket that the plan follows
        self.layout: Layout | None = None if earlier is None else earlier.layout
        trainable, active, pieces = ([], [], ()) if earlier is None else earlier._flags_and_owners()
        added = [param.requires_grad for param in table.params[len(active) :]]
        self._trainable, self._active = trainable + added, active + added
        self._bind(self._assign(table.specs(self._active), pieces))

    def for_table(self, table: ParameterTable) -> "Binding":
        """A binding for a table that begins with the same parameters, which keep their owners."""
        return Binding(self._ranks, table, self._as_views, self._syncs_in_forward, self.partition, self)

    def _flags_and_owners(self) -> tuple[list[bool], list[bool], Sequence[Pieces]]:
        """Flags of trainable and of active parameters, and all owners; waits for parameters in flight."""
        self.sync.pending_syncs.complete()
        return self._trainable, self._active, self.pieces

    def _assign(self, specs: list[ParameterSpec], decided: Sequence[Pieces] = ()) -> Ownership:
        """Assign owners to all parameters of the table; the first parameters keep their owners, ``decided``.

        Raises ValueError for a parameter that cannot be cut, if the partition cuts any.
        """
        owned = self.partition.assign(specs, self._comm.world_size, BUCKET_CAP_BYTES, decided)
        if self.partition.cuts:
            for index, param in enumerate(self._table.params):
                check_can_be_cut(param, self._table.label(index))
        return owned

    @property
    def pieces(self) -> Sequence[Pieces]:
        return self.plan.pieces

    # Following DDP and the user

    def pieces_for(self, layout: Layout, split: bool) -> Sequence[Pieces]:
        """The owners that all parameters would have with this bucket layout; see `Partition.assign_by_bucket`."""
        return self.partition.assign_by_bucket(self.plan, layout, split).pieces

    def adopt(self, layout: Layout, pieces: Sequence[Pieces]) -> None:
        """Bind again with this bucket layout, given by parameter indices, and these owners of each parameter."""
        self.layout = layout
        self._bind_again(pieces)

    @property
    def is_current(self) -> bool:
        """True if no parameter was moved, frozen or unfrozen since the binding was made."""
        params = self._table.params
        is_unmoved = [*map(Tensor.data_ptr, params)] == self._bound_addresses
        return is_unmoved and [*map(_REQUIRES_GRAD, params)] == self._trainable

    def refresh(self, may_communicate: bool, held: Collection[int] = ()) -> bool:
        """Plan and bind again if a parameter was moved, frozen or unfrozen; returns True if so.

        If the set of trainable parameters has changed (on every rank before the same step, since all run the same
        loop), this is a collective: a frozen parameter stays in the plan if any rank still has a gradient for it.

        Args:
            may_communicate: False under Join: ranks that have joined do not see the change, and `step.join` refuses.
            held: parameters with a gradient on this rank that is not in ``param.grad`` at the moment.
        """
        params = self._table.params
        has_woken = any(params[index].grad is not None for index in self._dormant)
        trainable = [*map(_REQUIRES_GRAD, params)]
        if has_woken or trainable != self._trainable:
            self._trainable = trainable
            has_grad = [param.grad is not None or index in held for index, param in enumerate(params)]
            active = [param.requires_grad or has for param, has in zip(params, has_grad, strict=True)]
            flags = "".join(str(int(flag)) for flag in active)
            # a collective that only a change of trainable parameters causes; the loop changes them on all ranks alike
            gathered = self._ranks.everyone.all_gather_text(flags) if may_communicate else [flags]
            active = ["1" in column for column in zip(*gathered, strict=True)]
            if self._as_views:
                was_and_is = zip(params, self._active, active, strict=True)
                give_own_storage([param for param, was_active, is_active in was_and_is if was_active and not is_active])
            self._active = active
        elif [*map(Tensor.data_ptr, params)] == self._bound_addresses:  # in each step, so without a Python loop
            return False
        self._table.check_distinct()  # users may have pointed a parameter at the memory of another
        self._bind_again(self.pieces)
        return True

    def _bind_again(self, pieces: Sequence[Pieces]) -> None:
        self.sync.pending_syncs.complete()
        self._bind(Ownership(self._comm.world_size, tuple(self._table.specs(self._active)), tuple(pieces)))

    def _bind(self, owned: Ownership) -> None:
        """Make the plan for these owners, and storage and syncs for its buckets; see the attributes of the class."""
        # new storage copies parameters: a parameter in flight would be copied half received
        self._memory: dict[int, _BucketMemory] = {}  # by bucket
        self._last_sums: tuple[tuple[frozenset[int], bool], BitSums] | None = None  # arguments and result
        params, me = self._table.params, self._comm.group_rank
        self._owned_parts = parts_of(owned.pieces, me)
        self.plan = self.partition.plan(owned, self.layout, BUCKET_CAP_BYTES)
        self.digest = self.plan.digest([param.stride() for param in params])
        self.sync = self._new_sync()
        reduced = {param for bucket in self.layout or () for param in bucket}
        followed = self.layout is not None
        self.not_reduced = [i for i, spec in enumerate(owned.specs) if followed and spec.active and i not in reduced]
        self._dormant = [index for index, spec in enumerate(owned.specs) if not spec.active]
        self._bound_addresses = [param.data_ptr() for param in params]
        self.accelerators = sorted({param.device for param in params if param.device.type != "cpu"}, key=str)
        held, buckets = len(self._owned_parts), len(self.plan.buckets)
        logger.debug("rank %d owns %d of %d parameters, %d buckets", me, held, len(params), buckets)

    def _new_sync(self) -> ParameterSync:
        """Build what sends and receives the plan's buckets; with ``as_views``, move parameters into flat storage."""
        plan, params, order = self.plan, self._table.params, self.plan.buckets
        if not self._as_views:
            return ParameterSync(self._ranks, PackedStorage(params), params, self.digest, order)
        may_outlast = self._syncs_in_forward
        if may_outlast and self.layout is not None:
            order = order[::-1]  # DDP's first bucket has the last layers, which the next forward pass needs last
        views = ViewStorage(plan, params, self._table.label)
        return_freed_memory(sum(param.nbytes for param in params))
        return ParameterSync(self._ranks, views, params, self.digest, order, may_outlast=may_outlast)

    # Owned by this rank

    @property
    def owners(self) -> Sequence[GroupRank]:
        """The owner of each parameter's first element, which owns the whole parameter unless it is cut."""
        return self.plan.owners

    def sole_owner(self, index: int) -> GroupRank:
        """The owner of a whole parameter; ValueError if the parameter is cut."""
        pieces = self.pieces[index]
        name = self._comm.name
        if is_cut(pieces):
            shared = ", ".join(f"{name(piece.owner)} elements {piece.start} to {piece.stop}" for piece in pieces)
            raise ValueError(
                f"{self._table.label(index)} has several owners: {shared}. It has a single owner with "
                "partition='parameters'. [ZERO-119]"
            )
        return home(pieces)

    def owned(self) -> list[int]:
        """Indices of the parameters of which this rank owns elements, dormant parameters included."""
        return list(self._owned_parts)

    def strides(self) -> list[tuple[int, ...]]:
        """The strides of all parameters, by index, without waiting for those in flight; empty if none can be cut."""
        if not self.partition.cuts:
            return []
        with not_awaiting_params():
            return [*map(Tensor.stride, self._table.params)]

    def owned_parts(self, rank: GroupRank | None = None) -> Mapping[int, Part]:
        """The parameters of which a rank (by default this rank) owns elements, by index, with the part that it owns."""
        return self._owned_parts if rank is None else parts_of(self.pieces, rank)

    def owned_by_others(self) -> list[int]:
        """The parameters of which other ranks own elements."""
        me = self._comm.group_rank
        return [index for index, held in enumerate(self.pieces) if any(piece.owner != me for piece in held)]

    def check_class(self, inner: Optimizer) -> None:
        """TypeError if parameters are cut and no class of the optimizer is known to step each element by itself."""
        if self.partition.cuts:
            check_elementwise(inner)

    def check_owns_whole(self, call: str) -> None:
        """NotImplementedError, naming the call that needs whole parameters, if this rank owns a part of one."""
        for index, part in self._owned_parts.items():
            if part is not None:
                raise NotImplementedError(
                    f"{call} needs whole parameters; with partition='elements' this rank has elements {part.start} to "
                    f"{part.stop} of {self._table.label(index)}. Use ddp_zero.checkpoint, or consolidate_state_dict(). "
                    "[ZERO-608]"
                )

    def owns(self, index: int) -> bool:
        return index in self._owned_parts

    # Memory

    def sums_at_rest(self, among: frozenset[int], on_host: bool, but: Collection[int] = ()) -> BitSums:
        """Checksums of the memory of parameters that are not in flight, keyed by the first parameter of each run.

        A run is contiguous memory of parameters that follow each other; a large parameter is a run of its own.

        Args:
            among: the parameters to include, by index.
            on_host: leave out parameters on an accelerator.
            but: leave out runs with these keys.
        """
        pending, last = self.sync.pending_syncs, self._last_sums
        if not (pending or but) and last is not None and last[0] == (among, on_host):
            return last[1]
        buckets: Sequence[Bucket] = self.plan.buckets
        if on_host and self.accelerators:
            buckets = [bucket for bucket in buckets if bucket.kind.startswith("cpu")]
        if pending:
            in_flight = map(pending.buckets.__contains__, map(_INDEX, buckets))
            buckets = [*compress(buckets, map(not_, in_flight))]
        runs: list[tuple[int, SummedMemory]] = []
        is_reusable = not (pending or but)
        for bucket in buckets:
            memory = self._memory.get(bucket.index) or self._find_memory(bucket)
            if memory.is_complete and among.issuperset(memory.members):
                runs += memory.keyed_runs
            else:
                is_reusable = False
                runs += self._runs_among(memory, among)
        sums = BitSums.of([(index, run) for index, run in runs if index not in but] if but else runs)
        if is_reusable:
            self._last_sums = (among, on_host), sums
        return sums

    def _runs_among(self, memory: "_BucketMemory", among: frozenset[int]) -> list[tuple[int, SummedMemory]]:
        """The runs of a bucket whose parameters are all asked for; the other parameters asked for, each by itself."""
        runs: list[tuple[int, SummedMemory]] = []
        rest = set(among.intersection(memory.members))
        for members, run in memory.runs:
            if rest.issuperset(members):
                runs.append((members[0], run))
                rest.difference_update(members)
        for index in rest:
            param = self._table.params[index].detach()
            runs.append((index, SummedMemory(run_of(param) if is_dense(param.shape, param.stride()) else param)))
        return runs

    def _find_memory(self, bucket: Bucket) -> "_BucketMemory":
        """Find the runs of memory of a bucket's parameters, and remember them until the binding is made again."""
        blocks = self.sync.storage.blocks_of(bucket)
        runs = [(params, SummedMemory(memory)) for block in blocks for params, memory in block.runs(LARGE_BYTES)]
        members = frozenset(index for segment in bucket.segments for index in segment.params)
        in_runs = [index for params, _ in runs for index in params]
        is_complete = members == {*in_runs} and len(members) == len(in_runs)
        keyed_runs = [(params[0], run) for params, run in runs]
        found = self._memory[bucket.index] = _BucketMemory(members, runs, keyed_runs, is_complete)
        return found


@dataclass(frozen=True)
class _BucketMemory:
    """The flat memory of one bucket, as runs."""

    members: frozenset[int]  # the bucket's parameters
    runs: list[tuple[tuple[int, ...], SummedMemory]]  # runs of memory with the parameters in each
    keyed_runs: list[tuple[int, SummedMemory]]  # the same runs, each with its first parameter
    is_complete: bool  # whether every parameter is in exactly one run


class LocalBucket(NamedTuple):
    """A bucket as this rank steps it; fixed until the shard is bound again."""

    bucket: Bucket
    indices: tuple[int, ...]  # the parameters that the local step changes
    devices: tuple[torch.device, ...]  # the devices that step them
    label: Label  # traces the local step


class Shard:
    """One rank's shard of an optimizer.

    Args:
        order: the order in which states were created; states that it does not have are new.
        strides: the strides of parameters that may be cut, which their states have too.
    """

    buckets: Sequence[LocalBucket]  # the plan's buckets as this rank steps them

    def __init__(
        self,
        ranks: Ranks,
        table: ParameterTable,
        binding: Binding,
        inner: Optimizer,
        exposed: Optimizer,
        targets: StepTargets,
        order: StateOrder,
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self.ranks = ranks
        self.everyone = ranks.everyone
        self.comm = ranks.shard  # the ranks that share the shards
        self.trace = ranks.shard.trace
        self.table = table
        self.binding = binding  # the owners, buckets and storage of these parameters
        self.inner = inner  # the optimizer over the tensors that this rank steps
        self.targets = targets  # the tensor that is stepped for each parameter
        self.masters = targets.masters  # the targets that are fp32 copies of parameters
        self._exposed_groups = groups_of(exposed)
        self.local_step = LocalStep(inner, self._exposed_groups)
        self.order = order  # of the states, as in the unsharded optimizer
        self.changes = StateChanges(inner)
        self.snapshot: State | None = None  # the full state, if gathered on this rank; dropped when anything changes
        self.num_loads = 0  # how often a state dict was loaded
        self.syncs_outlast_step = False  # whether syncs may finish after the step; pre-forward hooks then wait for them
        self._strides = strides
        order.note_new(self.inner_state, targets.index_of)
        self._bind()

    def copy_for(self, exposed: Optimizer, inner: Optimizer, memo: dict[int, Any]) -> "Shard":
        """A shard for copies of both optimizers, over the copied parameters."""
        table = ParameterTable(exposed.param_groups, self.table.hints_of, self.table.norm_order)
        targets = self.targets.copy_for(table, memo)
        binding = self.binding.for_table(table)
        order = copy.deepcopy(self.order, memo)
        return Shard(self.ranks, table, binding, inner, exposed, targets, order, self._strides)

    @property
    def plan(self) -> ShardPlan:
        return self.binding.plan

    @property
    def sync(self) -> ParameterSync:
        return self.binding.sync

    @property
    def pending_syncs(self) -> PendingSyncs:
        return self.binding.sync.pending_syncs

    @property
    def inner_state(self) -> State:
        return self.inner.state

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self._exposed_groups()

    # Whether a step can be taken

    def check_ready(self) -> None:
        """Raise RuntimeError if the exposed groups have other parameters than the shard, or a step must be refused."""
        self.table.check_groups(self._exposed_groups())
        if (complaint := self.reason_to_refuse()) is not None:
            self.check_memory_order()  # a parameter whose order has changed cannot be its rounded master either
            raise RuntimeError(complaint)

    def reason_to_refuse(self) -> str | None:
        """Why no step can be taken on this rank now, or None."""
        return self.targets.reason_to_refuse(self.comm.name(self.comm.group_rank))

    def check_masters(self) -> None:
        """Raise RuntimeError naming a low-precision parameter that is no longer its rounded master.

        The check is local: a rank may overwrite parameters temporarily.
        """
        if (complaint := self.targets.wrong_master(self.comm.name(self.comm.group_rank))) is not None:
            raise RuntimeError(complaint)

    def check_memory_order(self) -> None:
        """Check that the elements of each parameter that is cut have the same order in memory as its state.

        Raises RuntimeError naming the first parameter that differs, as after ``model.to(memory_format=...)``, on every
        rank, since all run the same loop; ValueError if a parameter has gaps.
        """
        strides = self.binding.strides()
        if strides == self._strides:
            return
        for index, (now, before) in enumerate(zip(strides, self._strides, strict=True)):
            if now == before:
                continue
            check_can_be_cut(self.table.params[index], self.table.label(index))
            if is_cut(self.binding.pieces[index]) and not self.order.has_initial_state:
                raise RuntimeError(
                    f"Expected the elements of {self.table.label(index)} in the order in memory that its state has, by "
                    f"strides {list(before)}, got strides {list(now)} ({self.comm.name(self.comm.group_rank)}): with "
                    "partition='elements' ranks share it in that order. Change memory formats before the first step; "
                    "later, keep opt.state_dict() of before the change, and load it after. [ZERO-114]"
                )
        self._strides = strides

    def memory_parts(self) -> dict[str, int]:
        """Current bytes of parameters, masters, state and gradients.

        Parameters count whole, gradients only their part on this rank.
        """
        with not_awaiting_params():
            params = list(self.table.params)
            grads = [param.grad for param in params if param.grad is not None]
            return {
                "parameter_bytes": sum(param.numel() * param.element_size() for param in params),
                "master_bytes": state_bytes(dict(self.masters)),
                "state_bytes": state_bytes(self.inner_state),
                "gradient_bytes": sum(held.nbytes for held in map(on_this_rank, grads) if held is not None),
            }

    # Changes of the shard

    def refresh(self, may_communicate: bool = True, held: Collection[int] = ()) -> None:
        """Plan again if a parameter was moved, frozen or unfrozen since the last step; see `Binding.refresh`."""
        self.check_memory_order()
        if self.binding.refresh(may_communicate, held):
            self._bind()

    def adopt(self, layout: Sequence[Sequence[int]], pieces: Sequence[Pieces]) -> None:
        """Bind again with a bucket layout, given by parameter indices, and move state to its new owners. A collective.

        Raises TypeError if a state that has to move cannot travel, naming the parameter; RuntimeError on other ranks.
        """
        # end and errors on every rank before anything moves: a rank that raised alone would leave peers in `Agreement`
        self.sync.end_step()  # the memory of buckets that this iteration has stepped is about to move
        self.sync.raise_errors()
        before = self.binding.pieces
        # every rank is here before the change begins: until then a peer may still ask for the state of the last step
        moves = self.table, self.inner_state, self.targets, before, pieces
        sends = agree_on_moves(self.ranks, *moves)
        with self.changing_state():
            # before the binding follows: blocking messages between old and new owners, in the order of parameters
            migrate_state(self.comm, self.order, *moves, sends=sends)
            self.binding.adopt(layout, pieces)
            self.local_step.reassign(self.targets.assign(self.binding.owned_parts()))
            self._bind()

    def master_weights(self) -> dict[Tensor, Tensor]:
        """The masters of parameters that this rank owns, by parameter."""
        self.masters.follow_model()
        return {self.table.params[index]: master.detach() for index, master in self.masters.items()}

    def refresh_masters(self) -> None:
        """Copy the model's parameters to the masters; RuntimeError without masters."""
        if not self.masters.are_kept:
            raise RuntimeError(
                "This optimizer has no master weights, so none differ: leave the call out, or build it with "
                "master_weights=True. [ZERO-121]"
            )
        with self.changing_state():
            self.masters.refresh()
            self.snapshot = None

    def follow_load(self, indices: Sequence[int]) -> None:
        """Follow a state dict that the inner optimizer has loaded, with states of these parameters, in this order."""
        self.snapshot = None
        self.num_loads += 1
        self._strides = self.binding.strides()
        self.local_step.mirror_to_exposed()
        self.local_step.options.note_load(self.param_groups)
        self._bind()
        self.order.follow_load([self.targets[index] for index in indices], self.inner_state)
        self.masters.note_versions()

    def extend(self, table: ParameterTable, binding: Binding) -> None:
        """Take over a table with parameters added at its end; the others keep their index and their owner."""
        self.snapshot = None
        self._strides = [*self._strides, *binding.strides()[len(self._strides) :]]
        table.inherit_from(self.table)
        self.table = table
        self.binding = binding
        self.order.note_new(self.inner_state, self.targets.index_of)
        self._bind()

    def broadcast_from_owner(self, index: int, value: Tensor) -> None:
        """Send a value in the shape of a parameter from the owners of its elements to all ranks. A collective."""
        pieces = self.binding.pieces[index]
        if is_cut(pieces):
            for piece in pieces:
                self.comm.broadcast_from_owner(run_of(value)[piece.start : piece.stop], piece.owner)
            return
        staged = value.contiguous()
        self.comm.broadcast_from_owner(staged, home(pieces))
        if staged.data_ptr() != value.data_ptr():
            value.copy_(staged)

    def changing_state(self) -> AbstractContextManager[None]:
        """A context for a change of the state outside a step; see `StateChanges`."""
        return self.changes.changing(self.binding.accelerators)

    def drop_state(self) -> None:
        """Drop this rank's state before another one is loaded, so that two are never in memory."""
        self.inner_state.clear()
        self.local_step.lists.forget()  # they hold tensors of the state

    def end_syncs(self) -> None:
        """After all buckets were sent: wait until all are received, unless each use of a parameter waits by itself."""
        self.sync.end_step(self.local_step.options)
        if not self.syncs_outlast_step:
            self.pending_syncs.complete()

    def abandon(self) -> None:
        """End a step that failed or that the user drops: forget copies and syncs in flight, wait for no peer."""
        self.targets.placement.abandon()
        self.sync.abandon()
        self.changes.abandon()

    def _bind(self) -> None:
        """Derive from the plan what the local step needs: each bucket's parameters here, their devices and labels."""
        targets = self.targets
        targets.follow_memory()
        buckets, me = self.plan.buckets, self.comm.group_rank
        segments = [bucket.segments[me].params for bucket in buckets]
        if self.local_step.steps_whole:  # in the step of the first bucket with parameters of this rank
            first = next((place for place, params in enumerate(segments) if params), None)
            segments = [tuple(self.binding.owned()) if place == first else () for place in range(len(buckets))]
        self.buckets = [
            LocalBucket(
                bucket,
                indices,
                tuple(dict.fromkeys(targets[index].device for index in indices)),
                self.trace.label("local_step", bucket.index),
            )
            for bucket, indices in zip(buckets, segments, strict=True)
        ]
        owned = ((bucket.index, bucket.segments[me].params) for bucket in buckets)
        self.local_step.bind({bucket: {targets[index] for index in indices} for bucket, indices in owned if indices})
