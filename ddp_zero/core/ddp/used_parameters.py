"""The parameters that a backward pass has used, on this rank and on any, as DDP finds out."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.comm.communicator import sum_as_ddp
from ddp_zero.core.ddp.reducer import finds_unused, has_static_graph


def may_be_unused(ddp: DistributedDataParallel) -> bool:
    """True if DDP expects that parameters may get no gradient."""
    return finds_unused(ddp) or has_static_graph(ddp)


class UsedParameters:
    """Which parameters have a gradient in a backward pass.

    Args:
        params: the parameters that DDP reduces.

    Attributes:
        unused: parameters without a gradient on this rank; known where DDP looks for them.
        anywhere: in a static graph, parameters with a gradient on any rank, once that is known; else None.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self.unused: set[Tensor] = set()
        self.anywhere: set[Tensor] | None = None
        self._counts: Tensor | None = None  # how many ranks have used each in the last pass
        self._has_counted = False  # in this pass

    def begin(self) -> None:
        """A pass begins."""
        self.unused.clear()
        self._has_counted = False

    def count(self, ddp: DistributedDataParallel, unused: set[Tensor]) -> set[Tensor] | None:
        """The parameters with a gradient on any rank; None: all. A collective, once in a pass.

        Args:
            ddp: the model.
            unused: parameters without a gradient on this rank, of all optimizers of the model.
        """
        if not self._has_counted:
            self._has_counted = True
            self._counts = self._flags([param for param in self._params if param not in unused])
            sum_as_ddp(ddp.process_group, self._counts).wait()
        if finds_unused(ddp) and not unused:
            return None  # this rank has used all of them: the host need not wait for the others' answers
        return {param for param, count in zip(self._params, self.counts.tolist(), strict=True) if count}

    @property
    def counts(self) -> Tensor:
        """For each parameter, how many ranks had a gradient of it in the last pass that has counted."""
        if self._counts is None:
            self._counts = self._flags(())
        return self._counts

    def unused_before(self) -> set[Tensor]:
        """The parameters that no rank has used in that pass."""
        return {param for param, count in zip(self._params, self.counts.tolist(), strict=True) if not count}

    def _flags(self, params: Iterable[Tensor]) -> Tensor:
        used = set(params)
        flags = [int(param in used) for param in self._params]
        return torch.tensor(flags, dtype=torch.int32).to(self._params[0].device, non_blocking=True)
