"""A training script that goes on from snapshots, and writes down every step with a digest of its parameters.

It runs under torchrun, or with the variables of torchrun set by hand. Its model has dropout, its loader and its
scheduler have states, and it is pointless to train it.
"""

import os
import random
import signal
import time
import zlib
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import ddp_zero.launch
from ddp_zero import shard_optimizer
from ddp_zero.snapshots import Snapshots


class Loader:
    """Shuffles its samples anew in every epoch."""

    def __init__(self, rank: int, samples: int = 40, batch: int = 8) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._samples, self._batch = samples, batch
        self._order: list[int] = []

    def draw(self) -> Tensor:
        """The next batch, of shape (batch, 32)."""
        if len(self._order) < self._batch:
            self._order = torch.randperm(self._samples, generator=self._generator).tolist()
        chosen, self._order = self._order[: self._batch], self._order[self._batch :]
        return torch.stack([torch.full((32,), float(one)).sin_() for one in chosen])

    def state_dict(self) -> dict[str, Any]:
        """The rest of the epoch."""
        return {"order": self._order, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an epoch."""
        self._order = list(state["order"])
        self._generator.set_state(state["generator"])


def digest(model: nn.Module) -> int:
    """Of all parameters and buffers."""
    found = 0
    for value in model.state_dict().values():
        found = zlib.crc32(value.numpy().tobytes() if value.dim() else bytes(str(value.item()), "ascii"), found)
    return found


def main() -> None:
    """Train, from the newest snapshot on."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of snapshots; {host} is the number of the host")
    parser.add_argument("log", type=Path, help="a folder, for a file of each rank")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--dies-after", type=int, default=-1, help="step after which rank 1 is killed, once")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--partition", default="parameters")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, host = int(os.environ["RANK"]), os.environ.get("GROUP_RANK", "0")
    ddp_zero.launch.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(
        nn.Linear(32, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=options.stage, partition=options.partition, lr=0.01)
    scheduler, loader = CosineAnnealingLR(opt, 50), Loader(rank)
    torch.manual_seed(rank)
    random.seed(rank)
    snapshots = Snapshots(
        ddp,
        opt,
        folder=options.folder.format(host=host),
        every=options.every,
        copies=options.copies,
        fallback=options.log / "checkpoints",
        extra={"scheduler": scheduler},
        rank_extra={"loader": loader},
        time_out=10.0,
    )
    loaded = snapshots.load()
    with (options.log / f"rank-{rank}").open("a", buffering=1) as log:
        log.write(f"start {snapshots.steps} {time.time()} {loaded.notes[0] if loaded is not None else 'nothing'}\n")
        while snapshots.steps < options.steps:
            opt.zero_grad()
            loss = ddp(loader.draw()).square().mean() * random.uniform(0.5, 1.5)
            loss.backward()
            opt.step()
            scheduler.step()
            snapshots.step()
            log.write(f"step {snapshots.steps} {digest(model)} {time.time()}\n")
            if snapshots.steps == options.dies_after and loaded is None:
                snapshots.wait()
                dist.barrier()  # a snapshot is complete when the parts of all ranks are
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.pause)
        numbers = {name: value for name, value in snapshots.stats().items() if value}
        log.write(f"end {numbers}\n")
    snapshots.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
