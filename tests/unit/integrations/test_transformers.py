"""`ZeroTrainer` with stand-ins for transformers and accelerate: options, clipping, schedules, checkpoints, refusals."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from tests import internals
from tests.unit.integrations.stand_ins import (
    AcceleratedOptimizer,
    DistributedDataParallelKwargs,
    ParallelMode,
    imported,
)


class Zero:
    def __init__(self, params: Any = (), optimizer_class: Any = SGD, **options: Any) -> None:
        self.params, self.kind, self.options = list(params), optimizer_class, options
        self.master_weights = False
        self.last_step: Any = None
        self.calls: list[Any] = []
        self.decision = SimpleNamespace(
            options=SimpleNamespace(max_grad_norm=options.get("max_grad_norm")), clips_as_torch=False
        )

    def attach(self, model: Any) -> None:
        self.calls.append(("attach", model))

    def accumulate(self) -> Any:
        self.calls.append("accumulate")
        return nullcontext()

    def clip_grad_norm_(self, limit: float) -> str:
        self.calls.append(("clip", limit))
        return "whole norm"

    def scale(self, loss: float) -> float:
        return loss * 8

    def refresh_master_weights(self) -> None:
        self.calls.append("refresh")


def arguments(**given: Any) -> Any:
    known: dict[str, Any] = {
        "parallel_mode": ParallelMode.DISTRIBUTED,
        "max_grad_norm": 1.0,
        "optim": SGD,
        "learning_rate": 0.25,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        **{"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.125},
        **{"fp16": False, "bf16": False, "get_warmup_steps": lambda steps: steps // 10},
    }
    return SimpleNamespace(**(known | given))


class Job:
    """The integration, and what it has saved and loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = imported("transformers", monkeypatch)
        self.folders: list[Any] = []
        monkeypatch.setattr(self.module, "ZeroRedundancyOptimizer", Zero)
        monkeypatch.setattr(self.module, "checkpoint", SimpleNamespace(save=self.save, load=self.load))
        monkeypatch.setattr(self.module, "unwrap", lambda one: getattr(one, "optimizer", one))
        monkeypatch.setattr(self.module, "engine_of", lambda zero: SimpleNamespace(decision=zero.decision))
        alone = SimpleNamespace(all_gather_ints=lambda mine: [mine])
        monkeypatch.setattr(self.module, "shard_of", lambda zero: SimpleNamespace(comm=alone))
        monkeypatch.setattr(self.module, "get_world_size", lambda: 2)
        monkeypatch.setattr(self.module, "get_rank", lambda: 0)

    def save(self, folder: Path, model: Any, opt: Any, **options: Any) -> None:
        self.folders.append(("save", folder, model, opt, options))

    def load(self, folder: Path, model: Any, opt: Any) -> Any:
        self.folders.append(("load", folder, model, opt))
        return SimpleNamespace(extra={"scheduler": "saved"})

    def trainer(self, args: Any = None, **options: Any) -> Any:
        trainer = self.module.ZeroTrainer(arguments() if args is None else args, **options)
        trainer.model = trainer.model_wrapped = nn.Linear(2, 2)
        return trainer


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


# Building


@pytest.mark.parametrize(
    ("limit", "zero", "options"),
    [
        (1.0, {}, {"overlap_with_ddp": True, "parameters_as_bucket_view": True, "max_grad_norm": 1.0}),
        (0.0, {}, {"overlap_with_ddp": True, "parameters_as_bucket_view": True, "max_grad_norm": None}),
        (
            1.0,
            {"stage": 2, "overlap_with_ddp": False, "max_grad_norm": 3.0},
            {"stage": 2, "overlap_with_ddp": False, "parameters_as_bucket_view": True, "max_grad_norm": 3.0},
        ),
    ],
)
def test_the_trainers_optimizer_is_sharded_with_its_options_and_the_users(
    job: Job, limit: float, zero: Any, options: Any
) -> None:
    trainer = job.trainer(arguments(max_grad_norm=limit), zero=zero)
    built = trainer.create_optimizer()
    assert built.kind is SGD
    assert built.options == {"lr": 0.25, **options}
    assert len(built.params) == 2
    assert trainer.optimizer_cls_and_kwargs is None, "the Trainer's own attribute is what it was"
    assert trainer.create_optimizer() is built, "built once"


