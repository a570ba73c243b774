"""Writes checkpoints of transformers' Trainer with DeepSpeed, and what that Trainer logs afterwards. Needs DeepSpeed.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 -m tests.frameworks.write_trainer_checkpoints OUT VARIANT
    python -m tests.frameworks.write_trainer_checkpoints --pack OUT tests/frameworks/trainer-deepspeed.tar.xz

trains for `STEPS` steps and leaves the checkpoint of the third in ``OUT/VARIANT``, with the log in ``log.json``.
"""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

STEPS, SAVED = 6, 3
AUTO: dict[str, Any] = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
ADAMW = {
    "type": "AdamW",
    "params": {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True},
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    # without gradient_clipping, which is DeepSpeed's default then
    "of the file": {**AUTO, "zero_optimization": {"stage": 2}, "optimizer": ADAMW, "scheduler": DECAY},
    "of the Trainer": {
        **AUTO,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "of the file": {"max_grad_norm": 0.25},
    "of the Trainer": {"bf16": True, "max_grad_norm": 0.5},
}
COMMON: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "warmup_steps": 2}
KEPT = ("latest", "model.safetensors", "config.json", "trainer_state.json", "scheduler.pt")


def main(out: Path, variant: str) -> None:
    """Train, and keep what a resumed run reads."""
    from transformers import Trainer

    from tests.frameworks.job import Words
    from tests.frameworks.trainers import arguments, build_model

    folder, target = out / "trained", out / variant
    options = {**COMMON, **OPTIONS[variant], "deepspeed": CONFIGS[variant]}
    trainer = Trainer(model=build_model(), args=arguments(folder, **options), train_dataset=Words(48))
    trainer.train()
    if trainer.args.process_index == 0:
        saved = folder / f"checkpoint-{SAVED}"
        shutil.copytree(saved / f"global_step{SAVED}", target / f"global_step{SAVED}")
        for name in KEPT:
            if (saved / name).is_file():
                shutil.copy(saved / name, target)
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        (target / "log.json").write_text(json.dumps(log))
        shutil.rmtree(folder)


def pack(out: Path, archive: Path) -> None:
    """Put what was written into one file."""
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(out.iterdir()):
            file.add(path, path.name)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if sys.argv[1] == "--pack":
        pack(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
