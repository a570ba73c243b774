"""Image classification in the manner of timm: everything from factories, and the average of the unwrapped model."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, RMSprop

from tests.scripts.networks import ConvNet, images

CLASSES, UPDATES_PER_EPOCH, ACCUMULATE = 5, 2, 2


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if average.is_floating_point():
                average.lerp_(value, weight=1 - self.decay)
            else:
                average.copy_(value)


class Schedule:
    """Sets the rate at every update, and again, from the groups, whatever it was before."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.first = [group["initial_lr"] for group in optimizer.param_groups]

    def step_update(self, updates: int) -> None:
        for group, first in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = first * 0.9**updates * group.get("lr_scale", 1.0)


def create_optimizer(model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    decay = [param for param in model.parameters() if param.ndim > 1]
    no_decay = [param for param in model.parameters() if param.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": no_decay, "weight_decay": 0.0, "lr_scale": 0.5}, {"params": decay}]
    return RMSprop(groups, lr=lr, weight_decay=weight_decay, momentum=0.9)


@torch.no_grad()
def validate(model: nn.Module) -> float:
    model.eval()
    inputs, labels = images(8, CLASSES, torch.Generator().manual_seed(99))
    return F.cross_entropy(model(inputs), labels).item()


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(42)
    model, first = ConvNet(CLASSES), 0
    optimizer = create_optimizer(model, lr=1e-3, weight_decay=0.05)
    if resume:
        checkpoint = torch.load(folder / "last.pth.tar", map_location="cpu")
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"] + 1
    ema = Ema(model, decay=0.8)
    if resume:
        ema.module.load_state_dict(checkpoint["state_dict_ema"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
    schedule = Schedule(optimizer)
    data = torch.Generator().manual_seed(100 * dist.get_rank() + first)
    schedule.step_update(first * UPDATES_PER_EPOCH)
    for epoch in range(first, steps // UPDATES_PER_EPOCH):
        updates = epoch * UPDATES_PER_EPOCH
        ddp.train()
        optimizer.zero_grad()
        for index in range(UPDATES_PER_EPOCH * ACCUMULATE):
            needs_update = (index + 1) % ACCUMULATE == 0
            inputs, labels = images(6, CLASSES, data)
            with nullcontext() if needs_update else ddp.no_sync():
                loss = F.cross_entropy(ddp(inputs), labels, label_smoothing=0.1) / ACCUMULATE
                loss.backward()
            log(loss.item())
            if not needs_update:
                continue
            optimizer.step()
            updates += 1
            optimizer.zero_grad()
            ema.update(model)
            schedule.step_update(updates)
        log(validate(ddp))
        log(validate(ema.module))
        if dist.get_rank() == 0:
            saved = {"state_dict": ddp.module.state_dict(), "state_dict_ema": ema.module.state_dict(), "epoch": epoch}
            torch.save(saved | {"optimizer": optimizer.state_dict()}, folder / "last.pth.tar")
    return [model, ema.module]
