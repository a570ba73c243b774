"""Counts calls and bytecodes for a bucket: ``python -m tests.walk.calls [MODE ...]``, on two Gloo ranks.

``--sim N`` counts on the simulated accelerator, on N ranks; ``--functions`` lists what is called. Each of 24 layers is
a bucket. *Further* is a bucket in the middle of backward, *iteration* a whole one divided by its buckets. Calls are
those of Python and C functions; bytecodes are the instructions that the interpreter runs, which the host's time per
bucket follows where calls do not (`benchmarks.host`). On an accelerator those of backward's own thread are missing.
"""

import argparse
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer
from ddp_zero.core.comm.communicator import Communicator
from tests.accelerator import simulation
from tests.multiproc.harness import Setup, run_ranks
from tests.walk.steps import PACKAGE

LAYERS, WIDTH = 24, 64
FIRST, LAST = 18, 6  # the layers between whose gradients calls are counted
FIRST_STEPS = 17  # the first eight compare options between ranks, and so does every power of two
PLAIN, FSDP = "DDP", "FSDP2"
MODES: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    FSDP: None,
    "cut": {"stage": 2, "partition": "elements"},
    "whole": {"stage": 2},
    "clipped": {"stage": 2, "partition": "elements", "max_grad_norm": 1.0},
    "masters": {"stage": 2, "partition": "elements", "master_weights": True},
    "late sync": {"stage": 2, "partition": "elements", "sync": "forward"},
    "stage 1": {"stage": 1},
}


class Bytecodes:
    """Counts the instructions that this thread's interpreter runs within it, by function."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def __enter__(self) -> None:
        sys.settrace(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.counted[f"{_place(frame)} {frame.f_code.co_name}"] += 1
        return self._on_event


def _place(frame: FrameType) -> str:
    path, folder = frame.f_code.co_filename, str(PACKAGE)
    return path[len(folder) + 1 :] if path.startswith(folder) else "/".join(path.split("/")[-2:])


class Calls:
    """Counts calls, by kind and name, while it is on."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.is_on = False

    def on_event(self, frame: FrameType, event: str, function: Any) -> None:
        """A function for `sys.setprofile`."""
        if self.is_on and event == "call":
            self.counted[f"{_place(frame)} {frame.f_code.co_name}"] += 1
        elif self.is_on and event == "c_call":
            self.counted[f"C {getattr(function, '__qualname__', function)}"] += 1

    def switch(self, is_on: bool) -> Callable[[Tensor], None]:
        """A tensor hook that turns this on or off, on the thread of backward."""

        def hook(_: Tensor) -> None:
            self.is_on = is_on
            if is_on:
                sys.setprofile(self.on_event)

        return hook


class Counted(NamedTuple):
    """Calls of the buckets in the middle of a backward pass, and of an iteration; bytecodes of an iteration."""

    further: Counter[str]
    iteration: Counter[str]
    bytecodes: Counter[str]

    def per_bucket(self) -> tuple[float, float, float]:
        return (self.further.total() / (FIRST - LAST), self.iteration.total() / LAYERS, self.bytecodes.total() / LAYERS)


def trained(mode: str, group: dist.ProcessGroup | None, device: torch.device) -> tuple[nn.Module, Any]:
    """A model in which each layer is a bucket, and its optimizer."""
    torch.manual_seed(0)
    options = MODES[mode]
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    dtype = torch.bfloat16 if mode == "masters" else torch.float32
    model = nn.Sequential(*layers).to(device, dtype)
    if mode == FSDP:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        return model, AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(
        model, device_ids=ids, process_group=group, bucket_cap_mb=0.007, gradient_as_bucket_view=True
    )
    if options is None:
        return ddp, AdamW(ddp.parameters(), lr=1e-4, fused=True)
    return ddp, shard_optimizer(ddp, AdamW, lr=1e-4, fused=True, **options)


def calls_of(mode: str, group: dist.ProcessGroup | None, device: torch.device) -> Counted:
    """What one mode makes."""
    model, opt = trained(mode, group, device)
    params, further, iteration, bytecodes = list(model.parameters()), Calls(), Calls(), Bytecodes()
    x = torch.randn(2, WIDTH, dtype=params[0].dtype).to(device)

    def iterate() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(FIRST_STEPS):
        iterate()
    hooks = [params[FIRST].register_hook(further.switch(True)), params[LAST].register_hook(further.switch(False))]
    iterate()
    sys.setprofile(None)
    for hook in hooks:
        hook.remove()
    iterate()
    iteration.switch(True)(x)
    iterate()
    sys.setprofile(None)
    with bytecodes:
        iterate()
    return Counted(further.counted, iteration.counted, bytecodes.counted)


def measure(setup: Setup, modes: list[str], is_simulated: bool) -> dict[str, Counted]:
    """Of all modes, on this rank; one alone sends to itself."""
    group, device = None, setup.device
    if is_simulated:
        warnings.simplefilter("ignore")  # what torch says of any device that is not CUDA
        os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
        simulation.load(setup.world_size).set_device(setup.rank)
        group, device = dist.new_group(backend="cpu:gloo,sim:simccl"), torch.device("sim", setup.rank)
    sends = patch.object(Communicator, "is_alone", property(lambda _: False, lambda *_: None), create=True)
    with sends if setup.world_size == 1 else nullcontext():
        return {mode: calls_of(mode, group, device) for mode in modes}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*")
    parser.add_argument("--sim", type=int, metavar="RANKS")
    parser.add_argument("--functions", action="store_true")
    given = parser.parse_args()
    if given.sim:
        simulation.compiled()  # not by all ranks at once
    # FSDP2 needs a default group that has a backend for the device
    modes = given.modes or [mode for mode in MODES if mode != FSDP or not given.sim]
    found = run_ranks(measure, given.sim or 2, modes, bool(given.sim), timeout=600.0)[0]
    rows = [
        "| mode | a further bucket | an iteration, per bucket | bytecodes | over DDP, of FSDP2's |",
        "|" + " --- |" * 5,
    ]
    bytecodes = {mode: counted.per_bucket()[2] for mode, counted in found.items()}
    base, most = bytecodes.get(PLAIN, math.nan), bytecodes.get(FSDP, math.nan)
    for mode, counted in found.items():
        further, iteration, own = counted.per_bucket()
        in_backward = "not counted" if mode == FSDP else f"{further:.0f}"  # its parameters call no hooks
        rows.append(f"| {mode} | {in_backward} | {iteration:.0f} | {own:.0f} | {(own - base) / (most - base):.2f} |")
        for name in sorted(set().union(*counted)) if given.functions else ():
            numbers = f"{counted.further[name] / (FIRST - LAST):6.1f} {counted.iteration[name] / LAYERS:6.1f}"
            sys.stdout.write(f"{numbers} {counted.bytecodes[name] / LAYERS:8.1f}  {mode}: {name}\n")
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
