"""Trainers of transformers beside each other."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ddp_zero.integrations.transformers import ZeroTrainerMixin
from tests.frameworks.job import Words, assert_moved, scale_on_a_cpu, values


def build_model() -> nn.Module:
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def arguments(folder: Path, **options: Any) -> Any:
    given = dict(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
        learning_rate=0.01,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return TrainingArguments(**copy.deepcopy(given | options))  # the Trainer writes to what it is given


def trained(
    kind: type, folder: Path, resume: str | bool | None = None, **options: Any
) -> tuple[Any, dict[str, Tensor], list[dict[str, float]]]:
    """A Trainer after its training, the parameters, and losses and norms of every log."""
    own = {name: options.pop(name) for name in ("zero", "optimizers", "optimizer_cls_and_kwargs") if name in options}
    model = build_model().to(options.pop("dtype", torch.float32))
    if "optimizers" in own:
        own["optimizers"] = (own["optimizers"](model), None)
    before = values(model)
    args = arguments(folder, **options)
    trainer = kind(model=model, args=args, train_dataset=Words(48), eval_dataset=Words(12), **own)
    trainer.train(resume_from_checkpoint=resume)
    after = values(model)
    assert_moved(before, after)
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    log = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
    return trainer, after, log


class Scaled(Trainer):
    """The Trainer with fp16 and a loss scale, as on a GPU."""

    initial = 1024.0

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        scale_on_a_cpu(self.accelerator, self.initial)


class ScaledZero(ZeroTrainerMixin, Scaled):
    """The same, sharded."""
