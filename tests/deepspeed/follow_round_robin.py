"""Trains with DeepSpeed and ``round_robin_gradients``, saves, and goes on there or with this library's engine.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node=3 -m tests.deepspeed.follow_round_robin theirs ROOT
    torchrun --nproc-per-node=3 -m tests.deepspeed.follow_round_robin ours ROOT

The first leaves each checkpoint in ``ROOT/<variant>``, and the values of DeepSpeed's ``zero_to_fp32`` in
``ROOT/<variant>.pt``; the second loads them. Both leave the losses of the steps that follow in ``ROOT/theirs.pt`` or
``ours.pt``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.deepspeed.write_checkpoints import ADAM, BASE, FP16, Model, groups_of, patched, tokens_of

STEPS, MORE = 3, 4
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": FP16}}
VARIANTS = {
    f"stage {stage}, {precision}": {
        "zero_optimization": {"stage": stage, "round_robin_gradients": True},
        "optimizer": ADAM,
        **PRECISIONS[precision],
    }
    for stage in (1, 2)
    for precision in PRECISIONS
}


def go_on(engine: Any, rank: int, steps: int) -> list[float]:
    """Train; the loss of each step on this rank."""
    losses = []
    for _ in range(steps):
        loss = engine(tokens_of(engine.global_steps, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def main(who: str, root: Path) -> None:
    """See the module."""
    if who == "theirs":
        patched()
        from deepspeed import initialize
    else:
        from ddp_zero.deepspeed import initialize
    told: dict[str, list[float]] = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(5 if who == "theirs" else 6)
        model: nn.Module = Model()
        engine, *_ = initialize(model=model, model_parameters=groups_of(model), config={**BASE, **options})
        rank = torch.distributed.get_rank()
        if who == "theirs":
            go_on(engine, rank, STEPS)
            engine.save_checkpoint(root / name, tag="last")
            if rank == 0:
                from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

                torch.save(get_fp32_state_dict_from_zero_checkpoint(root / name, "last"), root / f"{name}.pt")
        else:
            engine.load_checkpoint(root / name, tag="last")
        told[name] = go_on(engine, rank, MORE)
    if rank == 0:
        torch.save(told, root / f"{who}.pt")
    # an exit right after DeepSpeed's last all-gather can abort: a thread of Gloo then frees it while Python ends
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
