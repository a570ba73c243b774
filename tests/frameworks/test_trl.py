"""TRL's SFTTrainer behind `ZeroTrainerMixin`, next to itself with DDP alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.job import as_a_job, assert_equal, assert_moved, values
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ddp_zero.integrations.transformers import ZeroTrainerMixin
from tests.frameworks.trainers import build_model

case = Cases(as_a_job, timeout=240)


class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):
    """As docs/frameworks.md writes it."""


def train(kind: type, folder: Path, **own: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The parameters after a training on random words, and the losses of its log."""
    tokenizer = Tokenizer(
        WordLevel({"<end>": 0, **{f"w{number}": number for number in range(1, 64)}}, unk_token="<end>")
    )
    tokenizer.pre_tokenizer = Whitespace()
    rows = torch.randint(1, 64, (48, 8), generator=torch.Generator().manual_seed(0)).tolist()
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=3,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_length=16,
    )
    model = build_model()
    before = values(model)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"text": [" ".join(f"w{word}" for word in row) for row in rows]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"),
        **own,
    )
    trainer.train()
    assert_moved(before, values(model))
    return values(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@case(2)
def _both_stages_equal_the_trainer_with_ddp(setup: Setup) -> None:
    expected = train(SFTTrainer, setup.folder / "plain")
    assert len(expected[1]) == 4
    for stage in (1, 2):
        assert_equal(expected, train(ZeroSFTTrainer, setup.folder / "ours", zero={"stage": stage}), f"stage {stage}")


test_trl = case.each()
