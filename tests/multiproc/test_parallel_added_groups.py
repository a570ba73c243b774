"""Groups added to a `ParallelOptimizer` after some steps, beside the plain optimizer to which the same were added."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from ddp_zero import DynamicLossScale, checkpoint
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.beside_parallel import DDP_OPTIONS, mesh_of_4
from tests.multiproc.cases import assert_identical, batches, loss_of, sum_in_rank_order
from tests.multiproc.cut_models import CutBlock
from tests.multiproc.experts import cut_mixture, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.test_parallel_meshes import OPTIONS, local, parallelized, squared
from tests.multiproc.test_parallel_stages import MICRO_BATCHES, Stages

CLIP = 0.05
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 2},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
    {"overlap": False},
    {"loss_scale": DynamicLossScale(1024.0, growth_interval=2)},
    {"partition": "elements"},
)

case = Cases(timeout=300, group_timeout=40)


class Pair:
    """A model for ours and one for the plain optimizer; both begin with some of the groups, and get the rest later.

    Args:
        build: makes this rank's part of the model.
        wrap: makes it a DDP model or leaves it as it is.
        groups: its groups, in order; those in ``late`` are added. Options that only ours has are in `OURS`.
        late: positions of the added groups.
        loss: of a model and a batch.
        reduce: averages gradients of the plain model as DDP would.
        norms: the square of the gradients' norm over the whole model, from this rank's parameters.
        freezes: ``"first"``, before the model is wrapped, ``"later"``, or ``""``: late parameters train, unused.
        **options: of ours.
    """

    OURS = ("process_group", "sharded_over", "shard_group")

    def __init__(
        self,
        build: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], nn.Module],
        groups: Callable[[nn.Module], list[dict[str, Any]]],
        late: Sequence[int],
        loss: Callable[[nn.Module, Any], Tensor],
        reduce: Callable[[nn.Module], None],
        norms: Callable[[nn.Module], Tensor],
        freezes: str = "first",
        optimizer_class: Any = AdamW,
        **options: Any,
    ) -> None:
        self.loss, self.reduce, self.norms, self.optimizer_class = loss, reduce, norms, optimizer_class
        self._late = late
        models = []
        for _ in range(2):
            model = build()
            self._freeze(groups(model), freezes == "first")
            models.append(wrap(model))
            self._freeze(groups(models[-1]), freezes == "later")
        self.model, self.expected = models
        if options.get("stage") == 2 and isinstance(self.expected, DistributedDataParallel):
            self.expected.register_comm_hook(self.expected.process_group, sum_in_rank_order)
        self.groups, theirs = groups(self.model), groups(self.expected)
        self.their_groups = [{key: group[key] for key in group if key not in self.OURS} for group in theirs]
        early = [place for place in range(len(self.groups)) if place not in late]
        self.plain = optimizer_class([dict(self.their_groups[place]) for place in early], **OPTIONS)
        self.clip = options.get("max_grad_norm")
        mine = [dict(self.groups[place]) for place in early]
        self.opt = ParallelOptimizer(self.model, optimizer_class, mine, **options, **OPTIONS)
        self.step_number = 0
        self.before = [local(param).detach().clone() for param in self.model.parameters()]

    def _freeze(self, groups: list[dict[str, Any]], freezes: bool) -> None:
        for place in self._late if freezes else ():
            for _, param in groups[place]["params"]:
                param.requires_grad_(False)

    def add(self) -> None:
        """Thaw the late parameters of both models, and add their groups."""
        for place in self._late:
            for group in (self.groups[place], self.their_groups[place]):
                for _, param in group["params"]:
                    param.requires_grad_(True)
            self.plain.add_param_group(dict(self.their_groups[place]))
            self.opt.add_param_group(dict(self.groups[place]))

    def backward(self, batch: Any) -> None:
        scale = self.opt.loss_scale or 1.0
        self.plain.zero_grad()
        (self.loss(self.expected, batch) * scale).backward()
        self.reduce(self.expected)
        for param in self.expected.parameters():
            if param.grad is not None:
                param.grad.mul_(1.0 / scale)
        self.opt.zero_grad()
        loss = self.loss(self.model, batch)
        (loss if self.opt.loss_scale is None else self.opt.scale(loss)).backward()

    def train(self, feed: Any, steps: int) -> None:
        for batch in [next(feed) for _ in range(steps)]:
            self.backward(batch)
            self.opt.step()
            record = self.opt.last_step
            assert record is not None
            assert record.stepped
            if self.clip is not None:
                assert record.grad_norm is not None
                expected = self.norms(self.expected).sqrt()
                torch.testing.assert_close(
                    torch.tensor(record.grad_norm), expected, rtol=1e-5, atol=0, check_dtype=False
                )
                factor = torch.clamp(self.clip / (torch.tensor(record.grad_norm) + 1e-6), max=1.0)
                assert factor < 1
                for param in self.stepped():
                    if param.grad is not None:
                        local(param.grad).mul_(factor)
            self.plain.step()
            self.step_number += 1
            self.compare()

    def stepped(self) -> list[Tensor]:
        return [param for group in self.plain.param_groups for param in group["params"]]

    def compare(self) -> None:
        for (name, mine), other in zip(self.model.named_parameters(), self.expected.parameters(), strict=True):
            assert_identical(local(other).detach(), local(mine).detach(), f"{name} after step {self.step_number}")

    def assert_moved(self) -> None:
        for (name, param), old in zip(self.model.named_parameters(), self.before, strict=True):
            assert not torch.equal(local(param), old), f"{name} has not moved"


def squares(params: Sequence[Tensor]) -> Tensor:
    grads = [local(param.grad).double() for param in params if param.grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *(grad.square().sum() for grad in grads)]).sum()


def all_reduced(value: Tensor, group: Any = None) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


def average(params: Sequence[Tensor], group: Any) -> None:
    """Over all four ranks, as one tensor: its place there decides in which order ranks are added up."""
    has = all_reduced(torch.tensor([float(param.grad is not None) for param in params]), group)
    used = [param for param, ranks in zip(params, has.tolist(), strict=True) if ranks]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in used]
    if grads:
        flat = all_reduced(torch.cat([grad.reshape(-1) for grad in grads]).mul_(0.25), group)
        for param, part in zip(used, flat.split([grad.numel() for grad in grads]), strict=True):
            param.grad = part.view(param.shape)


def run(pair: Pair, place: int) -> None:
    feed = batches(place, 12)
    pair.train(feed, 3)
    pair.add()
    pair.train(feed, 4)
    pair.assert_moved()


# Experts


def experts_pair(late: str, freezes: str, mode: dict[str, Any], **ddp: Any) -> Pair:
    rank = dist.get_rank()
    spread, same = expert_groups(rank, 4, 2)
    is_late = {"experts": (2, 3), "dense": (1,), "both": (1, 2, 3)}[late]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        own: list[list[Any]] = [[], [], [], []]
        for name, param in named:
            place = 2 + ("local.1" in name) if "experts." in name else int("enter" in name)
            own[place].append((name, param))
        return [
            {"params": own[0]},
            {"params": own[1], "lr": 3e-2},
            {"params": own[2], "process_group": same},
            {"params": own[3], "process_group": same, "weight_decay": 0.5},
        ]

    def reduce(model: nn.Module) -> None:
        own: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, param in model.named_parameters():
            is_averaged = "experts." in name or ("enter" in name and freezes == "first" and late != "experts")
            if param.requires_grad and is_averaged:
                own["experts." in name].append(param)
        for params, group in zip(own, (None, same), strict=True):
            average(params, group)

    def norms(model: nn.Module) -> Tensor:
        stepped = set(map(id, pair.stepped()))
        own = [(name, param) for name, param in model.named_parameters() if id(param) in stepped]
        experts = [param for name, param in own if "experts." in name]
        dense = [param for name, param in own if "experts." not in name]
        return all_reduced(squares(experts) if rank < 2 else torch.zeros((), dtype=torch.float64)) + squares(dense)

    pair = Pair(
        lambda: cut_mixture(rank, 2, 4, spread),
        lambda model: wrapped_without_experts(model, **DDP_OPTIONS, **ddp),
        groups,
        is_late,
        lambda model, batch: loss_of(model, *batch),
        reduce,
        norms,
        freezes,
        **mode,
    )
    return pair


@case(4)
def _experts_and_dense_layers_are_thawed_later(setup: Setup) -> None:
    for mode in MODES:
        for late in ("experts", "dense", "both"):
            run(experts_pair(late, "first", mode), setup.rank)
        if mode.get("stage") == 2:
            with pytest.raises(ValueError, match=r"every parameter that DDP reduces.*'enter\.weight' is not.*ZERO-212"):
                experts_pair("dense", "later", mode, find_unused_parameters=True)
        else:
            run(experts_pair("dense", "later", mode, find_unused_parameters=True), setup.rank)


@case.each
def test_added_groups(run: Callable[[], None]) -> None:
    run()
