"""Trains a small GPT-2 of transformers on the text of this repository, in stage 2, and resumes where it was stopped.

    pip install -e '.[transformers]'
    torchrun --standalone --nproc-per-node=2 examples/train_transformers.py
    torchrun --standalone --nproc-per-node=3 examples/train_transformers.py --resume --steps 200

Nothing is downloaded: the model is built from a configuration, and a token is a byte.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ddp_zero.integrations.transformers import ZeroTrainer

DOCS = Path(__file__).parents[1] / "docs"
LENGTH = 64


class Pieces(Dataset[dict[str, Tensor]]):
    """Text in pieces of equal length, a byte a token."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.tensor(list(text), dtype=torch.long)
        self._pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--out", default="runs/transformers")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        save_steps=50,
        save_total_limit=2,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
    trainer = ZeroTrainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Pieces(text), zero={"stage": options.stage}
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    if trainer.is_world_process_zero():
        print(trainer.zero_optimizer.explain())


if __name__ == "__main__":
    main()
