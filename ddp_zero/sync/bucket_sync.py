"""One bucket on its way: what its owners stepped is sent, and what other ranks stepped is received."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.exchange import InFlight
from ddp_zero.plan.shard_plan import Bucket
from ddp_zero.sync.storage import ParameterStorage


@dataclass(frozen=True)
class BucketSync:
    """A bucket whose exchange was started.

    Attributes:
        bucket: the bucket.
        segments: what is sent and received, by rank.
        exchange: the messages.
        changed: parameters that other ranks step, and that do not count as changed in place yet.
    """

    bucket: Bucket
    segments: Sequence[Tensor]
    exchange: InFlight
    changed: Sequence[Tensor]

    def receive(self, storage: ParameterStorage, comm: Communicator) -> None:
        """Wait for the messages and show the parameters in the model.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        with comm.trace.label("wait_sync", self.bucket.index):
            self.exchange.wait(f"the sync of bucket {self.bucket.index}")
        storage.write_back(self.bucket, self.segments, comm.group_rank)
        increment_version(self.changed)  # as an in-place step does on the owner
