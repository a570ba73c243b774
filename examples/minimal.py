"""DDP with a sharded AdamW: ZeRO stage 2, gradient clipping, a checkpoint. Copy this and replace model and data.

    torchrun --standalone --nproc-per-node=2 examples/minimal.py

It trains on GPUs if there is one for each rank of this host, else on the CPU. Run it again, with the same or another
number of ranks, and it continues from its checkpoint in runs/minimal.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ddp_zero import checkpoint, shard_optimizer

FOLDER = "runs/minimal"
EPOCHS = 5  # per run
BATCH_SIZE = 32  # per rank


def join() -> torch.device:
    """Join the job that torchrun started; returns the device of this rank."""
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    return device


def build_data() -> Dataset[tuple[torch.Tensor, ...]]:
    """Inputs, and the function of them that the model learns; the same on every rank."""
    inputs = torch.randn(1280, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))


def train(device: torch.device) -> None:
    """Train for some epochs, continuing the count of earlier runs."""
    data = build_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)  # each rank has its own samples
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, pin_memory=device.type == "cuda")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=2, max_grad_norm=1.0, lr=1e-2)

    done = 0
    try:
        done = checkpoint.load(FOLDER, ddp, opt).step
    except FileNotFoundError:  # the first run
        pass

    for epoch in range(done + 1, done + EPOCHS + 1):
        sampler.set_epoch(epoch)  # a new order
        for batch in loader:
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()
            opt.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} {opt.last_step}", flush=True)
    checkpoint.save(FOLDER, ddp, opt, step=done + EPOCHS, keep=2)


if __name__ == "__main__":
    train(join())
    dist.destroy_process_group()
