"""`state_dict()` on one rank of the simulated accelerator while the others train on: the plain optimizer's state.

A rank that has gone on has its streams behind collectives that the asking rank has yet to join, and step counters on
the host that are ahead of its device.
"""

import copy
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests.accelerator import simulation
from tests.accelerator.modes import small_model
from tests.multiproc.cases import batches, loss_of
from tests.multiproc.harness import Cases, Setup

pytestmark = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))

STEPS = 4
SIZES = (8, 48, 48, 32, 64, 3)
BACKEND = "cpu:gloo,sim:simccl"


class NewTensors(Optimizer):
    """Momentum in a new tensor and a number, in each step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["calls"] = state.get("calls", 0) + 1
                    before = state.get("sum")
                    state["sum"] = param.grad.clone() if before is None else 0.9 * before + param.grad
                    param.add_(state["sum"], alpha=-group["lr"])


@dataclass(frozen=True)
class Asked:
    """A mode in which ranks ask.

    Attributes:
        options: of `shard_optimizer`.
        inner: the class of the optimizer, whose counters are on the host.
        dtype: of the parameters.
    """

    options: dict[str, Any] = field(default_factory=dict)
    inner: Any = AdamW
    dtype: torch.dtype = torch.float32


STAGE_2: dict[str, Any] = {"stage": 2}
MODES = {
    "stage 1, after backward": Asked({"overlap": False}),
    "stage 1, new tensors": Asked(inner=NewTensors),
    "stage 2": Asked(STAGE_2),
    "stage 2, masters, late sync": Asked({**STAGE_2, "master_weights": True, "sync": "forward"}, dtype=torch.bfloat16),
}


def _optimizer(mode: Asked, ddp: DistributedDataParallel) -> ZeroRedundancyOptimizer:
    options = {"lr": 0.01, "partition": "parameters", **mode.options}
    made: ZeroRedundancyOptimizer = shard_optimizer(ddp, mode.inner, **options)
    return made


def _train(
    ddp: DistributedDataParallel, opt: Any, setup: Setup, device: torch.device, ask: Callable[[int], None]
) -> None:
    """A loop with a call of ``ask`` after each step and in the middle of each forward pass, with the steps taken."""
    taken = 0
    dtype = next(ddp.parameters()).dtype
    ddp.module[4].register_forward_hook(lambda *_: ask(taken))
    for inputs, targets in batches(setup.rank, STEPS):
        opt.zero_grad()
        loss_of(lambda x: ddp(x.to(dtype)).float(), inputs.to(device), targets.to(device)).backward()  # type: ignore[arg-type]
        opt.step()
        taken += 1
        ask(taken)


class Plain:
    """DDP with the plain optimizer, over masters if the mode has them; its state after each step, on the host."""

    def __init__(self, mode: Asked, ddp: DistributedDataParallel) -> None:
        self._params = list(ddp.parameters())
        has_masters = "master_weights" in mode.options
        self._masters = [nn.Parameter(param.detach().float()) if has_masters else param for param in self._params]
        self._opt = mode.inner(self._masters, lr=0.01)
        self._has_masters = has_masters

    def zero_grad(self) -> None:
        self._opt.zero_grad()
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self._opt.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)

    def state(self) -> dict[int, dict[str, Any]]:
        state = copy.deepcopy(self._opt.state_dict()["state"])
        for index, master in enumerate(self._masters if self._has_masters and state else ()):
            state[index]["master_weight"] = master.detach().clone()
        return on_host(state)


def on_host(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        index: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in held.items()}
        for index, held in state.items()
    }


def _ranks_ask(setup: Setup, mode: Asked, is_late: bool) -> None:
    warnings.filterwarnings("ignore", "Time stats are currently only collected")
    warnings.filterwarnings("ignore", "No backend of type 0 found")
    os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
    extension = simulation.load(4, is_late)
    extension.set_device(setup.rank)
    device = torch.device("sim", setup.rank)
    group = dist.new_group(list(range(setup.world_size)), backend=BACKEND)
    module = small_model(SIZES, mode.dtype).to(device)

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(
            copy.deepcopy(module),
            [device.index],
            process_group=group,
            bucket_cap_mb=0.008,
            gradient_as_bucket_view=True,
        )

    ddp = wrapped()
    plain = Plain(mode, ddp)
    expected: dict[int, dict[int, dict[str, Any]]] = {}

    def note(taken: int) -> None:
        expected[taken] = plain.state()

    _train(ddp, plain, setup, device, note)
    extension.synchronize(-1)
    extension.clear_reports()

    ddp = wrapped()
    opt = _optimizer(mode, ddp)
    moments = 0

    def ask(taken: int) -> None:
        nonlocal moments
        moments += 1
        if setup.rank != moments // 2 % setup.world_size:
            return
        time.sleep(0.1)  # the others have gone on as far as they can
        what = f"state after {taken} steps, moment {moments}"
        found = on_host(opt.state_dict()["state"])
        if taken:
            assert found.keys() == expected[taken].keys(), what
        for index, held in found.items():
            for key, value in held.items() if taken else ():
                wanted = expected[taken][index][key]
                is_equal = torch.equal(value, wanted) if isinstance(value, Tensor) else value == wanted
                assert is_equal, f"{what}: {key} of {index} is {value}, not {wanted}"

    _train(ddp, opt, setup, device, ask)
    if "sync" in mode.options:
        opt.finish_sync()
    extension.synchronize(-1)
    assert not extension.races(), "\n".join(extension.races()[:5])
    assert not extension.faults(), "\n".join(extension.faults()[:5])
    dist.barrier()


_WAYS = [(2, False), (2, True), (3, False)]
_MIDDLE = {("stage 1, new tensors", 2, False), ("stage 2", 2, True)}


def _case(name: str, world_size: int, is_late: bool) -> Any:
    marks = [pytest.mark.middle] if (name, world_size, is_late) in _MIDDLE else []
    return pytest.param(MODES[name], world_size, is_late, id=f"{name}, {world_size}, {is_late}", marks=marks)


_CASES = [_case(name, *way) for way in _WAYS for name in MODES]


@pytest.mark.parametrize(("mode", "world_size", "is_late"), _CASES)
def test_ranks_that_go_on_answer_one_that_asks(mode: Asked, world_size: int, is_late: bool) -> None:
    simulation.compiled()
    Cases.pool_of(world_size, simulation.NAME).run(_ranks_ask, mode, is_late, timeout=120.0, group_timeout=20.0)
