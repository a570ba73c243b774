"""The shard of one rank: its parameters, the plan over them, what it steps and the state that steps leave.

A `Shard` is data and its changes: new owners, new buckets, loaded state, more parameters. `core.step.runner` steps it.

Owners are decided once, when parameters arrive, and never change: a trained parameter's state stays where it is.
Which parameters travel, and in which bucket, depends on which ones a step can change. It is decided again when a
parameter is frozen or unfrozen, but not when a gradient is dropped: ranks may drop one at different times. A frozen
parameter for which no rank had a gradient at that moment has an owner but does not travel until it is trainable or gets
a gradient.
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
from ddp_zero.core.local.storage import PackedStorage, ViewStorage, release
from ddp_zero.core.plan.ownership import Pieces, home, is_cut, parts_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import Bucket, Layout, Ownership, ParameterSpec, Partition, ShardPlan
from ddp_zero.core.step.state_changes import StateChanges
from ddp_zero.core.step.state_moves import agree_on_moves, migrate_state
from ddp_zero.core.step.state_order import State, StateOrder
from ddp_zero.values.parts import check_can_be_cut, run_of
from ddp_zero.values.placeholders import without_waiting
from ddp_zero.values.shapes import Part, is_dense

BUCKET_CAP_BYTES = 25 << 20
_WHOLE = WholeParameters()
_REQUIRES_GRAD, _INDEX = attrgetter("requires_grad"), attrgetter("index")


class Binding:
    """A plan and the parameters that it covers; notices when the user has moved or frozen them.

    Raises ValueError for a parameter that cannot be cut, if the partition cuts any.

    Args:
        ranks: that share the parameters.
        table: the parameters.
        as_views: whether they become windows of the buckets' flat memory.
        syncs_in_forward: whether they may arrive in the next forward pass.
        partition: decides the owners.
        earlier: of a table that begins with the same parameters; these keep their owners and buckets.
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
        trainable, active, pieces = ([], [], ()) if earlier is None else earlier._decided()
        added = [param.requires_grad for param in table.params[len(active) :]]
        self._trainable, self._active = trainable + added, active + added
        self._bind(self._assign(table.specs(self._active), pieces))

    def for_table(self, table: ParameterTable) -> "Binding":
        """A binding for a table that begins with the same parameters, which keep their owners."""
        return Binding(self._ranks, table, self._as_views, self._syncs_in_forward, self.partition, self)

    def _decided(self) -> tuple[list[bool], list[bool], Sequence[Pieces]]:
        """Flags of trainable and of active parameters, and all owners; nothing is in flight after it."""
        self.sync.pending_syncs.complete()
        return self._trainable, self._active, self.pieces

    def _assign(self, specs: list[ParameterSpec], decided: Sequence[Pieces] = ()) -> Ownership:
        """The owners of all parameters of the table, of which the first ones are decided already."""
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
        """The owners of all parameters once DDP's buckets are these; see `Partition.assign_by_bucket`."""
        return self.partition.assign_by_bucket(self.plan, layout, split).pieces

    def adopt(self, layout: Layout, pieces: Sequence[Pieces]) -> None:
        """Follow these buckets, given by parameter indices, from now on, with these owners of each parameter."""
        self.layout = layout
        self._bind_again(pieces)

    @property
    def is_current(self) -> bool:
        """True if no parameter was moved, frozen or unfrozen since."""
        params = self._table.params
        is_unmoved = [*map(Tensor.data_ptr, params)] == self._bound_addresses
        return is_unmoved and [*map(_REQUIRES_GRAD, params)] == self._trainable

    def refresh(self, may_talk: bool, held: Collection[int] = ()) -> bool:
        """Plan and bind again if a parameter was moved, frozen or unfrozen since; returns True if so.

        If the set of trainable parameters has changed (on every rank before the same step, since all run the same
        loop), this is a collective: a frozen parameter stays in the plan if any rank still has a gradient for it.
        ``may_talk`` is False under Join: ranks that have joined do not see the change, and `step.join` refuses.
        ``held`` are parameters with a gradient on this rank that is not in ``param.grad`` at the moment.
        """
        params = self._table.params
        woken = any(params[index].grad is not None for index in self._dormant)
        trainable = [*map(_REQUIRES_GRAD, params)]
        if woken or trainable != self._trainable:
            self._trainable = trainable
            has_grad = [param.grad is not None or index in held for index, param in enumerate(params)]
            active = [param.requires_grad or has for param, has in zip(params, has_grad, strict=True)]
            flags = "".join(str(int(flag)) for flag in active)
            # a collective that only a change of trainable parameters causes; the loop changes them on all ranks alike
            gathered = self._ranks.everyone.all_gather_text(flags) if may_talk else [flags]
            active = ["1" in column for column in zip(*gathered, strict=True)]
            if self._as_views:
                release(
                    [param for param, was, now in zip(params, self._active, active, strict=True) if was and not now]
                )
            self._active = active
        elif [*map(Tensor.data_ptr, params)] == self._bound_addresses:  # without a loop in Python: in each step
            return False
        self._table.check_distinct()  # users may have pointed one at the memory of another
        self._bind_again(self.pieces)
        return True

    def _bind_again(self, pieces: Sequence[Pieces]) -> None:
        self.sync.pending_syncs.complete()
        self._bind(Ownership(self._comm.world_size, tuple(self._table.specs(self._active)), tuple(pieces)))

    def _bind(self, owned: Ownership) -> None:
        # new storage copies parameters: none may be in flight, or it would be copied half received
        self._runs: dict[int, _Runs] = {}  # by bucket
        self._at_rest: tuple[tuple[frozenset[int], bool], BitSums] | None = None  # as last asked for
        params, me = self._table.params, self._comm.group_rank
        self._holdings = parts_of(owned.pieces, me)
        self.plan = self.partition.plan(owned, self.layout, BUCKET_CAP_BYTES)
        self.digest = self.plan.digest([param.stride() for param in params])
        self.sync = self._new_sync()
        reduced = {param for bucket in self.layout or () for param in bucket}
        followed = self.layout is not None
        self.not_reduced = [i for i, spec in enumerate(owned.specs) if followed and spec.active and i not in reduced]
        self._dormant = [index for index, spec in enumerate(owned.specs) if not spec.active]
        self._bound_addresses = [param.data_ptr() for param in params]
        self.accelerators = sorted({param.device for param in params if param.device.type != "cpu"}, key=str)
        held, buckets = len(self._holdings), len(self.plan.buckets)
        logger.debug("rank %d owns %d of %d parameters, %d buckets", me, held, len(params), buckets)

    def _new_sync(self) -> ParameterSync:
        plan, params, order = self.plan, self._table.params, self.plan.buckets
        if not self._as_views:
            return ParameterSync(self._ranks, PackedStorage(params), params, self.digest, order)
        outlasts = self._syncs_in_forward
        if outlasts and self.layout is not None:
            order = order[::-1]  # DDP's first bucket has the last layers, which the next forward pass needs last
        views = ViewStorage(plan, params, self._table.label)
        return_freed_memory(sum(param.nbytes for param in params))
        return ParameterSync(self._ranks, views, params, self.digest, order, may_outlast=outlasts)

    # Owned by this rank

    @property
    def owners(self) -> Sequence[GroupRank]:
        """The owner of each parameter's first element, and so of all of it unless it is cut."""
        return self.plan.owners

    def sole_owner(self, index: int) -> GroupRank:
        """The owner of all of a parameter; ValueError if it is cut."""
        pieces, name = self.pieces[index], self._comm.name
        if is_cut(pieces):
            shared = ", ".join(f"{name(piece.owner)} elements {piece.start} to {piece.stop}" for piece in pieces)
            raise ValueError(
                f"{self._table.label(index)} has several owners: {shared}. It has a single owner with "
                "partition='parameters'. [ZERO-119]"
            )
        return home(pieces)

    def owned(self) -> list[int]:
        """Indices of the parameters of which this rank owns anything, dormant ones included."""
        return list(self._holdings)

    def orders(self) -> list[tuple[int, ...]]:
        """The strides of all parameters, by index, those in flight too; none if no parameter is cut."""
        if not self.partition.cuts:
            return []
        with without_waiting():
            return [*map(Tensor.stride, self._table.params)]

    def holdings(self, rank: GroupRank | None = None) -> Mapping[int, Part]:
        """The parameters of which a rank, or this one, owns anything, by index, and which part of each."""
        return self._holdings if rank is None else parts_of(self.pieces, rank)

    def not_all_owned(self) -> list[int]:
        """The parameters of which other ranks own anything."""
        me = self._comm.group_rank
        return [index for index, held in enumerate(self.pieces) if any(piece.owner != me for piece in held)]

    def check_class(self, inner: Optimizer) -> None:
        """TypeError if parameters are cut, and the class of one is not known to step each element by itself."""
        if self.partition.cuts:
            check_elementwise(inner)

    def check_owns_whole(self, call: str) -> None:
        """NotImplementedError, naming the call that needs whole parameters, if this rank owns a part of one."""
        for index, part in self._holdings.items():
            if part is not None:
                raise NotImplementedError(
                    f"{call} needs whole parameters; with partition='elements' this rank has elements {part.start} to "
                    f"{part.stop} of {self._table.label(index)}. Use ddp_zero.checkpoint, or consolidate_state_dict(). "
                    "[ZERO-608]"
                )

    def owns(self, index: int) -> bool:
        return index in self._holdings

    # Memory

    def memory_at_rest(self, among: frozenset[int], on_host: bool, but: Collection[int] = ()) -> BitSums:
        """Sums over the memory of parameters that are not in flight, of each run with the first parameter in it.

        A large parameter is a run of its own.

        Args:
            among: the parameters.
            on_host: leave out those on an accelerator.
            but: leave out these runs.
        """
        left, known_all = self.sync.pending_syncs, self._at_rest
        if not (left or but) and known_all is not None and known_all[0] == (among, on_host):
            return known_all[1]
        buckets: Sequence[Bucket] = self.plan.buckets
        if on_host and self.accelerators:
            buckets = [bucket for bucket in buckets if bucket.kind.startswith("cpu")]
        if left:
            in_flight = map(left.buckets.__contains__, map(_INDEX, buckets))
            buckets = [*compress(buckets, map(not_, in_flight))]
        found: list[tuple[int, SummedMemory]] = []
        are_all = not (left or but)
        for bucket in buckets:
            known = self._runs.get(bucket.index) or self._find_runs(bucket)
            if known.is_all and among.issuperset(known.members):
                found += known.whole
                continue
            are_all = False
            rest = set(among.intersection(known.members))
            for members, run in known.runs:
                if rest.issuperset(members):
                    found.append((members[0], run))
                    rest.difference_update(members)
            for index in rest:
                param = self._table.params[index].detach()
                found.append((index, SummedMemory(run_of(param) if is_dense(param.shape, param.stride()) else param)))
        sums = BitSums.of([(index, run) for index, run in found if index not in but] if but else found)
        if are_all:
            self._at_rest = (among, on_host), sums
        return sums

    def _find_runs(self, bucket: Bucket) -> "_Runs":
        blocks = self.sync.storage.blocks_of(bucket)
        runs = [(one, SummedMemory(memory)) for block in blocks for one, memory in block.runs(LARGE_BYTES)]
        members = frozenset(index for segment in bucket.segments for index in segment.params)
        is_all = members == {index for one, _ in runs for index in one} and len(members) == sum(len(m) for m, _ in runs)
        found = self._runs[bucket.index] = _Runs(members, runs, [(one[0], run) for one, run in runs], is_all)
        return found


