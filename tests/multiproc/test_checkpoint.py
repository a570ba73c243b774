"""Checkpoints in all situations: what is saved, what fits, what is refused, who waits for whom."""

import copy
import os
import signal
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.checkpoint import loading
from ddp_zero.checkpoint.folder import tensor_file_name
from ddp_zero.checkpoint.tensor_file import read, write_tensors
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.optimizer import states_of
from ddp_zero.snapshots import Snapshots
from tests.multiproc.cases import (
    OPTIMIZERS,
    LargestLiveBytes,
    OptimizerCase,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    loss_of,
    split_groups,
    step_on,
)
from tests.multiproc.checkpointed import OPTIONS, everything, sharded, train, wrap
from tests.multiproc.harness import Cases, Setup

case = Cases()


Pair = tuple[DistributedDataParallel, Optimizer]


def trained(setup: Setup, *args: Any, **options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """As `sharded`, after three steps."""
    model, opt = sharded(*args, **options)
    train(setup, model, opt)
    return model, opt


def both_go_on(setup: Setup, one: Pair, other: Pair, where: str) -> None:
    """Train both on the same data; the sums of three ranks depend on buckets, so only fewer end alike."""
    for model, optimizer in (one, other):
        train(setup, model, optimizer, 1)
    if setup.world_size <= 2:
        assert_equal_models(one[0], other[0], where)


@contextmanager
def refused(kind: type[Exception], match: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """The block raises on every rank, and changes nothing."""
    before = everything(model, optimizer)
    with pytest.raises(kind, match=match):
        yield
    assert_identical(before, everything(model, optimizer), "after a load that was refused")


# What is saved


HAS_STATE_OF_ITS_OWN_KIND = ("SGD momentum", "Adam tensor lr", "ASGD", "Rprop", "Adafactor", "Muon", "toy 8-bit Adam")


@case(
    *(1, 2, 3),
    few=[case for case in OPTIMIZERS if case.name in HAS_STATE_OF_ITS_OWN_KIND],
    every=[case for case in OPTIMIZERS if case.name not in HAS_STATE_OF_ITS_OWN_KIND],
)
def _every_optimizer_resumes(setup: Setup, configurations: Sequence[OptimizerCase]) -> None:
    for place, case in enumerate(configurations):
        if setup.world_size > 2 and place % 4:
            continue  # the sums of three ranks depend on buckets, so only what is loaded is compared
        model, opt = trained(
            setup, 1 + place % 2, build_model(matrices_only=case.matrices_only), case.build, **case.options
        )
        checkpoint.save(setup.folder / case.name, model, opt)
        other, resumed = sharded(2 - place % 2, build_model(1, case.matrices_only), case.build, **case.options)
        checkpoint.load(setup.folder / case.name, other, resumed)
        assert_equal_models(model, other, case.name)
        if case.name == "toy 8-bit Adam":
            resumed.optim.calls = opt.optim.calls  # type: ignore[attr-defined]  # on the optimizer, not in its state
        if setup.world_size <= 2:
            both_go_on(setup, (model, opt), (other, resumed), f"{case.name}, resumed")


class Odd(nn.Module):
    """Tied weights, buffers, a frozen layer, a parameter in no optimizer, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.free = nn.Parameter(torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.notes: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.frozen(self.tied(self.norm(self.first(inputs)))) + self.free
        return output

    def get_extra_state(self) -> Any:
        return {"notes": self.notes, "seen": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"].tolist() == [0, 1, 2]
        self.notes = state["notes"]


@case(1, 2, 3)
def _buffers_ties_frozen_and_foreign_parameters_load_as_they_were_saved(setup: Setup) -> None:
    def build(seed: int) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        torch.manual_seed(seed)
        model = Odd()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        params = [param for name, param in ddp.named_parameters() if "free" not in name and param.requires_grad]
        return ddp, ZeroRedundancyOptimizer(params, AdamW, lr=0.1)

    model, opt = build(0)
    model.module.notes = {"epoch": 3, "names": ("a", None)}
    train(setup, model, opt)
    assert int(model.module.norm.num_batches_tracked) == 3
    checkpoint.save(setup.folder, model, opt)
    other, resumed = build(1)
    checkpoint.load(setup.folder, other, resumed)
    wrong = [name for name, one in model.state_dict().items() if isinstance(one, Tensor) and "running" not in name]
    for name in wrong:
        assert_identical(model.state_dict()[name], other.state_dict()[name], name)
    assert other.module.notes == {"epoch": 3, "names": ("a", None)}
    first = copy.deepcopy(model.module.norm.state_dict())
    for value in first.values():
        dist.broadcast(value, 0)
    assert_identical(dict(first), dict(other.module.norm.state_dict()), "buffers are those of rank 0")
    assert other.module.tied.weight is other.module.first.weight
    before = {name: param.detach().clone() for name, param in other.named_parameters() if not param.requires_grad}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    checkpoint.save(setup.folder / "trainable", model, opt, exclude_frozen=True)
    loaded = checkpoint.load(setup.folder / "trainable", other, resumed)
    assert loaded.notes == tuple(
        f"'frozen.{name}' keeps its value: it is frozen and not saved" for name in ("bias", "weight")
    )
    for name, param in other.named_parameters():
        assert_identical(param.detach(), before.get(name, model.get_parameter(name).detach()), name)
    assert sorted(before) == ["module.frozen.bias", "module.frozen.weight"]


@case(1, 2)
def _frozen_parameters_that_were_trained_are_left_out_with_their_state(setup: Setup) -> None:
    """Pieces of which several ranks own one each, too."""
    for partition in ("parameters", "elements"):
        (model, opt), (other, resumed) = (sharded(partition=partition) for _ in range(2))
        train(setup, model, opt)
        names = [name for name, _ in model.named_parameters()][::2]
        for name in names:
            for one in (model, other):
                one.get_parameter(name).requires_grad_(False)
        before = {name: param.detach().clone() for name, param in other.named_parameters()}
        folder = setup.folder / f"trained, {partition}"
        checkpoint.save(folder, model, opt, exclude_frozen=True)
        loaded = checkpoint.load(folder, other, resumed)
        assert len(loaded.notes) == len(names)
        for name, param in other.named_parameters():
            expected = before[name] if name in names else model.get_parameter(name).detach()
            assert_identical(expected, param.detach(), name)
        saved, found = opt.state_dict()["state"], resumed.state_dict()["state"]
        kept = [at for at, (name, _) in enumerate(model.named_parameters()) if name not in names]
        assert_identical({at: saved[at] for at in kept}, found, partition)
        dist.barrier()


class Counter(nn.Linear):
    """Its extra state is a tensor, which `state_dict` does not write in place."""

    count = 0

    def get_extra_state(self) -> Any:
        return torch.tensor([self.count])

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


@case(1, 2)
def _state_of_modules_and_of_no_parameter_comes_back(setup: Setup) -> None:
    for stage in (1, 2):
        model, opt = trained(setup, stage, nn.Sequential(Counter(8, 3)))
        model.module[0].count = 7
        opt.optim.state["calls"] = {"seen": torch.ones(2)}  # type: ignore[index]
        checkpoint.save(setup.folder / str(stage), model, opt)
        plain_model = wrap(nn.Sequential(Counter(8, 3)))
        plain = AdamW(plain_model.parameters(), lr=0.1)
        checkpoint.load(setup.folder / str(stage), plain_model, plain)
        checkpoint.save(setup.folder / f"plain {stage}", plain_model, plain)
        other, resumed = sharded(stage, nn.Sequential(Counter(8, 3)))
        checkpoint.load(setup.folder / f"plain {stage}", other, resumed)
        for one, optimizer in ((plain_model, plain), (other, resumed.optim)):
            assert one.module[0].count == 7
            assert optimizer.state["calls"]["seen"].tolist() == [1, 1]  # type: ignore[index]


@case(1, 2)
def _extra_and_rank_extra_load_as_they_were_saved(setup: Setup) -> None:
    model, opt = sharded()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 2, 5])  # its state has a Counter
    train(setup, model, opt)
    scheduler.step()
    extra = {
        "scheduler": scheduler.state_dict(),
        "position": (3, 0.1, float("inf"), None, True, "text"),
        "moments": [torch.arange(6).view(2, 3).t(), {7: torch.tensor(2.5, dtype=torch.bfloat16)}],
        "nothing": {},
        "average": model.module.state_dict(),  # an OrderedDict
    }
    torch.manual_seed(setup.rank)
    saved = checkpoint.save(setup.folder, model, opt, extra=extra, rank_extra=torch.get_rng_state(), step=12)
    assert saved.wait() == setup.folder / "step-00000012"
    drawn = torch.rand(3)
    loaded = checkpoint.load(setup.folder, model, opt)
    assert (loaded.step, loaded.folder) == (12, setup.folder / "step-00000012")
    assert_identical(extra, loaded.extra, "extra")
    assert [type(loaded.extra[key]) for key in ("scheduler", "average")] == [dict, OrderedDict]
    scheduler.load_state_dict(loaded.extra["scheduler"])
    torch.set_rng_state(loaded.rank_extra)
    assert torch.equal(torch.rand(3), drawn)
    if setup.rank == 0:
        alone = checkpoint.load(setup.folder, build_model())
        assert_identical(extra, alone.extra, "extra, read by one process")
        assert (alone.rank_extra is None) == (setup.world_size > 1)
    dist.barrier()


@case(1, 2, 3)
def _states_come_back_in_their_order(setup: Setup) -> None:
    """That of the plain optimizer: by step and then by parameter, whoever owns it."""
    ddp = wrap()
    params = list(ddp.parameters())
    opt = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    for param in params[:4]:
        param.requires_grad_(False)
    ddp = wrap(ddp.module)
    train(setup, ddp, opt, 0, 1)
    for param in params[:4]:
        param.requires_grad_(True)
    ddp = wrap(ddp.module)
    train(setup, ddp, opt, 0, 1)
    checkpoint.save(setup.folder, ddp, opt)
    other_model = wrap(build_model(1))
    other = ZeroRedundancyOptimizer(other_model.parameters(), AdamW, lr=0.1)
    checkpoint.load(setup.folder, other_model, other)
    plain_model = wrap(build_model(1))
    plain = AdamW(plain_model.parameters(), lr=0.1)
    checkpoint.load(setup.folder, plain_model, plain)
    for one in (opt, other):
        one.consolidate_state_dict()
    if setup.rank == 0:
        orders = [list(one.state_dict()["state"]) for one in (opt, other, plain)]
        assert orders == [[4, 5, 6, 7, 8, 9, 0, 1, 2, 3]] * 3


@case(1, 2)
def _masters_and_loss_scale_come_back(setup: Setup) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        own = {"master_weights": True, "loss_scale": DynamicLossScale(initial=64.0, growth_interval=2)}

        def low(dtype: torch.dtype = dtype, own: dict[str, Any] = own, stage: int = 2) -> Any:
            model = build_model().to(dtype)
            model.get_submodule("2").float()
            return sharded(stage, Wrapped(model, dtype), **own)

        model, opt = low()
        train(setup, model, opt)
        assert opt.loss_scale == 128
        checkpoint.save(setup.folder / str(dtype), model, opt)
        for stage in (1, 2):
            other, resumed = low(stage=stage)
            checkpoint.load(setup.folder / str(dtype), other, resumed)
            assert resumed.loss_scale == 128
            checkpoint.save(setup.folder / f"{dtype} {stage}", other, resumed)
            again, twice = low(stage=3 - stage)
            checkpoint.load(setup.folder / f"{dtype} {stage}", again, twice)
            expected = states_of(opt).owned_state()
            for index, state in states_of(twice).owned_state().items():
                if index in expected:
                    assert_identical(expected[index], state, f"state of {index}")
        both_go_on(setup, (model, opt), (other, resumed), f"{dtype}, resumed")
        train(setup, again, twice, 1)
        assert opt.loss_scale == resumed.loss_scale == twice.loss_scale == 512
        assert_equal_models(model, again, f"{dtype}, resumed twice")


class Wrapped(nn.Module):
    """A low-precision model, one layer in fp32, with inputs and outputs in fp32."""

    def __init__(self, layers: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers, self.dtype = layers, dtype

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.to(self.dtype)
        for layer in self.layers:  # type: ignore[attr-defined]
            param = next(layer.parameters(), hidden)
            hidden = layer(hidden.to(param.dtype))
        return hidden.float()


@case(1, 2, 3, few=[(1, 1), (2, 0), (2, 2)], every=[(1, 0), (1, 2), (2, 1)])
def _any_moment_between_steps_is_saved(setup: Setup, configurations: Sequence[tuple[int, int]]) -> None:
    """Before the first step, and after DDP's buckets are final; in both stages."""
    for stage, steps in configurations:
        model, opt = sharded(stage)
        unbroken, reference = sharded(stage)
        train(setup, model, opt, 0, steps)
        train(setup, unbroken, reference, 0, steps)
        checkpoint.save(setup.folder / f"{stage} {steps}", model, opt)
        other, resumed = sharded(3 - stage, build_model(1))
        checkpoint.load(setup.folder / f"{stage} {steps}", other, resumed)
        for one, optimizer in ((model, opt), (unbroken, reference), (other, resumed)):
            train(setup, one, optimizer, 1)
        assert_equal_models(unbroken, model, f"after saving at step {steps} in stage {stage}")
        if setup.world_size <= 2:
            assert_equal_models(unbroken, other, f"resumed from step {steps} in stage {stage}")


@case(1, 2, 3)
def _added_groups_are_saved(setup: Setup) -> None:
    def build(seed: int) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer, list[nn.Parameter]]:
        ddp = wrap(build_model(seed))
        params = list(ddp.parameters())
        return ddp, ZeroRedundancyOptimizer(params[:4], AdamW, lr=0.1), params[4:]

    model, opt, rest = build(0)
    train(setup, model, opt)
    opt.add_param_group({"params": rest, "lr": 0.03})
    checkpoint.save(setup.folder / "fresh", model, opt)
    train(setup, model, opt)
    checkpoint.save(setup.folder / "later", model, opt)
    for name in ("fresh", "later"):
        other, resumed, others = build(1)
        resumed.add_param_group({"params": others, "lr": 0.7})
        checkpoint.load(setup.folder / name, other, resumed)
        assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.03]
    both_go_on(setup, (model, opt), (other, resumed), "with an added group")


