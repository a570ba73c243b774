"""The buckets of the plan: decided before any backward pass, and put into the order of the first one."""

from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.ddp.reducer import bucket_caps, in_buckets
from ddp_zero.core.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, ddp_layout
from ddp_zero.core.plan.shard_plan import Layout
from ddp_zero.core.step.rank_shard import Shard


class BucketPlan:
    """The buckets of the plan for the parameters of an optimizer that a DDP model reduces.

    They, and owners, are decided by DDP's rule over the model's parameters: building one is a collective.

    Args:
        split: whether a bucket is spread over ranks, or goes whole to one.

    Attributes:
        reduced: the parameters that DDP reduces.
        given_caps: the bytes at which the user wants buckets closed; None: not asked for.
        members: the parameters of each bucket.
        bucket_of: the bucket of each parameter.
        knows_order: whether buckets will never again change places.
    """

    def __init__(self, shard: Shard, ddp: DistributedDataParallel, split: bool) -> None:
        self._shard, self._split = shard, split
        self.reduced = [param for _, param in in_buckets(ddp)]  # asked now: the reducer is locked in the hook
        self.given_caps = bucket_caps(ddp)
        self.knows_order = False
        self._add(())

    def follow_added(self) -> None:
        """Plan buckets for parameters that were added, behind the others. A collective if there are any."""
        if self._table is not self._shard.table:
            self._add(self._shard.binding.layout or ())

    def _add(self, known: Layout) -> None:
        """Plan buckets for the parameters that DDP reduces and that are in none of these."""
        shard, table = self._shard, self._shard.table
        self._table = table
        planned = {index for bucket in known for index in bucket}
        reduced = [table.index_of[param] for param in self.reduced if param in table.index_of]
        indices = [index for index in reduced if index not in planned]
        if indices:
            specs = shard.plan.specs
            sizes = [specs[index].nbytes for index in indices]
            kinds = [specs[index].kind for index in indices]
            found = ddp_layout(sizes, kinds, self.given_caps or (FIRST_CAP_BYTES, CAP_BYTES))
            added = [[indices[place] for place in bucket] for bucket in found]
            # state of an optimizer inside another could not move
            steps_whole, pieces = shard.local_step.steps_whole, shard.binding.pieces
            shard.adopt([*known, *added], pieces if steps_whole else shard.binding.pieces_for(added, self._split))
        self._read()

    def _read(self) -> None:
        params = self._shard.table.params
        self.members = [[params[index] for index in bucket] for bucket in self._shard.binding.layout or ()]
        self.bucket_of = {param: place for place, members in enumerate(self.members) for param in members}

    def put_in_order(self, order: list[int] | None) -> bool:
        """After a reduced pass: reduce buckets in the order in which they became full on the first rank. A collective.

        Returns True if that is another order than before.

        Args:
            order: in which they became full on this rank; None: it is not known yet, on any rank. Ranks that have
                joined take no part.
        """
        if order is None:
            return False
        self.knows_order = True
        # a collective: every rank has ended the same pass, and ranks that have joined are not asked
        first = self._shard.everyone.all_gather_ints(order)[0]
        layout = self._shard.binding.layout
        if first == sorted(first) or layout is None:
            return False
        self._shard.adopt([layout[place] for place in first], self._shard.binding.pieces)
        self._read()
        return True
