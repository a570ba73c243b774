"""Two replica groups of torchft, each of half of a job's ranks, and what a run of theirs leaves."""

import copy
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper

from ddp_zero import checkpoint
from ddp_zero.integrations.torchft import prepare
from tests.frameworks.job import assert_equal, assert_moved, values
from tests.multiproc.harness import Setup

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 8
REFUSED = 3, 5
"""Steps that group 1 does not commit, at its first try."""


class Net(nn.Module):
    """Experts, of which some groups use some: each by a number in the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: Tensor, used: tuple[int, ...]) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for expert in used:
            hidden = torch.tanh(self.experts[expert](hidden))
        out: Tensor = self.last(hidden)
        return out


@dataclass
class Groups:
    """The groups, and a lighthouse of their own."""

    setup: Setup
    is_async: bool
    init_sync: bool
    pair: Any = None
    stores: list[Any] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.setup.rank // self.size

    @property
    def size(self) -> int:
        return self.setup.world_size // 2

    def manager(self) -> Manager:
        first = self.number * self.size
        if self.pair is None:
            ranks = range(self.setup.world_size)
            self.pair = [dist.new_group(ranks[: self.size]), dist.new_group(ranks[self.size :])][self.number]
        told: list[Any] = [None, None, None]
        if self.setup.rank == 0:
            self.stores.append(LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100))
            told[0] = self.stores[-1].address()
        dist.broadcast_object_list(told, src=0)
        if self.setup.rank == first:
            self.stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        ports: list[Any] = [None] * self.setup.world_size
        dist.all_gather_object(ports, self.stores[-1].port if self.setup.rank == first else 0)
        limit = timedelta(seconds=30)
        return Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=1,
            use_async_quorum=self.is_async,
            init_sync=self.init_sync,
            rank=self.setup.rank - first,
            world_size=self.size,
            store_addr="localhost",
            store_port=ports[first],
            lighthouse_addr=told[0],
            replica_id=f"group_{self.number}",
            hostname=socket.gethostname(),
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            load_state_dict=None,
            state_dict=None,
        )


def average_within_and_over_groups(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of the plain side: DDP's average, then the manager's, of whole buckets on every rank."""
    pair, manager = state
    buffer = bucket.buffer().div_(dist.get_world_size(pair))
    dist.all_reduce(buffer, group=pair)
    manager.allreduce(buffer).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@dataclass(frozen=True)
class Recipe:
    """How a run trains; ``options`` are the sharded optimizer's."""

    stage: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    is_async: bool = True
    uses: Callable[[int, int], tuple[int, ...]] = lambda group, step: (0, 1, 2)
    finds_unused: bool = False
    optimizer: Any = AdamW
    clip_inside: float | None = None
    refuses: bool = True
    starts_alike: bool = True
    has_schedule: bool = True
    load: Path | None = None
    dtype: torch.dtype = torch.float32
    steps: int = STEPS


@dataclass
class Run:
    """What a run leaves."""

    model: dict[str, Tensor]
    state: dict[str, Any]
    norms: list[Any]
    committed: list[bool]
    sent: int
    opt: Any
    ddp: Any
    manager: Manager


def inputs_of(setup: Setup, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * setup.rank + part)
    return torch.randn(5, 6, generator=generator)


