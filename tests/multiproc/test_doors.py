"""The doors of the library: what users pass in, in the form in which frameworks and people pass it, and what they get.

Every case runs on real ranks and compares with DDP and the plain optimizer, or says what the error must say.
"""

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ddp_zero
from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.ddp.reducer import bucket_caps
from ddp_zero.values.placeholders import Awaited
from tests import internals
from tests.multiproc.cases import (
    OPTIMIZERS,
    Twins,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    build_twins,
    loss_of,
    sharded_twins,
    step_on,
    sum_in_rank_order,
)
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.late_sync import MODES, OPTIONS, assert_same_values, left, plain, sharded, train_step, wrapped

case = Cases()


# Model and optimizer in one line


@case(2)
def _wrap_equals_ddp_with_the_plain_optimizer(setup: Setup) -> None:
    for options in ({}, {"stage": 2}, {"stage": 2, "max_grad_norm": 0.1}, {"stage": 2, "overlap": False}):
        expected = DistributedDataParallel(build_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
        reference = AdamW(expected.parameters(), **OPTIONS)
        ddp, opt = ddp_zero.wrap(build_model(), AdamW, **options, **OPTIONS)
        before = copy.deepcopy(expected.module)
        for inputs, targets in batches(setup.rank, 5):
            loss_of(expected, inputs, targets).backward()
            if "max_grad_norm" in options:
                nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
            train_step(ddp, opt, inputs, targets)
        assert_equal_models(expected.module, ddp.module, f"{options}")
        pairs = zip(before.parameters(), ddp.module.parameters(), strict=True)
        assert all(not torch.equal(one, other) for one, other in pairs), "nothing moved"


@case(2)
def _wrap_passes_options_to_ddp(setup: Setup) -> None:
    ddp, opt = ddp_zero.wrap(build_model(), AdamW, ddp={"find_unused_parameters": True, "bucket_cap_mb": 3}, **OPTIONS)
    assert ddp.find_unused_parameters
    assert ddp.gradient_as_bucket_view
    assert ddp.bucket_bytes_cap == 3 << 20
    assert opt.stage == 1
    sizes: list[tuple[dict[str, Any], list[int]]] = [({}, [1 << 20, 25 << 20]), ({"bucket_mb": 0.5}, [1 << 19])]
    for options, caps in sizes:
        small, _ = ddp_zero.wrap(build_model(), AdamW, **options, **OPTIONS)
        assert bucket_caps(small) == caps


@case(2)
def _wrap_of_a_ddp_model_or_with_an_unknown_option_is_refused(setup: Setup) -> None:
    with pytest.raises(TypeError, match="Expected a module that is not wrapped yet, got Distributed"):
        ddp_zero.wrap(wrapped(build_model()), AdamW, **OPTIONS)
    with pytest.raises(TypeError, match="learning_rate"):
        ddp_zero.wrap(build_model(), AdamW, learning_rate=1.0)


@case(2)
def _buckets_have_the_size_that_ddp_gives_them_or_bucket_cap_mb(setup: Setup) -> None:
    """1 MiB for the first, 25 for all others; layers of 1 MiB."""
    layouts: list[tuple[dict[str, Any], list[int]]] = [({}, [1, 8]), ({"bucket_cap_mb": 2}, [2, 2, 2, 2, 1])]
    for stage in (1, 2):
        for caps, expected in layouts:
            model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(9)])
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **caps)
            opt = shard_optimizer(ddp, AdamW, stage=stage, **OPTIONS)
            layout = internals.shard_of(opt).binding.layout
            assert layout is not None
            assert [len(bucket) for bucket in layout] == expected


@case(2, few=[1], every=[1, 2])
def _opt_step_within_torch_compile_equals_ddp(setup: Setup, configurations: list[int]) -> None:
    for stage in configurations:
        expected = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
        reference = AdamW(expected.parameters(), **OPTIONS)
        ddp, opt = ddp_zero.wrap(build_model(), AdamW, stage=stage, **OPTIONS)
        step = torch.compile(opt.step, backend="eager")
        for inputs, targets in batches(setup.rank, 3):
            for model, take in ((expected, reference.step), (ddp, step)):
                loss_of(model, inputs, targets).backward()
                take()
                model.zero_grad()
        assert_equal_models(expected.module, ddp.module, f"stage {stage}")


WHOLE_STEPS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "overlap": False, "partition": "elements", "sync": "forward", "clips": True},
    {"stage": 2, "sync": "forward"},
    {"stage": 2, "max_grad_norm": 0.1},
    {"stage": 1, "accumulate_in_fp32": True},
    {"stage": 1, "overlap": False},
    {"stage": 1, "clips": True},
    {"stage": 2, "clips": True},
    {"stage": 1, "partition": "elements", "sync": "forward"},
    {"stage": 2, "partition": "elements", "nonfinite": "skip"},
]


