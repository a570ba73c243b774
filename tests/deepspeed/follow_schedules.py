"""Trains under each schedule of DeepSpeed with this library's engine, and goes on there or with DeepSpeed.

    torchrun --nproc-per-node=2 -m tests.deepspeed.follow_schedules ours ROOT
    DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 -m tests.deepspeed.follow_schedules theirs ROOT

The first saves under two tags and goes on from each; the second loads what was exported of them into
``ROOT/<schedule>/theirs``, and takes the same steps. Both leave losses and rates in ``ROOT/ours.pt`` or ``theirs.pt``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MORE = 4
TAGS = {"early": 2, "late": 5}
"""Tags, and after how many steps they are saved."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4, "warmup_max_lr": 0.05},
    "WarmupDecayLR": {"warmup_num_steps": 3, "warmup_max_lr": 0.05, "total_num_steps": 12},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 12},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
}


def document(schedule: str) -> dict[str, Any]:
    """A configuration."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": schedule, "params": SCHEDULES[schedule]},
        "zero_optimization": {"stage": 2},
    }


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Different on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def go_on(engine: Any, rank: int, steps: int) -> list[tuple[float, list[float]]]:
    """Train; the loss and the rates of each step."""
    told = []
    for _ in range(steps):
        inputs, targets = batch(engine.global_steps, rank)
        loss = (engine(inputs) - targets).square().mean()
        engine.backward(loss)
        engine.step()
        told.append((float(loss.detach()), list(engine.get_lr())))
    return told


def main(who: str, root: Path) -> None:
    """See the module."""
    if who == "ours":
        from ddp_zero.deepspeed import initialize
    else:
        from deepspeed import initialize  # type: ignore[no-redef]
    told: dict[str, Any] = {}
    for schedule in SCHEDULES:
        for tag, steps in TAGS.items():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
            checkpoint: dict[str, Any] = {} if who == "ours" else {"checkpoint": {"load_universal": True}}
            engine, *_ = initialize(
                model=model, model_parameters=list(model.parameters()), config={**document(schedule), **checkpoint}
            )
            rank = torch.distributed.get_rank()
            if who == "ours":
                go_on(engine, rank, steps)
                engine.save_checkpoint(root / schedule / "saved", tag=tag, client_state={"epoch": steps})
            else:
                client: Any
                _, client = engine.load_checkpoint(root / schedule / "theirs", tag=f"{tag}_universal")
                assert client["epoch"] == steps
                assert (engine.global_steps, engine.skipped_steps) == (steps, 0)
            told[f"{schedule} {tag}"] = go_on(engine, rank, MORE)
    if rank == 0:
        torch.save(told, root / f"{who}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
