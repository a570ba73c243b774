"""transformers' Trainer with this library's optimizer, untouched and as `ZeroTrainer`, next to DDP alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tests.frameworks.job import as_a_job, assert_equal, run_and_resume, values
from tests.multiproc.cases import sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from transformers import GPT2LMHeadModel, Trainer

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.integrations.transformers import ZeroTrainer, ZeroTrainerMixin
from tests.frameworks.trainers import Scaled, ScaledZero, arguments, build_model, trained

case = Cases(as_a_job, timeout=240)

STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, not overlapped": {"stage": 2, "overlap_with_ddp": False},
}


class InRankOrder(Trainer):
    """The Trainer with DDP and nothing of this library, but the order of sums that stage 2 has at three ranks."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.model_wrapped.register_comm_hook(None, sum_in_rank_order)
        return prepared


@case(2)
def _models_in_bf16_are_clipped_as_by_the_trainer(setup: Setup) -> None:
    for name, zero in STAGES.items():
        for clip in (0.5, 1.0):  # the latter is the Trainer's default
            recipe = {"dtype": torch.bfloat16, "max_grad_norm": clip, "learning_rate": 0.05}
            equal_training(setup, ZeroTrainer, {"zero": zero}, f"{name}, {clip=}", **recipe)
        by_hand = {"zero": {**zero, "max_grad_norm": None}}
        equal_training(setup, ZeroTrainer, by_hand, f"{name}, in the loop", **recipe)


class Overflowing(Scaled):
    """A first scale at which steps overflow."""

    initial = 2.0**20


class OverflowingZero(ZeroTrainerMixin, Overflowing):
    """The same, sharded."""


def without_norm(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in entry.items() if key != "grad_norm"} for entry in log]


def equal_training(setup: Setup, kind: type, ours: dict[str, Any], where: str, **options: Any) -> Any:
    """Train both and compare parameters, losses, learning rates and norms."""
    _, expected, expected_log = trained(Trainer, setup.folder / "plain", **options)
    trainer, actual, log = trained(kind, setup.folder / "ours", **ours, **options)
    assert_equal(expected, actual, where)
    computes_none = options.get("max_grad_norm") == 0.0 and kind is ZeroTrainer
    assert_equal(without_norm(expected_log) if computes_none else expected_log, log, f"log, {where}")
    assert len(log) > 3, "no logs were compared"
    return trainer


RECIPES: dict[str, dict[str, Any]] = {
    "train": {"max_grad_norm": 0.0},
    "clip": {"max_grad_norm": 0.5},
    "accumulate": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "evaluate": {"eval_strategy": "steps", "eval_steps": 2},
}


def _untouched(**options: Any) -> Callable[[nn.Module], ZeroRedundancyOptimizer]:
    return lambda model: ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, **options)


def _plain_adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


@case(2)
def _stage_1_untouched(setup: Setup) -> None:
    for name, recipe in RECIPES.items():
        _, expected, expected_log = trained(Trainer, setup.folder / "plain", optimizers=_plain_adamw, **recipe)
        for views in (False, True):
            _, actual, log = trained(
                Trainer, setup.folder / "ours", optimizers=_untouched(parameters_as_bucket_view=views), **recipe
            )
            assert_equal(expected, actual, name)
            assert_equal(expected_log, log, name)
    _, expected, expected_log = trained(Scaled, setup.folder / "plain", optimizers=_plain_adamw, fp16=True)
    _, actual, log = trained(Scaled, setup.folder / "ours", optimizers=_untouched(), fp16=True)
    assert_equal((expected, expected_log), (actual, log), "fp16")


