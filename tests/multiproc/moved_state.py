"""State of parallel models that moves between numbers of ranks."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import checkpoint, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, batches, loss_of
from tests.multiproc.cut_models import FirstStage, LastStage, Whole, token_batch
from tests.multiproc.experts import Mixture, cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Setup

OPTIONS: dict[str, Any] = {"lr": 1e-2}
TOTAL = 4


class Spread:
    """A mixture whose experts are spread over some of the ranks, and its optimizer.

    Args:
        ranks: that train it.
        expert_ranks: of these that hold different experts.
        stage: of the optimizer.
        named: whether it says which expert is which.
    """

    def __init__(self, setup: Setup, expert_ranks: int, named: bool = True, **options: Any) -> None:
        spread, same = expert_groups(setup.rank, setup.world_size, expert_ranks)
        self.model = cut_mixture(setup.rank, expert_ranks, TOTAL, spread)
        self.ddp = wrapped_without_experts(self.model, gradient_as_bucket_view=True)
        self.first = setup.rank % expert_ranks * (TOTAL // expert_ranks)
        names = {f"experts.local.{i}": f"experts.local.{self.first + i}" for i in range(len(self.model.experts.local))}
        found = shard_optimizer(
            self.ddp,
            AdamW,
            dense_and_experts(self.ddp, same),
            global_names=names if named else None,
            **options,
            **OPTIONS,
        )
        assert isinstance(found, ParallelOptimizer)
        self.opt = found

    def train(self, rank: int, seed: int, steps: int = 2) -> None:
        for batch in batches(rank, steps, seed):
            self.opt.zero_grad()
            loss_of(self.ddp, *batch).backward()
            self.opt.step()

    def whole_name(self, name: str) -> str:
        if not name.startswith("experts.local."):
            return name
        number, _, rest = name.removeprefix("experts.local.").partition(".")
        return f"experts.local.{self.first + int(number)}.{rest}"

    def values(self) -> dict[str, Any]:
        """Parameters and their states by name in the whole model; empty states of what other ranks own."""
        state = self.opt.state_dict()["state"]
        params = [param for group in self.opt.param_groups for param in group["params"]]
        number = {id(param): index for index, param in enumerate(params)}
        found = {}
        for name, param in self.model.named_parameters():
            found[self.whole_name(name)] = (param.detach().clone(), copy.deepcopy(state[number[id(param)]]))
        dist.barrier()  # ranks ask each other
        return found


def everyones(values: dict[str, Any], folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """The values of all ranks, by name."""
    folder.mkdir(exist_ok=True)
    torch.save(values, folder / str(rank))
    dist.barrier()
    found: dict[str, Any] = {}
    for other in range(world_size):
        found |= torch.load(folder / str(other), weights_only=True)
    return found


def move_experts(setup: Setup, expert_ranks_before: int, expert_ranks_after: tuple[int, ...]) -> None:
    """Save at one number of expert-parallel ranks, and load at others, and into the whole model, and back."""
    saved = Spread(setup, expert_ranks_before, stage=2)
    saved.train(setup.rank, seed=0)
    extra = {"note": 3}
    checkpoint.save(setup.folder / "run", saved.ddp, saved.opt, extra=extra, rank_extra=setup.rank, background=True)
    checkpoint.wait()
    expected = everyones(saved.values(), setup.folder / "values", setup.rank, setup.world_size)
    assert len(expected) == len(list(Mixture(range(TOTAL), TOTAL).parameters()))
    for expert_ranks in expert_ranks_after:
        other = Spread(setup, expert_ranks, stage=2 if expert_ranks == expert_ranks_before else 1)
        for param in other.model.parameters():
            param.data.zero_()
        loaded = checkpoint.load(setup.folder / "run", other.ddp, other.opt)
        assert loaded.extra == extra
        assert loaded.rank_extra == setup.rank
        for name, (value, state) in other.values().items():
            assert_identical(expected[name][0], value, f"{name} at {expert_ranks}")
            assert_identical(expected[name][1], state, f"state of {name} at {expert_ranks}")
        other.train(setup.rank, seed=1)
        if expert_ranks == expert_ranks_before:
            saved.train(setup.rank, seed=1)
            for one, two in zip(saved.model.parameters(), other.model.parameters(), strict=True):
                assert_identical(one.detach(), two.detach(), "resumed")
    whole = Mixture(range(TOTAL), TOTAL)
    ddp = DistributedDataParallel(whole, find_unused_parameters=True)
    plain = AdamW(ddp.parameters(), **OPTIONS)
    checkpoint.load(setup.folder / "run", ddp, plain)
    for name, param in whole.named_parameters():
        assert_identical(expected[name][0], param.detach(), f"{name}, whole")
        assert_identical(expected[name][1], plain.state[param], f"state of {name}, whole")
    checkpoint.save(setup.folder / "whole", ddp, plain)
    back = Spread(setup, 2)
    checkpoint.load(setup.folder / "whole", back.ddp, back.opt)
    for name, (value, state) in back.values().items():
        assert_identical(expected[name], (value, state), f"{name}, back")


class Staged:
    """One of two stages, whose names are those in `Whole`."""

    def __init__(
        self, mesh: DeviceMesh, tied: Any, named: bool = True, empties_last: bool = False, ties: bool = True
    ) -> None:
        self.number = mesh.get_local_rank("pipe")
        tensor = mesh.get_group("tensor") if "tensor" in (mesh.mesh_dim_names or ()) else None
        self.model: Any = LastStage(tensor) if self.number else FirstStage(tensor)
        every = list(self.model.named_parameters())
        cut = {"block.up": 0, "block.down": 1} if tensor is not None else {}
        groups: list[dict[str, Any]] = [{"params": [one for one in every if one[0] not in (*cut, "embedding")]}]
        for name, dim in cut.items():
            groups.append({"params": [(name, self.model.get_parameter(name))], "sharded_over": {"tensor": dim}})
        if ties or not self.number:
            groups.append({"params": [("embedding", self.model.embedding)], "process_group": tied})
        if empties_last:  # the first stage has its first group's parameters in another; torch names all groups or none
            groups = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
            groups.append({"params": [] if self.number else groups[0]["params"], "lr": 0.02})
            groups[0]["params"] = groups[0]["params"] if self.number else []
        if self.number:  # the options of the first stage, in another order
            groups[0] = {"amsgrad": False, **groups[0]}
        here = "last" if self.number else "first"
        names = {"block": f"{here}.block", "embedding": f"{'first' if ties else here}.embedding"}
        self.opt = shard_optimizer(
            self.model,
            AdamW,
            groups,
            mesh=mesh,
            data_parallel_dim="data",
            pipeline_dim="pipe",
            global_names=names if named else None,
            **OPTIONS,
        )
        self.stage = PipelineStage(self.model, self.number, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        self.schedule = ScheduleGPipe(self.stage, n_microbatches=4, loss_fn=token_loss, scale_grads=False)
        self.data_rank = mesh.get_local_rank("data")

    def train(self, start: int) -> None:
        for step in (start, start + 1):
            tokens, targets = token_batch(self.data_rank, step)
            self.opt.zero_grad()
            if self.number:
                self.schedule.step(target=targets)
            else:
                self.schedule.step(tokens)
            self.opt.step()


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, targets) / 4


def move_stages(setup: Setup, mesh: DeviceMesh, tied: Any) -> None:
    """Save stages, whose blocks may be cut, load the whole model, save that, and load stages."""
    saved = Staged(mesh, tied)
    saved.train(0)
    checkpoint.save(setup.folder / "run", saved.model, saved.opt)
    whole = Whole()
    ddp = DistributedDataParallel(whole)
    plain = AdamW(ddp.parameters(), **OPTIONS)
    loaded = checkpoint.load(setup.folder / "run", ddp, plain)
    assert loaded.notes == ("'last.embedding' is loaded as 'first.embedding', to which it is tied",)
    same = whole.last if saved.number else whole.first
    states = saved.opt.state_dict()["state"]
    params = [param for group in saved.opt.param_groups for param in group["params"]]
    parts, part = (2, mesh.get_local_rank("tensor")) if "tensor" in (mesh.mesh_dim_names or ()) else (1, 0)
    for name, param in saved.model.named_parameters():
        one, number = same.get_parameter(name), next(index for index, found in enumerate(params) if found is param)
        dim = {"block.up": 0, "block.down": 1}.get(name)
        assert param.numel() == one.numel() // (1 if dim is None else parts)
        own = {"value": one.detach(), **plain.state[one]}
        if dim is not None:
            own = {
                key: value.chunk(parts, dim)[part].contiguous() if value.dim() else value for key, value in own.items()
            }
        assert_identical({"value": param.detach(), **states[number]}, own, name)
    dist.barrier()
    checkpoint.save(setup.folder / "whole", ddp, plain)
    back = Staged(mesh, tied)
    loaded = checkpoint.load(setup.folder / "whole", back.model, back.opt)
    assert loaded.notes == ("'last.embedding' is left out: it was tied to 'first.embedding', which is there",)
    saved.train(2)
    back.train(2)
    assert_identical(dict(saved.model.state_dict()), dict(back.model.state_dict()), "resumed")
