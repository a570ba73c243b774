"""`prepare` with a stand-in for accelerate: what is prepared, clipped, saved, loaded and refused."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from tests.unit.integrations.stand_ins import Accelerator, DistributedDataParallelKwargs, imported


class Zero:
    def __init__(self, params: Any, stage: int = 2) -> None:
        self.params, self.stage = list(params), stage
        self.last_step: Any = None
        self.clipped: list[Any] = []

    def clip_grad_norm_(self, max_norm: float, norm_type: float, parameters: Any) -> str:
        self.clipped.append(("norm", max_norm, norm_type, parameters))
        return "whole norm"

    def clip_grad_value_(self, clip_value: float, parameters: Any) -> None:
        self.clipped.append(("value", clip_value, parameters))


class Job:
    """The integration, and how `prepare` has called the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = imported("accelerate", monkeypatch)
        self.accelerator = Accelerator()
        self.model = nn.Linear(2, 2)
        self.sharded: list[Any] = []
        self.folders: list[Any] = []
        monkeypatch.setattr(self.module, "shard_optimizer", self.shard)
        monkeypatch.setattr(self.module, "shard_of", self.table)
        monkeypatch.setattr(self.module, "checkpoint", SimpleNamespace(save=self.save, load=self.load))

    def shard(self, model: nn.Module, kind: Any, stage: int = 1, **options: Any) -> Zero:
        self.sharded.append((model, kind, stage, options))
        return Zero(model.parameters(), stage)

    def table(self, zero: Zero) -> Any:
        return SimpleNamespace(table=SimpleNamespace(index_of={param: 0 for param in zero.params}))

    def save(self, folder: Path, model: nn.Module, opt: Any, keep: int) -> None:
        self.folders.append(("save", folder, model, opt, keep))

    def load(self, folder: Path, model: nn.Module, opt: Any) -> None:
        self.folders.append(("load", folder, model, opt))

    def prepare(self, *others: Any, **options: Any) -> Any:
        return self.module.prepare(self.accelerator, self.model, SGD, *others, **options)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def gradient(param: Tensor) -> Tensor:
    param.grad = torch.ones_like(param)
    return param


# Preparing


@pytest.mark.parametrize("handler", [None, DistributedDataParallelKwargs(bucket_cap_mb=7)])
def test_the_model_is_wrapped_with_views_and_the_users_other_options(job: Job, handler: Any) -> None:
    job.accelerator.ddp_handler = handler
    model, opt = job.prepare(stage=2, lr=0.5)
    cap = 25 if handler is None else 7
    assert job.accelerator.ddp_handler == DistributedDataParallelKwargs(cap, gradient_as_bucket_view=True)
    assert handler is None or not handler.gradient_as_bucket_view, "the user's own object is left alone"
    assert job.sharded == [(job.model, SGD, 2, {"lr": 0.5})]
    assert model is job.model
    assert job.accelerator.prepared_optimizers == [opt]
    assert opt.options == {"device_placement": True, "scaler": None}


def test_one_and_several_further_objects_come_back_prepared_in_order(job: Job) -> None:
    assert job.prepare(lr=0.1)[2:] == ()
    assert job.prepare("loader", lr=0.1)[2:] == ("loader",)
    assert job.prepare("loader", "other", lr=0.1)[2:] == ("loader", "other")


def test_schedulers_are_built_from_the_sharded_optimizer(job: Job) -> None:
    def function(optimizer: Any) -> Any:
        return ("function", optimizer)

    class Callable:
        def __call__(self, *_: Any) -> None: ...

    loader = Callable()
    _, opt, *made = job.prepare(partial(lambda opt, name: (name, opt), name="partial"), function, loader, lr=0.1)
    assert made == [("partial", opt.optimizer), ("function", opt.optimizer), loader]


def test_a_schedulers_class_is_called_and_other_classes_are_not(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(StepLR, "__init__", lambda self, optimizer: made.append(optimizer))
    _, opt, scheduler, other = job.prepare(StepLR, dict, lr=0.1)
    assert made == [opt.optimizer]
    assert type(scheduler) is StepLR
    assert other is dict


@pytest.mark.parametrize("kind", ["DistributedType.NO", "DistributedType.FSDP", "DistributedType.DEEPSPEED"])
def test_a_job_without_ddp_is_refused(job: Job, kind: str) -> None:
    job.accelerator.distributed_type = kind
    with pytest.raises(RuntimeError, match=rf"several processes with DDP, got {kind}.*\[ZERO-911\]"):
        job.prepare(lr=0.1)
    assert not job.sharded


@pytest.mark.parametrize("one", [StepLR(SGD(nn.Linear(1, 1).parameters()), 1), SGD(nn.Linear(1, 1).parameters())])
def test_what_belongs_to_another_optimizer_is_refused_before_anything_is_wrapped(job: Job, one: Any) -> None:
    with pytest.raises(TypeError, match=rf"got a {type(one).__name__}.*functools.partial.*\[ZERO-911\]"):
        job.prepare(one, lr=0.1)
    assert job.accelerator.ddp_handler is None


# Clipping


def test_stage_1_clips_as_accelerate_does(job: Job) -> None:
    job.prepare(stage=1, lr=0.1)
    assert job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0) == "plain norm"
    assert not job.accelerator.unscaled