class Sharding(Trainer):
    """A Trainer whose `create_optimizer` builds the optimizer, as the documentation of transformers says."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=0.01)
        return self.optimizer


@case(2)
def _stage_1_by_class_and_by_create_optimizer(setup: Setup) -> None:
    plain_pair = (AdamW, {"lr": 0.01})
    pair = (ZeroRedundancyOptimizer, {"optimizer_class": AdamW, "lr": 0.01})
    _, expected, expected_log = trained(Trainer, setup.folder / "plain", optimizer_cls_and_kwargs=plain_pair)
    _, actual, log = trained(Trainer, setup.folder / "ours", optimizer_cls_and_kwargs=pair)
    assert_equal((expected, expected_log), (actual, log), "optimizer_cls_and_kwargs")
    _, expected, expected_log = trained(Trainer, setup.folder / "plain", optimizers=_plain_adamw)
    _, actual, log = trained(Sharding, setup.folder / "ours")
    assert_equal((expected, expected_log), (actual, log), "create_optimizer")


def _each_recipe(setup: Setup, stage: str) -> None:
    for name, recipe in RECIPES.items():
        trainer = equal_training(setup, ZeroTrainer, {"zero": STAGES[stage]}, f"{stage}, {name}", **recipe)
        assert trainer.zero_optimizer.stage == STAGES[stage]["stage"]
    scaled: list[dict[str, Any]] = [{"max_grad_norm": 0.5}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}]
    for options in scaled:
        _, expected, log = trained(Scaled, setup.folder / "plain", fp16=True, **options)
        _, actual, our_log = trained(ScaledZero, setup.folder / "ours", zero=STAGES[stage], fp16=True, **options)
        assert_equal((expected, without_norm(log)), (actual, without_norm(our_log)), f"{stage}, fp16, {options}")


@case(2)
def _zero_trainer_in_stage_1(setup: Setup) -> None:
    _each_recipe(setup, "stage 1")


@case(2)
def _zero_trainer_in_stage_2(setup: Setup) -> None:
    _each_recipe(setup, "stage 2")


@case(2)
def _zero_trainer_in_stage_2_not_overlapped(setup: Setup) -> None:
    _each_recipe(setup, "stage 2, not overlapped")


@case(2)
def _passes_that_are_reduced_add_up(setup: Setup) -> None:
    """With ``sync_each_batch``; last bits differ, see `opt.accumulate`."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "ddp_find_unused_parameters": False,
        "optim": "sgd",
        "learning_rate": 1.0,
    }
    _, expected, _ = trained(Trainer, setup.folder / "plain", **options)
    for stage, zero in STAGES.items():
        _, actual, _ = trained(ZeroTrainer, setup.folder / "ours", zero=zero, **options)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=f"{stage}, {name}")


@case(2)
def _zero_trainer_steps_inside_backward(setup: Setup) -> None:
    for stage in ("stage 1", "stage 2"):
        options = {"max_grad_norm": 0.0, "ddp_find_unused_parameters": False, "max_steps": 6}
        trainer = equal_training(setup, ZeroTrainer, {"zero": STAGES[stage]}, stage, **options)
        assert "regime: overlapped" in trainer.zero_optimizer.explain(), trainer.zero_optimizer.explain()
        assert trainer.model_wrapped.gradient_as_bucket_view


SAVING: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 2}


def _resumes(setup: Setup, stage: str, **options: Any) -> None:
    _, expected, _ = trained(Trainer, setup.folder / "plain", **SAVING, **options)
    zero: dict[str, Any] = {"zero": STAGES[stage]}
    trainer, unbroken, _ = trained(ZeroTrainer, setup.folder / "ours", **zero, **SAVING, **options)
    assert_equal(expected, unbroken, f"{stage}, a run that saves")
    folder = setup.folder / "ours" / "checkpoint-2"
    assert len(list((folder / "zero").glob("step-00000002*/complete.json"))) == 1
    assert not (folder / "optimizer.pt").exists()
    saved = GPT2LMHeadModel.from_pretrained(setup.folder / "ours" / "checkpoint-6")
    assert_equal(expected, values(saved), f"{stage}, from_pretrained")
    for start in (folder, setup.folder / "plain" / "checkpoint-4"):  # the latter has the plain Trainer's optimizer.pt
        again, resumed, _ = trained(ZeroTrainer, setup.folder / "again", str(start), **zero, **SAVING, **options)
        assert again.state.global_step == 6
        assert_equal(expected, resumed, f"{stage}, resumed from {start}")
    trainer.args.max_steps = 8  # the same Trainer goes on, from the newest checkpoint that it finds
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8


