"""Attaches a plan to live tensors, and notices when the user has moved them.

Owners are decided once, when parameters arrive, and never change: a trained parameter's state stays where it is.
Which parameters travel, and in which bucket, depends on what a step can change. It is decided again when a parameter is
frozen or unfrozen, but not when a gradient is dropped: ranks may drop one at different times. A frozen parameter for
which no rank had a gradient at that moment has an owner but does not travel until it is trainable or gets a gradient.
"""

import copy
from collections.abc import Collection, Iterable, Sequence, Set

from torch import Tensor

from ddp_zero.core.comm.parameter_sync import ParameterSync
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.awaited import untouched
from ddp_zero.core.local.digest import LARGE_BYTES, SummedMemory
from ddp_zero.core.local.heap import return_freed_memory
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.local.part_windows import check_can_be_cut
from ddp_zero.core.local.storage import PackedStorage, ViewStorage, release
from ddp_zero.core.plan.ownership import Pieces, home, is_cut, piece_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import Layout, Partition, WholeParameters
from ddp_zero.core.plan.shapes import is_dense
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, ShardPlan, segments_of

BUCKET_CAP_BYTES = 25 << 20
_PACKED_IN_FLIGHT = 2
_WHOLE = WholeParameters()


class Binding:
    """A plan and the parameters that it covers.

    Args:
        ranks: the ranks; those of the shard group share the parameters.
        table: the parameters.
        as_views: whether parameters move into flat storage (``parameters_as_bucket_view``).
        syncs_in_forward: whether a sync may outlast its step, which needs flat storage.
        partition: how parameters are divided among ranks.

    Raises:
        ValueError: for a parameter that cannot be cut, if the partition cuts any.

    Attributes:
        layout: parameter indices of each DDP bucket that the plan follows, or None.
        pieces: who owns which elements of every parameter, by index.
        plan: the current plan.
        not_reduced: the active parameters in none of the DDP buckets that the plan follows.
        digest: a number that differs if owners, buckets or the parameters in them differ, or the order in memory of
            parameters that may be cut.
        sync: sends and receives its buckets.
    """

    plan: ShardPlan
    sync: ParameterSync

    def __init__(
        self,
        ranks: Ranks,
        table: ParameterTable,
        as_views: bool,
        syncs_in_forward: bool = False,
        partition: Partition = _WHOLE,
    ) -> None:
        self._ranks = ranks
        self._comm = ranks.shard
        self._partition = partition
        self._table = table
        self._as_views = as_views
        self._syncs_in_forward = syncs_in_forward
        self._trainable = [param.requires_grad for param in table.params]
        self._active = list(self._trainable)
        self._is_settled = True
        self.layout: Layout | None = None
        specs = table.specs(self._active)
        self.pieces: list[Pieces] = self._assigned(specs, [])
        self._bind(specs)

    def extended(self, table: ParameterTable) -> "Binding":
        """A binding for a table that begins with the same parameters, which keep their owners."""
        clone = copy.copy(self)
        clone._table = table
        added = [param.requires_grad for param in table.params[len(self._active) :]]
        clone._trainable = self._trainable + added
        clone._active = self._active + added
        specs = table.specs(clone._active)
        clone.pieces = clone._assigned(specs, self.pieces)
        clone._bind(specs)
        return clone

    def _assigned(self, specs: list[ParameterSpec], decided: Sequence[Pieces]) -> list[Pieces]:
        """The pieces of all parameters of the table, of which the first ones are decided already."""
        pieces = self._partition.assign(specs, decided, self._comm.world_size, BUCKET_CAP_BYTES)
        if self.cuts:
            for index, param in enumerate(self._table.params):
                check_can_be_cut(param, self._table.label(index))
        return pieces

    @property
    def cuts(self) -> bool:
        """Whether several ranks may own parts of one parameter."""
        return self._partition.cuts

    @property
    def owners(self) -> list[GroupRank]:
        """The owner of each parameter's first element, which is that of all of it unless it is cut."""
        return list(map(home, self.pieces))

    def pieces_for(self, layout: Layout, split: bool, decided: int) -> list[Pieces]:
        """Who is to own what once DDP's buckets are these; see `Partition.assign_by_bucket`."""
        ranks = self._comm.world_size
        return self._partition.assign_by_bucket(self.plan.specs, self.pieces, ranks, layout, split, decided)

    def adopt(self, layout: Layout, pieces: list[Pieces], moves_later: bool) -> None:
        """Follow these DDP buckets from now on, with these owners.

        Args:
            layout: parameter indices of each bucket.
            pieces: one entry per parameter.
            moves_later: move parameters into flat storage only at `settle`: a move needs memory for a second copy of
                them, which an iteration with whole gradients does not have.
        """
        self.layout = layout
        self.pieces = pieces
        self._is_settled = not (self._as_views and moves_later)
        self._bind(self._table.specs(self._active))

    def bucket_over(self, index: int, params: Sequence[int]) -> Bucket:
        """A bucket of DDP's that the plan does not have, such as one with a parameter that was frozen since.

        If DDP's buckets are those that the plan follows, owners stay: they hold what earlier passes have added up.
        """
        if any(set(params) <= set(bucket) for bucket in self.layout or ()):
            kind = self.plan.specs[params[0]].kind
            return Bucket(index, kind, segments_of(sorted(params), self.plan.specs, self.pieces, self._comm.world_size))
        return self._partition.bucket_over(index, params, self.plan.specs, self.pieces, self._comm.world_size)

    def settle(self) -> None:
        """Move the parameters into flat storage if that was postponed."""
        if not self._is_settled:
            self._is_settled = True
            self._bind(self._table.specs(self._active))

    def refresh(self, may_talk: bool, held: Collection[int] = ()) -> bool:
        """Plan and bind again if a parameter was moved, frozen or unfrozen since; returns True if so.

        If the set of trainable parameters has changed (on every rank before the same step, since all run the same
        loop), this is a collective: a frozen parameter stays in the plan if any rank still has a gradient for it.

        Args:
            may_talk: False under Join: ranks that have joined do not see the change, and `step.join` refuses.
            held: parameters with a gradient on this rank that is not in ``param.grad`` at the moment.
        """
        params = self._table.params
        woken = any(params[index].grad is not None for index in self._dormant)
        trainable = [param.requires_grad for param in params]
        if woken or trainable != self._trainable:
            self._trainable = trainable
            has_grad = [param.grad is not None or index in held for index, param in enumerate(params)]
            active = [param.requires_grad or has for param, has in zip(params, has_grad, strict=True)]
            flags = "".join(str(int(flag)) for flag in active)
            gathered = self._ranks.everyone.all_gather_text(flags) if may_talk else [flags]
            active = ["1" in column for column in zip(*gathered, strict=True)]
            if self._as_views:
                release(
                    [param for param, was, now in zip(params, self._active, active, strict=True) if was and not now]
                )
            self._active = active
        elif self._is_settled and self._addresses() == self._bound_addresses:
            return False
        self._is_settled = True
        self._bind(self._table.specs(self._active))
        return True

    def checked_strides(self, strides: list[tuple[int, ...]], may_change: bool) -> list[tuple[int, ...]]:
        """The strides of parameters now; see `ShardedStep.check_memory_order`.

        Args:
            strides: of parameters when they were last looked at.
            may_change: whether parameters that are cut may have others, since they have no state yet.
        """
        if not self.cuts:
            return strides
        found = strides_of(self._table)
        for index, (now, before) in enumerate(zip(found, strides, strict=True)):
            if now == before:
                continue
            check_can_be_cut(self._table.params[index], self._table.label(index))
            if is_cut(self.pieces[index]) and not may_change:
                raise RuntimeError(
                    f"Expected the elements of {self._table.label(index)} in the order in memory that its state has, "
                    f"by strides {list(before)}, got strides {list(now)} ({self._comm.name(self._comm.group_rank)}): "
                    "with partition='elements' ranks share it in that order. Change memory formats before the first "
                    "step; later, keep opt.state_dict() of before the change, and load it after."
                )
        return found

    def owned(self) -> list[int]:
        """Indices of the parameters of which this rank owns anything, dormant ones included."""
        me = self._comm.group_rank
        return [index for index, pieces in enumerate(self.pieces) if piece_of(pieces, me) is not None]

    def owned_parts(self) -> dict[int, slice]:
        """The elements that this rank owns of each parameter that is cut."""
        mine = ((index, piece_of(self.pieces[index], self._comm.group_rank)) for index in self.owned())
        return {
            index: slice(piece.start, piece.stop)
            for index, piece in mine
            if piece is not None and is_cut(self.pieces[index])
        }

    def holdings(self) -> list[tuple[int, slice | None]]:
        """The parameters of which this rank owns anything, and which part of each."""
        parts = self.owned_parts()
        return [(index, parts.get(index)) for index in self.owned()]

    def gained(self, pieces: Sequence[Pieces]) -> list[tuple[int, slice | None]]:
        """What this rank would own with these pieces and does not own now: parameters, and which part of each."""
        me = self._comm.group_rank
        found: list[tuple[int, slice | None]] = []
        for index, (before, after) in enumerate(zip(self.pieces, pieces, strict=True)):
            new = piece_of(after, me)
            if new is not None and (new != piece_of(before, me) or is_cut(before) != is_cut(after)):
                found.append((index, slice(new.start, new.stop) if is_cut(after) else None))
        return found

    def owns(self, index: int) -> bool:
        """Whether this rank owns anything of a parameter."""
        return piece_of(self.pieces[index], self._comm.group_rank) is not None

    def owned_of_bucket(self) -> dict[int, set[Tensor]]:
        """This rank's parameters of each bucket in which it has any."""
        segments = [(bucket.index, bucket.segments[self._comm.group_rank]) for bucket in self.plan.buckets]
        return {
            index: {self._table.params[param] for param in segment.params}
            for index, segment in segments
            if segment.params
        }

    def memory_at_rest(self, buckets: Iterable[Bucket], among: Set[int]) -> list[tuple[int, SummedMemory]]:
        """The memory of parameters that are not in flight, to sum, each run with the first parameter in it.

        A large parameter is a run of its own.

        Args:
            buckets: of the plan.
            among: indices of the parameters to include.
        """
        left, params = self.sync.left, self._table.params
        found: list[tuple[int, SummedMemory]] = []
        for bucket in [one for one in buckets if one.index not in left] if left else buckets:
            if bucket.index not in self._runs:
                blocks = self.sync.storage.blocks_of(bucket)
                runs = [run for block in blocks for run in block.runs(LARGE_BYTES)]
                self._runs[bucket.index] = [(members, SummedMemory(memory)) for members, memory in runs]
            rest = {index for one in bucket.segments for index in one.params if index in among}
            for members, run in self._runs[bucket.index]:
                if rest.issuperset(members):
                    found.append((members[0], run))
                    rest.difference_update(members)
            for index in rest:
                param = params[index].detach()
                dense = is_dense(param.shape, param.stride())
                found.append((index, SummedMemory(param.as_strided((param.numel(),), (1,)) if dense else param)))
        return found

    def _bind(self, specs: list[ParameterSpec]) -> None:
        self._runs: dict[int, list[tuple[tuple[int, ...], SummedMemory]]] = {}  # of flat memory, by bucket
        if hasattr(self, "sync"):
            self.sync.left.complete()
        params = self._table.params
        ranks = self._comm.world_size
        self.plan = self._partition.plan(specs, self.pieces, ranks, self.layout, BUCKET_CAP_BYTES)
        self.digest = self.plan.digest([param.stride() for param in params] if self.cuts else [])
        self.sync = self._new_sync()
        reduced = {param for bucket in self.layout or () for param in bucket}
        followed = self.layout is not None
        self.not_reduced = [i for i, spec in enumerate(specs) if followed and spec.active and i not in reduced]
        self._dormant = [index for index, spec in enumerate(specs) if not spec.active]
        self._bound_addresses = self._addresses()
        logger.debug(
            "rank %d owns %d of %d parameters, %d buckets",
            self._comm.group_rank,
            len(self.owned()),
            len(params),
            len(self.plan.buckets),
        )

    def _new_sync(self) -> ParameterSync:
        plan, params, order = self.plan, self._table.params, self.plan.buckets
        if not (self._as_views and self._is_settled):
            packed = PackedStorage(params)
            return ParameterSync(self._ranks, packed, params, self.digest, order, max_in_flight=_PACKED_IN_FLIGHT)
        outlasts = self._syncs_in_forward
        if outlasts and self.layout is not None:
            order = order[::-1]  # DDP's first bucket has the last layers, which the next forward pass needs last
        views = ViewStorage(plan, params, self._table.label)
        return_freed_memory(sum(param.nbytes for param in params))
        return ParameterSync(self._ranks, views, params, self.digest, order, may_outlast=outlasts)

    def _addresses(self) -> list[int]:
        return [param.data_ptr() for param in self._table.params]


def strides_of(table: ParameterTable) -> list[tuple[int, ...]]:
    """The strides of all parameters, by index; of those in flight too."""
    with untouched():
        return [param.stride() for param in table.params]