@case(1, 2)
def _groups_without_parameters_come_back_with_their_options(setup: Setup) -> None:
    models = [wrap(build_model(seed)) for seed in (0, 1)]
    groups: list[list[dict[str, Any]]] = [[{"params": list(model.parameters())}, {"params": []}] for model in models]
    opt, other = (ZeroRedundancyOptimizer(one, AdamW, lr=0.1) for one in groups)
    opt.param_groups[1]["lr"] = 0.03
    train(setup, models[0], opt)
    checkpoint.save(setup.folder / "run", models[0], opt)
    checkpoint.load(setup.folder / "run", models[1], other)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.03]


@case(1, 2)
def _gradients_are_not_part_of_a_checkpoint(setup: Setup) -> None:
    """Saved in the middle of accumulation, it is that of the last step; a load drops what was accumulated."""
    for stage in (1, 2):
        model, opt = sharded(stage)
        unbroken, reference = sharded(stage)
        train(setup, model, opt)
        train(setup, unbroken, reference)
        (inputs, targets), last = batches(setup.rank, 2, 7)
        for one, optimizer in ((model, opt), (unbroken, reference)):
            optimizer.zero_grad()
            with one.no_sync():
                loss_of(one, inputs, targets).backward()
        checkpoint.save(setup.folder / str(stage), model, opt)
        for one, optimizer in ((model, opt), (unbroken, reference)):
            loss_of(one, *last).backward()
            optimizer.step()
        assert_equal_models(unbroken, model, "saving in the middle changes nothing")
        other, resumed = sharded(stage, build_model(1))
        with other.no_sync():
            loss_of(other, *last).backward()
        checkpoint.load(setup.folder / str(stage), other, resumed)
        with other.no_sync():
            loss_of(other, inputs, targets).backward()
        loss_of(other, *last).backward()
        resumed.step()
        assert_equal_models(unbroken, other, "the whole accumulation again")