@pytest.mark.parametrize("gives", [list, iter, lambda params: next(params)])
def test_stage_2_clips_by_the_norm_of_all_after_unscaling(job: Job, gives: Any) -> None:
    _, opt = job.prepare(stage=2, lr=0.1)
    params = list(job.model.parameters())
    clipped = job.accelerator.clip_grad_norm_(gives(job.model.parameters()), 0.5, norm_type=1.0)
    assert clipped == "whole norm"
    own = params[:1] if callable(gives) and gives not in (list, iter) else params
    assert opt.optimizer.clipped[0][:3] == ("norm", 0.5, 1.0)
    assert all(map(lambda a, b: a is b, opt.optimizer.clipped[0][3], own))
    assert job.accelerator.unscaled == 1
    assert not job.accelerator.clipped


def test_gradients_of_another_optimizer_are_clipped_alone(job: Job) -> None:
    _, opt = job.prepare(stage=2, lr=0.1)
    foreign = gradient(nn.Parameter(torch.ones(2)))
    assert job.accelerator.clip_grad_norm_([foreign], 0.5) == "plain norm"
    assert not opt.optimizer.clipped
    with pytest.raises(ValueError, match=r"1 parameters with a gradient are not .*\[ZERO-911\]"):
        job.accelerator.clip_grad_norm_([*job.model.parameters(), foreign], 0.5)
    foreign.grad = None
    assert job.accelerator.clip_grad_norm_([*job.model.parameters(), foreign], 0.5) == "whole norm"


def test_values_are_clamped_on_both_sides_and_unscaled_once(job: Job) -> None:
    _, opt = job.prepare(stage=2, lr=0.1)
    job.accelerator.clip_grad_value_(job.model.parameters(), 0.5)
    assert (job.accelerator.unscaled, job.accelerator.clipped) == (1, [])
    foreign = gradient(nn.Parameter(torch.ones(2)))
    job.accelerator.clip_grad_value_([*job.model.parameters(), foreign], 0.25)
    assert job.accelerator.unscaled == 1, "accelerate's own unscales"
    assert [one[0] for one in job.accelerator.clipped] == ["value"]
    assert job.accelerator.clipped[0][1][0] is foreign
    assert [one[:2] for one in opt.optimizer.clipped] == [("value", 0.5), ("value", 0.25)]


# Schedules, which wait for skipped steps


@pytest.mark.parametrize(
    ("scaler", "overflow", "last_step", "skipped"),
    [
        (None, False, None, False),
        (None, False, SimpleNamespace(stepped=True), False),
        (None, False, SimpleNamespace(stepped=False), True),
        (object(), False, SimpleNamespace(stepped=False), False),  # a fused optimizer's, which a scaler calls anyway
        (object(), True, SimpleNamespace(stepped=False), True),
        (object(), True, None, True),
    ],
)
def test_a_skipped_step_is_reported_as_the_plain_optimizers(
    job: Job, scaler: object, overflow: bool, last_step: Any, skipped: bool
) -> None:
    _, opt = job.prepare(lr=0.1)
    opt.scaler, opt._is_overflow, opt.optimizer.last_step = scaler, overflow, last_step
    assert opt.step_was_skipped is skipped


# Checkpoints


def test_a_save_writes_a_sharded_checkpoint_and_one_placeholder(job: Job, tmp_path: Path) -> None:
    model, opt = job.prepare(stage=2, lr=0.1)
    job.accelerator.saves[0]([], [], str(tmp_path))
    assert job.folders == [("save", tmp_path / "zero_0", model, opt, 1)]
    shown = opt.state_dict()
    assert "zero_0" in shown.values()
    assert opt.state_dict() == {"state": "whole"}, "outside of save_state"
    opt.load_state_dict(shown)
    assert opt.loaded == []
    opt.load_state_dict({"state": "whole"})
    assert opt.loaded == [{"state": "whole"}]


def test_each_optimizer_has_a_folder_of_its_own(job: Job, tmp_path: Path) -> None:
    job.prepare(lr=0.1)
    job.prepare(lr=0.1)
    for hook in job.accelerator.saves:
        hook([], [], str(tmp_path))
    assert [folder.name for _, folder, *_ in job.folders] == ["zero_0", "zero_1"]


def test_a_folder_of_a_plain_optimizer_is_left_to_accelerate(job: Job, tmp_path: Path) -> None:
    model, opt = job.prepare(lr=0.1)
    job.accelerator.loads[0]([], str(tmp_path))
    assert job.folders == []
    (tmp_path / "zero_0").mkdir()
    job.accelerator.loads[0]([], str(tmp_path))
    assert job.folders == [("load", tmp_path / "zero_0", model, opt)]
