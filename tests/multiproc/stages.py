"""Stages of a pipeline beside the same stages with the plain optimizer."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import assert_identical, sum_in_rank_order
from tests.multiproc.cut_models import FirstStage, LastStage, MiddleStage, Whole, is_cut, token_batch
from tests.multiproc.parallel_models import CLIP, OPTIONS, norm_of, scale_gradients, token_loss
from tests.multiproc.parity import Parity

STEPS = 4
MICRO_BATCHES = 4
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}


STAGE_MODES: dict[str, dict[str, Any]] = {
    "stage 1 without DDP, clipped": {"max_grad_norm": CLIP, "wraps": False},
    "stage 1, overlapped": {},
    "stage 1, clipped": {"max_grad_norm": CLIP},
    "stage 1, sums in fp32": {"accumulate_in_fp32": True, "overlap": False},
    "stage 2, overlapped": {"stage": 2},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": CLIP},
    "stage 2, scaled": {"stage": 2, "loss_scale": 1024.0},
    "stage 2, standalone": {"stage": 2, "overlap": False},
    "stage 2, finds unused": {"stage": 2, "ddp": {"find_unused_parameters": True}},
}


class Stages:
    """One rank's stage, its schedule, and groups for its optimizer.

    Args:
        mesh: with dimensions ``data``, ``pipe`` and perhaps ``tensor``.
        schedule: of torch.
        wraps: whether the stage is a DDP model, which leaves the shared embedding alone.
        learns_shapes: whether the schedule runs the stage once to learn shapes, in which DDP prepares a reduction.
        **ddp_options: of the DDP model.
    """

    def __init__(self, mesh: DeviceMesh, schedule: Any, wraps: bool, learns_shapes: bool, **ddp_options: Any) -> None:
        self.mesh, self.number, self.last = mesh, mesh.get_local_rank("pipe"), mesh["pipe"].size() - 1
        self.data = mesh.get_group("data")
        tensor = mesh.get_group("tensor") if "tensor" in (mesh.mesh_dim_names or ()) else None
        kind: Any = {0: FirstStage, self.last: LastStage}.get(self.number, MiddleStage)
        self.part: Any = kind(tensor)
        self.model: nn.Module = self.part
        if wraps:
            ignored = ["embedding", ".embedding"]  # DDP looks for the latter, other parts of torch for the former
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.part, ignored)
            self.model = DistributedDataParallel(self.part, process_group=self.data, **DDP_OPTIONS, **ddp_options)
        shapes: dict[str, Any] = {} if learns_shapes else self.shapes()
        group, device = mesh.get_group("pipe"), torch.device("cpu")
        stage = PipelineStage(self.model, self.number, self.last + 1, device, group=group, **shapes)
        self.schedule = schedule(stage, n_microbatches=MICRO_BATCHES, loss_fn=self.loss, scale_grads=False)
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        self.cuts = tensor is not None

    def shapes(self) -> dict[str, Tensor]:
        """What the stage takes and returns for a micro-batch of two tokens."""
        between = torch.zeros(2, 8, requires_grad=True)
        if self.number == 0:
            return {"input_args": torch.zeros(2, dtype=torch.int64), "output_args": between}
        if self.number < self.last:
            return {"input_args": between, "output_args": torch.zeros(2, 8, requires_grad=True)}
        return {"input_args": between, "output_args": torch.zeros(2, 11, requires_grad=True)}

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.scale(token_loss(scores, targets))

    def groups(self, tied: dist.ProcessGroup | None) -> list[dict[str, Any]]:
        named = list(self.part.named_parameters())
        shared = [one for one in named if one[0] == "embedding"]
        return [
            {"params": [one for one in named if one[0] != "embedding" and not is_cut(one[0])]},
            {"params": [one for one in named if is_cut(one[0])], **({"sharded_over": "tensor"} if self.cuts else {})},
            *([{"params": shared, "process_group": tied}] if shared else []),
        ]

    def run(self, step: int) -> None:
        """All micro-batches of a batch, forward and backward."""
        tokens, targets = token_batch(self.mesh.get_local_rank("data"), step)
        if self.number == 0:
            self.schedule.step(tokens)
        elif self.number < self.last:
            self.schedule.step()
        else:
            self.schedule.step(target=targets)

    def evaluate(self, step: int) -> None:
        """Forward alone; the next step learns shapes again."""
        tokens, targets = token_batch(self.mesh.get_local_rank("data"), step)
        with torch.no_grad():
            if self.number == 0:
                self.schedule.eval(tokens)
            elif self.number < self.last:
                self.schedule.eval()
            else:
                self.schedule.eval(target=targets)

    def reduce_by_hand(self, tied: dist.ProcessGroup | None) -> None:
        """As a plain loop does for what DDP does not reduce."""
        by_ddp = isinstance(self.model, DistributedDataParallel)
        for name, param in self.part.named_parameters():
            if name == "embedding" or not by_ddp:
                assert param.grad is not None
                param.grad.mul_(1.0 / dist.get_world_size(self.data))
                dist.all_reduce(param.grad, group=tied if name == "embedding" else self.data)

    def norm(self) -> Tensor:
        """The norm of all stages' averaged gradients; the shared embedding counts once."""
        counted = [param.grad for name, param in self.part.named_parameters() if name != "embedding" or not self.number]
        total = torch.stack([grad.double().square().sum() for grad in counted if grad is not None]).sum()
        dist.all_reduce(total, group=self.mesh.get_group("pipe"))
        return total.sqrt().float()