def test_a_subclass_of_the_trainer_is_sharded_by_the_mixin_before_it(job: Job) -> None:
    class Own(job.module.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any, args: Any, *, peft_config: Any = None, **options: Any) -> None:
            super().__init__(args, **options)
            self.peft_config = peft_config

    class ZeroOwn(job.module.ZeroTrainerMixin, Own):  # type: ignore[misc, name-defined]
        pass

    model = nn.Linear(2, 2)
    trainer = ZeroOwn(model, arguments(), peft_config="own", zero={"stage": 2})
    trainer.model = model
    assert (trainer.create_optimizer().options["stage"], trainer.peft_config) == (2, "own")


def test_a_chosen_class_is_sharded_and_stays_the_choice_even_if_it_cannot_be_built(job: Job) -> None:
    chosen = (AdamW, {"lr": 0.5})
    trainer = job.trainer(optimizer_cls_and_kwargs=chosen, zero={"stage": 2})
    assert (trainer.create_optimizer().kind, trainer.optimizer.options["lr"]) == (AdamW, 0.5)
    trainer = job.trainer(optimizer_cls_and_kwargs=chosen, zero={"optimizer_class": 1, "params": 2})
    with pytest.raises(TypeError):
        trainer.create_optimizer()
    assert trainer.optimizer_cls_and_kwargs is chosen


def test_an_optimizer_of_the_users_own_is_neither_built_nor_sharded_again(job: Job) -> None:
    trainer, own = job.trainer(), Zero()
    trainer.optimizer = own
    assert trainer.create_optimizer() is own
    assert trainer.zero_optimizer is own
    trainer.optimizer = AcceleratedOptimizer(own)
    assert trainer.zero_optimizer is own


def test_an_optimizer_that_is_not_sharded_is_refused_with_its_name(job: Job) -> None:
    trainer = job.trainer()
    trainer.optimizer = SGD(trainer.model.parameters())
    with pytest.raises(TypeError, match=r"got SGD.*optimizer_cls_and_kwargs=.*\[ZERO-911\]"):
        _ = trainer.zero_optimizer


def test_a_job_of_one_process_is_refused(job: Job) -> None:
    trainer = job.trainer(arguments(parallel_mode=ParallelMode.NOT_DISTRIBUTED))
    with pytest.raises(RuntimeError, match=r"several processes, got .*NOT_DISTRIBUTED.*torchrun.*\[ZERO-911\]"):
        trainer.create_optimizer()


class Adam8bit(SGD):
    """As those of bitsandbytes."""

    __module__ = "bitsandbytes.optim"


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ((lambda params: SGD(params), {}), r"Expected an optimizer class.*\[ZERO-911\]"),
        ((nn.Linear, {}), r"Expected an optimizer class.*\[ZERO-911\]"),
        ((Adam8bit, {"optim_bits": 8}), r"8-bit optimizers of bitsandbytes.*\[ZERO-911\]"),
    ],
)
def test_an_optimizer_of_a_whole_model_is_refused(job: Job, chosen: Any, error: str) -> None:
    with pytest.raises(NotImplementedError, match=error):
        job.trainer(optimizer_cls_and_kwargs=chosen).create_optimizer()


def test_an_optimizer_of_bitsandbytes_in_32_bits_is_sharded(job: Job) -> None:
    assert job.trainer(optimizer_cls_and_kwargs=(Adam8bit, {"optim_bits": 32})).create_optimizer().kind is Adam8bit


def test_the_model_is_wrapped_with_views(job: Job) -> None:
    other = object()
    given = job.trainer().accelerator_args(kwargs_handlers=[other, DistributedDataParallelKwargs(7)], more=1)
    assert given == {"kwargs_handlers": [other, DistributedDataParallelKwargs(7, True)], "more": 1}


def prepared(job: Job, **options: Any) -> tuple[Any, Zero]:
    """A trainer whose optimizer is wrapped by accelerate, at the start of training."""
    trainer = job.trainer(**options)
    zero = trainer.create_optimizer()
    trainer.optimizer = AcceleratedOptimizer(zero)
    trainer.begin_training(10)
    return trainer, zero


def test_the_hook_is_registered_once_for_each_model(job: Job) -> None:
    trainer, zero = prepared(job)
    first = trainer.model_wrapped
    trainer.begin_training(10)
    assert zero.calls == [("attach", first)]
    trainer.model_wrapped = nn.Linear(2, 2)
    trainer.begin_training(10)
    assert zero.calls == [("attach", first), ("attach", trainer.model_wrapped)]
    assert zero.decision.clips_as_torch


# A step


@pytest.mark.parametrize("syncs", [True, False])
def test_passes_before_a_step_accumulate(job: Job, syncs: bool) -> None:
    trainer, zero = prepared(job)
    trainer.accelerator.gradient_state.sync_gradients = syncs
    zero.calls.clear()
    assert trainer.training_step() == "loss"
    assert zero.calls == ([] if syncs else ["accumulate"])


