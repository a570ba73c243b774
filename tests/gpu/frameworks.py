"""Trainer, accelerate and Lightning beside their plain optimizers: ``python -m tests.gpu.frameworks RANKS DEVICE``.

Starts the ranks, each as the only one of a host. Prints a line for each comparison; the exit code is 1 if any differs.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.machines import share_gpus

STEPS = 6


def _values(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().float().cpu() for param in params]


def _trainer(precision: str, is_on_gpu: bool) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ddp_zero.integrations.transformers import ZeroTrainer

    draws = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(64)]
    data = [{"input_ids": one, "labels": one} for one in draws]
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    def trained(kind: Any, **more: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        options: dict[str, Any] = {} if precision == "fp32" else {precision: True}
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not is_on_gpu,
            ddp_backend=None if is_on_gpu else "gloo",
            ddp_find_unused_parameters=False,
            **options,
        )
        kind(model=model, args=arguments, train_dataset=data, **more).train()
        return _values(model.parameters())

    plain = trained(Trainer)
    stages = [(stage, trained(ZeroTrainer, zero={"stage": stage})) for stage in (1, 2)]
    return [(f"Trainer {precision}, clipped, stage {stage}", plain, found) for stage, found in stages]


def _pairs() -> torch.utils.data.TensorDataset:
    drawn = [torch.randn(64, width, generator=torch.Generator().manual_seed(width)) for width in (32, 2)]
    return torch.utils.data.TensorDataset(*drawn)


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))


def _accelerate(precision: str, is_on_gpu: bool) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from ddp_zero.integrations.accelerate import prepare

    def trained(stage: int | None) -> list[Tensor]:
        AcceleratorState._reset_state()
        accelerator = Accelerator(mixed_precision=precision, cpu=not is_on_gpu)
        model: Any = _layers()
        data: Any = torch.utils.data.DataLoader(_pairs(), batch_size=4)
        if stage is None:
            built = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, data = accelerator.prepare(model, built, data)
        else:
            model, optimizer, data = prepare(accelerator, model, torch.optim.AdamW, data, stage=stage, lr=1e-2)
        for inputs, targets in data:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return _values(model.parameters())

    plain = trained(None)
    return [(f"accelerate {precision}, clipped, stage {stage}", plain, trained(stage)) for stage in (1, 2)]


def _lightning(precision: str, is_on_gpu: bool, ranks: int) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    import lightning

    from ddp_zero.integrations.lightning import ZeroDDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trained(strategy: Any) -> list[Tensor]:
        module = Module()
        lightning.Trainer(
            strategy=strategy,
            accelerator="gpu" if is_on_gpu else "cpu",
            devices=1,
            num_nodes=ranks,
            precision=precision,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            gradient_clip_val=1.0,
        ).fit(module, torch.utils.data.DataLoader(_pairs(), batch_size=4))
        return _values(module.parameters())

    return [(f"Lightning {precision}, clipped, stage 2", trained("ddp"), trained(ZeroDDPStrategy(stage=2)))]


def _train_all(rank: int, ranks: int, is_on_gpu: bool) -> int:
    """What one rank does; 1 if anything differs."""
    warnings.filterwarnings("ignore")
    if is_on_gpu:
        share_gpus(rank, ranks)
        torch.cuda.set_device(0)
    half = "fp16" if is_on_gpu else "bf16"  # the CPU has no scaler in Lightning and accelerate
    jobs: list[Callable[[], list[tuple[str, list[Tensor], list[Tensor]]]]] = [
        *(partial(_trainer, precision, is_on_gpu) for precision in ("fp32", "bf16", *(["fp16"] if is_on_gpu else []))),
        partial(_accelerate, half, is_on_gpu),
        partial(_lightning, "16-mixed" if is_on_gpu else "bf16-mixed", is_on_gpu, ranks),
    ]
    wrong = 0
    for job in jobs:
        try:
            compared = job()
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:400]}", flush=True)
            return 1  # the other ranks may be anywhere
        for name, plain, found in compared:
            largest = max((one - other).abs().max().item() for one, other in zip(plain, found, strict=True))
            wrong += largest > 0
            if rank == 0:
                print(f"{name}: {f'differs by {largest:.2g}' if largest else 'equal'}", flush=True)
    return int(wrong > 0)


def main() -> int:
    """The command; within a rank's environment, that rank."""
    ranks, device = int(sys.argv[1]), sys.argv[2]
    if "RANK" in os.environ:
        code = _train_all(int(os.environ["RANK"]), ranks, device == "cuda")
        os._exit(code)  # threads of process groups live as long as anything refers to them
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    command = [sys.executable, "-m", "tests.gpu.frameworks", *sys.argv[1:]]
    started = []
    for rank in range(ranks):
        own = {**job, "RANK": rank, "GROUP_RANK": rank, "NODE_RANK": rank}
        started.append(subprocess.Popen(command, env={**os.environ, **{name: str(one) for name, one in own.items()}}))
    codes = list[int]()
    try:
        while len(codes) < ranks and not any(codes):
            codes = [ended for one in started if (ended := one.poll()) is not None]
            time.sleep(0.1)
    finally:
        for one in started:
            one.kill()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
