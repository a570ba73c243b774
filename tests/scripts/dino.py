"""Self-distillation in the manner of DINO."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW

from tests.scripts.networks import Block, perceptron

WIDTH, OUTPUTS, EPOCHS, PER_EPOCH = 16, 20, 3, 3
CLIP, FREEZE_LAST_LAYER = 0.02, 1
LR, WEIGHT_DECAY, MOMENTUM = (1e-2, 1e-3), (0.04, 0.4), (0.9, 1.0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.norm = nn.Linear(6, WIDTH), Block(WIDTH, 2), nn.LayerNorm(WIDTH)

    def forward(self, crops: Tensor) -> Tensor:
        features: Tensor = self.norm(self.block(self.patches(crops))).mean(1)
        return features


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = perceptron(WIDTH, 24, 8)
        self.last_layer = weight_norm(nn.Linear(8, OUTPUTS, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.last_layer(F.normalize(self.mlp(features), dim=-1))
        return logits


class MultiCrop(nn.Module):
    """Crops of one size at a time through the encoder, all of them at once through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), Head()

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = sorted({crop.shape[1] for crop in crops}, reverse=True)
        of_size = [torch.cat([crop for crop in crops if crop.shape[1] == size]) for size in sizes]
        logits: Tensor = self.head(torch.cat([self.encoder(some) for some in of_size]))
        return logits


class Loss(nn.Module):
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUTPUTS))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        views = student.div(0.1).chunk(4)
        targets = ((teacher - self.center) / 0.04).softmax(-1).detach().chunk(2)
        pairs = [(one, two) for one in range(2) for two in range(4) if one != two]
        losses = [-(targets[one] * views[two].log_softmax(-1)).sum(-1).mean() for one, two in pairs]
        self.update_center(teacher)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        center = teacher.sum(0, keepdim=True)
        dist.all_reduce(center)
        self.center = self.center * 0.9 + center / (len(teacher) * dist.get_world_size()) * 0.1


def cosine(values: tuple[float, float], step: int) -> float:
    first, last = values
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * step / (EPOCHS * PER_EPOCH)))


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    bare = [param for name, param in named if name.endswith(".bias") or len(param.shape) == 1]
    rest = [param for name, param in named if not (name.endswith(".bias") or len(param.shape) == 1)]
    return [{"params": rest}, {"params": bare, "weight_decay": 0.0}]


def clip_gradients(model: nn.Module, clip: float) -> None:
    for _, param in model.named_parameters():
        if param.grad is not None:
            coefficient = clip / (param.grad.data.norm(2) + 1e-6)
            if coefficient < 1:
                param.grad.data.mul_(coefficient)


def cancel_gradients_last_layer(epoch: int, model: nn.Module) -> None:
    if epoch >= FREEZE_LAST_LAYER:
        return
    for name, param in model.named_parameters():
        if "last_layer" in name:
            param.grad = None


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    student: Any = MultiCrop()
    teacher, loss_of, first = MultiCrop(), Loss(), 0
    student = DistributedDataParallel(student, bucket_cap_mb=0.003)
    teacher.load_state_dict(student.module.state_dict())
    for param in teacher.parameters():
        param.requires_grad = False
    optimizer = AdamW(param_groups(student))
    if resume:
        checkpoint = torch.load(folder / "checkpoint.pth", map_location="cpu")
        student.load_state_dict(checkpoint["student"])
        teacher.load_state_dict(checkpoint["teacher"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loss_of.load_state_dict(checkpoint["loss"])
        first = checkpoint["epoch"]
    torch.manual_seed(100 * dist.get_rank() + first)
    for epoch in range(first, steps // PER_EPOCH):
        for step in range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH):
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = cosine(LR, step)
                if index == 0:
                    group["weight_decay"] = cosine(WEIGHT_DECAY, step)
            image = torch.randn(4, 1, 6)
            crops = [image + torch.randn(4, length, 6) for length in (6, 6, 3, 3)]
            loss = loss_of(student(crops), teacher(crops[:2]))
            log(loss.item())
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(student, CLIP)
            cancel_gradients_last_layer(epoch, student)
            optimizer.step()
            with torch.no_grad():
                momentum = cosine(MOMENTUM, step)
                for ours, theirs in zip(student.module.parameters(), teacher.parameters(), strict=True):
                    theirs.data.mul_(momentum).add_((1 - momentum) * ours.detach().data)
        saved = {"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict()}
        if dist.get_rank() == 0:
            torch.save(saved | {"loss": loss_of.state_dict(), "epoch": epoch + 1}, folder / "checkpoint.pth")
    return [student.module, teacher, loss_of]
