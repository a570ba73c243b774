"""Step 3 of docs/quickstart.md: stage 2, gradients are reduced to their owners only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
model = DistributedDataParallel(module, gradient_as_bucket_view=True)
opt = shard_optimizer(model, AdamW, stage=2, lr=3e-4)

torch.manual_seed(dist.get_rank())  # every rank has its own data
inputs = torch.randn(64, 32)
targets = inputs.square().mean(dim=1, keepdim=True)
for step in range(1, 6):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item()}", flush=True)
dist.destroy_process_group()
