"""`ZeroDDPStrategy` with a stand-in for Lightning: options, schedulers that follow, clipping, checkpoints, refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, SequentialLR

from tests.unit.integrations.stand_ins import GradClipAlgorithmType, imported


class Zero:
    def __init__(self, groups: Any, kind: Any, **options: Any) -> None:
        self.groups, self.kind, self.options = groups, kind, options
        self.attached: list[Any] = []
        self.clipped: list[Any] = []

    def attach(self, model: Any) -> None:
        self.attached.append(model)

    def clip_grad_norm_(self, limit: float) -> None:
        self.clipped.append(("norm", limit))

    def clip_grad_value_(self, limit: float) -> None:
        self.clipped.append(("value", limit))


class Job:
    """The integration, and what it has saved and loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = imported("lightning", monkeypatch)
        self.folders: list[Any] = []
        monkeypatch.setattr(self.module, "ZeroRedundancyOptimizer", Zero)
        monkeypatch.setattr(self.module, "save", self.save)
        monkeypatch.setattr(self.module, "load", self.load)

    def save(self, folder: Path, model: Any, opt: Any, keep: int) -> None:
        self.folders.append(("save", folder, model, opt, keep))

    def load(self, folder: Path, model: Any, opt: Any) -> None:
        self.folders.append(("load", folder, model, opt))

    def strategy(self, optimizers: Any = (), schedulers: Any = (), automatic: bool = True, **options: Any) -> Any:
        strategy = self.module.ZeroDDPStrategy(**options)
        strategy.model = nn.Linear(1, 1)
        strategy.lightning_module = SimpleNamespace(automatic_optimization=automatic)
        configs = [SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]
        strategy.setup_optimizers(SimpleNamespace(optimizers=list(optimizers), configs=configs))
        return strategy


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


# Building


def test_options_of_lightning_pass_and_views_cannot_be_turned_off(job: Job) -> None:
    strategy = job.module.ZeroDDPStrategy("a", gradient_as_bucket_view=False, bucket_cap_mb=7)
    assert strategy.args == ("a",)
    assert strategy.kwargs == {"gradient_as_bucket_view": True, "bucket_cap_mb": 7}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"stage": 1, "overlap_with_ddp": True, "parameters_as_bucket_view": True}),
        ({"stage": 2}, {"stage": 2, "overlap_with_ddp": True, "parameters_as_bucket_view": True}),
        (
            {"stage": 2, "zero": {"overlap_with_ddp": False, "grad_comm_dtype": "bf16"}},
            {"stage": 2, "overlap_with_ddp": False, "parameters_as_bucket_view": True, "grad_comm_dtype": "bf16"},
        ),
    ],
)
def test_an_optimizer_is_replaced_with_its_class_options_and_groups(job: Job, given: Any, options: Any) -> None:
    groups = [
        {"params": list(nn.Linear(2, 2).parameters()), "lr": 0.3},
        {"params": list(nn.Linear(2, 2).parameters()), "weight_decay": 0.7},
    ]
    plain = AdamW(groups, lr=0.5, betas=(0.8, 0.9))
    strategy = job.strategy([plain], **given)
    (sharded,) = strategy.optimizers
    assert sharded.kind is AdamW
    assert sharded.groups is plain.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in sharded.groups] == [(0.3, 0.01), (0.5, 0.7)]
    assert {name: sharded.options[name] for name in options} == options
    assert (sharded.options["lr"], sharded.options["betas"]) == (0.5, (0.8, 0.9))
    AdamW(plain.param_groups, **{name: one for name, one in sharded.options.items() if name not in options})
    assert sharded.attached == [strategy.model]


def test_options_of_the_users_come_before_the_optimizers_own(job: Job) -> None:
    plain = AdamW(nn.Linear(2, 2).parameters(), lr=0.5)
    assert job.strategy([plain], zero={"lr": 0.25}).optimizers[0].options["lr"] == 0.25


def test_a_sharded_optimizer_stays(job: Job) -> None:
    zero = Zero([], SGD)
    strategy = job.strategy([zero], stage=2)
    assert strategy.optimizers == [zero]
    assert zero.options == {}
    assert zero.attached == [strategy.model]


def test_manual_optimization_is_refused(job: Job) -> None:
    with pytest.raises(NotImplementedError, match=r"automatic_optimization=False.*\[ZERO-911\]"):
        job.strategy([SGD(nn.Linear(1, 1).parameters())], automatic=False)


# Schedulers


def plain_optimizers() -> list[SGD]:
    return [SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)]


def test_every_scheduler_follows_its_own_optimizer(job: Job) -> None:
    plain = plain_optimizers()
    schedulers = [LinearLR(plain[1]), LinearLR(plain[0])]
    strategy = job.strategy(plain, schedulers)
    assert [scheduler.optimizer for scheduler in schedulers] == [strategy.optimizers[1], strategy.optimizers[0]]