def train_beside_plain(
    mesh: DeviceMesh, tied: dist.ProcessGroup | None, schedule: Any, mode: Mapping[str, Any], runs: int = 1
) -> Parity:
    """Train, and compare after every step.

    Args:
        mesh: see `Stages`.
        tied: the ranks that share the embedding; None in stages without it.
        schedule: of torch.
        mode: options, ``wraps``, and ``ddp`` for those of the DDP model.
        runs: how many batches add up to a step.
    """
    options = {key: value for key, value in mode.items() if key not in ("wraps", "ddp")}
    wraps, partitions, of_ddp = mode.get("wraps", True), mode.get("stage") == 2, mode.get("ddp", {})
    sums_once = partitions or "accumulate_in_fp32" in mode  # DDP sums the first micro-batch twice if shapes are learnt
    all_first = schedule is ScheduleGPipe or mesh["pipe"].size() >= MICRO_BATCHES  # forward passes before backward
    fails = wraps and all_first  # DDP of torch 2.13.0 does then, without this library
    ours = Stages(mesh, schedule, wraps, learns_shapes=sums_once or not fails, **of_ddp)
    plain = Stages(mesh, schedule, wraps, learns_shapes=not (sums_once or fails), **of_ddp)
    if partitions:
        plain.model.register_comm_hook(plain.data, sum_in_rank_order)  # type: ignore[operator]
    expected: Optimizer = AdamW(plain.part.parameters(), **OPTIONS)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    opt = ParallelOptimizer(ours.model, AdamW, ours.groups(tied), **arguments, **options, **OPTIONS)
    assert [member.stage for member in opt.members] == [2 if partitions else 1, *([] if tied is None else [1])]
    if "loss_scale" in mode:
        ours.scale = opt.scale
    before, parity = [param.detach().clone() for param in ours.part.parameters()], Parity()
    for step in range(STEPS):
        opt.zero_grad()
        expected.zero_grad()
        for run in range(runs):
            plain.run(step * runs + run)
            if run < runs - 1:
                with opt.accumulate():
                    ours.run(step * runs + run)
            else:
                ours.run(step * runs + run)
        plain.reduce_by_hand(tied)
        opt.step()
        assert opt.last_step is not None
        assert opt.last_step.stepped
        if "max_grad_norm" in mode:
            assert opt.last_step.grad_norm is not None
            assert (opt.last_step.clip_coefficient or 1.0) < 1.0
            if not ours.cuts:
                parity.note_norm(opt.last_step.grad_norm, plain.norm())
            scale_gradients(plain.part, opt.last_step.grad_norm)
        expected.step()
        for (name, mine), other in zip(ours.part.named_parameters(), plain.part.parameters(), strict=True):
            parity.note_plain([other], [mine])
            if runs == 1:
                assert_identical(other.detach(), mine.detach(), f"{name} after step {step}: {mode}, {schedule}")
        if step == 1:
            ours.evaluate(step)
            plain.evaluate(step)
    for (name, param), old in zip(ours.part.named_parameters(), before, strict=True):
        assert not torch.equal(param, old), f"{name} has not moved: {mode}"
    return parity


def check_counting(mesh: DeviceMesh, tied: dist.ProcessGroup) -> None:
    """The norm is that of one device, and shows every parameter that is left out or counted twice, wherever it is."""
    stages = Stages(mesh, Schedule1F1B, wraps=True, learns_shapes=True)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    opt = ParallelOptimizer(stages.model, AdamW, stages.groups(tied), stage=2, overlap=False, **arguments, **OPTIONS)
    stages.run(0)
    norm = float(opt.clip_grad_norm_(1e9))
    whole = Whole()
    every = [token_batch(rank, 0) for rank in range(mesh["data"].size())]
    inputs, wanted = (torch.cat(parts) for parts in zip(*every, strict=True))
    nn.functional.cross_entropy(whole(inputs), wanted).backward()
    Parity().note_norm(norm, norm_of(whole))
    shape = [mesh.size(dim) for dim in range(1, mesh.ndim)]  # all but the data dimension
    mine = tuple((mesh.get_coordinate() or [])[1:])
    for number, member in enumerate(opt.members):
        num_counted = internals.num_counted_in_norms(member)
        for place in product(*map(range, shape)):
            for left_out in range(6):  # no stage has more
                # a shared parameter counts in the first stage
                changes = mine == place and left_out < num_counted and (number == 0 or stages.number == 0)
                anywhere = torch.tensor([float(changes)])
                dist.all_reduce(anywhere)
                with internals.miscounted_in_norms(member, [left_out] if changes else []):
                    found = float(opt.clip_grad_norm_(1e9))
                assert (abs(found / norm - 1) > 2e-6) == bool(anywhere), f"{place}, parameter {left_out} of {number}"
    level = internals.norm_levels(opt)[0]
    assert level.counted is not None
    for number in range(len(opt.members)):
        for counts in (True, False):
            rows = [[counts] * len(row) if at == number else list(row) for at, row in enumerate(level.counted)]
            with internals.first_norm_level(opt, rows):
                found = float(opt.clip_grad_norm_(1e9))
            assert abs(found / norm - 1) > 2e-6, f"member {number}, all count: {counts}"
    assert float(opt.clip_grad_norm_(1e9)) == norm
