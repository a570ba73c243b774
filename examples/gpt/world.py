"""The processes that train together."""

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process and its place among the ranks."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> "World":
        """Join the job that torchrun started, or start a job of one process."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus, device = torch.cuda.device_count(), torch.device("cpu")
        if gpus:
            device = torch.device("cuda", local_rank % gpus)
            torch.cuda.set_device(device)
        backend = "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @classmethod
    def meet(cls, rank: int, size: int, rendezvous: Path) -> "World":
        """Join a job of processes on this machine that have agreed on a file that does not exist yet."""
        has_gpus = torch.cuda.device_count() >= size and dist.is_nccl_available()
        device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
        if has_gpus:
            torch.cuda.set_device(device)
        backend = "nccl" if has_gpus else "gloo"
        dist.init_process_group(backend, init_method=rendezvous.as_uri(), rank=rank, world_size=size)
        return cls(rank, size, device)

    def check_is_multiple(self, of: int, what: str) -> None:
        """Leave the job and exit with a message if the number of ranks is not a multiple of a number.

        Args:
            of: the number.
            what: the reason, in words.
        """
        if self.size % of:
            if self.rank == 0:
                print(f"Expected a multiple of {of} ranks for {what}, got {self.size}.", file=sys.stderr)
            self.leave()
            sys.exit(2)

    def leave(self) -> None:
        """Leave the job, once nothing refers to the model and the optimizer any more."""
        # torch leaves the first DDP model of a process, and the group with it, to the garbage collector (seen with
        # torch 2.13.0). Gloo's threads would outlive the group, and some exits abort.
        gc.collect()
        dist.destroy_process_group()

    def be_deterministic(self) -> None:
        """Make two trainings on a GPU compute the same numbers; on the CPU they do anyway."""
        if self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
            torch.use_deterministic_algorithms(True)

    def gather(self, values: Tensor) -> Tensor:
        """Stack the values of all ranks on the CPU, in a new first dimension. A collective."""
        mine = values.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def say(self, text: str) -> None:
        """Print a text on rank 0. On a terminal it overwrites the line of progress."""
        if self.rank == 0:
            print(f"\r{text:<79}" if sys.stdout.isatty() else text, flush=True)

    def update(self, text: str, is_due: bool) -> None:
        """Show progress on rank 0: on a terminal as one line that changes, in a log as a line whenever one is due."""
        if self.rank == 0 and sys.stdout.isatty():
            print(f"\r{text[:79]:<79}", end="", flush=True)
        elif is_due:
            self.say(text)