@dataclass(frozen=True)
class _Runs:
    """The flat memory of one bucket."""

    members: frozenset[int]  # the bucket's parameters
    runs: list[tuple[tuple[int, ...], SummedMemory]]  # runs of memory with the parameters in each
    whole: list[tuple[int, SummedMemory]]  # the first parameter of each run, and the run
    is_all: bool  # whether every parameter is in exactly one run


class OwnBucket(NamedTuple):
    """A bucket as this rank steps it; fixed until the shard is bound again."""

    bucket: Bucket
    stepped: tuple[int, ...]  # the parameters that the local step changes
    devices: tuple[torch.device, ...]  # that step them
    label: Label  # of the local step


class Shard:
    """One rank's shard of an optimizer.

    Args:
        order: in which states were created; those that are in none of it yet are new.
        strides: of parameters that may be cut, as the elements of their states lie.
    """

    buckets: Sequence[OwnBucket]  # the plan's buckets as this rank steps them

    def __init__(
        self,
        ranks: Ranks,
        table: ParameterTable,
        binding: Binding,
        inner: Optimizer,
        exposed: Optimizer,
        stepped: StepTargets,
        order: StateOrder,
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self.ranks = ranks
        self.everyone = ranks.everyone
        self.comm = ranks.shard  # the ranks that share the shards
        self.trace = ranks.shard.trace
        self.table = table
        self.binding = binding  # their owners, buckets and storage
        self.inner = inner  # over the tensors that this rank steps
        self.stepped = stepped
        self.masters = stepped.masters  # those that are fp32 copies of parameters
        self._exposed_groups = groups_of(exposed)
        self.local_step = LocalStep(inner, self._exposed_groups)
        self.order = order
        self.changes = StateChanges(inner)
        self.snapshot: State | None = None  # the whole state as it is, if gathered here; dropped when anything changes
        self.life = 0  # how often a state dict was loaded
        self.leaves_syncs = False  # whether syncs may finish after the step; pre-forward hooks then wait for them
        self._strides = strides
        order.note_new(self.inner_state, stepped.index_of)
        self._bind()

    def copy_for(self, exposed: Optimizer, inner: Optimizer, memo: dict[int, Any]) -> "Shard":
        """A step for copies of both optimizers, over the copied parameters."""
        table = ParameterTable(exposed.param_groups, self.table.weigh, self.table.norm_order)
        stepped, binding = self.stepped.copy_for(table, memo), self.binding.for_table(table)
        order = copy.deepcopy(self.order, memo)
        return Shard(self.ranks, table, binding, inner, exposed, stepped, order, self._strides)

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
        """Raise RuntimeError if exposed groups have other parameters than are sharded, or a step has to be refused."""
        self.table.check_groups(self._exposed_groups())
        if (complaint := self.why_refuse()) is not None:
            self.check_memory_order()  # in another order a parameter cannot be its rounded master either
            raise RuntimeError(complaint)

    def why_refuse(self) -> str | None:
        """Why no step can be taken on this rank now, or None."""
        return self.stepped.why_refuse(self.comm.name(self.comm.group_rank))

    def check_masters(self) -> None:
        """Raise RuntimeError, naming it, if a low-precision parameter is no longer its rounded master.

        The check is local: a rank may overwrite parameters temporarily.
        """
        if (complaint := self.stepped.wrong_master(self.comm.name(self.comm.group_rank))) is not None:
            raise RuntimeError(complaint)

    def check_memory_order(self) -> None:
        """Check that the elements of parameters that are cut lie in the order in which their states do.

        Raises RuntimeError naming the first that do not, as after ``model.to(memory_format=...)``, on every rank, since
        all run the same loop; ValueError if they have gaps.
        """
        found = self.binding.orders()
        if found == self._strides:
            return
        for index, (now, before) in enumerate(zip(found, self._strides, strict=True)):
            if now == before:
                continue
            check_can_be_cut(self.table.params[index], self.table.label(index))
            if is_cut(self.binding.pieces[index]) and not self.order.is_at_birth:
                raise RuntimeError(
                    f"Expected the elements of {self.table.label(index)} in the order in memory that its state has, by "
                    f"strides {list(before)}, got strides {list(now)} ({self.comm.name(self.comm.group_rank)}): with "
                    "partition='elements' ranks share it in that order. Change memory formats before the first step; "
                    "later, keep opt.state_dict() of before the change, and load it after. [ZERO-114]"
                )
        self._strides = found

    # Changes of the shard

    def refresh(self, may_talk: bool = True, held: Collection[int] = ()) -> None:
        """Plan again if a parameter was moved, frozen or unfrozen since the last step; see `Binding.refresh`."""
        self.check_memory_order()
        if self.binding.refresh(may_talk, held):
            self._bind()

    def adopt(self, layout: Sequence[Sequence[int]], pieces: Sequence[Pieces]) -> None:
        """Take over a layout of buckets, given by parameter indices, and move state to its new owners. A collective.

        Raises TypeError if a state that has to move cannot travel, naming the parameter; RuntimeError on other ranks.
        """
        # end and errors on every rank before anything moves: a rank that raised alone would leave peers in `Agreement`
        self.sync.end_step()  # buckets that this iteration has stepped already: their memory is about to move
        self.sync.raise_errors()
        before = self.binding.pieces
        # every rank is here before the change begins: until then a peer may still ask for the state of the last step
        moves = self.table, self.inner_state, self.stepped, before, pieces
        sends = agree_on_moves(self.ranks, *moves)
        with self.change():
            # before the binding follows: blocking messages between old and new owners, in the order of parameters
            migrate_state(self.comm, self.order, *moves, sends=sends)
            self.binding.adopt(layout, pieces)
            self.local_step.own(self.stepped.assign(self.binding.holdings()))
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
        with self.change():
            self.masters.refresh()
            self.snapshot = None

    def follow_load(self, indices: Sequence[int]) -> None:
        """Follow a state dict that the inner optimizer has loaded, with states of these parameters, in this order."""
        self.snapshot = None
        self.life += 1
        self._strides = self.binding.orders()
        self.local_step.mirror_to_exposed()
        self.local_step.options.note_load(self.param_groups)
        self._bind()
        self.order.follow_load([self.stepped[index] for index in indices], self.inner_state)
        self.masters.note_versions()

    def extend(self, table: ParameterTable, binding: Binding) -> None:
        """Take over parameters that were added; existing ones keep their index and their owner."""
        self.snapshot = None
        self._strides = [*self._strides, *binding.orders()[len(self._strides) :]]
        table.extends(self.table)
        self.table = table
        self.binding = binding
        self.order.note_new(self.inner_state, self.stepped.index_of)
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

    def change(self) -> AbstractContextManager[None]:
        """A change of the state outside a step; see `StateChanges`."""
        return self.changes.one(self.binding.accelerators)

    def drop_state(self) -> None:
        """Drop this rank's state before another one is loaded, so that two are never in memory."""
        self.inner_state.clear()
        self.local_step.lists.forget()  # they hold tensors of the state

    def end_syncs(self) -> None:
        """After all buckets were sent: wait for them, unless each use of a parameter waits by itself."""
        self.sync.end_step(self.local_step.options)
        if not self.leaves_syncs:
            self.pending_syncs.complete()

    def abandon(self) -> None:
        """End a step that failed, or that a user drops: forget copies and exchanges in flight, waiting for no peer."""
        self.stepped.residence.abandon()
        self.sync.abandon()
        self.changes.abandon()

    def _bind(self) -> None:
        stepped = self.stepped
        stepped.follow_memory()
        buckets, me = self.plan.buckets, self.comm.group_rank
        segments = [bucket.segments[me].params for bucket in buckets]
        if self.local_step.steps_whole:  # the step of the first bucket with parameters of this rank is the whole one
            first = next((place for place, params in enumerate(segments) if params), None)
            segments = [tuple(self.binding.owned()) if place == first else () for place in range(len(buckets))]
        self.buckets = [
            OwnBucket(
                bucket,
                indices,
                tuple(dict.fromkeys(stepped[index].device for index in indices)),
                self.trace.label("local_step", bucket.index),
            )
            for bucket, indices in zip(buckets, segments, strict=True)
        ]
        owned = ((bucket.index, bucket.segments[me].params) for bucket in buckets)
        self.local_step.bind({bucket: {stepped[index] for index in indices} for bucket, indices in owned if indices})
