"""The cuts of eight ranks: data x expert 2 x 4, and data x pipeline x tensor 2 x 2 x 2; parity, bytes and memory.

    python -m tests.eight_ranks

Eight processes are slow on a few cores, so the default test run has the same bodies at four ranks. Writes
benchmarks/results/parallel-8ranks.md.
"""

import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.experts import CLIP, EXPERT_MODES, train_mixture
from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.moved_state import move_experts, move_stages
from tests.multiproc.parallel_models import tied_group, train_stages
from tests.multiproc.parity import Parity, largest
from tests.multiproc.stages import STAGE_MODES, check_counting, train_beside_plain
from tests.multiproc.two_ddp_models import train_two_ddp_models

PAGE = Path(__file__).parent.parent / "benchmarks" / "results" / "parallel-8ranks.md"
STEPS = 5

Rows = dict[str, Parity]


def train_experts(setup: Setup) -> Rows:
    """Four expert-parallel ranks with an expert each, twice."""
    found = {
        f"2 x 4 experts, {name}": train_mixture(setup, mode, "in the loop" in name, expert_ranks=4, total=4)
        for name, mode in EXPERT_MODES.items()
    }
    for clipped in (None, CLIP):
        name = "overlapped" if clipped is None else "clipped"
        found[f"2 x 4 experts in a second DDP model, stage 2, {name}"] = train_two_ddp_models(setup, clipped, 4)
    return found


def train_in_three_dimensions(setup: Setup) -> Rows:
    """Two stages of two parts each, twice."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    tied, found = tied_group(mesh), {}
    for schedule in (ScheduleGPipe, Schedule1F1B):
        kind = schedule.__name__.removeprefix("Schedule")
        for wraps, stage in ((False, 1), (True, 1), (True, 2)):
            name = f"2 x 2 x 2, {kind}, stage {stage}{'' if wraps else ' without DDP'}, clipped, one step skipped"
            found[name] = train_stages(mesh, mesh.get_group("tensor"), (schedule,), wraps, stage)
        for name, mode in STAGE_MODES.items():
            found[f"2 x 2 x 2, {kind}, {name}"] = train_beside_plain(mesh, tied, schedule, mode)
    check_counting(mesh, tied)
    return found


# Bytes and memory


class Halves(nn.Module):
    """Something dense and something that a part of the ranks shares, without messages of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        self.experts: nn.Module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense(x) + self.experts(x)
        return result


def bytes_by_socket() -> dict[str, int]:
    """Bytes that this process has sent on each TCP connection, as the kernel has counted them."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found[name] = struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
        except OSError:
            continue  # closed meanwhile, or not TCP
    return found


@contextmanager
def noting(sockets: set[str]) -> Iterator[None]:
    """Add the connections that are made in this block."""
    before = set(bytes_by_socket())
    yield
    sockets |= set(bytes_by_socket()) - before


def sent_and_held(setup: Setup, mode: dict[str, Any]) -> dict[str, float]:
    """Bytes per step on the connections of all ranks and of those with the same experts, and bytes of state."""
    dense_sockets: set[str] = set(bytes_by_socket())
    shared_sockets: set[str] = set()
    with noting(shared_sockets):
        for start in range(4):
            group = dist.new_group([start, start + 4])
            if setup.rank % 4 == start:
                same = group
        dist.barrier(same)
    torch.manual_seed(0)
    model: Any = Halves()
    mode = dict(mode)
    has_second, is_plain = mode.pop("second", False), mode.pop("plain", False)
    sizes = [sum(param.nbytes for param in part.parameters()) for part in (model.dense, model.experts)]
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    if has_second:
        model.experts = DistributedDataParallel(model.experts, process_group=same, **options)
    ignored = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, **options)
    named = list(ddp.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for one in named if "experts." not in one[0]]},
        {"params": [one for one in named if "experts." in one[0]], "process_group": same},
    ]
    opt: Optimizer = AdamW(ddp.parameters()) if is_plain else ParallelOptimizer(ddp, AdamW, groups, **mode)
    before: dict[str, int] = {}
    for step in range(3 + STEPS):
        if step == 3:
            dist.barrier()
            before = bytes_by_socket()
        opt.zero_grad()
        ddp(torch.randn(4, 256)).square().mean().backward()
        if is_plain and not has_second:
            for param in model.experts.parameters():
                dist.all_reduce(param.grad, group=same)
        opt.step()
    after = bytes_by_socket()
    moved = {name: (after[name] - before.get(name, 0)) / STEPS for name in after}
    state = sum(value.nbytes for one in opt.state.values() for value in one.values() if value.ndim)
    dist.barrier()
    return {
        "dense": sum(moved[name] for name in dense_sockets if name in moved),
        "experts": sum(moved[name] for name in shared_sockets if name in moved),
        "state": state,
        "D": sizes[0],
        "E": sizes[1],
    }


BYTES: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain optimizer, averages by DDP and by hand": ({"plain": True}, 2, 2),
    "plain optimizer, two DDP models": ({"plain": True, "second": True}, 2, 2),
    "stage 1, experts that DDP ignores": ({}, 3, 3),
    "stage 2, experts that DDP ignores": ({"stage": 2}, 2, 3),
    "stage 2, clipped, experts that DDP ignores": ({"stage": 2, "max_grad_norm": 1.0}, 2, 3),
    "stage 2, two DDP models": ({"stage": 2, "second": True}, 2, 2),
}
"""Modes, and how many times (N - 1)/N of a parameter's bytes a rank sends by the formula of docs/parallel.md."""


