"""A trainer in the manner of the tutorials on fault-tolerant DDP: snapshots by rank 0, from which torchrun goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PER_EPOCH, SAVE_EVERY = 2, 1


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points and their targets."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(size, 20, generator=generator)
        self.targets = self.points.square().mean(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.targets[index]


class Trainer:
    """Runs epochs, and saves what it needs to go on."""

    def __init__(self, model: nn.Module, optimizer: Any, loader: Any, path: Path, log: Callable[[float], None]) -> None:
        self.optimizer, self.loader, self.path, self.log = optimizer, loader, path, log
        self.epochs_run = 0
        if path.exists():
            self._load_snapshot(model)
        self.model = DistributedDataParallel(model, bucket_cap_mb=0.001)

    def _load_snapshot(self, model: nn.Module) -> None:
        snapshot = torch.load(self.path, map_location="cpu")
        model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _save_snapshot(self, epoch: int) -> None:
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, self.path)

    def _run_batch(self, source: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.log(loss.item())

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            if dist.get_rank() == 0 and epoch % SAVE_EVERY == 0:
                self._save_snapshot(epoch)


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    dataset = Points(4 * PER_EPOCH * dist.get_world_size())
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = SGD(model.parameters(), lr=1e-2)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, shuffle=False, sampler=sampler)
    trainer = Trainer(model, optimizer, loader, folder / "snapshot.pt", log)
    trainer.train(steps // PER_EPOCH)
    return [trainer.model.module]