def trained(setup: Setup, recipe: Recipe) -> Run:
    groups = Groups(setup, recipe.is_async, init_sync=not recipe.starts_alike)
    manager = groups.manager()
    net = Net().to(recipe.dtype)
    if not recipe.starts_alike:
        with torch.no_grad():
            for param in net.parameters():
                param.add_(groups.number)
    ddp = DistributedDataParallel(
        net,
        process_group=groups.pair,
        gradient_as_bucket_view=recipe.stage == 2,
        find_unused_parameters=recipe.finds_unused,
        bucket_cap_mb=0.001,
    )
    opt: Any
    if recipe.stage is None:
        ddp.register_comm_hook((groups.pair, manager), average_within_and_over_groups)
        plain = recipe.optimizer(net.parameters(), **OPTIONS)
        opt = OptimizerWrapper(manager, plain)
        manager.register_state_dict_fn("model", net.load_state_dict, net.state_dict)
        manager.register_state_dict_fn("optimizer", plain.load_state_dict, plain.state_dict)
    else:
        options = {"max_grad_norm": recipe.clip_inside, **recipe.options}
        opt = prepare(manager, ddp, recipe.optimizer, stage=recipe.stage, **options, **OPTIONS)
    if recipe.load is not None:
        manager.load_state_dict(checkpoint.load(recipe.load, ddp, opt).extra["torchft"])
    schedule = StepLR(opt, step_size=3 if recipe.has_schedule else 1 << 30, gamma=0.5)
    manager.register_state_dict_fn("schedule", schedule.load_state_dict, schedule.state_dict)
    before, sent = values(net), _count_bytes(manager)
    norms, committed, refused = list[Any](), list[bool](), set[int]()
    while manager.current_step() < recipe.steps:
        step = manager.current_step()
        opt.zero_grad()
        for part in range(recipe.accumulate):
            with nullcontext() if part == recipe.accumulate - 1 else ddp.no_sync():
                inputs, uses = inputs_of(setup, step, part).to(recipe.dtype), recipe.uses(groups.number, step)
                loss = ddp(inputs, uses).square().mean()
                (opt.scale(loss) if "loss_scale" in recipe.options else loss).backward()
        if recipe.stage is not None:
            opt.average_gradients()
        clip_norm: Any = partial(nn.utils.clip_grad_norm_, net.parameters())
        clip_value: Any = partial(nn.utils.clip_grad_value_, net.parameters())
        if recipe.stage is not None:
            clip_norm, clip_value = opt.clip_grad_norm_, opt.clip_grad_value_
        if recipe.clip is not None or (recipe.clip_inside is not None and recipe.stage is None):
            norms.append(clip_norm(recipe.clip or recipe.clip_inside))
        if recipe.clip_value is not None:
            clip_value(recipe.clip_value)
        if recipe.refuses and setup.rank == groups.size and groups.number and step in REFUSED and step not in refused:
            refused.add(step)
            manager.report_error(RuntimeError("a test refuses this step"))
        was = values(net), manager.current_step(), _held(opt, recipe)
        opt.step()
        committed.append(manager.current_step() > was[1])
        if committed[-1]:
            schedule.step()
        if not committed[-1]:
            assert_equal(was[0], values(net), "a refused step has changed parameters")
            assert_equal(was[2], _held(opt, recipe), "a refused step has changed state")
        if recipe.stage is not None:
            assert opt.last_step.stepped is committed[-1]
            assert committed[-1] or all(param.grad is None for param in net.parameters())
        if recipe.clip_inside is not None and recipe.stage is not None and committed[-1]:
            norms.append(torch.tensor(opt.last_step.grad_norm))
    after = values(net)
    assert_moved(before, after)
    state = opt.state_dict()
    manager.shutdown(wait=False)
    dist.barrier()
    return Run(after, state, norms, committed, sent[0], opt, ddp, manager)


def _held(opt: Any, recipe: Recipe) -> dict[str, Any]:
    """A copy of this rank's state."""
    shown = opt.state_dict() if recipe.stage is None else opt.sharded_state_dict()
    return copy.deepcopy(dict(shown))


def _count_bytes(manager: Manager) -> list[int]:
    """Count the bytes that this rank gives to the manager to average."""
    allreduce, sent = manager.allreduce, [0]

    def count(tensor: Tensor) -> Any:
        sent[0] += tensor.nbytes
        return allreduce(tensor)

    manager.allreduce = count
    return sent


def equal_training(setup: Setup, recipe: Recipe, where: str) -> Run:
    theirs = trained(setup, replace(recipe, stage=None, options={}))
    ours = trained(setup, recipe)
    assert_equal(theirs.model, ours.model, f"{where}, parameters")
    assert_equal(theirs.state["state"], ours.state["state"], f"{where}, state")
    if recipe.clip_inside is None:
        assert_equal(theirs.norms, ours.norms, f"{where}, norms")
    assert theirs.committed == ours.committed, where
    lost = len(REFUSED) if setup.rank >= setup.world_size // 2 else 0
    assert ours.committed.count(False) == lost, (where, ours.committed)
    everyone: list[Any] = [None] * setup.world_size
    dist.all_gather_object(everyone, ours.model)
    for model in everyone:
        assert_equal(everyone[0], model, f"{where}, between groups")
    return ours