def bytes_tables() -> list[str]:
    """What ranks have sent and hold, beside the formulas and the lower bound."""
    sent = ["| mode | dense: counted | formula | bound | experts: counted | formula | bound |"]
    held = ["| mode | mean of the ranks | formula | largest |"]
    sent.append("| --- " + "| ---: " * 6 + "|")
    held.append("| --- " + "| ---: " * 3 + "|")
    for name, (mode, of_dense, of_experts) in BYTES.items():
        ranks = run_ranks(sent_and_held, 8, mode, timeout=600, group_timeout=120)
        dense, experts, state = (sum(one[key] for one in ranks) / 8 for key in ("dense", "experts", "state"))
        whole, part = 7 / 8 * ranks[0]["D"], 1 / 2 * ranks[0]["E"]
        formula = 2 * ranks[0]["D"] / 8 + 2 * ranks[0]["E"] / 2
        if mode.get("plain"):
            formula = 2 * ranks[0]["D"] + 2 * ranks[0]["E"]
        cells = (dense, of_dense * whole, 2 * whole, experts, of_experts * part, 2 * part)
        assert all(0.98 < cells[at] / cells[at + 1] < 1.03 for at in (0, 3)), (name, cells)
        assert state == formula, (name, state, formula)
        sent.append(f"| {name} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |")
        most = max(one["state"] for one in ranks)
        held.append(f"| {name} | {state:,.0f} | {formula:,.0f} | {most:,.0f} |")
        print(sent[-1], held[-1], sep="\n", flush=True)
    return [*sent, "", held[0], *held[1:]]


# The page


def parity_table(rows: Rows) -> list[str]:
    """Modes, and the largest differences over all ranks and steps."""
    lines = [
        "| mode | from the plain optimizer | norm from that of one device | parameters from those of one device |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        cells = [row.plain, row.norm, row.one_device]
        shown = [re.sub(r"^0\.0e\+00$", "0", "-" if cell is None else f"{cell:.1e}") for cell in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def main() -> None:
    """Run everything, and write the page."""
    rows: Rows = {}
    for body in (train_in_three_dimensions, train_experts):
        of_ranks = run_ranks(body, 8, timeout=1800, group_timeout=300)
        found = {name: largest(one[name] for one in of_ranks) for name in of_ranks[0]}
        rows |= found
        print("\n".join(parity_table(found)), flush=True)
    assert all(row.plain in (None, 0.0) for row in rows.values()), "bit-equal to the plain optimizer"
    run_ranks(move_checkpoints, 8, timeout=1800, group_timeout=300)
    page = f"""# Eight ranks that hold different parts of a model

Written by `python -m tests.eight_ranks` with torch {torch.__version__}: Gloo, fp32, small models. *Plain optimizer*:
the same parallel model with torch's AdamW on every rank and the same reductions; 0 means that every bit is equal.
Norms differ from those of one device by the ratio shown at most. A dash: not compared in that row.

{chr(10).join(parity_table(rows))}

A norm that leaves out any one parameter of any member at any place of the 2 x 2 x 2 mesh, or counts it twice, was
found to differ.

## Bytes per rank and step, and bytes of optimizer state

Eight ranks, experts shared by two; a model of 4 MiB dense and 2 MiB of experts. *Counted*: what the kernel says was
sent on the connections of a process group, per step, on average over the ranks, with headers and decisions. *Bound*:
an all-reduce of the gradients alone. State: AdamW's moments, without counters.

{chr(10).join(bytes_tables())}
"""
    PAGE.write_text(page)
    print(f"wrote {PAGE.name}")


def move_checkpoints(setup: Setup) -> None:
    """Save at 2 x 4 and at 2 x 2 x 2, and load at other cuts and the whole model."""
    move_experts(setup, 4, (4, 2))
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    move_stages(setup, mesh, tied_group(mesh))


if __name__ == "__main__":
    main()
