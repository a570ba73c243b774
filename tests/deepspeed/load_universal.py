"""Loads a checkpoint in DeepSpeed's universal format with DeepSpeed, and trains on. Needs DeepSpeed, not this library.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 tests/deepspeed/load_universal.py ROOT STAGE DTYPE RESULT

writes to RESULT what DeepSpeed then has: parameters in fp32, states as its own engine saves them again in ``ROOT``, and
the losses of the steps that follow. Run with ``-m`` from the root of the checkout.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed.write_checkpoints import ADAM, BASE, MORE, Model, convert, groups_of, patched, tokens_of


def main(root: Path, stage: int, dtype: str, result: Path) -> None:
    """Load, save again, and train on."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    patched()
    torch.manual_seed(77)
    model = Model()
    (file,) = root.glob("*/mp_rank_00_model_states.pt")  # DeepSpeed itself loads what is trainable, and no more
    saved = torch.load(file, weights_only=True)["module"]
    trainable = {name for name, param in model.named_parameters() if param.requires_grad} | {"head.weight"}
    model.load_state_dict({key: value for key, value in saved.items() if key not in trainable}, strict=False)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model),
        config={
            **BASE,
            "optimizer": ADAM,
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": True},
            **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        },
    )
    path, _ = engine.load_checkpoint(root)
    assert path is not None, "DeepSpeed finds a checkpoint"
    found: dict[str, Any] = {"params": {}, "steps": engine.global_steps}
    for name, param in model.named_parameters():
        if param.requires_grad:
            found["params"][name] = safe_get_full_fp32_param(param).clone()
    found["lrs"] = engine.get_lr()
    engine.save_checkpoint(root / "again", tag="last")
    losses = []
    for _ in range(MORE):
        loss = engine(tokens_of(engine.global_steps, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if engine.global_rank == 0:
        torch.save({**found, "losses": losses}, result)
        convert(root / "again")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
