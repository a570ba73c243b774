"""Pre-training of a GPT in the manner of nanoGPT."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tests.scripts.networks import Block

VOCABULARY, CONTEXT, WIDTH = 32, 12, 24
MICRO_STEPS, CLIP = 3, 1.0
LR, WARM_UP, DECAY_STEPS = 1e-2, 2, 8


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 2, dropout=0.1, is_causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay: float, lr: float) -> Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def scheduled_lr(step: int) -> float:
    if step < WARM_UP:
        return LR * (step + 1) / (WARM_UP + 1)
    done = min(1.0, (step - WARM_UP) / (DECAY_STEPS - WARM_UP))
    return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def batch_of(data: Tensor) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (4,)).tolist()
    return tuple(torch.stack([data[one + shift : one + shift + CONTEXT] for one in starts]) for shift in (0, 1))  # type: ignore[return-value]


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor) -> float:
    model.eval()
    losses = torch.stack([model(*batch_of(data))[1] for _ in range(2)])
    model.train()
    return losses.mean().item()


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    data = torch.arange(400).pow(2).remainder(VOCABULARY)
    model, step, best = GPT(), 0, 1e9
    optimizer = model.configure_optimizers(0.1, LR)
    if resume:
        checkpoint: dict[str, Any] = torch.load(folder / "ckpt.pt", map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, best = checkpoint["step"], checkpoint["best"]
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    inputs, targets = batch_of(data)
    while True:
        for group in optimizer.param_groups:
            group["lr"] = scheduled_lr(step)
        if step % 2 == 0 and rank == 0:
            found = evaluate(ddp, data)
            log(found)
            best = min(found, best)
            if step > 0:
                checkpoint = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(checkpoint | {"step": step, "best": best}, folder / "ckpt.pt")
        if step >= steps:
            return [ddp.module]
        for micro_step in range(MICRO_STEPS):
            ddp.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = ddp(inputs, targets)
                loss = loss / MICRO_STEPS
            inputs, targets = batch_of(data)
            scaler.scale(loss).backward()
        if CLIP != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log(loss.item() * MICRO_STEPS)
        step += 1
