"""Measurements: the loss on held-out text, and the memory of every rank."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero import ZeroRedundancyOptimizer
from gpt.corpus import EVAL_WINDOWS, Corpus
from gpt.world import World

STATUS = Path("/proc/self/status")  # of Linux
CLEAR_REFS = Path("/proc/self/clear_refs")  # 5 resets VmHWM, see proc(5)


@dataclass(frozen=True)
class Usage:
    """Memory of one rank at the end.

    Attributes:
        parameters: number of parameters that its optimizer steps.
        elements: number of their elements.
        state: bytes of optimizer state, masters included.
        gradients: bytes of gradients.
        peak: peak memory in bytes.
    """

    parameters: int
    elements: int
    state: int
    gradients: int
    peak: int


@torch.no_grad()
def evaluate(model: nn.Module, batch_size: int, corpus: Corpus, world: World) -> float:
    """Compute the mean loss on held-out text, each rank on its share. A collective."""
    total = torch.zeros((), device=world.device)
    for inputs, targets in corpus.held_out(batch_size, world):
        total += model(inputs, targets) * len(inputs)
    return world.gather(total / EVAL_WINDOWS).sum().item()


def measure(model: nn.Module, optimizer: Optimizer, gradients: int, world: World) -> list[Usage]:
    """Measure the memory of every rank. A collective."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer  # owns a part, or all
    params = [param for group in local.param_groups for param in group["params"]]
    state = [value for values in local.state.values() for value in values.values() if isinstance(value, Tensor)]
    masters = set(params).difference(model.parameters())
    mine = [
        len(params),
        sum(param.numel() for param in params),
        sum(value.numel() * value.element_size() for value in [*state, *masters]),
        gradients,
        peak_memory(world.device),
    ]
    return [Usage(*row) for row in world.gather(torch.tensor(mine)).tolist()]


def gradient_bytes(model: nn.Module) -> int:
    """Count the bytes that ``param.grad`` keeps alive, each storage once."""
    storages = [param.grad.untyped_storage() for param in model.parameters() if param.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def forget_peak_memory(device: torch.device) -> None:
    """Start measuring the peak anew, on a GPU and on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def memory_in_use(device: torch.device) -> int:
    """Bytes allocated on the GPU, or resident bytes of this process on Linux; else its peak so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident("VmRSS")


def peak_memory(device: torch.device) -> int:
    """The largest `memory_in_use` since `forget_peak_memory`; without a GPU or Linux, since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM")


def _resident(field: str) -> int:
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_parameters(model: nn.Module) -> list[Tensor]:
    """Copy the present parameters to the CPU."""
    return [param.detach().cpu().clone() for param in model.parameters()]
