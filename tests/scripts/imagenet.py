"""Image classification in the manner of PyTorch's examples: SGD, a rate per epoch, the best model kept."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.scripts.networks import ConvNet, images

CLASSES, PER_EPOCH = 5, 2


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet(CLASSES), bucket_cap_mb=0.003)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    first, best = 0, 1e9
    if resume:
        checkpoint = torch.load(folder / "checkpoint.pth.tar", map_location="cpu")
        first, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    dataset = TensorDataset(*images(4 * PER_EPOCH * dist.get_world_size(), CLASSES, torch.Generator().manual_seed(1)))
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    for epoch in range(first, steps // PER_EPOCH):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
            loss = F.cross_entropy(model(inputs), labels)
            log(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total = F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1])
        dist.all_reduce(total)
        log(total.item())
        scheduler.step()
        is_best, best = total.item() < best, min(total.item(), best)
        if dist.get_rank() == 0:
            states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            saved = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best, **states}
            torch.save(saved, folder / "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile(folder / "checkpoint.pth.tar", folder / "model_best.pth.tar")
    return [model.module]