@case(2, few=WHOLE_STEPS[1:3], every=WHOLE_STEPS)
def _a_whole_step_within_torch_compile_equals_the_plain_one(setup: Setup, configurations: list[dict[str, Any]]) -> None:
    """The compiler meets hooks and the reducer, which torch calls from C++ while it compiles."""
    torch._dynamo.config.optimize_ddp = False  # it takes no small buckets
    for options in configurations:
        mode = dict(options)
        clips, clips_within = mode.pop("clips", False), "max_grad_norm" in mode
        expected = wrapped(build_model())
        reference = AdamW(expected.parameters(), **OPTIONS)
        ddp = wrapped(build_model())
        opt = shard_optimizer(ddp, AdamW, **mode, **OPTIONS)

        def whole(inputs: Tensor, targets: Tensor) -> None:
            loss_of(ddp, inputs, targets).backward()  # noqa: B023
            if clips:  # noqa: B023
                opt.clip_grad_norm_(0.1)  # noqa: B023
            opt.step()  # noqa: B023
            opt.zero_grad()  # noqa: B023

        torch._dynamo.reset()
        compiled: Any = torch.compile(whole, backend="eager")
        for step, (inputs, targets) in enumerate(batches(setup.rank, 3)):
            loss_of(expected, inputs, targets).backward()
            if clips or clips_within:
                nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of what it looks at while it compiles
                compiled(inputs, targets)
            opt.finish_sync()
            assert_equal_models(expected.module, ddp.module, f"{options}, step {step}")
        pairs = zip(build_model().parameters(), ddp.module.parameters(), strict=True)
        assert all(not torch.equal(one, other) for one, other in pairs), "nothing moved"


@case(2)
def _ddp_with_its_python_reducer_is_refused_where_a_hook_is_needed(setup: Setup) -> None:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        expected, ddp = (DistributedDataParallel(build_model()) for _ in range(2))
        further = [DistributedDataParallel(build_model()) for _ in range(4)]
    finally:
        torch._dynamo.config.optimize_ddp = before
    needs: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 2, "overlap": False}]
    for model, options in zip(further, [*needs, {"overlap": False, "nonfinite": "skip"}], strict=True):
        with pytest.raises(NotImplementedError, match=r"optimize_ddp='python_reducer'.*ZERO-215"):
            shard_optimizer(model, AdamW, **options, **OPTIONS)
    opt, reference = shard_optimizer(ddp, AdamW, overlap=False, **OPTIONS), AdamW(expected.parameters(), **OPTIONS)
    for inputs, targets in batches(setup.rank, 3):
        train_step(expected, reference, inputs, targets)
        train_step(ddp, opt, inputs, targets)
    assert_equal_models(expected.module, ddp.module, "standalone, over the Python reducer")


@case(2)
def _a_step_within_a_cuda_graph_is_refused(setup: Setup) -> None:
    twins = build_twins(OPTIMIZERS[0])
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        internals.as_on_cuda(twins.opt),
        pytest.raises(NotImplementedError, match="CUDA graphs do not support a sharded step"),
    ):
        twins.opt.step()


# sync="forward" and checkpoints


@case(2)
def _forward_passes_captured_before_parameters_move_are_refused(setup: Setup) -> None:
    model = build_model()

    def graphed(*inputs: Tensor) -> Tensor:
        result: Tensor = type(model).forward(model, *inputs)
        return result

    graphed.__module__ = "torch.cuda.graphs"  # as `torch.cuda.make_graphed_callables` leaves it
    model.forward = graphed
    ddp = DistributedDataParallel(model)
    places = [param.data_ptr() for param in ddp.parameters()]
    with pytest.raises(NotImplementedError, match=r"of 'module'.*parameters_as_bucket_view=False.*\[ZERO-124\]"):
        shard_optimizer(ddp, AdamW)
    shard_optimizer(ddp, AdamW, stage=2, parameters_as_bucket_view=False, partition="parameters")
    assert [param.data_ptr() for param in ddp.parameters()] == places


@case(
    2,
    few=["stage 1, overlapped", "stage 2, after backward"],
    every=["stage 1, standalone", "stage 1, overlapped", "stage 2, interleaved", "stage 2, after backward"],
)
def _checkpoints_with_a_sync_in_flight_resume_bit_for_bit(setup: Setup, configurations: list[str]) -> None:
    for name in configurations:
        expected, ddp = plain(build_model()), wrapped(build_model())
        reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES[name])
        before, on_their_way = copy.deepcopy(expected.module), 0
        for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            train_step(expected, reference, inputs, targets)
            train_step(ddp, opt, inputs, targets)
            on_their_way += bool(left(opt))
            checkpoint.save(setup.folder / name, ddp, opt, background=step % 2 == 1)
        assert on_their_way >= 3, f"{name} waits at the end of a step"
        assert_same_values(expected.module, ddp.module, f"saved after every step, {name}")
        assert not any(map(torch.equal, before.parameters(), ddp.module.parameters())), "nothing moved"

        other = wrapped(build_model(1))
        resumed = sharded(other, MODES[name])
        for inputs, targets in batches(setup.rank, 4, seed=2):
            train_step(other, resumed, inputs, targets)
        assert left(resumed), "to be loaded over parameters that are on their way"
        checkpoint.load(setup.folder / name, other, resumed)
        for inputs, targets in batches(setup.rank, 3, seed=1):
            train_step(expected, reference, inputs, targets)
            train_step(other, resumed, inputs, targets)
        assert_same_values(expected.module, other.module, f"resumed, {name}")


