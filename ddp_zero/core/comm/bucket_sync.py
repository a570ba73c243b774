"""One bucket's parameters on their way: what its owners stepped is sent, what other ranks stepped is received."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import InFlight
from ddp_zero.core.local.storage import ParameterStorage
from ddp_zero.core.plan.shard_plan import Bucket


class BucketSync:
    """The all-gather of one bucket's parameters, prepared once and started in every step.

    Args:
        bucket: the bucket.
        storage: where its segment tensors come from.
        params: the parameters of the plan, by index.
        comm: the ranks that share the bucket.
        plan_digest: a number that differs if plans differ.

    Attributes:
        bucket: as given.
        params: its parameters, in the order of their owners.
        changed: parameters that other ranks have stepped and that do not count as changed in place yet: not those
            without a gradient, which a graph may still need in backward.
    """

    def __init__(
        self, bucket: Bucket, storage: ParameterStorage, params: Sequence[Tensor], comm: Communicator, plan_digest: int
    ) -> None:
        self.bucket = bucket
        self.params = [params[index] for index in _indices(bucket, range(comm.world_size))]
        others = (rank for rank in range(comm.world_size) if rank != comm.group_rank)
        self._of_others = [params[index] for index in _indices(bucket, others)]
        self._storage = storage
        self._comm = comm
        self._subject = (plan_digest, bucket.index)
        self._sending, self._waiting = (comm.trace.label(phase, bucket.index) for phase in ("sync", "wait_sync"))
        self._what = f"the sync of bucket {bucket.index}"
        fixed = storage.fixed_segments(bucket)
        self._all_gather: Callable[[tuple[int, ...]], InFlight] | None = None
        if fixed is not None:
            self._all_gather = comm.all_gather_of(fixed)
        self._packed: Sequence[Tensor] = ()
        self._exchange: InFlight | None = None
        self.changed: list[Tensor] = []

    def start(self) -> None:
        """Send what this rank has stepped, and post the receives of what others step."""
        with self._sending:
            all_gather = self._all_gather
            if all_gather is None:
                self._packed = self._storage.segments_to_sync(self.bucket, self._comm.group_rank)
                all_gather = self._comm.all_gather_of(self._packed)
            self._exchange = all_gather(self._subject)
        self.changed = [param for param in self._of_others if param.grad is not None]

    def receive(self) -> None:
        """Wait for the messages and show the parameters in the model.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        assert self._exchange is not None, "started before"
        with self._waiting:
            self._exchange.wait(self._what)
        if self._all_gather is None:
            self._storage.write_back(self.bucket, self._packed, self._comm.group_rank)
        self._packed, self._exchange = (), None
        if self.changed:
            increment_version(self.changed)

    def count_changes(self) -> None:
        """Count received parameters as changed in place, as the step does on their owners."""
        increment_version(self.changed)
        self.changed = []


def _indices(bucket: Bucket, ranks: Iterable[int]) -> list[int]:
    """The parameters of which these ranks own anything, once each."""
    return list(dict.fromkeys(index for rank in ranks for index in bucket.segments[rank].params))
