"""lightning's Trainer and Fabric with this library's optimizer, next to themselves with DDP and the plain optimizer."""

import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.job import as_a_job, assert_equal, assert_moved, run_and_resume, values
from tests.multiproc.cases import sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("lightning", minversion="2.6")

from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.integrations.lightning import ZeroDDPStrategy

case = Cases(as_a_job, timeout=240)

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STEPS, GLOBAL_BATCH = 12, 12


class Net(LightningModule):
    """A small model that remembers its losses and learning rates."""

    def __init__(self, build: Callable[[Any], Any] | None = None, schedule: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.build = build
        self.schedule = partial(StepLR, step_size=4, gamma=0.5) if schedule is None else schedule
        self.seen: list[Any] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = (self.layers(inputs) - targets).square().mean()
        self.seen.append((loss.detach(), self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        self.log("far", (self.layers(inputs) - targets).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        params: Any = [
            {"params": self.layers[:2].parameters(), "weight_decay": 0.0},
            {"params": self.layers[2:].parameters()},
        ]
        opt = AdamW(params, **OPTIONS) if self.build is None else self.build(params)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": self.schedule(opt), "interval": "step"}}


class InRankOrder(DDPStrategy):
    """DDP that sums as stage 2 does at three ranks."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, sum_in_rank_order)


def zero(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, AdamW, **options, **OPTIONS)


def build_loader(world_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    count = STEPS * GLOBAL_BATCH
    data = TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))
    return DataLoader(data, batch_size=GLOBAL_BATCH // world_size)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "stage 1": lambda: ZeroDDPStrategy(stage=1),
    "stage 2": lambda: ZeroDDPStrategy(stage=2),
    "stage 2, not overlapped": lambda: ZeroDDPStrategy(stage=2, zero={"overlap_with_ddp": False}),
}
RECIPES: dict[str, dict[str, Any]] = {
    "train": {},
    "clip": {"gradient_clip_val": 0.05},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip and accumulate": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    "clip values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "without validation": {"validates": False},
    "clip and accumulate, without validation": {
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 3,
        "validates": False,
    },
}
SCALER: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 3}
"""The first steps overflow, and the scale changes in others."""


def fp16(plugin: type = MixedPrecision) -> list[Any]:
    """Mixed precision with a loss scale; by its name alone Lightning turns it into bf16 on a CPU."""
    return [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SCALER))]


class DividesToClip(MixedPrecision):
    """Clips where Lightning refuses, the gradients of an optimizer whose step divides them, as a loop of torch does."""

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.scaler.unscale_(optimizer)
        Precision.clip_gradients(self, optimizer, *args, **kwargs)


def trained(
    setup: Setup,
    strategy: Any,
    build: Callable[[Any], Any] | None = None,
    save: Path | None = None,
    load: Path | None = None,
    **recipe: Any,
) -> tuple[dict[str, Tensor], list[Any], Any]:
    """Parameters after two epochs, losses and learning rates, and the Trainer."""
    net = Net(build, recipe.pop("schedule", None))
    before = values(net)
    saver = recipe.pop("callbacks", None)
    if plugin := recipe.pop("fp16", None):
        recipe["plugins"] = fp16(plugin)
    if save is not None:
        saver = ModelCheckpoint(save, monitor="far", save_top_k=2, filename="{epoch}")
    epochs, validates = recipe.pop("max_epochs", 2), recipe.pop("validates", True)
    trainer = Trainer(
        accelerator="cpu",
        devices=setup.world_size,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=saver,
        enable_checkpointing=saver is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=True,
        **recipe,
    )
    loader = build_loader(setup.world_size)
    trainer.fit(net, loader, loader if validates else None, ckpt_path=None if load is None else str(load))
    after = values(net)
    assert_moved(before, after)
    assert len(net.seen) == (epochs * STEPS if load is None else STEPS)
    return after, net.seen, trainer


def equal_training(setup: Setup, strategy: Any, build: Any, where: str, **recipe: Any) -> Any:
    expected = trained(setup, "ddp", **recipe)
    actual = trained(setup, strategy, build, **recipe)
    assert_equal(expected[:2], actual[:2], where)
    return actual[2]


@case(2)
def _stage_1_in_plain_ddp(setup: Setup) -> None:
    for name, recipe in RECIPES.items():
        equal_training(setup, "ddp", zero, name, **recipe)
    for build in (partial(zero, fused=True), partial(AdamW, fused=True)):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):  # of Lightning
            trained(setup, "ddp", build, **RECIPES["bf16"])
    clipped = partial(zero, max_grad_norm=0.05, nonfinite="step")
    expected = trained(setup, "ddp", **RECIPES["bf16"])
    assert_equal(expected[:2], trained(setup, "ddp", clipped, precision="bf16-mixed")[:2], "clipped inside")
    _scales_its_loss(setup, "ddp", zero)
    folder = setup.folder
    expected = trained(setup, "ddp", save=folder / "plain")
    actual = trained(setup, "ddp", zero, save=folder / "ours")
    assert_equal(expected[:2], actual[:2], "a run that saves")
    resumed = trained(setup, "ddp", zero, load=folder / "ours" / "epoch=0.ckpt")
    assert_equal((expected[0], expected[1][STEPS:]), resumed[:2], "resumed")


def _scales_its_loss(setup: Setup, strategy: Any, build: Any) -> None:
    trainer = equal_training(setup, strategy, build, "fp16", fp16=MixedPrecision)
    scale = trainer.precision_plugin.scaler.get_scale()
    assert 1.0 < scale < SCALER["init_scale"], "no step has overflowed"


def _each_recipe(setup: Setup, stage: str) -> None:
    for name, recipe in RECIPES.items():
        trainer = equal_training(setup, STRATEGIES[stage](), None, f"{stage}, {name}", **recipe)
        assert isinstance(trainer.optimizers[0], ZeroRedundancyOptimizer)
        if name == "train" and "not" not in stage:
            assert "regime: overlapped" in trainer.optimizers[0].explain(), trainer.optimizers[0].explain()
    _scales_its_loss(setup, STRATEGIES[stage](), None)


@case(2)
def _stage_1(setup: Setup) -> None:
    _each_recipe(setup, "stage 1")


@case(2)
def _stage_2(setup: Setup) -> None:
    _each_recipe(setup, "stage 2")


@case(2)
def _stage_2_not_overlapped(setup: Setup) -> None:
    _each_recipe(setup, "stage 2, not overlapped")


CLIPS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


@case(2)
def _fp16_overflows_as_with_the_plain_optimizer(setup: Setup) -> None:
    """Fused or not, clipped or not, resumed: schedules and scales, too."""
    doors: dict[str, tuple[Callable[[], Any], type]] = {stage: (one, AdamW) for stage, one in STRATEGIES.items()}
    doors["untouched"] = (lambda: "ddp"), ZeroRedundancyOptimizer
    for number, (fused, clip) in enumerate(product((True, False), CLIPS)):
        plugin = DividesToClip if fused and clip else MixedPrecision
        build = partial(AdamW, fused=fused, **OPTIONS)
        expected = trained(setup, "ddp", build, fp16=plugin, **clip)
        scale = expected[2].precision_plugin.scaler.get_scale()
        assert scale < SCALER["init_scale"], "no step has overflowed"
        for name, (strategy, kind) in doors.items():
            where, folder = f"{name}, {fused=}, {clip}", setup.folder / f"{number}-{name}"
            ours = partial(zero, fused=fused) if kind is ZeroRedundancyOptimizer else build
            own = {"fp16": plugin if name == "untouched" else MixedPrecision, **clip}
            actual = trained(setup, strategy(), ours, save=folder, **own)
            found = *actual[:2], actual[2].precision_plugin.scaler.get_scale()
            assert_equal((*expected[:2], scale), found, where)
            actual = trained(setup, strategy(), ours, load=folder / "epoch=0.ckpt", **own)
            found = *actual[:2], actual[2].precision_plugin.scaler.get_scale()
            assert_equal((expected[0], expected[1][STEPS:], scale), found, f"{where}, resumed")


def _warm_up_and_decay(opt: Any) -> SequentialLR:
    return SequentialLR(opt, [LinearLR(opt, 0.1, total_iters=3), ExponentialLR(opt, 0.8)], [3])


def _chained(opt: Any) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(opt, 0.1, total_iters=3), StepLR(opt, 4, 0.5)])


@case(2)
def _schedulers_that_are_built_of_others_follow(setup: Setup) -> None:
    for stage, strategy in STRATEGIES.items():
        for schedule in (_warm_up_and_decay, _chained):
            trainer = equal_training(setup, strategy(), None, f"{stage}, {schedule.__name__}", schedule=schedule)
            assert isinstance(trainer.optimizers[0], ZeroRedundancyOptimizer)
            assert len({rate for _, rate in trainer.lightning_module.seen}) > 3


def _saves(setup: Setup, stage: str) -> None:
    folder = setup.folder
    for recipe in (RECIPES["train"], RECIPES["clip and accumulate"]):
        place = folder / f"{len(recipe)}"
        expected = trained(setup, "ddp", save=place / "plain", **recipe)
        actual = trained(setup, STRATEGIES[stage](), save=place / "ours", **recipe)
        assert_equal(expected[:2], actual[:2], f"{stage}, a run that saves")
        best = [Path(one[2].checkpoint_callback.best_model_path).name for one in (expected, actual)]
        assert best[0] == best[1]
        again = Net.load_from_checkpoint(place / "ours" / "epoch=1.ckpt", map_location="cpu")
        assert_equal(expected[0], values(again), "load_from_checkpoint")
        assert len(list((place / "ours" / "epoch=0.ckpt.zero" / "0").glob("step-*/complete.json"))) == 1
        for start in ("ours", "plain"):
            resumed = trained(setup, STRATEGIES[stage](), load=place / start / "epoch=0.ckpt", **recipe)
            assert_equal((expected[0], expected[1][STEPS:]), resumed[:2], f"{stage}, resumed from {start}")
        torch.distributed.barrier()
        actual[2].strategy.remove_checkpoint(str(place / "ours" / "epoch=0.ckpt"))
        torch.distributed.barrier()
        assert sorted(path.name for path in (place / "ours").iterdir()) == ["epoch=1.ckpt", "epoch=1.ckpt.zero"]


@case(2)
def _stage_1_saves(setup: Setup) -> None:
    _saves(setup, "stage 1")


@case(2)
def _stage_2_saves(setup: Setup) -> None:
    _saves(setup, "stage 2")


@case(2)
def _a_file_beside_the_state_of_another_step_is_refused(setup: Setup) -> None:
    """As a save leaves them that is interrupted while it writes to a name that was there."""
    trained(setup, STRATEGIES["stage 2"](), save=setup.folder)
    torch.distributed.barrier()
    first, second = (setup.folder / f"epoch={epoch}.ckpt" for epoch in (0, 1))
    if setup.rank == 0:
        shutil.rmtree(f"{first}.zero")
        shutil.copytree(f"{second}.zero", f"{first}.zero")
    torch.distributed.barrier()
    expected = f"the state of global step {STEPS}, .* got that of {2 * STEPS} in "
    with pytest.raises(RuntimeError, match=expected):
        trained(setup, STRATEGIES["stage 2"](), load=first)


@case(2)
def _the_last_checkpoint_may_be_a_link(setup: Setup) -> None:
    expected = trained(setup, STRATEGIES["stage 2"]())
    saver = ModelCheckpoint(setup.folder, save_last="link", filename="{epoch}")
    half = trained(setup, STRATEGIES["stage 2"](), callbacks=saver, limit_train_batches=STEPS, max_epochs=1)
    assert len(half[1]) == STEPS
    assert (setup.folder / "last.ckpt").is_symlink()
    resumed = trained(setup, STRATEGIES["stage 2"](), load=setup.folder / "last.ckpt")
    assert_equal((expected[0], expected[1][STEPS:]), resumed[:2], "resumed from a link")


def _trains_or_resumes(setup: Setup, folder: Path, stage: str, resume: bool) -> None:
    plain = InRankOrder() if setup.world_size > 2 and stage == "stage 2" else "ddp"
    results = []
    by_strategy = stage in STRATEGIES
    ours = STRATEGIES[stage]() if by_strategy else "ddp"
    for name, strategy, build in (("plain", plain, None), ("ours", ours, None if by_strategy else zero)):
        place: dict[str, Any] = {"load": folder / name / "epoch=0.ckpt"} if resume else {"save": folder / name}
        results.append(trained(setup, strategy, build, gradient_clip_val=0.05, **place)[:2])
    assert_equal(results[0], results[1], f"{stage} at {setup.world_size} ranks")


@pytest.mark.parametrize("stage", ["stage 1, in plain ddp", "stage 1", "stage 2"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_resumes_at_another_number_of_ranks(stage: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    run_and_resume(_trains_or_resumes, sizes, tmp_path, stage)


# Fabric, which needs no strategy of this library


def _in_fabric(
    setup: Setup, stage: int | None, clip: float | None, steps: range, start: Path | None, **options: Any
) -> Any:
    in_rank_order = options.pop("in_rank_order", False)
    strategy = FabricDDP(gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=setup.world_size, strategy=strategy, **options)
    fabric.launch()
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    if stage == 2:
        model = fabric.setup_module(inner)
        opt: Any = shard_optimizer(model, AdamW, stage=2, **OPTIONS)
        opt = fabric.setup_optimizers(opt) if "plugins" in options else opt  # which steps by the loss scale
    else:
        opt = AdamW(inner.parameters(), **OPTIONS) if stage is None else zero(inner.parameters())
        model, opt = fabric.setup(inner, opt)
    if in_rank_order:
        model._forward_module.register_comm_hook(None, sum_in_rank_order)
    if start is not None:
        checkpoint.load(start, model, opt)
    before, seen = values(inner), []
    for step in steps:
        torch.manual_seed(100 * step + setup.rank)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = model(torch.randn(5, 6)).square().mean()
            fabric.backward(loss)
        if step % 2 == 0:
            continue
        if clip is not None and stage == 2:
            fabric.strategy.precision.unscale_gradients(getattr(opt, "optimizer", opt))
            opt.clip_grad_norm_(clip)
        elif clip is not None:
            fabric.clip_gradients(model, opt, max_norm=clip, error_if_nonfinite=False)
        opt.step()
        opt.zero_grad()
        seen.append(loss.detach())
    assert_moved(before, values(inner))
    return values(inner), seen, model, opt


@case(2)
def _fabric(setup: Setup) -> None:
    for clip in (None, 0.05):
        expected = _in_fabric(setup, None, clip, range(10), None)
        for stage in (1, 2):
            actual = _in_fabric(setup, stage, clip, range(10), None)
            assert_equal(expected[:2], actual[:2], f"stage {stage}, clip {clip}")
            half = _in_fabric(setup, stage, clip, range(6), None)
            place = setup.folder / f"{stage}-{clip}"
            checkpoint.save(place, half[2], half[3])
            resumed = _in_fabric(setup, stage, clip, range(6, 10), place)
            assert_equal((expected[0], expected[1][3:]), resumed[:2], f"stage {stage}, resumed")
    for clip in (None, 0.05):
        expected = _in_fabric(setup, None, clip, range(40), None, plugins=fp16(FabricMixedPrecision))
        for stage in (1, 2):
            actual = _in_fabric(setup, stage, clip, range(40), None, plugins=fp16(FabricMixedPrecision))
            assert_equal(expected[:2], actual[:2], f"stage {stage}, fp16, clip {clip}")


def _trains_or_resumes_in_fabric(setup: Setup, folder: Path, stage: str, resume: bool) -> None:
    number = int(stage[-1])
    plain = {"in_rank_order": setup.world_size > 2 and number == 2}
    results = []
    for name, kind, options in (("plain", None, plain), ("ours", number, {})):
        steps, start = (range(6, 10), folder / name) if resume else (range(6), None)
        *result, model, opt = _in_fabric(setup, kind, 0.05, steps, start, **options)
        results.append(result)
        if not resume:
            checkpoint.save(folder / name, model, opt)
    assert_equal(results[0], results[1], f"{stage} at {setup.world_size} ranks")


@pytest.mark.parametrize("stage", ["Fabric, stage 1", "Fabric, stage 2"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_fabric_resumes_at_another_number_of_ranks(stage: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    run_and_resume(_trains_or_resumes_in_fabric, sizes, tmp_path, stage)


# What is refused


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@case(2)
def _what_cannot_be_sharded_is_refused(setup: Setup) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=ZeroDDPStrategy(stage=2), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(
        NotImplementedError, match="ZeroDDPStrategy does not support a module with automatic_optimization=False"
    ):
        trainer.fit(Manual(), build_loader(2))


def test_views_cannot_be_turned_off() -> None:
    assert ZeroDDPStrategy(gradient_as_bucket_view=False)._ddp_kwargs["gradient_as_bucket_view"]


test_lightning = case.each()