def test_gradients_are_clipped_once_inside_the_step_or_before_it(job: Job) -> None:
    trainer, zero = prepared(job)
    zero.calls.clear()
    assert trainer.clip_before_step() is None
    assert zero.calls == []
    trainer, zero = prepared(job, zero={"max_grad_norm": None})
    zero.calls.clear()
    assert trainer.clip_before_step() == "whole norm"
    assert zero.calls == [("clip", 1.0)]


@pytest.mark.parametrize(
    ("given", "should_log", "last_step", "logged"),
    [
        (None, True, SimpleNamespace(grad_norm=2.5), 2.5),
        (None, True, None, None),
        (None, False, SimpleNamespace(grad_norm=2.5), None),
        (1.5, True, SimpleNamespace(grad_norm=2.5), 1.5),
    ],
)
def test_the_norm_of_the_step_is_logged(job: Job, given: Any, should_log: bool, last_step: Any, logged: Any) -> None:
    trainer, zero = prepared(job)
    trainer.control, zero.last_step = SimpleNamespace(should_log=should_log), last_step
    trainer.end_step(given)
    assert trainer.calls[-1] == ("log", logged)


# Checkpoints


@pytest.mark.parametrize(
    ("asked", "is_peft", "leaves_out"),
    [(None, False, False), (None, True, True), (False, True, False), (True, False, True)],
)
def test_a_checkpoint_has_the_schedule_and_leaves_out_a_frozen_base(
    job: Job, tmp_path: Path, asked: bool | None, is_peft: bool, leaves_out: bool
) -> None:
    trainer, zero = prepared(job, exclude_frozen=asked)
    trainer.model.is_peft = is_peft
    trainer.lr_scheduler = SimpleNamespace(state_dict=lambda: "the schedule")
    trainer.state = SimpleNamespace(global_step=7)
    trainer.save(tmp_path)
    options = {"extra": {"scheduler": "the schedule"}, "step": 7, "keep": 1, "exclude_frozen": leaves_out}
    assert job.folders == [("save", tmp_path / "zero", trainer.model_wrapped, zero, options)]


def test_a_sharded_checkpoint_is_loaded_with_its_schedule(job: Job, tmp_path: Path) -> None:
    trainer, zero = prepared(job)
    loaded: list[Any] = []
    trainer.lr_scheduler = SimpleNamespace(load_state_dict=loaded.append)
    (tmp_path / "zero").mkdir()
    trainer.resume(tmp_path)
    assert job.folders == [("load", tmp_path / "zero", trainer.model_wrapped, zero)]
    assert loaded == ["saved"]
    assert ("load", str(tmp_path)) not in trainer.calls


@pytest.mark.parametrize("has_masters", [True, False])
def test_a_plain_checkpoint_and_the_best_model_are_loaded_by_the_trainer_and_masters_follow(
    job: Job, tmp_path: Path, has_masters: bool
) -> None:
    trainer, zero = prepared(job)
    zero.master_weights = has_masters
    (tmp_path / "optimizer.pt").touch()
    trainer.resume(tmp_path)
    assert trainer.calls[-1] == ("load", str(tmp_path))
    assert zero.calls.count("refresh") == int(has_masters)
    trainer.end_training()
    assert zero.calls.count("refresh") == 2 * int(has_masters)
    assert not job.folders


def test_without_a_checkpoint_nothing_is_loaded_or_attached(job: Job) -> None:
    trainer = job.trainer()
    trainer.resume(None)
    assert not trainer.calls


# A DeepSpeed configuration


AUTO = "auto"
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), AUTO),
}


def written(folder: Path, **document: Any) -> Path:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(document))
    return file


def configured(job: Job, folder: Path, **document: Any) -> Any:
    """A trainer whose configuration is complete, as at the start of training."""
    trainer = job.trainer(zero=written(folder, **document))
    unfinished = internals.configuration_of(trainer)
    completed = unfinished.complete(trainer.args, trainer.model, 100)
    assert unfinished.config is completed
    return trainer