@case(2)
def _models_extras_and_state_dicts_are_saved_with_the_parameters_after_the_sync(setup: Setup) -> None:
    expected, ddp = plain(build_model()), wrapped(build_model())
    reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES["stage 2, interleaved"])
    data = batches(setup.rank, 100)

    def train() -> None:
        for _ in range(3):
            inputs, targets = next(data)
            train_step(expected, reference, inputs, targets)
            train_step(ddp, opt, inputs, targets)
        assert left(opt)

    for model in (ddp, ddp.module):
        train()
        checkpoint.save(setup.folder / type(model).__name__, ddp, None) if model is ddp else checkpoint.save(
            setup.folder / type(model).__name__, model, opt
        )
        fresh = build_model(1)
        checkpoint.load(setup.folder / type(model).__name__, fresh)
        assert_equal_models(expected, fresh, "the model alone")
    train()
    weights = {"average": dict(ddp.module.named_parameters()), "last": [ddp.module[-1].weight]}
    checkpoint.save(setup.folder / "extra", build_model_in_ddp(), extra=weights)
    loaded = checkpoint.load(setup.folder / "extra", build_model_in_ddp())
    assert_identical({k: v.detach() for k, v in expected.module.named_parameters()}, loaded.extra["average"], "extra")
    train()
    own = opt.sharded_state_dict(ddp)
    opt.consolidate_state_dict(to=setup.rank * 0)
    if setup.rank == 0:
        assert_identical(reference.state_dict()["state"], opt.state_dict()["state"], "consolidated")
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    assert sorted(own["state"]) == sorted(names[id(param)] for param in opt.state)


def build_model_in_ddp() -> nn.Module:
    return wrapped(build_model(2))


# A state dict before the first step


COPIED = ("AdamW foreach", "Adagrad")


@case(
    *(2, 3),
    few=[place for place, one in enumerate(OPTIMIZERS) if place % 2 or one.name in COPIED],
    every=[*range(len(OPTIMIZERS))],
)
def _a_state_dict_before_the_first_step_is_the_plain_optimizers(setup: Setup, configurations: list[int]) -> None:
    for position in configurations:
        case = OPTIMIZERS[position]
        twins = build_twins(case, groups=1 + position % 2, parameters_as_bucket_view=bool(position % 2))
        _assert_initial_state_dict_equals_the_plain_one(twins, case.name)
        twins.opt.load_state_dict(twins.opt.state_dict())  # as frameworks do to move it to a device
        twins.plain.load_state_dict(twins.plain.state_dict())
        if case.name != "Adagrad":
            _assert_initial_state_dict_equals_the_plain_one(twins, f"{case.name}, loaded")
        twins.train(setup, 2)
        twins.assert_moved()
        if case.name in COPIED:
            with pytest.raises(RuntimeError, match=r"copy of an optimizer.*consolidate_state_dict"):
                copy.deepcopy(twins.opt).state_dict()


def _assert_initial_state_dict_equals_the_plain_one(twins: Twins, what: str) -> None:
    with mock.patch.object(Communicator, "all_gather_ints", side_effect=AssertionError("communicates")):
        found = twins.opt.state_dict()
    expected = twins.plain.state_dict()
    assert_identical(expected, found, what)
    assert list(found) == list(expected)
    assert [list(group) for group in found["param_groups"]] == [list(group) for group in expected["param_groups"]]


@case(2, 3)
def _a_state_dict_before_the_first_step_is_whole_on_ranks_without_parameters(setup: Setup) -> None:
    for build in (AdamW, torch.optim.Adagrad):
        model = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        opt = ZeroRedundancyOptimizer(model.named_parameters(), build, lr=0.1)
        assert_identical(build(model.named_parameters(), lr=0.1).state_dict(), opt.state_dict(), str(build))
        twin = copy.deepcopy(opt)
        assert_identical(opt.state_dict(), twin.state_dict(), "of a copy")
        opt.load_state_dict({**opt.state_dict(), "state": {}})
        plain = build(model.named_parameters(), lr=0.1)
        for optimizer in (plain, twin):
            optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))], "lr": 0.2})
        if build is AdamW:
            assert opt.state_dict()["state"] == {}
            assert_identical(plain.state_dict(), twin.state_dict(), "of an added group")
        else:  # Adagrad creates states at construction, but not for what is added: only its owner knows
            with pytest.raises(RuntimeError, match="copy of an optimizer"):
                twin.state_dict()
            assert opt.state_dict()["state"] == {}
        dist.barrier()  # no rank drops its optimizer while others ask


@case(2, 3)
def _a_state_dict_before_the_first_step_has_masters_and_loads(setup: Setup) -> None:
    for build in (AdamW, torch.optim.Adagrad):
        ddp = wrapped(build_model().to(torch.bfloat16))
        opt = shard_optimizer(ddp, build, lr=0.1, master_weights=True, loss_scale=DynamicLossScale())
        with torch.no_grad():
            ddp.module[0].weight.mul_(2)
        found = opt.state_dict()
        for index, param in enumerate(ddp.parameters()):
            assert torch.equal(found["state"][index]["master_weight"], param.detach().float())
        opt.consolidate_state_dict(to=0)
        if setup.rank == 0:
            assert_identical(opt.state_dict(), found, "masters")
        other = wrapped(build_model(1).to(torch.bfloat16))
        loaded = shard_optimizer(other, build, lr=0.1, master_weights=True, loss_scale=DynamicLossScale())
        other.load_state_dict(ddp.state_dict())
        loaded.load_state_dict(found)
        for model, optimizer in ((ddp, opt), (other, loaded)):
            for inputs, targets in batches(setup.rank, 3):
                step_on(optimizer, optimizer.scale(loss_of(model, inputs.bfloat16(), targets.bfloat16())))
        assert_equal_models(ddp, other, "loaded from before the first step")


