"""Attaches a plan to live tensors, and notices when the user has moved them.

Owners are decided once, when parameters arrive, and never change: a trained parameter's state stays where it is.
Which parameters travel, and in which bucket, follows what can change in a step. Frozen parameters have owners but do
not travel until they are trainable.
"""

from collections.abc import Sequence

from torch import Tensor

from ddp_zero.collectives import Communicator
from ddp_zero.flat import PackedStorage, ParameterStorage, ViewStorage, release
from ddp_zero.param_sync import ParameterSync
from ddp_zero.parameters import ParameterTable, is_active
from ddp_zero.partition import GroupRank, partition_greedy
from ddp_zero.plan import ParameterSpec, ShardPlan, plan_for_ddp, plan_standalone
from ddp_zero.tracing import logger

BUCKET_CAP_BYTES = 25 << 20
_PACKED_IN_FLIGHT = 2

Layout = Sequence[Sequence[int]]


class Binding:
    """A plan and the parameters it speaks of.

    Args:
        comm: the group that shares the parameters.
        table: the parameters.
        as_views: whether parameters move into flat storage (``parameters_as_bucket_view``).
        owners: owners that are decided already, for a prefix of the parameters.
        layout: parameter indices of each DDP bucket, if the plan is to follow DDP's.

    Attributes:
        layout: DDP's buckets that the plan follows, or None.
        plan: the current plan.
        sync: sends and receives its buckets.
    """

    plan: ShardPlan
    sync: ParameterSync

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        as_views: bool,
        owners: list[GroupRank] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._comm = comm
        self._table = table
        self._as_views = as_views
        specs = table.specs()
        decided = owners or []
        self.layout = layout
        self._active: list[bool] = []
        self._owners = decided + assign_owners(specs, decided, comm.world_size)
        self._bind(specs)

    def adopt(self, layout: Layout, owners: list[GroupRank]) -> None:
        """Follow these DDP buckets from now on, with these owners."""
        self.layout = layout
        self._owners = owners
        self._bind(self._table.specs())

    def not_reduced(self) -> int | None:
        """The first active parameter in none of the DDP buckets that the plan follows, or None."""
        reduced = {param for bucket in self.layout or () for param in bucket}
        return next((index for index, spec in enumerate(self.plan.specs) if spec.active and index not in reduced), None)

    def refresh(self) -> bool:
        """Plan and bind again if a parameter was moved, frozen or unfrozen since; says whether it was.

        Every rank must see the same change before the same step, as the loop that all ranks run makes it.
        """
        if self._activity() == self._active and self._places() == self._bound_places:
            return False
        self._bind(self._table.specs())
        return True

    def owned(self) -> list[int]:
        """Indices of this rank's parameters, dormant ones included."""
        return [index for index, owner in enumerate(self._owners) if owner == self._comm.group_rank]

    def owned_of_bucket(self) -> dict[int, set[Tensor]]:
        """This rank's parameters of each bucket in which it has any."""
        segments = [(bucket.index, bucket.segments[self._comm.group_rank]) for bucket in self.plan.buckets]
        return {
            index: {self._table.params[param] for param in segment.params}
            for index, segment in segments
            if segment.params
        }

    @property
    def owners(self) -> list[GroupRank]:
        """The owner of every parameter, by index."""
        return self._owners

    def _bind(self, specs: list[ParameterSpec]) -> None:
        params = self._table.params
        if self._as_views:
            release([param for param, was in zip(params, self._active, strict=False) if was and not is_active(param)])
        ranks = self._comm.world_size
        if self.layout is None:
            self.plan = plan_standalone(specs, self._owners, ranks, BUCKET_CAP_BYTES)
        else:
            self.plan = plan_for_ddp(specs, self._owners, ranks, self.layout, BUCKET_CAP_BYTES)
        storage: ParameterStorage
        if self._as_views:
            storage = ViewStorage(self.plan, params, self._table.label)
            in_flight = max(1, len(self.plan.buckets))
        else:
            storage = PackedStorage(params)
            in_flight = _PACKED_IN_FLIGHT
        self.sync = ParameterSync(self._comm, storage, in_flight)
        self._active = self._activity()
        self._bound_places = self._places()
        logger.debug(
            "rank %d owns %d of %d parameters, %d buckets",
            self._comm.group_rank,
            len(self.owned()),
            len(params),
            len(self.plan.buckets),
        )

    def _activity(self) -> list[bool]:
        return [is_active(param) for param in self._table.params]

    def _places(self) -> list[int]:
        return [param.data_ptr() for param in self._table.params]


def assign_owners(specs: list[ParameterSpec], decided: list[GroupRank], world_size: int) -> list[GroupRank]:
    """Owners for the parameters after the first ``len(decided)``, balancing bytes with what those carry already.

    Active parameters are spread first and dormant ones after, so that state is balanced now and stays nearly so when
    more parameters are unfrozen.
    """
    loads = [0] * world_size
    for spec, owner in zip(specs, decided, strict=False):
        loads[owner] += spec.nbytes
    owners = [GroupRank(0)] * len(specs)
    for active in (True, False):
        members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
        sizes = [specs[index].nbytes for index in members]
        for index, owner in zip(members, partition_greedy(sizes, world_size, loads), strict=True):
            owners[index] = owner
            loads[owner] += specs[index].nbytes
    return owners[len(decided) :]