@case(1, 2)
def _a_save_between_a_first_backward_and_its_step_is_refused(setup: Setup) -> None:
    ((inputs, targets),) = batches(setup.rank, 1)
    waiting, opt = sharded(2, max_grad_norm=1.0)
    loss_of(waiting, inputs, targets).backward()
    checkpoint.save(setup.folder, waiting, opt)  # the state of the last step, as a plain loop has it
    opt.step()
    checkpoint.save(setup.folder, waiting, opt)
    first, other = sharded(1)
    loss_of(first, inputs, targets).backward()
    with pytest.raises(RuntimeError, match="got gradients that wait for it"):
        checkpoint.save(setup.folder, first, other)
    other.step()
    checkpoint.save(setup.folder, first, other)
    with torch.distributed.algorithms.join.Join([first, other]), pytest.raises(RuntimeError, match="save inside Join"):
        checkpoint.save(setup.folder, first, other)
    loss_of(waiting, inputs, targets).backward()
    checkpoint.load(setup.folder, waiting, opt, strict=False)  # drops the iteration
    train(setup, waiting, opt, 1)


# What fits


@case(1, 2)
def _misfits_are_listed_and_the_rest_is_loaded_where_strict_is_false(setup: Setup) -> None:
    model, opt = trained(setup)
    checkpoint.save(setup.folder, model, opt)

    layers = list(build_model(1).children())
    layers[3], layers[5] = nn.Linear(31, 16), nn.Linear(16, 5)
    changed = nn.Sequential(*layers, nn.Linear(3, 3))
    other, resumed = sharded(1, changed)
    with refused(
        ValueError, r"(?s)'3.weight' has shape \[16, 31\], saved is \[17, 31\].*'8.bias' .* not in the", other, resumed
    ):
        checkpoint.load(setup.folder, other, resumed)
    before = copy.deepcopy(dict(other.state_dict()))
    loaded = checkpoint.load(setup.folder, other, resumed, strict=False)
    skipped = ["3.bias", "3.weight", "5.weight", "8.bias", "8.weight"]
    assert sorted(line.split("'")[1] for line in loaded.skipped) == skipped
    for name, value in other.module.state_dict().items():
        source = before[f"module.{name}"] if name in skipped else model.module.state_dict()[name]
        assert_identical(source, value, name)
    own = {name for name, param in other.module.named_parameters() if param in resumed.state}
    assert not own & {*skipped}
    train(setup, other, resumed)
    before = copy.deepcopy(dict(other.module.state_dict()))
    names = [name for name, _ in other.module.named_parameters()]
    states = {names[index]: state for index, state in copy.deepcopy(states_of(resumed).owned_state()).items()}
    checkpoint.load(setup.folder, other, resumed, strict=False)
    for index, state in states_of(resumed).owned_state().items():
        if names[index] in skipped:
            assert_identical(states[names[index]], state, "what is left as it is keeps its state")
            assert_identical(before[names[index]], other.module.state_dict()[names[index]], names[index])
        else:
            assert state["step"] == 3


