"""What users see in ``param.grad`` between iterations of stage 2, and how it is taken up by the next backward pass."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_zero.absent import AbsentGradient, absent_gradient
from ddp_zero.grad_bucket import Workshop
from ddp_zero.sharded_step import ShardedStep


class VisibleGradients:
    """Averaged gradients on the rank that owns them, `AbsentGradient` elsewhere.

    Args:
        workshop: takes gradients that are carried over to the next sum.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._sharded = workshop.sharded
        self._shown = WeakTensorKeyDictionary()  # our tensors in param.grad: their exact sum, their version
        self._absent: dict[tuple[int, bool], AbsentGradient] = {}

    def show(self, index: int, grad: Tensor, exact: Tensor | None = None) -> None:
        """Put an averaged gradient into ``param.grad``.

        Args:
            index: the parameter.
            grad: in its shape and dtype.
            exact: the same in the dtype of the sum, where that is another one.
        """
        self._sharded.table.params[index].grad = grad
        self._shown[grad] = (exact, grad._version)

    def hide(self, index: int, was_consumed: bool) -> None:
        """Say in ``param.grad`` where the gradient is."""
        self._sharded.table.params[index].grad = self._absence(index, was_consumed)

    def forget(self) -> None:
        """Owners have changed."""
        self._absent.clear()

    def take_out(self, will_be_reduced: bool) -> list[tuple[Tensor, Tensor]]:
        """Carry averaged gradients over to the next sums; what is left, as pairs of parameter and gradient.

        Raises:
            RuntimeError: if a step has used up gradients that were not set to None since, or if averaged gradients
                would be mixed with those of this rank alone.
        """
        table, carried, left = self._sharded.table, self._workshop.carried, list[tuple[Tensor, Tensor]]()
        for index, param in enumerate(table.params):
            grad = param.grad
            if grad is None:
                continue
            shown = None if isinstance(grad, AbsentGradient) else self._shown.get(grad)
            if isinstance(grad, AbsentGradient):
                if grad.consumed:
                    raise RuntimeError(
                        f"Expected opt.step() and opt.zero_grad() before the next backward pass, got one while the "
                        f"gradient of {table.label(index)} was not set to None ({self._where}). DDP would accumulate "
                        "gradients, and the step inside backward has used up the first (stage 2). To accumulate, run "
                        "all but the last backward pass in opt.accumulate() or ddp.no_sync()."
                    )
                param.grad = None
            elif shown is not None:
                exact, version = shown
                carried[index] = grad if exact is None or grad._version != version else exact
                param.grad = None
            else:
                left.append((param, grad))
                continue
            if not will_be_reduced:
                raise RuntimeError(
                    f"Expected no averaged gradients at a backward pass under ddp.no_sync(), got one for "
                    f"{table.label(index)} ({self._where}): this rank's own would be added to them. Call "
                    "opt.zero_grad() before, or accumulate in opt.accumulate() instead of ddp.no_sync()."
                )
        return left

    def _absence(self, index: int, was_consumed: bool) -> AbsentGradient:
        key = (index, was_consumed)
        if key not in self._absent:
            table = self._sharded.table
            name = table.label(index)
            if was_consumed:
                reason = (
                    f"Expected the gradient of {name}, got none: the step inside backward has used it up (stage 2, "
                    f"{self._where}). To look at gradients, or to clip them before the step by "
                    "opt.clip_grad_norm_(max_norm), build the optimizer with overlap_with_ddp=False."
                )
            else:
                owner = self._sharded.comm.name(self._sharded.binding.owners[index])
                reason = (
                    f"Expected the gradient of {name}, got none: stage 2 keeps it on {owner} only (this is "
                    f"{self._where}). opt.full_grad(param) gets it on every rank. A norm here would be that of a part "
                    "of the model: opt.clip_grad_norm_(max_norm) clips by that of the whole."
                )
            self._absent[key] = absent_gradient(table.params[index], was_consumed, reason)
        return self._absent[key]

    @property
    def _where(self) -> str:
        return self._workshop.where


def gather_gradient(sharded: ShardedStep, index: int) -> Tensor | None:
    """A parameter's averaged gradient from its owner, on every rank; None if it has none. A collective.

    Raises:
        RuntimeError: if it was used up.
    """
    param, comm = sharded.table.params[index], sharded.comm
    owner = sharded.binding.owners[index]
    grad = param.grad
    is_absent = isinstance(grad, AbsentGradient)
    statements = comm.all_gather_ints([int(grad is not None) + int(is_absent)])
    if statements[owner] == [0]:
        return None
    if isinstance(grad, AbsentGradient) and statements[owner] == [2]:
        grad.refuse()
    full = torch.empty_like(param) if is_absent or grad is None else grad.detach().clone()
    contiguous = full.contiguous()
    comm.send_to_all(contiguous, owner)
    return full.copy_(contiguous)
