"""LoRA by PEFT: a frozen base and trained adapters, next to DDP with the plain optimizer."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.checkpoint.rows import SavedCheckpoint
from tests.multiproc.cases import assert_equal_models, step_on
from tests.multiproc.harness import Setup, run_ranks

STEPS = 5


def build_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model: nn.Module = get_peft_model(GPT2LMHeadModel(config), lora)
    return model


def train(setup: Setup, model: DistributedDataParallel, opt: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + setup.rank)
        tokens = torch.randint(0, 64, (3, 12), generator=generator)
        step_on(opt, model(input_ids=tokens, labels=tokens).loss)


def _trains(setup: Setup) -> None:
    warnings.simplefilter("ignore")  # of other libraries
    base = build_model()
    before = {name: param.detach().clone() for name, param in base.named_parameters()}
    plain = DistributedDataParallel(copy.deepcopy(base), gradient_as_bucket_view=True)
    train(setup, plain, AdamW((p for p in plain.parameters() if p.requires_grad), lr=0.01), range(STEPS))
    for mode in ("standalone", "stage 1", "stage 2", "all parameters"):
        model = DistributedDataParallel(copy.deepcopy(base), gradient_as_bucket_view=True)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        opt: ZeroRedundancyOptimizer
        if mode == "standalone":
            opt = ZeroRedundancyOptimizer([param for _, param in trained], AdamW, lr=0.01)
        elif mode == "all parameters":  # the frozen ones, too: nothing of them is kept or sent
            opt = shard_optimizer(model, AdamW, stage=2, lr=0.01)
        else:
            opt = shard_optimizer(model, AdamW, params=trained, stage=int(mode[-1]), lr=0.01)
        train(setup, model, opt, range(3))
        checkpoint.save(setup.folder / mode, model, opt)
        train(setup, model, opt, range(3, STEPS))
        assert_equal_models(plain, model, mode)
        for name, param in model.module.named_parameters():
            assert torch.equal(param, before[name]) is not param.requires_grad, f"{mode}, {name}"
        assert 0 < len(opt.state) < len(trained), f"{mode}: state of {len(opt.state)} parameters"


def test_adapters_are_trained_and_the_base_is_left_alone() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    run_ranks(_trains, 2)


def _in_the_trainer(setup: Setup) -> None:
    from tests.frameworks.job import as_a_job

    as_a_job(setup, _trains_in_the_trainer)


def _trains_in_the_trainer(setup: Setup) -> None:
    from transformers import Trainer, TrainingArguments

    from ddp_zero.integrations.transformers import ZeroTrainer
    from tests.frameworks.job import Words, assert_equal, values

    def trained(kind: type, **own: Any) -> dict[str, torch.Tensor]:
        model = build_model()
        args = TrainingArguments(
            output_dir=str(setup.folder / kind.__name__), max_steps=4, per_device_train_batch_size=3, use_cpu=True,
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no", learning_rate=0.01,
        )  # fmt: skip
        trainer = kind(model=model, args=args, train_dataset=Words(48), **own)
        before = values(model)
        trainer.train()
        after = values(model)
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved == {name for name in before if "lora_" in name}
        return after

    expected = trained(Trainer)
    for stage in (1, 2):
        assert_equal(expected, trained(ZeroTrainer, zero={"stage": stage}), f"stage {stage}")
    check_checkpoints(setup, expected)


def check_checkpoints(setup: Setup, expected: dict[str, torch.Tensor]) -> None:
    """A checkpoint leaves the frozen base out, or holds it if told to; a resumed training ends the same."""
    from transformers import TrainingArguments

    from ddp_zero.integrations.transformers import FOLDER, ZeroTrainer
    from tests.frameworks.job import Words, assert_equal, values

    def trainer(name: str, **own: Any) -> Any:
        args = TrainingArguments(
            output_dir=str(setup.folder / name), max_steps=4, per_device_train_batch_size=3, use_cpu=True,
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False, save_steps=2, learning_rate=0.01,
        )  # fmt: skip
        return ZeroTrainer(model=build_model(), args=args, train_dataset=Words(48), zero={"stage": 2}, **own)

    frozen_in = {}
    for name, own in {"default": {}, "kept": {"exclude_frozen": False}}.items():
        trainer(name, **own).train()
        saved = SavedCheckpoint.open(setup.folder / name / "checkpoint-2" / FOLDER)
        frozen_in[name] = [key for key in saved.model if "lora_" not in key]
        assert any("lora_" in key for key in saved.model)
        resumed = trainer(name, **own)
        before = values(resumed.model)
        resumed.train(resume_from_checkpoint=str(setup.folder / name / "checkpoint-2"))
        after = values(resumed.model)
        assert any(not torch.equal(before[key], value) for key, value in after.items())
        assert_equal(expected, after, f"resumed, frozen parameters: {name}")
    assert not frozen_in["default"]
    assert frozen_in["kept"]


def test_adapters_in_the_trainer() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run_ranks(_in_the_trainer, 2)