@case(2)
def _renamed_parameters_are_found(setup: Setup) -> None:
    model, opt = trained(setup)
    checkpoint.save(setup.folder, model, opt)
    other, resumed = sharded(1, nn.ModuleDict({"body": build_model(1)}))
    body: nn.Module = other.module.body
    other.module.forward = body.forward
    rename = {name.split(".")[0]: f"body.{name.split('.')[0]}" for name in model.module.state_dict()}
    with refused(ValueError, "'body.0.weight' of the model is not in the checkpoint", other, resumed):
        checkpoint.load(setup.folder, other, resumed)
    with refused(ValueError, r"Expected names in rename= that the checkpoint has, got \['nine'\]", other, resumed):
        checkpoint.load(setup.folder, other, resumed, rename={**rename, "nine": "ten"})
    assert checkpoint.load(setup.folder, other, resumed, rename=rename).skipped == ()
    both_go_on(setup, (model, opt), (other, resumed), "renamed")


@case(2)
def _state_of_another_optimizer_class_is_refused_or_left_out_if_not_strict(setup: Setup) -> None:
    model, opt = trained(setup)
    checkpoint.save(setup.folder, model, opt)
    other, resumed = sharded(2, build_model(1), SGD, momentum=0.9)
    with refused(ValueError, r"the optimizer is torch.optim.sgd.SGD, saved is torch.optim.adamw.AdamW", other, resumed):
        checkpoint.load(setup.folder, other, resumed)
    loaded = checkpoint.load(setup.folder, other, resumed, strict=False)
    assert len(loaded.skipped) == 1
    assert not resumed.state
    assert resumed.param_groups[0]["momentum"] == 0.9
    assert_equal_models(model, other, "weights alone")
    train(setup, other, resumed)