@pytest.mark.parametrize("kind", ["sequential", "chained", "nested"])
def test_schedulers_inside_a_scheduler_follow_too(job: Job, kind: str) -> None:
    plain = plain_optimizers()
    inner: list[Any] = [ConstantLR(plain[0]), LinearLR(plain[0])]
    outer: Any = ChainedScheduler(inner) if kind == "chained" else SequentialLR(plain[0], inner, [3])
    if kind == "nested":
        inner = [*inner, outer]
        outer = ChainedScheduler([outer])
    strategy = job.strategy(plain, [outer])
    assert [one.optimizer for one in [*inner, outer]] == [strategy.optimizers[0]] * (len(inner) + 1)


def test_a_scheduler_of_something_else_is_left_alone(job: Job) -> None:
    other = SimpleNamespace(optimizer="of another library")
    job.strategy(plain_optimizers(), [other])
    assert other.optimizer == "of another library"


# Clipping


class Plugin:
    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self.plain: list[Any] = []

    def clip_gradients(self, *args: Any) -> None:
        self.plain.append(args)


def plugged(job: Job, scaler: Any = None) -> Plugin:
    strategy, plugin = job.strategy(), Plugin(scaler)
    strategy.precision_plugin = plugin
    strategy.setup_precision_plugin()
    assert strategy.calls == ["setup_precision_plugin"]
    return plugin


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_gradients_of_a_sharded_optimizer_are_clipped_by_the_library(job: Job, is_wrapped: bool) -> None:
    plugin, zero = plugged(job), Zero([], SGD)
    given = SimpleNamespace(_optimizer=zero) if is_wrapped else zero  # a LightningOptimizer
    plugin.clip_gradients(given, 0.5)
    plugin.clip_gradients(given, 0.25, GradClipAlgorithmType.VALUE)
    plugin.clip_gradients(given, 0.0)
    plugin.clip_gradients(given, -1.0, GradClipAlgorithmType.VALUE)
    assert zero.clipped == [("norm", 0.5), ("value", 0.25)]
    assert not plugin.plain


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_a_scaler_has_scaled_is_divided_before_it_is_clipped(job: Job, is_fused: bool) -> None:
    unscaled: list[Any] = []
    zero = Zero([], SGD)
    vars(zero)["_step_supports_amp_scaling"] = is_fused
    plugin = plugged(job, scaler=SimpleNamespace(unscale_=unscaled.append))
    plugin.clip_gradients(zero, 0.5)
    assert zero.clipped == [("norm", 0.5)]
    assert unscaled == ([zero] if is_fused else []), "Lightning itself divides what no step does"


# Checkpoints


def test_a_checkpoint_is_a_file_and_a_folder_for_each_optimizer(job: Job, tmp_path: Path) -> None:
    strategy = job.strategy([Zero([], SGD), Zero([], AdamW)])
    file = tmp_path / "last.ckpt"
    strategy.save_checkpoint({"optimizer_states": []}, file)
    folder = tmp_path.resolve() / "last.ckpt.zero"
    assert job.folders == [
        ("save", folder / str(number), strategy.model, zero, 1) for number, zero in enumerate(strategy.optimizers)
    ]
    assert strategy.calls == [("save", file)]


def test_weights_alone_are_saved_without_a_folder(job: Job, tmp_path: Path) -> None:
    strategy = job.strategy([Zero([], SGD)])
    strategy.save_checkpoint({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert not job.folders
    assert len(strategy.calls) == 1


def test_a_link_leads_to_the_folder_of_the_file_that_it_names(job: Job, tmp_path: Path) -> None:
    strategy = job.strategy([Zero([], SGD)])
    (tmp_path / "step_3.ckpt").touch()
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "step_3.ckpt")
    assert strategy.load_checkpoint(tmp_path / "last.ckpt") == {"a": "checkpoint"}
    strategy.load_optimizer_state_dict({"optimizer_states": [strategy.optimizer_state(strategy.optimizers[0])]})
    assert job.folders == [
        ("load", tmp_path.resolve() / "step_3.ckpt.zero" / "0", strategy.model, strategy.optimizers[0])
    ]
    assert strategy.calls == [("read", tmp_path / "last.ckpt")]


def test_the_state_of_a_plain_strategy_is_loaded_by_lightning(job: Job) -> None:
    strategy = job.strategy([Zero([], SGD)])
    plain: dict[str, Any] = {"optimizer_states": [{"state": {}, "param_groups": []}]}
    strategy.load_optimizer_state_dict(plain)
    assert strategy.calls == [("load", plain)]
    assert not job.folders


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_one_rank_removes_the_folder_with_the_file(job: Job, tmp_path: Path, is_global_zero: bool) -> None:
    strategy = job.strategy([Zero([], SGD)])
    strategy.is_global_zero = is_global_zero
    (tmp_path / "a.ckpt.zero" / "0").mkdir(parents=True)
    (tmp_path / "b.ckpt.zero").mkdir()
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert strategy.calls == [("remove", tmp_path / "a.ckpt")]
    assert (tmp_path / "a.ckpt.zero").exists() != is_global_zero
    assert (tmp_path / "b.ckpt.zero").exists()
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
