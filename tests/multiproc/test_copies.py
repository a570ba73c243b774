"""Copies of a DDP model whose hook steps: by `copy.deepcopy`, pickle, `torch.save` and `AveragedModel`.

A copy trains as plain DDP does, since plain DDP's copies do, and the original goes on as if nothing had been copied.
"""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from tests.multiproc.cases import batches, build_model, loss_of, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.late_sync import MODES, OPTIONS, assert_same_values, plain, train_step, wrapped

case = Cases()

Optimizer = ZeroRedundancyOptimizer


def _one_line(**options: Any) -> Callable[[DistributedDataParallel], Optimizer]:
    def build(ddp: DistributedDataParallel) -> Optimizer:
        own: dict[str, Any] = {"hook": sum_in_rank_order} if options.get("stage", 1) == 1 else {}
        opt: ZeroRedundancyOptimizer = shard_optimizer(ddp, AdamW, **own, **options, **OPTIONS)
        return opt

    return build


def _standalone(ddp: DistributedDataParallel) -> Optimizer:
    ddp.register_comm_hook(None, sum_in_rank_order)
    return ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **OPTIONS)


def _hook_of_torchs_signature(ddp: DistributedDataParallel) -> Optimizer:
    opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, **OPTIONS)
    ddp.register_comm_hook(None, hook_with_zero_step(sum_in_rank_order, ddp, opt))
    return opt


_HOOKS: dict[str, Callable[[DistributedDataParallel], Optimizer]] = {
    "standalone": _standalone,
    "torch's signature": _hook_of_torchs_signature,
    **{name: _one_line(**mode) for name, mode in MODES.items()},
    "stage 1, clipped": _one_line(max_grad_norm=1e9),
    "late": _one_line(sync="forward"),
    "stage 2, late": _one_line(stage=2, sync="forward"),
    "stage 2, clipped": _one_line(stage=2, max_grad_norm=1e9),
    "stage 2, elements": _one_line(stage=2, partition="elements"),
    "sums in fp32": _one_line(accumulate_in_fp32=True),
}


def _pickled(ddp: DistributedDataParallel) -> DistributedDataParallel:
    copied: DistributedDataParallel = pickle.loads(pickle.dumps(ddp))
    return copied


def _saved(ddp: DistributedDataParallel) -> DistributedDataParallel:
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    copied: DistributedDataParallel = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    return copied


def _averaged(ddp: DistributedDataParallel) -> DistributedDataParallel:
    copied = AveragedModel(ddp).module
    assert isinstance(copied, DistributedDataParallel)
    return copied


_WAYS = (copy.deepcopy, _pickled, _saved, _averaged)


class _Run:
    """A model under DDP with the plain optimizer and under ours, and copies with optimizers of their own."""

    def __init__(self, build: Callable[[DistributedDataParallel], Optimizer]) -> None:
        model = build_model()
        self.before = copy.deepcopy(model)
        self.expected, self.ddp = plain(model), wrapped(copy.deepcopy(model))
        self.reference, self.opt = AdamW(self.expected.parameters(), **OPTIONS), build(self.ddp)
        self.copies: list[tuple[DistributedDataParallel, DistributedDataParallel, tuple[AdamW, AdamW]]] = []

    def copy_by(self, way: Callable[[DistributedDataParallel], DistributedDataParallel], when: str) -> None:
        """Copy ours, beside the same parameters in a new plain DDP model."""
        copied, fresh = way(self.ddp), wrapped(copy.deepcopy(self.expected.module))
        assert_same_values(fresh, copied, f"{way.__name__} {when}")
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        optimizers = AdamW(fresh.parameters(), **OPTIONS), AdamW(copied.parameters(), **OPTIONS)
        self.copies.append((fresh, copied, optimizers))

    def train_copies(self, data: Any, when: str) -> None:
        for fresh, copied, optimizers in self.copies:
            before = copy.deepcopy(copied.module)
            fresh.require_backward_grad_sync = copied.require_backward_grad_sync = True  # copied within no_sync()
            for inputs, targets in (next(data), next(data)):
                for model, optimizer in zip((fresh, copied), optimizers, strict=True):
                    train_step(model, optimizer, inputs, targets)
            assert_same_values(fresh, copied, f"of a trained copy {when}")
            pairs = zip(before.parameters(), copied.parameters(), strict=True)
            assert all(not torch.equal(one, other) for one, other in pairs), "the copy has not moved"
        self.copies.clear()

    def iterate(
        self, data: Any, then: Callable[[], object] = lambda: None, within: Callable[[], object] | None = None
    ) -> None:
        """One iteration of both, calling ``then`` before the steps, and ``within`` after a pass under no_sync()."""
        inputs, targets = next(data)
        if within is not None:
            with self.expected.no_sync(), self.ddp.no_sync():
                for model in (self.expected, self.ddp):
                    loss_of(model, inputs, targets).backward()
                within()
        for model in (self.expected, self.ddp):
            loss_of(model, inputs, targets).backward()
        then()
        for optimizer in (self.reference, self.opt):
            optimizer.step()
            optimizer.zero_grad()


@case(
    2,
    3,
    few=[(name, _WAYS[1 + place // 2 % 3] if place % 2 else copy.deepcopy) for place, name in enumerate(_HOOKS)],
    every=[*product(_HOOKS, _WAYS)],
)
def _copies_train_as_plain_ddp_and_originals_go_on(
    setup: Setup, configurations: list[tuple[str, Callable[[DistributedDataParallel], DistributedDataParallel]]]
) -> None:
    for name, way in configurations:
        data = batches(setup.rank, 1000)
        run = _Run(_HOOKS[name])
        run.copy_by(way, f"{name}, before training")
        for _ in range(2):
            run.iterate(data)
        run.copy_by(way, f"{name}, after a step")
        if way is copy.deepcopy:  # what a step inside backward has stepped by then is not what plain DDP has
            run.iterate(data, then=partial(copy.deepcopy, run.ddp))
            run.iterate(data, within=partial(run.copy_by, way, f"{name}, in no_sync()"))
        run.iterate(data)
        run.train_copies(data, f"by {way.__name__}, {name}")
        run.iterate(data)
        assert_same_values(run.expected.module, run.ddp.module, f"of the original, {name}")
        pairs = zip(run.before.parameters(), run.ddp.module.parameters(), strict=True)
        assert all(not torch.equal(one, other) for one, other in pairs), "nothing moved"


@case(2)
def _a_copy_takes_an_optimizer_of_its_own(setup: Setup) -> None:
    for stage in (1, 2):
        data = batches(setup.rank, 1000)
        run = _Run(_one_line(stage=stage))
        run.iterate(data)
        copied, fresh = _saved(run.ddp), wrapped(copy.deepcopy(run.expected.module))
        opt, reference = shard_optimizer(copied, AdamW, stage=stage, **OPTIONS), AdamW(fresh.parameters(), **OPTIONS)
        for _ in range(3):
            inputs, targets = next(data)
            train_step(fresh, reference, inputs, targets)
            train_step(copied, opt, inputs, targets)
            run.iterate(data)
        assert_same_values(fresh, copied, f"of the copy, stage {stage}")
        assert_same_values(run.expected.module, run.ddp.module, f"of the original, stage {stage}")
        with pytest.raises(ValueError, match="ZERO-206"):
            shard_optimizer(run.ddp, AdamW, **OPTIONS)


test_copies = case.each()