@case(1, 2)
def _dtypes_are_converted_where_strict_is_false(setup: Setup) -> None:
    fp32, opt = trained(setup)
    checkpoint.save(setup.folder / "fp32", fp32, opt)
    low, masters = sharded(2, Wrapped(build_model(1).bfloat16(), torch.bfloat16), master_weights=True)
    rename = {str(place): f"layers.{place}" for place in (0, 2, 3, 5, 7)}
    with refused(ValueError, "'layers.0.weight' has dtype bfloat16, saved is float32", low, masters):
        checkpoint.load(setup.folder / "fp32", low, masters, rename=rename)
    checkpoint.load(setup.folder / "fp32", low, masters, rename=rename, strict=False)
    exact = dict(fp32.module.named_parameters())
    names = {param: name.removeprefix("layers.") for name, param in low.module.named_parameters()}
    assert masters.master_weights
    for param, master in masters.master_weights.items():
        assert_identical(exact[names[param]].detach(), master, "a master is the saved fp32 value")
    train(setup, low, masters)

    checkpoint.save(setup.folder / "low", low, masters)
    back, plain = sharded(1, Wrapped(build_model(1), torch.float32))
    checkpoint.load(setup.folder / "low", back, plain, strict=False)
    values = dict(back.module.named_parameters())
    for param, master in masters.master_weights.items():
        assert_identical(master, values[f"layers.{names[param]}"].detach(), "a parameter is the saved master")
    without, opt = sharded(2, Wrapped(build_model(1).bfloat16(), torch.bfloat16))
    with refused(ValueError, "the saved master weight of 'layers.0.weight' has no place", without, opt):
        checkpoint.load(setup.folder / "low", without, opt)
    checkpoint.load(setup.folder / "low", without, opt, strict=False)
    assert_equal_models(low, without, "without masters")


@case(2)
def _checkpoints_load_where_other_parameters_are_frozen(setup: Setup) -> None:
    def build(frozen: int, seed: int = 0) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        module = build_model(seed)
        for param in list(module.parameters())[:frozen]:
            param.requires_grad_(False)
        ddp = wrap(module)
        return ddp, ZeroRedundancyOptimizer([param for param in ddp.parameters() if param.requires_grad], AdamW, lr=0.1)

    few, opt = build(4)
    train(setup, few, opt)
    checkpoint.save(setup.folder / "few", few, opt)
    model, resumed = build(0, 1)
    loaded = checkpoint.load(setup.folder / "few", model, resumed)
    assert (loaded.skipped, len(loaded.notes)) == ((), 4)
    train(setup, model, resumed)
    checkpoint.save(setup.folder / "all", model, resumed)
    again, last = build(4, 1)
    loaded = checkpoint.load(setup.folder / "all", again, last)
    assert (loaded.skipped, len(loaded.notes)) == ((), 4)
    assert_equal_models(model, again, "weights")
    train(setup, again, last)


