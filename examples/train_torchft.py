r"""Replica groups of torchft: stage 2 within a group; a group that dies comes back and takes over the others' state.

    pip install -e '.[torchft]'
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --max-restarts 10 \
        examples/train_torchft.py --group 0 &
    torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --max-restarts 10 \
        examples/train_torchft.py --group 1

Kill a process of a group while they train: torchrun starts the group again, and it goes on from the others' step.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft import ProcessGroupGloo

from ddp_zero import launch
from ddp_zero.integrations.torchft import build_manager, prepare

LIMIT = timedelta(seconds=30)


def main() -> None:
    """Train one replica group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, required=True, help="number of this replica group, from 0")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    options = parser.parse_args()
    launch.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    manager = build_manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=1,
        replica_id=f"group_{options.group}",
        init_sync=False,  # all groups begin with the same parameters
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = prepare(manager, ddp, torch.optim.AdamW, stage=options.stage, max_grad_norm=1.0, lr=1e-2)

    while manager.current_step() < options.steps:
        step = manager.current_step()
        opt.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + 10 * options.group + rank)  # data of its own
        inputs = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.square().mean(dim=1, keepdim=True))
        loss.backward()
        opt.step()
        if rank == 0 and manager.current_step() % 100 == 0:
            print(f"group {options.group} step {manager.current_step()} loss {loss.item():.4f} {opt.last_step}")
    if rank == 0:
        total = sum(param.double().sum().item() for param in model.parameters())
        print(f"group {options.group} ends with parameters that add up to {total:.12f}", flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