@case(2, 3)
def _state_loaded_on_one_rank_alone_is_in_its_consolidated_state_dict(setup: Setup) -> None:
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, lr=0.1, overlap=False)
    opt.load_sharded_state_dict(opt.sharded_state_dict(ddp, init_missing=setup.rank == 0), ddp)
    assert len(opt.state_dict()["state"]) < 10
    found = opt.state_dict()["state"]
    opt.consolidate_state_dict(to=0)
    if setup.rank == 0:
        assert 0 < len(found) < 10
        assert_identical(opt.state_dict()["state"], found, "what rank 0 has loaded")


# Wrappers in checkpoints


class LikeAccelerate(torch.optim.Optimizer):
    """As Accelerate's: all that it is comes from the optimizer that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class WithOwnState(torch.optim.Optimizer):
    """Wraps an optimizer and has state of its own besides."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


class Holder(nn.Module):
    """A module that holds a DDP model and passes on."""

    def __init__(self, ddp: nn.Module, buffer: bool = False) -> None:
        super().__init__()
        self.inner = ddp
        if buffer:
            self.register_buffer("count", torch.zeros(2))

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def in_one_bucket(model: nn.Module) -> DistributedDataParallel:
    """The compiler refuses small buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@case(2)
def _checkpoints_of_wrapped_models_and_optimizers_load_without_wrappers_and_into_others(setup: Setup) -> None:
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, lr=0.1, stage=2)
    model, optimizer = Holder(ddp), LikeAccelerate(LikeAccelerate(opt))
    for inputs, targets in batches(setup.rank, 3):
        train_step(model, optimizer, inputs, targets)
    checkpoint.save(setup.folder / "wrapped", model, optimizer)
    other = wrapped(build_model(1))
    resumed = shard_optimizer(other, AdamW, lr=0.1, stage=1)
    loaded = checkpoint.load(setup.folder / "wrapped", other, resumed)
    assert not loaded.skipped
    bare = in_one_bucket(build_model(2))
    compiled: Any = torch.compile(bare, backend="eager")
    third = shard_optimizer(compiled, AdamW, lr=0.1, stage=2)
    checkpoint.load(setup.folder / "wrapped", compiled, LikeAccelerate(third))
    for inputs, targets in batches(setup.rank, 3, seed=1):
        for one, by in ((model, optimizer), (other, resumed), (compiled, third)):
            train_step(one, by, inputs, targets)
    assert_equal_models(ddp, other, "loaded without wrappers")
    assert_equal_models(ddp.module, bare.module, "loaded into others")

    holder = Holder(ddp, buffer=True)
    count = holder.get_buffer("count")
    checkpoint.save(setup.folder / "holder", holder, optimizer)
    count.fill_(3)
    checkpoint.load(setup.folder / "holder", holder, optimizer)
    assert count.tolist() == [0, 0], "a holder with state of its own is saved whole"
    plain_one = AdamW(ddp.parameters(), lr=0.1)
    checkpoint.save(setup.folder / "plain", ddp, LikeAccelerate(plain_one))
    checkpoint.load(setup.folder / "plain", ddp, plain_one)
    with pytest.raises(TypeError, match=r"got WithOwnState, which has state of its own. Give its .optimizer"):
        checkpoint.save(setup.folder / "ahead", ddp, WithOwnState(plain_one))


@case(2)
def _an_empty_path_is_refused(setup: Setup) -> None:
    ddp = wrapped(build_model())
    before = os.getcwd()
    try:
        os.chdir(setup.folder)
        for act in (checkpoint.save, checkpoint.load):
            with pytest.raises(ValueError, match=r"Expected the path of a folder, got ''. Pass '\.'"):
                act("", ddp)
            assert list(setup.folder.iterdir()) == []
        checkpoint.save(".", ddp, step=1)
        assert checkpoint.load(Path(), ddp).step == 1
    finally:
        os.chdir(before)


# What shard_optimizer takes


@case(2)
def _compiled_and_nested_ddp_models_equal_ddp(setup: Setup) -> None:
    for stage, hold in ((1, "compiled"), (2, "compiled"), (2, "held")):
        expected, ddp = plain(build_model()), in_one_bucket(build_model())
        reference = AdamW(expected.parameters(), **OPTIONS)
        model: Any = torch.compile(ddp, backend="eager") if hold == "compiled" else Holder(Holder(ddp))
        hook = sum_in_rank_order if stage == 1 else None
        opt = shard_optimizer(model, AdamW, stage=stage, hook=hook, **OPTIONS)
        before = copy.deepcopy(expected.module)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            train_step(expected, reference, inputs, targets)
            train_step(model, opt, inputs, targets)
            assert_same_values(expected.module, ddp.module, f"{hold}, stage {stage}, step {step}")
        assert not any(map(torch.equal, before.parameters(), ddp.module.parameters())), "nothing moved"


@case(2)
def _shard_optimizer_of_two_or_no_ddp_models_is_refused(setup: Setup) -> None:
    one, two = wrapped(build_model()), wrapped(build_model())
    with pytest.raises(ValueError, match=r"holds one DistributedDataParallel model, got 2: '0', '1.inner'\. Shard an"):
        shard_optimizer(nn.Sequential(one, Holder(two)), AdamW)
    for nothing, name in ((build_model(), "Sequential"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"or a module that holds one, got {name}. Wrap the model first"):
            shard_optimizer(nothing, AdamW)  # type: ignore[arg-type]


def _decays(name: str, param: nn.Parameter) -> dict[str, Any] | None:
    assert not name.startswith("module."), name
    if name == "0.weight":
        return {"lr": 0.02, "betas": (0.8, 0.9)}
    return {"weight_decay": 0.0} if param.ndim < 2 else None


def _like(groups: list[dict[str, Any]], ddp: nn.Module, are_named: bool) -> list[dict[str, Any]]:
    """Groups of named parameters, of the parameters of these names in another model."""

    def param(name: str) -> Any:
        return (name, ddp.get_parameter(name)) if are_named else ddp.get_parameter(name)

    return [{**group, "params": [param(name) for name, _ in group["params"]]} for group in groups]


@case(2)
def _groups_given_by_a_function_by_names_or_by_parameters_train_as_the_plain_groups(setup: Setup) -> None:
    for stage in (1, 2):
        expected = plain(build_model())
        named = list(expected.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [named[0]], "lr": 0.02, "betas": (0.8, 0.9)},
            {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
            {"params": [(n, p) for n, p in named[1:] if p.ndim >= 2]},
        ]
        reference = AdamW([dict(group) for group in groups], **OPTIONS)
        hook = sum_in_rank_order if stage == 1 else None

        def sharded(ddp: Any, params: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
            return ddp, shard_optimizer(ddp, AdamW, stage=stage, params=params, hook=hook, **OPTIONS)  # noqa: B023

        with_names, with_parameters = wrapped(build_model()), wrapped(build_model())
        sides = {
            "by a function": sharded(wrapped(build_model()), _decays),
            "by names": sharded(with_names, _like(groups, with_names, are_named=True)),
            "by parameters": sharded(with_parameters, _like(groups, with_parameters, are_named=False)),
        }
        for form in ("by a function", "by names"):
            assert all("param_names" in group for group in sides[form][1].param_groups)
        of_function, of_parameters = sides["by a function"][1], sides["by parameters"][1]
        assert of_function.state_dict()["param_groups"] == reference.state_dict()["param_groups"]
        assert "param_names" not in of_parameters.state_dict()["param_groups"][0], "as the plain optimizer's would be"
        assert "'module.0.weight'" in internals.label_of(of_parameters, 0), "names are known for messages"
        for inputs, targets in batches(setup.rank, 4):
            train_step(expected, reference, inputs, targets)
            for form, (ddp, opt) in sides.items():
                train_step(ddp, opt, inputs, targets)
                assert_same_values(expected.module, ddp.module, f"groups {form}, stage {stage}")


@case(2)
def _parameters_that_are_not_given_stay_as_they_were(setup: Setup) -> None:
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, params=[ddp.module[0].weight, ddp.module[0].bias], lr=0.1)
    before = copy.deepcopy(ddp.module)
    for inputs, targets in batches(setup.rank, 3):
        train_step(ddp, opt, inputs, targets)
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), ddp.module.parameters(), strict=True)]
    assert moved == [True, True] + [False] * (len(moved) - 2)


@case(2)
def _layers_added_to_a_model_with_named_groups_train_as_ddp(setup: Setup) -> None:
    """Named after the module where the model that has them is attached already, by their place where it is not."""
    for stage in (1, 2):
        twins = sharded_twins(stage=stage)
        for is_first, is_known, names in (
            (False, True, ["module.8.weight", "module.8.bias"]),
            (True, True, ["added.12", "added.13"]),  # the layer that was first has its names
            (False, False, ["added.14", "added.15"]),
        ):
            twins.train(setup, 2, where=f"stage {stage}")
            twins.zero_grad()
            twins.opt.reset()
            grown = [ddp.module for ddp, _ in twins.sides]
            layers = [nn.Linear(8, 8) if is_first else nn.Linear(3, 3) for _ in grown]
            for module, layer in zip(grown, layers, strict=True):
                assert isinstance(module, nn.Sequential)
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)
                module.insert(0 if is_first else len(module), layer)
            twins.wrap_again()
            twins.plain.add_param_group({"params": layers[0].parameters(), "lr": 0.02})
            if is_known:
                twins.opt.attach(twins.model)
            twins.opt.add_param_group({"params": layers[1].parameters(), "lr": 0.02})
            if not is_known:
                twins.opt.attach(twins.model)
            assert twins.opt.param_groups[-1]["param_names"] == names
        twins.train(setup, 2, where=f"stage {stage}, grown")


def _frozen_answers(name: str, param: nn.Parameter) -> Any:
    return 0.1 if "bias" in name else {}


@case(2)
def _wrong_arguments_are_refused_with_the_name_and_the_value(setup: Setup) -> None:
    ddp = wrapped(build_model())
    params = list(ddp.parameters())
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    with warnings.catch_warnings():  # torch's, of what is in beta
        warnings.simplefilter("ignore")
        rows = nn.Parameter(torch.eye(3).to_sparse_csr())
        nested = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        lazy = nn.LazyLinear(3).weight

    def zero(*args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: ZeroRedundancyOptimizer(*args, **options)

    def shard(**options: Any) -> Callable[[], Any]:
        return lambda: shard_optimizer(ddp, options.pop("optimizer_class", AdamW), **options)

    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, r"process_group .* got 0.001. Options are keywords: .*lr=", zero(params, AdamW, 1e-3)),
        (TypeError, r"process_group .* got 1. Options are keywords", zero(params, AdamW, 1)),
        (TypeError, r"parameters_as_bucket_view to be True or False, got 0.001", zero(params, AdamW, None, 1e-3)),
        (TypeError, r"overlap_with_ddp to be True or False, got 'yes'", zero(params, AdamW, overlap_with_ddp="yes")),
        (TypeError, r"stage to be the int 1 or 2, got '2'", zero(params, AdamW, stage="2")),
        (TypeError, r"grad_comm_dtype .* got 'bf16'", zero(params, AdamW, stage=2, grad_comm_dtype="bf16")),
        (TypeError, r"gradient_predivide_factor .*number", zero(params, AdamW, stage=2, gradient_predivide_factor="2")),
        (TypeError, r"max_grad_norm to be a number, got '1'", zero(params, AdamW, max_grad_norm="1")),
        (TypeError, r"norm_type to be a number, got 'inf'", zero(params, AdamW, norm_type="inf")),
        (ValueError, r"nonfinite to be one of .* got True", zero(params, AdamW, nonfinite=True)),
        (TypeError, r"loss_scale to be .* got 'dynamic'", zero(params, AdamW, loss_scale="dynamic")),
        (TypeError, r"master_weights to be True or False, got 1", zero(params, AdamW, master_weights=1)),
        (ValueError, r"sync to be one of .* got True", zero(params, AdamW, sync=True)),
        (TypeError, r"got the class Linear. The order is", zero(params, nn.Linear)),
        (TypeError, r"got the class AdamW. The parameters come first", zero(AdamW, AdamW)),
        (TypeError, r"DistributedDataParallel. Pass model.named_parameters", zero(ddp, AdamW)),
        (TypeError, r"type AdamW. Pass its class, after the parameters", zero(AdamW(params), AdamW)),
        (ValueError, r"parameter 0, which is of layout torch.sparse_coo.*plain optimizer", zero([sparse], AdamW)),
        (ValueError, r"parameter 1 'rows', which is of .*csr", zero([("a", params[0]), ("rows", rows)], AdamW)),
        (ValueError, r"parameter 0, which is a nested tensor", zero([nested], AdamW)),
        (ValueError, r"parameter 0, which belongs to a lazy module .*Run the model once", zero([lazy], AdamW)),
        (TypeError, r"got 'max_grad_nrom'. Did you mean 'max_grad_norm'\?", shard(max_grad_nrom=1.0)),
        (TypeError, r"got 'overlapp'. Did you mean 'overlap'\?", shard(overlapp=True)),
        (TypeError, r"got 'max_grad_nrom'. Did you mean 'max_grad_norm'\?", zero(params, AdamW, max_grad_nrom=1.0)),
        (TypeError, r"got 'overlap'. Did you mean 'overlap_with_ddp'\?", zero(params, AdamW, overlap=True)),
        (TypeError, r"got 'overlap_with_ddp'. Use overlap=", shard(overlap_with_ddp=True)),
        (TypeError, r"got 'process_group'. It is that of the model", shard(process_group=None)),
        (TypeError, r"unexpected keyword argument 'momentumm'", shard(momentumm=1.0, optimizer_class=torch.optim.SGD)),
        (TypeError, r"overlap to be True or False, got 'yes'", shard(overlap="yes")),
        (TypeError, r"interleaved to be True or False, got 1", shard(interleaved=1)),
        (TypeError, r"hook to be a communication hook or None, got 'fp16'", shard(hook="fp16")),
        (TypeError, r"group of '0.bias', or None for the class's own, got 0.1", shard(params=_frozen_answers)),
    ]
    for kind, message, build in cases:
        with pytest.raises(kind, match=message):
            build()
    last = setup.rank == setup.world_size - 1
    one_sided: list[Any] = [(AdamW, (1e-3,) if last else ()), ("AdamW" if last else AdamW, ())]
    for chosen, surplus in one_sided:
        with pytest.raises(TypeError if last else RuntimeError, match=r"Expected .* got"):
            ZeroRedundancyOptimizer(params, chosen, *surplus)
    with pytest.raises(ValueError, match="state of the optimizer"):  # handed over on one rank, built on the others
        ZeroRedundancyOptimizer(params, AdamW(params) if last else AdamW)
    opt = shard_optimizer(ddp, AdamW, lr=0.1)  # nothing was changed by any of these
    for inputs, targets in batches(setup.rank, 2):
        train_step(ddp, opt, inputs, targets)


# refresh_master_weights() forgotten

MASTERS: list[dict[str, Any]] = [
    {"stage": 1, "overlap": True},
    {"stage": 1, "interleaved": True, "sync": "forward"},
    {"stage": 1, "max_grad_norm": 1.0},
    {"stage": 1, "overlap": False},
    {"stage": 2},
    {"stage": 2, "interleaved": False, "sync": "forward"},
    {"stage": 2, "overlap": False},
    {"stage": 1, "find_unused_parameters": True},
    {"stage": 2, "find_unused_parameters": True},
]


@case(2, marks=[pytest.mark.nightly])
def _training_after_a_refused_step_without_refresh_equals_one_with_it(setup: Setup) -> None:
    for mode in MASTERS:
        for continues in ("with these gradients", "with the next batch"):
            _train_without_refresh(setup, dict(mode), continues)


def _train_without_refresh(setup: Setup, mode: dict[str, Any], continues: str) -> None:
    unused = mode.pop("find_unused_parameters", False)
    models = [wrapped(build_model().bfloat16(), find_unused_parameters=unused) for _ in range(2)]
    opts = [shard_optimizer(ddp, AdamW, lr=1e-2, master_weights=True, **mode) for ddp in models]
    other = build_model(3).bfloat16().state_dict()
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(setup.rank, 10)]
    for inputs, targets in data[:4]:
        for ddp, opt in zip(models, opts, strict=True):
            train_step(ddp, opt, inputs, targets)
    for ddp in models:
        ddp.module.load_state_dict(other)
    opts[0].refresh_master_weights()
    unrefreshed, opt = models[1], opts[1]
    for _ in range(2):  # again and again
        with pytest.raises(RuntimeError, match=r"parameter \d+ .*Call opt.refresh_master_weights\(\) after writing"):
            train_step(unrefreshed, opt, *data[4])
        assert_identical(dict(other), dict(unrefreshed.module.state_dict()), "a step that was refused")
        if continues == "with the next batch":
            opt.zero_grad()
            continue
        break
    opt.refresh_master_weights()
    if continues == "with these gradients":
        opt.step()
        opt.zero_grad()
        train_step(models[0], opts[0], *data[4])
    for inputs, targets in data[5:]:
        for ddp, opt in zip(models, opts, strict=True):
            train_step(ddp, opt, inputs, targets)
    assert_same_values(models[0].module, models[1].module, f"{mode}, {continues}")
    assert not any(map(torch.equal, other.values(), unrefreshed.module.state_dict().values())), "nothing moved"


# Who reads a parameter on its way


def _scripted(tensor: Tensor) -> Tensor:
    return tensor * 1.0


def _readers_that_wait() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "nn.Parameter": nn.Parameter,
        "nn.Parameter, frozen": lambda param: nn.Parameter(param, requires_grad=False),
        "nn.Buffer": nn.Buffer,
        "as_subclass": lambda param: param.as_subclass(Tensor),
        "detach": lambda param: param.detach(),
        "torch.ops": lambda param: torch.ops.aten.mul.Tensor(param, 1.0),
        "torch.jit.fork": lambda param: torch.jit.wait(torch.jit.fork(torch.mul, param, 1.0)),
        "a function while it is traced": lambda param: torch.jit.trace(_scripted, (param,), check_trace=False)(param),
        "torch.nn.utils": lambda param: nn.utils.parameters_to_vector([param]).view_as(param),
        "torch.from_dlpack": lambda param: torch.utils.dlpack.from_dlpack(param.detach()),
    }


def _readers_that_do_not_wait() -> dict[str, Callable[[Tensor], Tensor]]:
    """By the words that `finish_sync` has for them."""
    script, trace = torch.jit.script(_scripted), torch.jit.trace(_scripted, (torch.ones(2),))
    return {
        "torch.jit.script": script,
        "``trace``": trace,
        "torch.Tensor(param)": Tensor,
        "torch.tensor(param)": torch.tensor,
        "torch.as_tensor": lambda param: torch.as_tensor(param, dtype=torch.float64).float(),
        "torch.asarray": lambda param: torch.asarray(param, dtype=torch.float64).float(),
        "tensor.new_tensor(param)": torch.ones(1).new_tensor,
        "tensor.new(param)": torch.ones(1).new,
        "torch.autograd.Variable(param)": torch.autograd.Variable,
        "torch.nested.nested_tensor": lambda param: torch.nested.nested_tensor([param]).unbind()[0],
        "torch.sparse_coo_tensor": lambda param: torch.sparse_coo_tensor(
            torch.arange(param.shape[0])[None], param, param.shape
        ).to_dense(),
        "torch.func.grad": torch.func.grad(lambda value: (value * value).sum() / 2),
        "``vmap``": torch.func.vmap(lambda value: value * 1.0),
    }


def _is_in_flight(param: Tensor) -> bool:
    return isinstance(param, Awaited)


@case(2)
def _readers_of_a_parameter_in_flight_wait_for_it_or_are_listed_in_the_limits(setup: Setup) -> None:
    expected, ddp = plain(build_model()), wrapped(build_model())
    reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES["stage 2, interleaved"])
    data = batches(setup.rank, 1000)
    theirs: Any = expected.module[3].weight
    ours: Any = ddp.module[3].weight

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(data)
            train_step(expected, reference, inputs, targets)
            train_step(ddp, opt, inputs, targets)
        assert left(opt)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: TorchScript and nested tensors
        train(3)
        for name, read in _readers_that_wait().items():
            train(1)
            assert _is_in_flight(ours), name
            found = read(ours)
            assert not _is_in_flight(ours), f"{name} does not wait"
            assert_identical(theirs.detach(), found.detach().as_subclass(Tensor), name)
            assert type(found) is type(read(theirs)), name
        train(1)
        copied = nn.Parameter(ours)
        assert (copied.requires_grad, copied.is_leaf, copied.data_ptr()) == (True, True, ours.data_ptr())
        assert not nn.Parameter(ours, requires_grad=False).requires_grad
        for name, read in _readers_that_do_not_wait().items():
            assert name in str(ZeroRedundancyOptimizer.finish_sync.__doc__), f"{name} is not named in the limits"
            train(1)
            read(ours)
            assert _is_in_flight(ours), f"{name} waits now: take it out of the limits"
            opt.finish_sync()
            assert_identical(theirs.detach(), read(ours).detach().as_subclass(Tensor), name)
    assert_same_values(expected.module, ddp.module, "after all of it")


# Parameters in flat storage, as savers see them


class Adapted(nn.Module):
    """Large layers, a small adapter, and a head that is tied to a part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.adapter = nn.Linear(64, 2, bias=False)
        self.head = nn.Linear(2, 64, bias=False)
        self.tied = nn.Linear(64, 2, bias=False)
        self.tied.weight = self.adapter.weight
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.adapter(self.base(inputs)) + self.tied(inputs))
        return hidden


