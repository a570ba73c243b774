"""Object detection in the manner of torchvision: a dictionary of losses, a frozen stem, a warm-up by steps."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, MultiStepLR

from tests.scripts.networks import images

CLASSES, PER_EPOCH, BOX = 4, 2, 4


class FrozenBatchNorm(nn.Module):
    """Statistics and weights are buffers."""

    scale: Tensor
    shift: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((channels,), 0.9))
        self.register_buffer("shift", torch.full((channels,), 0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale[:, None, None] + self.shift[:, None, None]


class Detector(nn.Module):
    """Objectness and boxes at each place, and classes of the places that have an object."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), FrozenBatchNorm(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), FrozenBatchNorm(16), nn.ReLU())
        self.objectness, self.boxes = nn.Conv2d(16, 1, 1), nn.Conv2d(16, BOX, 1)
        self.classes = nn.Linear(16, CLASSES)
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, inputs: Tensor, labels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        features = self.body(self.frozen(inputs))
        scores, found = self.objectness(features).flatten(1), self.boxes(features).flatten(2)
        places = scores.detach().argmax(1)
        at_place = found[torch.arange(len(places)), :, places]
        pooled = features.flatten(2)[torch.arange(len(places)), :, places]
        return {
            "loss_objectness": F.binary_cross_entropy_with_logits(scores, F.one_hot(places, scores.shape[1]).float()),
            "loss_box_reg": F.smooth_l1_loss(at_place, boxes),
            "loss_classifier": F.cross_entropy(self.classes(pooled), labels),
        }


def reduce_dict(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        names = sorted(losses)
        values = torch.stack([losses[name] for name in names])
        dist.all_reduce(values)
        return dict(zip(names, values / dist.get_world_size(), strict=True))


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Detector(), bucket_cap_mb=0.002)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)
    first = 0
    if resume:
        checkpoint = torch.load(folder / "checkpoint.pth", map_location="cpu")
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["lr_scheduler"])
        first = checkpoint["epoch"] + 1
    for epoch in range(first, steps // PER_EPOCH):
        model.train()
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=PER_EPOCH - 1) if epoch == 0 else None
        generator = torch.Generator().manual_seed(100 * epoch + dist.get_rank())
        for _ in range(PER_EPOCH):
            inputs, labels = images(4, CLASSES, generator)
            losses = model(inputs, labels, torch.rand(4, BOX, generator=generator))
            total = torch.stack([*losses.values()]).sum()
            reduced = sum(reduce_dict(losses).values(), torch.zeros(()))
            if not reduced.isfinite():
                raise SystemExit(f"Loss is {reduced.item()}, stopping training")
            log(reduced.item())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            if warmup is not None:
                warmup.step()
            log(optimizer.param_groups[0]["lr"])
        scheduler.step()
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        if dist.get_rank() == 0:
            torch.save(saved | {"lr_scheduler": scheduler.state_dict()}, folder / "checkpoint.pth")
    return [model.module]
