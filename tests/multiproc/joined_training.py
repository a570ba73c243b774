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
from tests.multiproc.cases import batches
from tests.multiproc.cut_models import is_cut
from tests.multiproc.mesh_twins import MeshTwins
from tests.multiproc.parallel_models import CLIP, local_part


def joinables(model: Any, opt: Any = None) -> list[Any]:
    return [one for one in (model, opt) if isinstance(one, DistributedDataParallel | ParallelOptimizer)]


def _decay(optimizer: Optimizer) -> None:
    """Schedulers of ranks that have joined stop: they step with the options of ranks that still train."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def train_ours(twins: MeshTwins, steps: int, **join_options: Any) -> list[float]:
    """Train our copy under Join. Returns the norm of each step of this rank."""
    norms = []
    with Join(joinables(twins.model, twins.opt), **join_options):
        for batch in batches(twins.place, steps):
            twins.opt.zero_grad()
            _decay(twins.opt)
            twins.loss(twins.model, batch).backward()
            twins.opt.step()
            record = twins.opt.last_step
            assert record is not None
            assert record.stepped
            norms.append(float(record.grad_norm or 0.0))
    return norms


def _norm(twins: MeshTwins) -> float:
    """The norm of the whole model's averaged gradients."""
    grads = [
        (name, local_part(param.grad)) for name, param in twins.plain_model.named_parameters() if param.grad is not None
    ]
    cut = torch.stack([grad.pow(2).sum() for name, grad in grads if is_cut(name)]).sum()
    whole = torch.stack([grad.pow(2).sum() for name, grad in grads if not is_cut(name)]).sum()
    dist.all_reduce(cut, group=twins.mesh.get_group("tensor"))
    return float((cut + whole).sqrt())


def step_plain(twins: MeshTwins, norm: float) -> None:
    if norm:  # clipped by the norm that ours has found, for the same bits
        if twins.kind.startswith("cut"):
            assert _norm(twins) == pytest.approx(norm, rel=1e-5)
        factor = torch.clamp(CLIP / (torch.tensor(norm) + 1e-6), max=1.0)
        assert factor < 1
        for param in twins.plain_model.parameters():
            if param.grad is not None:
                local_part(param.grad).mul_(factor)
    _decay(twins.plain)
    twins.plain.step()


def train_plain_with_ddp(twins: MeshTwins, steps: int, norms: Sequence[float], **join_options: Any) -> None:
    with Join(joinables(twins.plain_model), **join_options):
        for batch, norm in zip(batches(twins.place, steps), norms, strict=True):
            twins.plain.zero_grad()
            twins.loss(twins.plain_model, batch).backward()
            step_plain(twins, norm)


def train_plain_by_hand(twins: MeshTwins, uneven: Sequence[int], norms: Sequence[float], counts_all: bool) -> None:
    """Every rank goes on to the end, with gradients of zeros once it has no inputs."""
    last = [list[float](norms)]
    dist.broadcast_object_list(last, src=beside_rank(twins, uneven.index(max(uneven))), group=twins.data)
    for step, (batch, norm) in enumerate(zip(batches(twins.place, max(uneven)), last[0], strict=True)):
        twins.plain.zero_grad()
        twins.loss(twins.plain_model, batch).backward()
        training = sum(step < steps for steps in uneven)
        for param in twins.plain_model.parameters():
            grad = local_part(param.grad)
            if step >= uneven[twins.place]:
                grad.zero_()
            grad.mul_(1.0 / (len(uneven) if counts_all else training))
            dist.all_reduce(grad, group=twins.data)
        step_plain(twins, norm)


def beside_rank(twins: MeshTwins, place: int) -> int:
    """The global rank at a place of this rank's data-parallel group."""
    return dist.get_global_rank(twins.data, place)


def go_on(twins: MeshTwins, uneven: Sequence[int], is_clipped: bool) -> None:
    """A step after Join; plain optimizers of ranks that joined early have missed steps, ours have not."""
    for batch in batches(twins.place, 1, 7):
        twins.zero_grad()
        twins.backward(batch)
        twins.opt.step()
        if is_clipped:
            twins.clip_plain(CLIP)
        twins.plain.step()
    if uneven[twins.place] == max(uneven):
        twins.assert_equal(f"one step after Join with {uneven} batches")


class FailingAdamW(torch.optim.AdamW):
    """Fails in the second step on the ranks at the first place of the data dimension."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        """Step, or fail."""
        self.taken += 1
        if self.taken == 2 and dist.get_rank() == 0:
            raise ArithmeticError("of rank 0")
        return super().step(closure)
