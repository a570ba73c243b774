"""Notices when gradients are changed after the step inside backward has used them, which would have no effect."""

from torch import Tensor

from ddp_zero.absent import AbsentGradient
from ddp_zero.awaited import untouched
from ddp_zero.sharded_step import ShardedStep


class PublishedGradients:
    """Gradients as an iteration that has stepped leaves them: places and versions, no references."""

    def __init__(self, sharded: ShardedStep) -> None:
        self._sharded = sharded
        self._noted: list[tuple[int, int, int]] = []  # parameter, place and version of its gradient, see _mark

    def note(self) -> None:
        """The step was taken; from now on a change is too late."""
        with untouched():
            grads = [(index, param.grad) for index, param in enumerate(self._sharded.table.params)]
            self._noted = [(index, *_mark(grad)) for index, grad in grads if grad is not None]

    def first_changed(self) -> int | None:
        """The first parameter whose gradient was changed in place, replaced or dropped since, or None.

        What is written through ``grad.data`` cannot be seen.
        """
        params = self._sharded.table.params
        with untouched():
            for index, place, version in self._noted:
                grad = params[index].grad
                if grad is None or _mark(grad) != (place, version):
                    return index
            return None

    def check_unchanged(self) -> None:
        """See that no gradient was changed too late.

        Raises:
            RuntimeError: naming the first parameter whose gradient was.
        """
        changed = self.first_changed()
        if changed is not None:
            comm = self._sharded.comm
            raise RuntimeError(
                f"Expected gradients as backward left them, since the step was taken inside it, got a changed one "
                f"for {self._sharded.table.label(changed)} ({comm.name(comm.group_rank)}). To clip, scale or unscale "
                "gradients before the step, do so from the first step on, or build the optimizer with max_grad_norm=, "
                "loss_scale= or overlap_with_ddp=False."
            )

    def forget(self) -> None:
        """The next iteration begins, or this one is dropped."""
        self._noted = []


def _mark(grad: Tensor) -> tuple[int, int]:
    """What changes when a gradient does; one that is not here may have been set to zero."""
    if isinstance(grad, AbsentGradient):
        return id(grad), grad.zeroed
    return grad.data_ptr(), grad._version