def _fp16_overflows(setup: Setup, fused: bool) -> None:
    """Clipped or not, resumed: schedules and scales, too."""
    for clip in (0.5, 0.0):
        options = {**SAVING, "save_steps": 3, "fp16": True, "max_grad_norm": clip}
        pair = (AdamW, {"lr": 0.01, "fused": fused})
        plain, expected, log = trained(Overflowing, setup.folder / "plain", optimizer_cls_and_kwargs=pair, **options)
        scale = plain.accelerator.scaler.get_scale()
        assert scale < Overflowing.initial, "no step has overflowed"
        doors: dict[str, tuple[type, dict[str, Any]]] = {
            stage: (OverflowingZero, {"zero": zero, "optimizer_cls_and_kwargs": pair}) for stage, zero in STAGES.items()
        }
        by_class = (ZeroRedundancyOptimizer, {"optimizer_class": AdamW, **pair[1]})
        doors["untouched"] = Overflowing, {"optimizer_cls_and_kwargs": by_class}
        for name, (kind, own) in doors.items():
            where, folder = f"{name}, {fused=}, {clip=}", setup.folder / "ours"
            shown = without_norm if clip == 0.0 and "zero" in own else list
            ours, actual, our_log = trained(kind, folder, **own, **options)
            found = actual, shown(our_log), ours.accelerator.scaler.get_scale()
            assert_equal((expected, shown(log), scale), found, where)
            start = str(folder / "checkpoint-3")
            again, actual, our_log = trained(kind, setup.folder / "again", start, **own, **options)
            found = actual, shown(our_log), again.accelerator.scaler.get_scale()
            assert_equal((expected, shown(log), scale), found, f"{where}, resumed")


@case(2)
def _fp16_overflows_with_a_fused_optimizer(setup: Setup) -> None:
    """The Trainer's default, whose step a scaler calls in any case."""
    _fp16_overflows(setup, fused=True)


@case(2)
def _fp16_overflows_with_an_optimizer_that_is_skipped(setup: Setup) -> None:
    _fp16_overflows(setup, fused=False)


@case(2)
def _stage_1_untouched_resumes(setup: Setup) -> None:
    """Rank 0 alone asks for the state dict, and every rank loads the whole one."""
    folder = setup.folder
    recipes: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 2, "bf16": True}]
    for number, given in enumerate(recipes):
        options = SAVING | given
        plain, ours = folder / f"plain-{number}", folder / f"ours-{number}"
        _, expected, log = trained(Trainer, plain, optimizers=_plain_adamw, **options)
        for views in (False, True):
            build = _untouched(parameters_as_bucket_view=views)
            _, unbroken, our_log = trained(Trainer, ours, optimizers=build, **options)
            assert_equal((expected, log), (unbroken, our_log), "a run that saves")
            for start in (ours / "checkpoint-2", plain / "checkpoint-4"):
                again, resumed, _ = trained(Trainer, folder / "again", str(start), optimizers=build, **options)
                assert again.state.global_step == 6
                assert_equal(expected, resumed, f"resumed from {start}")
        _, back, _ = trained(Trainer, folder / "again", str(ours / "checkpoint-2"), optimizers=_plain_adamw, **options)
        assert_equal(expected, back, "the plain optimizer, from a checkpoint of the sharded one")


@case(2)
def _stage_1_untouched_loads_the_best_model_at_the_end(setup: Setup) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    _, expected, log = trained(Trainer, setup.folder / "plain", optimizers=_plain_adamw, **SAVING | options)
    ours, actual, our_log = trained(Trainer, setup.folder / "ours", optimizers=_untouched(), **SAVING | options)
    assert Path(ours.state.best_model_checkpoint).name != "checkpoint-6"
    assert_equal((expected, log), (actual, our_log), "the best model")


@case(2)
def _zero_trainer_in_stage_1_resumes(setup: Setup) -> None:
    _resumes(setup, "stage 1")
    _resumes(setup, "stage 1", gradient_accumulation_steps=2, bf16=True)


@case(2)
def _zero_trainer_in_stage_2_resumes(setup: Setup) -> None:
    _resumes(setup, "stage 2")
    _resumes(setup, "stage 2", gradient_accumulation_steps=2, bf16=True)