def test_auto_values_come_from_the_training_arguments(job: Job, tmp_path: Path) -> None:
    trainer = configured(
        job,
        tmp_path,
        train_batch_size=AUTO,
        train_micro_batch_size_per_gpu=AUTO,
        gradient_accumulation_steps=AUTO,
        gradient_clipping=AUTO,
        optimizer=ADAMW,
        scheduler=DECAY,
    )
    config = internals.configuration_of(trainer).config
    assert (config.batch.train, config.rest.gradient_clipping) == (16, 1.0)
    built = trainer.create_optimizer()
    assert built.kind is AdamW
    given = {name: built.options[name] for name in ("lr", "betas", "eps", "weight_decay", "max_grad_norm")}
    assert {**given, "betas": list(given["betas"])} == {
        **{"lr": 0.25, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.125, "max_grad_norm": 1.0}
    }
    assert config.scheduler.params["total_num_steps"] == 100
    assert config.scheduler.params["warmup_num_steps"] == 10


def test_a_file_that_contradicts_the_arguments_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_clipping = 0.5, but max_grad_norm = 1.0"):
        configured(job, tmp_path, gradient_clipping=0.5)


def test_an_optimizer_in_the_file_and_another_in_the_arguments_are_refused(job: Job, tmp_path: Path) -> None:
    for optim, refused in (("adamw_torch", False), ("adafactor", True)):
        trainer = job.trainer(arguments(optim=optim), zero=written(tmp_path, optimizer=ADAMW))
        expected = pytest.raises(ValueError, match=r"optim='adafactor'.*ZERO-707") if refused else nullcontext()
        with expected:
            internals.configuration_of(trainer).complete(trainer.args, trainer.model, 100)


def test_the_trainers_optimizer_has_the_options_of_the_file(job: Job, tmp_path: Path) -> None:
    trainer = configured(job, tmp_path, zero_optimization={"stage": 2, "overlap_comm": True})
    built = trainer.create_optimizer()
    assert built.kind is SGD
    assert {name: built.options[name] for name in ("lr", "stage", "overlap_with_ddp", "max_grad_norm")} == {
        **{"lr": 0.25, "stage": 2, "overlap_with_ddp": True, "max_grad_norm": 1.0}
    }
    assert not {"overlap", "hook", "accumulate_in_fp32"} & set(built.options), "those of shard_optimizer"


def test_a_dtype_for_communication_in_stage_1_is_refused(job: Job, tmp_path: Path) -> None:
    trainer = configured(job, tmp_path, zero_optimization={"stage": 1}, communication_data_type="bf16")
    with pytest.raises(ValueError, match=r"communication_data_type in stage 1.*\[ZERO-911\]"):
        trainer.create_optimizer()


def test_keys_without_effect_in_the_trainer_are_named_once(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = configured(job, tmp_path, steps_per_print=10, wall_clock_breakdown=True)
        internals.configuration_of(trainer).complete(trainer.args, trainer.model, 100)
    named = [text for text in caplog.messages if "no effect in the Trainer" in text]
    assert len(named) == 1
    assert named[0].startswith("steps_per_print, wall_clock_breakdown:")


@pytest.mark.parametrize(("key", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_is_cast_and_with_fp16_the_loss_is_scaled_here_alone(
    job: Job, tmp_path: Path, key: str, dtype: torch.dtype
) -> None:
    trainer = job.trainer(arguments(**{key: True}), zero=written(tmp_path, **{key: {"enabled": AUTO}}))
    trainer.optimizer = Zero()
    losses: list[float] = []
    trainer.accelerator.scaler, trainer.accelerator.backward = "accelerate's", losses.append
    for _ in range(2):  # training again must not scale twice
        trainer.begin_training(10)
        trainer.accelerator.backward(0.5)
    assert {param.dtype for param in trainer.model.parameters()} == {dtype}
    assert losses == ([4.0, 4.0] if key == "fp16" else [0.5, 0.5])
    assert trainer.accelerator.scaler == (None if key == "fp16" else "accelerate's")


def test_the_schedule_is_the_files_if_it_has_one_and_the_users_if_there_is_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    def build(name: str, params: Any, zero: Zero) -> str:
        built.append((name, zero))
        return "the file's"

    monkeypatch.setattr(job.module, "build_schedule", build)
    trainer = configured(job, tmp_path, optimizer=ADAMW, scheduler=DECAY)
    zero = trainer.create_optimizer()
    assert trainer.create_scheduler(100) == "the file's"
    assert trainer.create_scheduler(100) == "the file's"
    assert built == [("WarmupDecayLR", zero)]
    assert trainer.created_its_schedule
    trainer = configured(job, tmp_path, optimizer=ADAMW)
    trainer.create_optimizer()
    assert trainer.create_scheduler(100) is None
    assert not trainer.created_its_schedule
    assert ("create_scheduler", 100) in trainer.calls, "the Trainer's own"
