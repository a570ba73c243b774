"""`ZeroTrainer` with a DeepSpeed configuration: ``"auto"``, and the file's optimizer and schedule or the Trainer's."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frameworks.job import Words, as_a_job, assert_equal, values
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from transformers import Trainer

from ddp_zero.deepspeed.schedules import build_schedule
from ddp_zero.dsconfig.keys import ConfigError
from ddp_zero.dsconfig.sections import SchedulerSection
from ddp_zero.integrations.transformers import ZeroTrainer
from tests.frameworks.test_transformers import arguments, build_model, trained

case = Cases(as_a_job, timeout=240)

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}


def written(setup: Setup, **more: Any) -> str:
    """The configuration in a file of this rank."""
    file = setup.folder / f"ds_config-{setup.rank}.json"
    file.write_text(json.dumps({**AUTO, **more}))
    return str(file)


@case(2)
def _with_the_trainers_own_optimizer_and_schedule(setup: Setup) -> None:
    recipes: dict[int, dict[str, Any]] = {
        1: {"max_grad_norm": 0.5},
        2: {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
    }
    for stage, recipe in recipes.items():
        zero = {"stage": stage, "reduce_bucket_size": "auto", "overlap_comm": True}
        file = written(setup, zero_optimization=zero)
        _, expected, log = trained(Trainer, setup.folder / "plain", **recipe)
        trainer, actual, our_log = trained(ZeroTrainer, setup.folder / "ours", zero=file, **recipe)
        assert_equal((expected, log), (actual, our_log), f"stage {stage}")
        assert trainer.zero_optimizer.stage == stage


@case(2)
def _with_the_optimizer_and_the_schedule_of_the_file(setup: Setup) -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.5, "warmup_steps": 2, "learning_rate": 0.02}
    file = written(setup, zero_optimization={"stage": 2}, optimizer=ADAMW, scheduler=DECAY)
    model = build_model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    params = {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_max_lr": 0.02}
    schedule = build_schedule(SchedulerSection("WarmupDecayLR", params), plain)
    reference = Trainer(
        model=model,
        args=arguments(setup.folder / "plain", **options),
        train_dataset=Words(48),
        optimizers=(plain, schedule),
    )
    reference.train()
    trainer, actual, log = trained(ZeroTrainer, setup.folder / "ours", zero=file, **options)
    assert_equal(values(model), actual, "parameters")
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    expected = [entry["learning_rate"] for entry in reference.state.log_history if "learning_rate" in entry]
    assert rates == expected
    assert len(set(rates)) > 1
    assert len(trainer.zero_optimizer.param_groups) == 1


@case(2)
def _a_bf16_model_has_masters_and_resumes(setup: Setup) -> None:
    options: dict[str, Any] = {"bf16": True, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    file = written(setup, zero_optimization={"stage": 2}, optimizer=ADAMW, scheduler=DECAY)
    trainer, expected, log = trained(ZeroTrainer, setup.folder / "whole", zero=file, **options)
    assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.zero_optimizer.master_weights
    start = str(setup.folder / "whole" / "checkpoint-2")
    _, actual, again = trained(ZeroTrainer, setup.folder / "resumed", start, zero=file, **options)
    assert_equal(expected, actual, "parameters")
    assert_equal(log, again, "log")


@case(2)
def _what_contradicts_the_arguments_is_listed(setup: Setup) -> None:
    file = written(setup, train_batch_size=7, optimizer={"type": "AdamW", "params": {"lr": 1.0}})
    with pytest.raises(ConfigError) as raised:
        trained(ZeroTrainer, setup.folder / "ours", zero=file)
    assert "train_batch_size = 7, but" in str(raised.value)
    assert "optimizer.params.lr = 1.0, but learning_rate = 0.01" in str(raised.value)
    with pytest.raises(ConfigError, match="FSDP2"):
        trained(ZeroTrainer, setup.folder / "ours", zero=written(setup, zero_optimization={"stage": 3}))


@case.each
def test_transformers_config(run: Callable[[], None]) -> None:
    run()