def _bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def _shared(state: dict[str, Tensor]) -> list[set[str]]:
    """Names of tensors that share a storage, found as safetensors and accelerate find them."""
    names: dict[tuple[torch.device, int, int], set[str]] = {}
    for name, value in state.items():
        storage = value.untyped_storage()
        names.setdefault((value.device, storage.data_ptr(), storage.nbytes()), set()).add(name)
    return [found for found in names.values() if len(found) > 1]


@case(2)
def _state_dicts_of_flat_storage_share_no_memory_and_are_of_the_plain_size(setup: Setup) -> None:
    torch.manual_seed(0)
    fresh = Adapted()
    modes: list[dict[str, Any]] = [{}, {"sync": "forward"}, {"stage": 2}, {"stage": 2, "partition": "elements"}]
    for options in modes:
        ddp = DistributedDataParallel(copy.deepcopy(fresh), gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, AdamW, lr=0.1, **options)
        for iteration in range(4):
            step_on(opt, ddp(torch.randn(4, 64)).square().mean())
            if iteration not in (0, 3):  # in DDP's first buckets, and in the final ones
                continue
            if "sync" in options:
                assert left(opt)
                assert _bytes(ddp.module.state_dict(keep_vars=True)) < _bytes(fresh.state_dict()) + 4096
                assert not left(opt), "waits for parameters on their way"
            state = ddp.module.state_dict()
            assert _shared(state) == [{"adapter.weight", "tied.weight"}], options
            for value in state.values():
                assert value.untyped_storage().nbytes() == value.nbytes
            model = copy.deepcopy(fresh)
            model.load_state_dict(state)
            assert not torch.equal(model.head.weight, fresh.head.weight), "nothing moved"
            for name in ("head", "adapter", "base.2"):
                ours, plains = ddp.module.get_submodule(name), model.get_submodule(name)
                assert _bytes(ours.state_dict()) == _bytes(plains.state_dict()), name
            assert _bytes(state) == _bytes(model.state_dict())
            for copied in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
                assert copied.tied.weight is copied.adapter.weight
                assert_same_values(ddp.module, copied, "a copy")


