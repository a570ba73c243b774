"""Supervised fine-tuning by the Trainer of transformers: prompts are masked, the rate warms up and decays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, PROMPT, STEPS = 32, 12, 4, 8


class Conversations(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) * (index % 7 + 1) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) < PROMPT, -100)}


class EndAt(TrainerCallback):
    """Saves and ends early, as a job whose time is over."""

    def __init__(self, steps: int, log: Callable[[float], None]) -> None:
        self.steps, self.log = steps, log

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.steps:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
            if name in logs:
                self.log(logs[name])


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    model: Any = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        bf16=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data, callbacks = Conversations(), [EndAt(steps, log)]
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return [model]