@case(1, 2)
def _checkpoints_of_tied_weights_load_where_the_other_name_comes_first(setup: Setup) -> None:
    """Tied by either name, untied: states go where they belong, and what cannot be is a misfit."""

    def build(tie: str | None, seed: int = 0) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        torch.manual_seed(seed)
        parts = {"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False), "c": nn.Linear(8, 3)}
        if tie is not None:
            parts["b"].weight = parts["a"].weight
        order = "bac" if tie == "b first" else "abc"
        model = nn.Sequential()
        for name in order:
            model.add_module(name, parts[name])
        return sharded(2, model)

    model, opt = build("a first")
    train(setup, model, opt)
    checkpoint.save(setup.folder / "tied", model, opt)
    other, resumed = build("b first", 1)
    loaded = checkpoint.load(setup.folder / "tied", other, resumed)
    assert (loaded.skipped, loaded.notes) == ((), ())
    shared = {param: state["exp_avg"] for param, state in resumed.state.items() if param is other.module.a.weight}
    mine = {param: state["exp_avg"] for param, state in opt.state.items() if param is model.module.a.weight}
    if shared and mine:
        assert_identical(next(iter(mine.values())), next(iter(shared.values())), "state of the tied weight")
    apart, free = build(None, 1)
    with refused(ValueError, "'b.weight' of the optimizer is not in the saved one", apart, free):
        checkpoint.load(setup.folder / "tied", apart, free)
    checkpoint.load(setup.folder / "tied", apart, free, strict=False)
    assert_identical(apart.module.a.weight.detach(), apart.module.b.weight.detach(), "both have the value")
    train(setup, apart, free)
    checkpoint.save(setup.folder / "apart", apart, free)
    with refused(ValueError, "'b.weight' is tied to 'a.weight' in the model, saved are two values", model, opt):
        checkpoint.load(setup.folder / "apart", model, opt)


@case(2)
def _unfrozen_parameters_have_masters_after_a_load(setup: Setup) -> None:
    def build(frozen: int) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        module = Wrapped(build_model().bfloat16(), torch.bfloat16)
        for param in list(module.parameters())[:frozen]:
            param.requires_grad_(False)
        ddp = wrap(module)
        params = [param for param in ddp.parameters() if param.requires_grad]
        return ddp, ZeroRedundancyOptimizer(params, AdamW, master_weights=True, lr=0.1)

    model, opt = build(4)
    train(setup, model, opt)
    checkpoint.save(setup.folder, model, opt)
    other, resumed = build(0)
    assert checkpoint.load(setup.folder, other, resumed).skipped == ()
    for param, master in resumed.master_weights.items():
        assert torch.equal(master.bfloat16(), param)
    train(setup, other, resumed)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    if resumed.master_weights:
        with pytest.raises(RuntimeError, match=r"to be its fp32 master weight rounded|a failure on rank"):
            checkpoint.save(setup.folder, other, resumed)


# Others' formats and optimizers


@case(1, 2, 3)
def _checkpoints_load_into_torchs_own_zero_optimizer_and_back(setup: Setup) -> None:
    def theirs(seed: int) -> tuple[DistributedDataParallel, TorchZero]:
        ddp = wrap(build_model(seed))
        return ddp, TorchZero(split_groups(ddp, 2), AdamW, lr=0.1)

    model, torchs = theirs(0)
    train(setup, model, torchs)
    checkpoint.save(setup.folder / "theirs", model, torchs)
    ours_model = wrap(build_model(1))
    ours = ZeroRedundancyOptimizer(split_groups(ours_model, 2), AdamW, lr=0.5)
    assert checkpoint.load(setup.folder / "theirs", ours_model, ours).skipped == ()
    checkpoint.save(setup.folder / "ours", ours_model, ours)
    again_model, again = theirs(1)
    assert checkpoint.load(setup.folder / "ours", again_model, again).skipped == ()
    assert [group["lr"] for group in again.param_groups] == [0.1, 3e-3]
    for one, optimizer in ((model, torchs), (ours_model, ours), (again_model, again)):
        train(setup, one, optimizer, 1)
    if setup.world_size <= 2:
        assert_equal_models(model, ours_model, "ours, from theirs")
        assert_equal_models(model, again_model, "theirs, from ours")


@case(1, 2)
def _checkpoints_are_read_by_torchs_tools(setup: Setup) -> None:
    model, opt = trained(setup)
    folder = checkpoint.save(setup.folder, model, opt, extra={"epoch": 3}).wait()
    plain_model = wrap(build_model(1))
    template: dict[str, Any] = {
        "model": get_model_state_dict(plain_model),
        "optim": {"state": {}},
        "extra": {"epoch": 0},
    }
    state_dict_loader.load(template, checkpoint_id=folder)
    assert_identical(dict(model.module.state_dict()), dict(template["model"]), "by torch.distributed.checkpoint")
    assert template["extra"] == {"epoch": 3}


@case(1, 2, 3)
def _a_checkpoint_of_torch_distributed_checkpoint_resumes_bit_for_bit(setup: Setup) -> None:
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.8 warns of itself
    model, opt = trained(setup, master_weights=True, loss_scale=DynamicLossScale(initial=64.0))
    state_dict_saver.save(
        {"model": get_model_state_dict(model), "optim": opt.sharded_state_dict()}, checkpoint_id=setup.folder / "dcp"
    )
    other, resumed = sharded(1, build_model(1), loss_scale=DynamicLossScale(initial=2.0))
    state = {"model": get_model_state_dict(other), "optim": resumed.sharded_state_dict(other, init_missing=True)}
    assert not resumed.state
    state_dict_loader.load(state, checkpoint_id=setup.folder / "dcp")
    other.module.load_state_dict(state["model"])
    resumed.load_sharded_state_dict(state["optim"])
    assert resumed.loss_scale == 64
    both_go_on(setup, (model, opt), (other, resumed), "by way of torch.distributed.checkpoint")
    nameless = ZeroRedundancyOptimizer(wrap().parameters(), AdamW)
    with pytest.raises(ValueError, match=r"a name for each of 10 parameters, got 0. Give the model"):
        nameless.sharded_state_dict()


@case(1, 2)
def _torchs_helpers_work_without_a_gather(setup: Setup) -> None:
    model, opt = trained(setup)
    plain_model = wrap(build_model())
    plain = AdamW(plain_model.parameters(), **OPTIONS)
    plain_model.module.load_state_dict(model.module.state_dict())
    whole = get_optimizer_state_dict(model, opt)
    assert len(whole["state"]) == 10
    set_optimizer_state_dict(plain_model, plain, copy.deepcopy(whole))
    assert_identical(opt.state_dict()["state"], plain.state_dict()["state"], "the helpers' whole state")
    modes: list[dict[str, Any]] = [{}, {"overlap": False}, {"partition": "elements"}, {"sync": "forward"}]
    for stage, options in product((1, 2), modes):
        other, resumed = sharded(stage, build_model(1), **options)
        other.module.load_state_dict(model.module.state_dict())
        set_optimizer_state_dict(other, resumed, copy.deepcopy(whole))  # torch steps by zeros for state to load into
        assert_equal_models(model, other, f"stage {stage}, {options}: nothing has moved")
        assert_identical(resumed.state_dict()["state"], plain.state_dict()["state"], f"stage {stage}, {options}")
    other, resumed = sharded(1, build_model(1))
    train(setup, other, resumed, 2, 1)  # with state
    other.module.load_state_dict(model.module.state_dict())
    for rank in range(setup.world_size):
        resumed.consolidate_state_dict(to=rank)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(whole), options=StateDictOptions(full_state_dict=True))
    both_go_on(setup, (model, opt), (other, resumed), "set_optimizer_state_dict")


@case(2)
def _state_of_fsdp2_resumes_bit_for_bit(setup: Setup) -> None:
    theirs = build_model()
    fully_shard(theirs, reshard_after_forward=False)
    plain = AdamW(theirs.parameters(), **OPTIONS)
    for inputs, targets in batches(setup.rank, 3, 0):
        step_on(plain, loss_of(theirs, inputs, targets))
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(theirs, plain, options=whole)
    models = []
    for is_sharded in (False, True):
        model = wrap(build_model(1))
        model.module.load_state_dict(weights)
        optimizer: Optimizer = AdamW(model.parameters(), lr=0.5)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=whole)
        optimizer = shard_optimizer(model, optimizer, stage=2) if is_sharded else optimizer
        assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]
        train(setup, model, optimizer, 1)
        models.append(model)
    assert_equal_models(models[0], models[1], "from FSDP2, handed over")


# Ranks


