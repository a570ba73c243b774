"""Classification in the manner of accelerate's examples: everything is prepared, and accumulation is a context."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.networks import perceptron

CLASSES, PER_EPOCH, ACCUMULATE, CLIP = 4, 4, 2, 0.5


def rate(step: int) -> float:
    return float(0.9**step)


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16")
    inputs = torch.randn(4 * PER_EPOCH * ACCUMULATE * accelerator.num_processes, 6)
    loader: Any = DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=4)
    model: Any = perceptron(6, 24, 24, CLASSES)
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = LambdaLR(optimizer, rate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder / "state"))
    for _ in range(steps // PER_EPOCH - int(resume)):
        model.train()
        for batch, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch), labels)
                log(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder / "state"))
    return [accelerator.unwrap_model(model)]
