"""Counts calls of Python and C functions for a bucket: ``python -m tests.walk.calls [MODE ...]``, on two Gloo ranks.

``--sim N`` counts on the simulated accelerator, on N ranks; ``--functions`` lists what is called. Each of 24 layers is
a bucket. *Further* is a bucket in the middle of backward, *iteration* a whole one divided by its buckets.
"""

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
MODES: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "cut": {"stage": 2, "partition": "elements"},
    "whole": {"stage": 2},
    "clipped": {"stage": 2, "partition": "elements", "max_grad_norm": 1.0},
    "masters": {"stage": 2, "partition": "elements", "master_weights": True},
    "late sync": {"stage": 2, "partition": "elements", "sync": "forward"},
    "stage 1": {"stage": 1},
}


class Calls:
    """Counts calls, by kind and name, while it is on."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.is_on = False

    def on_event(self, frame: FrameType, event: str, function: Any) -> None:
        """A function for `sys.setprofile`."""
        if self.is_on and event == "call":
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            folder = str(PACKAGE)
            place = path[len(folder) + 1 :] if path.startswith(folder) else "/".join(path.split("/")[-2:])
            self.counted[f"{place} {name}"] += 1
        elif self.is_on and event == "c_call":
            self.counted[f"C {getattr(function, '__qualname__', function)}"] += 1

    def switch(self, is_on: bool) -> Callable[[Tensor], None]:
        """A tensor hook that turns this on or off, on the thread of backward."""

        def hook(_: Tensor) -> None:
            self.is_on = is_on
            if is_on:
                sys.setprofile(self.on_event)

        return hook


def calls_of(mode: str, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """Of the buckets in the middle of a backward pass, and of an iteration."""
    torch.manual_seed(0)
    options = MODES[mode]
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    dtype = torch.bfloat16 if mode == "masters" else torch.float32
    ids = None if device.type == "cpu" else [device.index]
    model = nn.Sequential(*layers).to(device, dtype)
    ddp = DistributedDataParallel(
        model, device_ids=ids, process_group=group, bucket_cap_mb=0.007, gradient_as_bucket_view=True
    )
    if options is None:
        opt: Any = AdamW(ddp.parameters(), lr=1e-4, fused=True)
    else:
        opt = shard_optimizer(ddp, AdamW, lr=1e-4, fused=True, **options)
    x = torch.randn(2, WIDTH, dtype=dtype).to(device)

    def iterate() -> None:
        ddp(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(FIRST_STEPS):
        iterate()
    params, further, iteration = list(ddp.parameters()), Calls(), Calls()
    hooks = [params[FIRST].register_hook(further.switch(True)), params[LAST].register_hook(further.switch(False))]
    iterate()
    sys.setprofile(None)
    for hook in hooks:
        hook.remove()
    iterate()
    iteration.switch(True)(x)
    iterate()
    sys.setprofile(None)
    return further.counted, iteration.counted


def measure(setup: Setup, modes: list[str], is_simulated: bool) -> dict[str, tuple[Counter[str], Counter[str]]]:
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
    parser.add_argument("modes", nargs="*", default=list(MODES))
    parser.add_argument("--sim", type=int, metavar="RANKS")
    parser.add_argument("--functions", action="store_true")
    given = parser.parse_args()
    if given.sim:
        simulation.compiled()  # not by all ranks at once
    found = run_ranks(measure, given.sim or 2, given.modes, bool(given.sim), timeout=600.0)[0]
    rows = ["| mode | a further bucket | an iteration, per bucket |", "| --- | --- | --- |"]
    for mode, (further, iteration) in found.items():
        counts = further.total() / (FIRST - LAST), iteration.total() / LAYERS
        rows.append(f"| {mode} | {counts[0]:.0f} | {counts[1]:.0f} |")
        for name in sorted({*further, *iteration}) if given.functions else ():
            numbers = f"{further[name] / (FIRST - LAST):6.1f} {iteration[name] / LAYERS:6.1f}"
            sys.stdout.write(f"{numbers}  {mode}: {name}\n")
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