@case(2, 3)
def _arguments_that_differ_between_ranks_are_refused(setup: Setup) -> None:
    model, opt = trained(setup)
    with pytest.raises(ValueError, match=r"Expected the same optimizer on every rank in checkpoint\.save"):
        checkpoint.save(setup.folder, model, None if setup.rank else opt)
    with pytest.raises(ValueError, match="without a model in DistributedDataParallel or a sharded optimizer"):
        checkpoint.save(setup.folder, model.module, AdamW(model.parameters()))
    checkpoint.save(setup.folder, model, opt)
    with refused(ValueError, "Expected the same optimizer on every rank in checkpoint.load, got", model, opt):
        checkpoint.load(setup.folder, model, None if setup.rank else opt)
    with refused(ValueError, "Expected the same strict and rename on every rank", model, opt):
        checkpoint.load(setup.folder, model, opt, strict=False, rename={"0": "0"} if setup.rank else {"2": "2"})
    pairs = dist.new_group([setup.rank], use_local_synchronization=True)
    alone = ZeroRedundancyOptimizer(model.module.parameters(), AdamW, process_group=pairs)
    with pytest.raises(ValueError, match="The optimizer and the DDP model are on different ranks"):
        checkpoint.save(setup.folder, model, alone)


@case(1, 2)
def _saves_into_one_folder_are_written_one_after_another(setup: Setup) -> None:
    """Two models in one folder, and one under another wrapper."""
    model, opt = sharded()
    other, second = sharded(1, build_model(1))
    compiled: Any = torch.compile(model, backend="eager")
    for one, optimizer in ((model, opt), (other, second), (compiled, opt)):
        checkpoint.save(setup.folder, one, optimizer, background=True)
    checkpoint.wait()
    assert len(list(setup.folder.glob("step-*"))) == 3
    assert checkpoint.load(setup.folder / "step-00000002", other, second).step == 2


@case(2, 3, few=[2], every=[0, 1])
def _ranks_that_never_came_are_named_in_time(setup: Setup, configurations: list[int]) -> None:
    calls: list[tuple[int, Callable[[Any, Any], object]]] = [
        (1, lambda ddp, opt: checkpoint.save(setup.folder, ddp, opt)),
        (0, lambda ddp, opt: checkpoint.load(setup.folder, ddp, opt)),
        (setup.world_size - 1, lambda ddp, opt: Snapshots(ddp, opt, folder=setup.folder / "memory").load()),
    ]
    for missing, call in [calls[place] for place in configurations]:
        group = dist.new_group(list(range(setup.world_size)), timeout=timedelta(seconds=3))
        ddp = DistributedDataParallel(build_model(), process_group=group)
        opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, process_group=group)
        if setup.rank != missing:
            who = rf"Expected rank {missing} \(global rank {missing}\) to reach their first save or load within 0:00:03"
            with pytest.raises(RuntimeError, match=who):
                call(ddp, opt)
        dist.barrier()


@case(2)
def _a_rank_that_does_not_come_is_missed_in_time(setup: Setup) -> None:
    group = dist.new_group(list(range(setup.world_size)), timeout=timedelta(seconds=3))
    ddp = DistributedDataParallel(build_model(), process_group=group)
    opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, process_group=group)
    checkpoint.save(setup.folder, ddp, opt)
    if setup.rank == 0:
        with pytest.raises(RuntimeError, match=r"Expected rank 1 \(global rank 1\) to take part in a save or load"):
            checkpoint.save(setup.folder, ddp, opt)
    dist.barrier()


@case(2, 4)
def _each_rank_writes_its_share(setup: Setup) -> None:
    model, opt = sharded(2, nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)]))
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        opt.step()
    folder = checkpoint.save(setup.folder, model, opt).wait()
    sizes = [(folder / tensor_file_name(rank)).stat().st_size for rank in range(setup.world_size)]
    whole = 3 * sum(param.nbytes for param in model.parameters())
    assert sum(sizes) > whole
    assert max(sizes) - min(sizes) < 0.15 * whole / setup.world_size, sizes


@case(2, 3)
def _a_save_or_load_needs_memory_of_the_shard_and_one_tensor(setup: Setup) -> None:
    for masters in (False, True):
        check_memory(setup.folder / str(masters), masters)


def check_memory(root: Path, masters: bool) -> None:
    one = 4 * 100 * 100
    dtype = torch.bfloat16 if masters else torch.float32

    def build() -> Any:
        layers = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(12)]).to(dtype)
        return sharded(2, Wrapped(layers, dtype), master_weights=masters)

    def existing(model: nn.Module, opt: ZeroRedundancyOptimizer) -> list[Tensor]:
        state = [value for state in states_of(opt).owned_state().values() for value in state.values()]
        return [*model.parameters(), *(value.grad for value in model.parameters() if value.grad is not None), *state]

    model, opt = build()
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 100)).sum().backward()
        opt.step()
    own = 2 * one * len(states_of(opt).owned_state())
    with LargestLiveBytes(existing(model, opt)) as memory:
        checkpoint.save(root, model, opt)
    assert memory.largest < 1.2 * one, "one tensor at a time leaves flat storage"
    with LargestLiveBytes(existing(model, opt)) as memory:
        checkpoint.save(root, model, opt, background=True).wait()
    assert own < memory.largest < 2.2 * own
    other, resumed = build()
    with LargestLiveBytes(existing(other, resumed)) as memory:
        checkpoint.load(root, other, resumed)
    assert own * 0.9 < memory.largest < own + 1.3 * one, (memory.largest, own, one)
    old = [weakref.ref(value) for state in opt.optim.state.values() for value in state.values()]
    alive = []

    def look(*args: Any) -> Tensor:
        alive.append(sum(reference() is not None for reference in old))
        return read(*args)

    with mock.patch.object(loading, "read", look):
        checkpoint.load(root, model, opt)
    assert alive[-1] == 0, "the old state had been dropped"


