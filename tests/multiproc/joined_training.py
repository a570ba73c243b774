"""Training beside the plain optimizer with ranks that have joined."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.beside_parallel import MeshTwins
from tests.multiproc.cases import batches
from tests.multiproc.cut_models import is_cut
from tests.multiproc.parallel_models import CLIP, local


def joinables(model: Any, opt: Any = None) -> list[Any]:
    return [one for one in (model, opt) if isinstance(one, DistributedDataParallel | ParallelOptimizer)]


def _decay(optimizer: Optimizer) -> None:
    """Schedulers of ranks that have joined stop: they step with the options of ranks that still train."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def train_ours(beside: MeshTwins, steps: int, **join_options: Any) -> list[float]:
    """Train our copy under Join. Returns the norm of each step of this rank."""
    norms = []
    with Join(joinables(beside.model, beside.opt), **join_options):
        for batch in batches(beside.place, steps):
            beside.opt.zero_grad()
            _decay(beside.opt)
            beside.loss(beside.model, batch).backward()
            beside.opt.step()
            record = beside.opt.last_step
            assert record is not None
            assert record.stepped
            norms.append(float(record.grad_norm or 0.0))
    return norms


def _norm(beside: MeshTwins) -> float:
    """The norm of the whole model's averaged gradients."""
    grads = [
        (name, local(param.grad)) for name, param in beside.plain_model.named_parameters() if param.grad is not None
    ]
    cut = torch.stack([grad.pow(2).sum() for name, grad in grads if is_cut(name)]).sum()
    whole = torch.stack([grad.pow(2).sum() for name, grad in grads if not is_cut(name)]).sum()
    dist.all_reduce(cut, group=beside.mesh.get_group("tensor"))
    return float((cut + whole).sqrt())


def step_plain(beside: MeshTwins, norm: float) -> None:
    if norm:  # clipped by the norm that ours has found, for the same bits
        if beside.kind.startswith("cut"):
            assert _norm(beside) == pytest.approx(norm, rel=1e-5)
        factor = torch.clamp(CLIP / (torch.tensor(norm) + 1e-6), max=1.0)
        assert factor < 1
        for param in beside.plain_model.parameters():
            if param.grad is not None:
                local(param.grad).mul_(factor)
    _decay(beside.plain)
    beside.plain.step()


def train_plain_with_ddp(beside: MeshTwins, steps: int, norms: Sequence[float], **join_options: Any) -> None:
    with Join(joinables(beside.plain_model), **join_options):
        for batch, norm in zip(batches(beside.place, steps), norms, strict=True):
            beside.plain.zero_grad()
            beside.loss(beside.plain_model, batch).backward()
            step_plain(beside, norm)


def train_plain_by_hand(beside: MeshTwins, uneven: Sequence[int], norms: Sequence[float], counts_all: bool) -> None:
    """Every rank goes on to the end, with gradients of zeros once it has no inputs."""
    last = [list[float](norms)]
    dist.broadcast_object_list(last, src=beside_rank(beside, uneven.index(max(uneven))), group=beside.data)
    for step, (batch, norm) in enumerate(zip(batches(beside.place, max(uneven)), last[0], strict=True)):
        beside.plain.zero_grad()
        beside.loss(beside.plain_model, batch).backward()
        training = sum(step < steps for steps in uneven)
        for param in beside.plain_model.parameters():
            grad = local(param.grad)
            if step >= uneven[beside.place]:
                grad.zero_()
            grad.mul_(1.0 / (len(uneven) if counts_all else training))
            dist.all_reduce(grad, group=beside.data)
        step_plain(beside, norm)


def beside_rank(beside: MeshTwins, place: int) -> int:
    """The global rank at a place of this rank's data-parallel group."""
    return dist.get_global_rank(beside.data, place)


def go_on(beside: MeshTwins, uneven: Sequence[int], is_clipped: bool) -> None:
    """A step after Join; plain optimizers of ranks that joined early have missed steps, ours have not."""
    for batch in batches(beside.place, 1, 7):
        beside.zero_grad()
        beside.backward(batch)
        beside.opt.step()
        if is_clipped:
            beside.clip_plain(CLIP)
        beside.plain.step()
    if uneven[beside.place] == max(uneven):
        beside.assert_equal(f"one step after Join with {uneven} batches")


class FailingAdamW(torch.optim.AdamW):
    """Fails in the second step on the ranks at the first place of the data dimension."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        """Step, or fail."""
        self.taken += 1
        if self.taken == 2 and dist.get_rank() == 0:
            raise ArithmeticError("of rank 0")
        return super().step(closure)