@case(2)
def _zero_trainer_loads_the_best_model_at_the_end(setup: Setup) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    for stage, zero in STAGES.items():
        trainer, expected, log = trained(Trainer, setup.folder / "plain", **SAVING | options)
        best = Path(trainer.state.best_model_checkpoint).name
        assert best != "checkpoint-6", "the last model is the best: nothing was loaded"
        ours, actual, our_log = trained(ZeroTrainer, setup.folder / "ours", zero=zero, **SAVING | options)
        assert Path(ours.state.best_model_checkpoint).name == best
        assert_equal((expected, log), (actual, our_log), stage)


# A different number of ranks

UNTOUCHED = "stage 1, untouched"


def _trains_or_resumes(setup: Setup, folder: Path, stage: str, resume: bool) -> None:
    options = SAVING | {"per_device_train_batch_size": 6 // setup.world_size, "max_grad_norm": 0.5}
    kind: Any
    ours: dict[str, Any]
    plain: dict[str, Any]
    if stage == UNTOUCHED:
        kind, ours, plain = Trainer, {"optimizers": _untouched()}, {"optimizers": _plain_adamw}
    else:
        kind, ours, plain = ZeroTrainer, {"zero": STAGES[stage]}, {}
    has_own_order = setup.world_size > 2 and stage == "stage 2"
    plain_kind = InRankOrder if has_own_order else Trainer
    starts = [str(folder / kind / "checkpoint-2") if resume else None for kind in ("plain", "ours")]
    targets = [folder / (f"{kind}-resumed" if resume else kind) for kind in ("plain", "ours")]
    _, expected, log = trained(plain_kind, targets[0], starts[0], **plain, **options)
    trainer, actual, our_log = trained(kind, targets[1], starts[1], **ours, **options)
    assert trainer.state.global_step == 6
    assert_equal((expected, log), (actual, our_log), f"{stage} at {setup.world_size} ranks")


@pytest.mark.parametrize("stage", [UNTOUCHED, "stage 1", "stage 2"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_resumes_at_another_number_of_ranks(stage: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    run_and_resume(_trains_or_resumes, sizes, tmp_path, stage)


class OwnOptimizer(ZeroTrainer):
    """Builds its optimizer itself, sharded."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), AdamW, stage=2, overlap_with_ddp=True, max_grad_norm=0.5, lr=0.01
        )
        return self.optimizer


class OwnPlainOptimizer(ZeroTrainer):
    """Builds one that is not sharded."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.optimizer = _plain_adamw(self.model)
        return self.optimizer


@case(2)
def _a_subclass_may_build_a_sharded_optimizer(setup: Setup) -> None:
    _, expected, log = trained(Trainer, setup.folder / "plain", optimizers=_plain_adamw, max_grad_norm=0.5)
    _, actual, own_log = trained(OwnOptimizer, setup.folder / "ours", max_grad_norm=0.5)
    assert_equal((expected, log), (actual, own_log), "create_optimizer of a subclass")


# What is refused


class Adam8bit(AdamW):
    """As those of bitsandbytes."""

    __module__ = "bitsandbytes.optim"


@case(2)
def _what_cannot_be_sharded_is_refused(setup: Setup) -> None:
    with pytest.raises(
        TypeError, match=r"got AdamW. .* build ZeroRedundancyOptimizer\(groups, AdamW, ...\) in a create"
    ):
        trained(OwnPlainOptimizer, setup.folder / "ours")
    with pytest.raises(TypeError, match=r"Expected a ZeroRedundancyOptimizer, got AdamW. Pass its class"):
        trained(ZeroTrainer, setup.folder / "ours", optimizers=_plain_adamw)
    for kind, options, said in (
        (lambda params: AdamW(params), {}, "Expected an optimizer class"),
        (nn.Linear, {}, "Expected an optimizer class"),
        (Adam8bit, {"optim_bits": 8}, "8-bit optimizers of bitsandbytes"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{said}.*\[ZERO-911\]"):
            trained(ZeroTrainer, setup.folder / "ours", optimizer_cls_and_kwargs=(kind, options))


def test_a_job_of_one_process_is_refused(tmp_path: Path) -> None:
    trainer = ZeroTrainer(model=build_model(), args=arguments(tmp_path))
    with pytest.raises(RuntimeError, match=r"several processes, got .*NOT_PARALLEL.*torchrun.*\[ZERO-911\]"):
        trainer.create_optimizer()


test_transformers = case.each()