@case(2)
def _parameters_moved_out_of_flat_storage_equal_ddp(setup: Setup) -> None:
    def share(model: nn.Module) -> None:
        model.share_memory()

    def replace_memory(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = param.detach().clone()

    modes: list[dict[str, Any]] = [{}, {"stage": 2}, {"stage": 2, "overlap": False}, {"sync": "forward"}]
    for options in modes:
        for leave in (share, replace_memory):
            torch.manual_seed(0)
            first = Adapted()
            expected, ours = (
                DistributedDataParallel(model, gradient_as_bucket_view=True) for model in (first, copy.deepcopy(first))
            )
            plain_opt, opt = AdamW(expected.parameters(), lr=0.1), shard_optimizer(ours, AdamW, lr=0.1, **options)
            generator = torch.Generator().manual_seed(setup.rank)
            before = ours.module.head.weight.detach().clone()
            for iteration in range(6):
                inputs = torch.randn(4, 64, generator=generator)
                for ddp, one in ((expected, plain_opt), (ours, opt)):
                    step_on(one, ddp(inputs).square().mean())
                    if iteration in (0, 3):
                        leave(ddp.module)
                assert_same_values(expected, ours, f"{leave.__name__} {options} {iteration}")
            assert not torch.equal(before, ours.module.head.weight), "nothing moved"


test_doors = case.each()
