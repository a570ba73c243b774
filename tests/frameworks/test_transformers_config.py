"""`ZeroTrainer` with a DeepSpeed configuration: ``"auto"``, and the file's optimizer and schedule or the Trainer's."""

import json
import logging
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.job import Words, as_a_job, assert_equal, values
from tests.multiproc.harness import Cases, Setup
from tests.pages import DOCS
from tests.unit.checkpoint.foreign.written import FILTER

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from transformers import Trainer

from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.schedules import Schedule, build_curve, build_schedule
from ddp_zero.integrations.transformers import ZeroTrainer
from tests.frameworks.trainers import Scaled, ScaledZero, arguments, build_model, trained
from tests.frameworks.write_trainer_checkpoints import COMMON, CONFIGS, OPTIONS, SAVED, STEPS

case = Cases(as_a_job, timeout=240)

ARCHIVE = Path(__file__).parent / "trainer-deepspeed.tar.xz"

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
    schedule = build_schedule("WarmupDecayLR", params, plain)
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


class ByHand(torch.optim.AdamW):
    """AdamW over fp32 copies of fp16 parameters, clipped; a loss scale that is halved at an overflow."""

    def __init__(self, params: Iterable[nn.Parameter], scale: float, clip: float, **options: Any) -> None:
        self.low = list(params)
        super().__init__([nn.Parameter(param.detach().float()) for param in self.low], **options)
        self.scale, self.clip, self.skipped, self.has_skipped = scale, clip, 0, False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for master, param in zip(masters, self.low, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() * (1 / self.scale)
        self.has_skipped = not all(bool(torch.isfinite(master.grad).all()) for master in masters)
        if self.has_skipped:
            self.scale, self.skipped = self.scale / 2, self.skipped + 1
            return
        nn.utils.clip_grad_norm_(masters, self.clip)
        super().step()
        with torch.no_grad():
            for master, param in zip(masters, self.low, strict=True):
                param.copy_(master)


class Waiting(Schedule):
    """The schedule of `ByHand`, which waits where a step was skipped."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        assert isinstance(self.optimizer, ByHand)
        if not self.optimizer.has_skipped:
            super().step(last_batch_iteration)


def by_hand(kind: type[Trainer], setup: Setup, **options: Any) -> tuple[Any, ByHand]:
    """A trained Trainer with DDP, and nothing of this library but the curve of the rate."""
    model = build_model().half()
    optimizer = ByHand(model.parameters(), 2.0**24, 0.5, lr=0.02, weight_decay=0.1)
    curve = build_curve("WarmupDecayLR", {"total_num_steps": 14, "warmup_num_steps": 2, "warmup_max_lr": 0.02})
    args = arguments(setup.folder / "plain", **{**options, "max_grad_norm": 0.0})
    pair = (optimizer, Waiting(optimizer, curve))
    trainer: Any = kind(model=model, args=args, train_dataset=Words(48), optimizers=pair)
    plain, trainer.accelerator.scaler = trainer.accelerator.backward, None
    trainer.accelerator.backward = lambda loss, **kwargs: plain(loss * optimizer.scale, **kwargs)
    trainer._get_grad_norm = lambda *_, **__: None  # it scales by inf / norm, which is NaN where fp16 overflows
    trainer.train()
    return trainer, optimizer


@case(2)
def _an_fp16_model_has_masters_and_the_loss_scale_of_the_file(setup: Setup) -> None:
    """The first scale is far too large: steps are skipped, and the schedule waits, until it fits."""
    options: dict[str, Any] = {"fp16": True, "max_grad_norm": 0.5, "warmup_steps": 2, "learning_rate": 0.02}
    options |= {"max_steps": 14, "save_strategy": "steps", "save_steps": 4}
    fp16 = {"enabled": "auto", "initial_scale_power": 24, "hysteresis": 1}
    for stage, plain, kind in ((1, Trainer, ZeroTrainer), (2, Scaled, ScaledZero)):
        zero = {"stage": stage}
        file = written(setup, fp16=fp16, zero_optimization=zero, optimizer=ADAMW, scheduler=DECAY)
        reference, optimizer = by_hand(plain, setup, **options)
        assert 4 < optimizer.skipped < 12, optimizer.skipped
        name = f"ours-{stage}"
        for start in (None, str(setup.folder / name / "checkpoint-4")):
            folder = setup.folder / (name if start is None else f"again-{stage}")
            trainer, actual, log = trained(kind, folder, start, zero=file, **options)
            assert_equal(values(reference.model), actual, f"stage {stage} from {start}")
            assert trainer.zero_optimizer.loss_scale == optimizer.scale
            rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
            expected = [one["learning_rate"] for one in reference.state.log_history if "learning_rate" in one]
            assert rates == expected
            assert rates.count(rates[0]) > optimizer.skipped, "the schedule waits"
            assert trainer.accelerator.scaler is None


@case(2)
def _a_run_of_the_trainer_with_deepspeed_goes_on(setup: Setup) -> None:
    """With its losses, norms and rates; at the checkpoint's stage and the other one."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(setup.folder / f"theirs-{setup.rank}", **FILTER)
    dist.barrier()
    for name, config in CONFIGS.items():
        start = setup.folder / "theirs-0" / name
        theirs = json.loads((start / "log.json").read_text())[SAVED:]
        for stage in (1, 2):
            file = setup.folder / f"theirs-{setup.rank}.json"
            file.write_text(json.dumps({**config, "zero_optimization": {"stage": stage}}))
            options = {**COMMON, **OPTIONS[name]}
            trainer, _, log = trained(Noting, setup.folder / "ours", str(start), zero=str(file), **options)
            ours = [entry for entry in log if "loss" in entry and entry["step"] > SAVED]
            assert len(ours) == len(theirs) == STEPS - SAVED
            for one, other in zip(ours, theirs, strict=True):
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-4), (name, stage)
                assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-3), (name, stage)
            taken = [0.01 * part for part in (1.0, 0.75, 0.5)] if "scheduler" in config else [0.0075, 0.005, 0.0025]
            assert trainer.rates == pytest.approx(taken), (name, stage)