@case(3)
def _a_subgroup_saves_by_itself(setup: Setup) -> None:
    members = list(range(1, setup.world_size))
    group = dist.new_group(members)
    if setup.rank in members:
        ddp = DistributedDataParallel(build_model(), process_group=group, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, AdamW, lr=0.1)
        train(setup, ddp, opt)
        checkpoint.save(setup.folder, ddp, opt)
        checkpoint.load(setup.folder, ddp, opt)
    dist.barrier()


@case(2, 3)
def _a_save_or_load_that_fails_on_one_rank_raises_on_all(setup: Setup) -> None:
    model, opt = trained(setup)
    checkpoint.save(setup.folder, model, opt, step=1)
    train(setup, model, opt)
    last = setup.rank == setup.world_size - 1
    kind: type[Exception] = TypeError if last else RuntimeError
    with pytest.raises(kind, match=r"pickle in a checkpoint.* got builtins.object at \['rank_extra'\]\['it'\]"):
        checkpoint.save(setup.folder, model, opt, rank_extra={"it": object() if last else 1})
    with pytest.raises(ValueError, match="the same step on every rank"):
        checkpoint.save(setup.folder, model, opt, step=2 + setup.rank)
    with pytest.raises(ValueError, match="keep to be an int of at least 1, got 0"):
        checkpoint.save(setup.folder, model, opt, keep=0)

    def fail(path: Path, tensors: Any) -> Any:
        write_tensors(path, tensors)
        raise OSError(28, "No space left on device")

    for background in (False, True):
        with mock.patch.object(checkpoint, "write_tensors", fail if last else write_tensors):
            kind = OSError if last else RuntimeError
            words = r"No space left on device.*\(rank .*\)\. Earlier checkpoints are whole.*\[ZERO-618\]$"
            if background:
                pending = checkpoint.save(setup.folder, model, opt, step=2, background=True)
                kind, words = RuntimeError, "No space left on device"
                while not pending.is_done:
                    time.sleep(0.01)
            with pytest.raises(kind, match=words):
                checkpoint.save(setup.folder, model, opt, step=2 + background)
        dist.barrier()  # rank 0 has removed what there was
        assert os.listdir(setup.folder) == ["step-00000001"]
        dist.barrier()
    with refused(ValueError if last else RuntimeError, "Expected", model, opt):
        checkpoint.load(setup.folder, model, opt, rename={"nine": "ten"} if last else {})
    with refused(FileNotFoundError, "No complete checkpoint .* at .*nowhere, nor a folder of them", model, opt):
        checkpoint.load(setup.folder / "nowhere", model, opt)
    checkpoint.load(setup.folder, model, opt)
    train(setup, model, opt)


@case(1, 2)
def _training_during_a_background_save_changes_nothing_in_it(setup: Setup) -> None:
    """The snapshot is of the moment; the training group carries nothing for it; a second save waits for the first."""
    model, opt = trained(setup)
    unbroken = copy.deepcopy(dict(model.module.state_dict()))
    may_write, threads = threading.Event(), []

    def slowly(path: Path, tensors: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_write.wait(30)
        return write_tensors(path, tensors)

    with mock.patch.object(checkpoint, "write_tensors", slowly):
        sent = opt.stats()["total_sent_bytes"]
        with mock.patch.object(Communicator, "all_gather_tensor", side_effect=AssertionError("on the training group")):
            pending = checkpoint.save(setup.folder, model, opt, background=True)
        assert opt.stats()["total_sent_bytes"] == sent
        train(setup, model, opt, 1)
        assert not pending.is_done
        assert not list(setup.folder.glob("step-*"))

        def preempt(*_: Any) -> None:
            raise TimeoutError("of a signal handler")

        signal.signal(signal.SIGALRM, preempt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError, match="of a signal handler"):
            pending.wait()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        threading.Timer(0.3, may_write.set).start()
        second = checkpoint.save(setup.folder, model, opt, background=True)
        assert pending.is_done
        second.wait()
    assert threading.main_thread() not in threads
    other, resumed = sharded(1, build_model(1))
    checkpoint.load(setup.folder / "step-00000001", other, resumed)
    assert_identical(unbroken, dict(other.module.state_dict()), "the moment of the save")
    checkpoint.load(setup.folder, other, resumed)
    assert_equal_models(model, other, "the second save")


@case(1, 2)
def _saves_keep_as_many_checkpoints_as_keep_says(setup: Setup) -> None:
    def visible() -> list[str]:
        names = sorted(path.name for path in setup.folder.glob("step-*"))
        dist.barrier()
        return names

    model, opt = sharded()
    for step in (1, 2, 3):
        checkpoint.save(setup.folder, model, opt, keep=2)
        assert len(visible()) == min(step, 2)
    assert visible() == ["step-00000002", "step-00000003"]
    with pytest.raises(ValueError if setup.rank == 0 else RuntimeError, match="a step of at least 3, the newest"):
        checkpoint.save(setup.folder, model, opt, step=1)
    with pytest.raises(
        ValueError if setup.rank == 0 else RuntimeError, match="is a checkpoint, not a folder of checkpoints"
    ):
        checkpoint.save(setup.folder / "step-00000003", model, opt)
    checkpoint.save(setup.folder, model, opt, step=3)
    assert checkpoint.load(setup.folder, model, opt).folder.name == "step-00000003-1"


test_checkpoint = case.each()
