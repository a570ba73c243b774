"""Writes checkpoints with DeepSpeed, and what DeepSpeed itself says is in them. Needs DeepSpeed, not this library.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 tests/deepspeed/write_checkpoints.py OUT VARIANT
    python tests/deepspeed/write_checkpoints.py --pack OUT tests/unit/checkpoint/foreign/deepspeed-0.19.8.tar.xz

trains a small model for some steps and saves it as ``OUT/VARIANT``. ``OUT/VARIANT.expected.pt`` holds every parameter
in fp32, as DeepSpeed's own functions gather them, and the losses of the steps that follow. DeepSpeed's converter writes
the universal format to ``OUT/VARIANT/last_universal``, where states are whole.
"""

import json
import os
import sys
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, MORE = 3, 3

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1, "torch_adam": True}}
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "stage1-fp32": {"zero_optimization": {"stage": 1}, "optimizer": ADAM},
    "stage1-bf16": {"zero_optimization": {"stage": 1}, "optimizer": ADAM, "bf16": {"enabled": True}},
    "stage1-bf16-fp32sum": {
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage1-fp16": {"zero_optimization": {"stage": 1}, "optimizer": ADAM, "fp16": FP16},
    "stage2-bf16": {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "bf16": {"enabled": True}},
    "stage2-fp16": {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "fp16": FP16},
    "stage2-elastic": {
        "zero_optimization": {"stage": 2, "elastic_checkpoint": True},
        "optimizer": ADAM,
        "bf16": {"enabled": True},
    },
    "stage1-own-adam": {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "bf16": {"enabled": True},
    },
    "stage2-sgd": {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "bf16": {"enabled": True},
    },
    "stage0-fp32": {"zero_optimization": {"stage": 0}, "optimizer": ADAM},
}


class Model(nn.Module):
    """Odd sizes, a frozen parameter, buffers, tied weights, and two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.calls: Tensor
        self.shift: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, 7))
        self.body = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = self.norm(self.embed(tokens)) + self.shift.to(self.norm.weight.dtype)
        logits = self.head(self.frozen(torch.tanh(self.body(hidden))))
        return nn.functional.cross_entropy(logits.float(), (tokens + 1) % 11)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the others do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]


def tokens_of(step: int, rank: int) -> Tensor:
    """A batch, different on every rank."""
    return torch.randint(11, (4,), generator=torch.Generator().manual_seed(1000 * step + rank))


def patched() -> None:
    """Join the job, with a DeepSpeed that runs with the PyTorch of this library, on CPUs."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.comm.has_all_gather_into_tensor = lambda: False  # before 0.19 it writes into protected views
    get_accelerator().is_fp16_supported = lambda: True  # it is, slowly
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)


def main(out: Path, variant: str) -> None:
    """Train, save, and write what is expected."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    patched()
    torch.manual_seed(5)
    rank = torch.distributed.get_rank()
    model = Model()
    config = {**BASE, **VARIANTS[variant]}
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model),
        config=config,
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.9),
    )

    def step(number: int) -> float:
        loss = engine(tokens_of(number, rank))
        engine.backward(loss)
        engine.step()
        return float(loss)

    for number in range(STEPS):
        step(number)
    exclude = {"exclude_frozen_parameters": True} if variant == "stage2-fp16" else {}
    engine.save_checkpoint(out / variant, tag="last", client_state={"epoch": 7, "note": ["any", 1.5]}, **exclude)
    expected: dict[str, Any] = {"params": {}}
    for name, param in model.named_parameters():
        if param.requires_grad and "stage0" not in variant:
            expected["params"][name] = safe_get_full_fp32_param(param).clone()
    expected["losses"] = [step(STEPS + number) for number in range(MORE)]
    if rank == 0:
        torch.save(expected, out / f"{variant}.expected.pt")
        if "sgd" not in variant and "elastic" not in variant and "stage0" not in variant:
            convert(out / variant)
        (out / "version.json").write_text(json.dumps({"deepspeed": deepspeed.__version__, "torch": torch.__version__}))
    torch.distributed.destroy_process_group()


def convert(root: Path) -> None:
    """Let DeepSpeed write the checkpoint in its universal format next to it."""
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(root / "last"), "output_folder": str(root / "last_universal")}
    ds_to_universal(Namespace(**folders, **options, inject_missing_state=True))


def pack(out: Path, archive: Path) -> None:
    """Put what was written into one file, the same bytes for the same files."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.endswith((".py", ".log")):  # DeepSpeed leaves a script in each folder
            return None
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(out.iterdir()):
            file.add(path, path.name, filter=plain)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if sys.argv[1] == "--pack":
        pack(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