class Noting(ZeroTrainer):
    """Notes the rate of every step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.rates: list[float] = [*getattr(self, "rates", []), self.optimizer.param_groups[0]["lr"]]
        return super().training_step(*args, **kwargs)


@case(2)
def _a_folder_without_state_raises_on_every_rank(setup: Setup) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    for stage in (1, 2):
        zero, folder = {"stage": stage}, setup.folder / f"stage-{stage}"
        trained(ZeroTrainer, folder, zero=zero, **options)
        start = folder / "checkpoint-2"
        dist.barrier()
        if setup.rank == 0:
            shutil.rmtree(start / "zero")
        dist.barrier()
        with pytest.raises(ValueError, match=r"Expected an optimizer's state in .*checkpoint-2.*from_pretrained"):
            trained(ZeroTrainer, setup.folder / "again", str(start), zero=zero, **options)
        if setup.rank == 0:
            (start / "global_step2").mkdir()
        dist.barrier()
        with pytest.raises(ValueError, match=r"Expected a file latest in .*checkpoint-2"):
            trained(ZeroTrainer, setup.folder / "again", str(start), zero=zero, **options)
        dist.barrier()


@case(2)
def _clipping_is_that_of_the_file_or_of_deepspeed(setup: Setup) -> None:
    file = setup.folder / f"unclipped-{setup.rank}.json"
    document = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "steps_per_print": 10}
    file.write_text(json.dumps(document))
    with mock.patch.object(logging.getLogger("ddp_zero"), "warning") as warning:
        _, actual, log = trained(ZeroTrainer, setup.folder / "ours", zero=str(file), max_grad_norm=0.25)
    said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert sum("DeepSpeed's default 1.0 applies instead of max_grad_norm = 0.25" in line for line in said) == (
        setup.rank == 0
    )
    assert sum(line.startswith("steps_per_print: no effect in the Trainer") for line in said) == (setup.rank == 0)
    _, expected, plain_log = trained(Trainer, setup.folder / "plain", max_grad_norm=1.0)
    assert_equal((expected, plain_log), (actual, log), "DeepSpeed's default")
    assert max(entry["grad_norm"] for entry in log if "grad_norm" in entry) > 1.0, "nothing was clipped"


@case(2)
def _a_flag_of_the_training_arguments_is_refused(setup: Setup) -> None:
    args = arguments(setup.folder / "ours")
    args.deepspeed = "ds.json"  # as TrainingArguments of a job that has DeepSpeed
    with pytest.raises(TypeError, match=r"does not read TrainingArguments\(deepspeed='ds.json'\).*zero="):
        ZeroTrainer(model=build_model(), args=args, train_dataset=Words(48))


@case(2)
def _what_contradicts_the_arguments_is_listed(setup: Setup) -> None:
    file = written(setup, train_batch_size=7, optimizer={"type": "AdamW", "params": {"lr": 1.0}})
    with pytest.raises(ConfigError) as raised:
        trained(ZeroTrainer, setup.folder / "ours", zero=file)
    assert "train_batch_size = 7, but" in str(raised.value)
    assert "optimizer.params.lr = 1.0, but learning_rate = 0.01" in str(raised.value)
    for contradiction, options, said in (
        ({"zero_optimization": {"stage": 3}}, {}, "FSDP2"),
        ({"optimizer": ADAMW}, {"optim": "adafactor"}, r"optim='adafactor'.*ZERO-707"),
        ({"zero_optimization": {"stage": 1}, "communication_data_type": "bf16"}, {}, r"in stage 1.*ZERO-911"),
    ):
        with pytest.raises(ConfigError, match=said):
            trained(ZeroTrainer, setup.folder / "ours", zero=written(setup, **contradiction), **options)


def test_a_scripts_flag_is_read_as_the_page_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    typed = re.search(r"flag first: `(.+?)`, then\s+`(.+?)`", (DOCS / "frameworks.md").read_text(), re.DOTALL)
    assert typed is not None
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", str(tmp_path), "--deepspeed", "ds.json", "--use_cpu"])
    names: dict[str, Any] = {}
    exec("from argparse import ArgumentParser; from transformers import HfArgumentParser, TrainingArguments", names)
    exec(typed[1], names)
    (args,) = eval(typed[2], names)
    assert names["known"].deepspeed == "ds.json"
    assert args.deepspeed is None
    assert args.output_dir == str(tmp_path)


test_transformers_config = case.each()
