"""Loops of the guides, typed as they stand there, and the messages that lead to them: equal to DDP doing the same."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step, shard_optimizer
from ddp_zero.values.placeholders import AbsentGradient
from tests import internals
from tests.multiproc.cases import assert_identical, assert_moved, batches, build_model, loss_of
from tests.multiproc.harness import Cases, Setup
from tests.pages import DOCS, blocks_of

case = Cases()

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
wrapped = partial(DistributedDataParallel, bucket_cap_mb=0.0015, gradient_as_bucket_view=True)
Build = Callable[[DistributedDataParallel], Any]


def code_of(guide: str, word: str) -> list[str]:
    """The blocks of a guide that contain a word, in order, from the loop on: not what builds its names."""
    codes = [block.code for block in blocks_of(DOCS / "guides" / f"{guide}.md") if word in block.code]
    return [code.partition("\n\n")[2] if "new_ddp()" in code else code for code in codes]


def values_of(*models: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for model in models for param in model.parameters()]


def plainly(ddp: DistributedDataParallel) -> Optimizer:
    return AdamW(ddp.parameters(), **OPTIONS)


def sharded(**mode: Any) -> Build:
    return lambda ddp: shard_optimizer(ddp, AdamW, **mode, **OPTIONS)


def standalone(ddp: DistributedDataParallel) -> Optimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **OPTIONS)


# Several backward passes before one step


class SumOfAverages(Adam):
    """Averages each pass by itself and adds up, as stage 2 does."""

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield
        # copies: DDP writes the next pass to the same memory
        self.first = {param: param.grad.clone() for group in self.param_groups for param in group["params"]}
        for param in self.first:
            param.grad = None

    def step(self, closure: Any = None) -> Any:
        for param, grad in vars(self).pop("first", {}).items():
            param.grad += grad
        return super().step(closure)


def played(setup: Setup, code: str, build: Build, of_judge: Build | None = None) -> list[Tensor]:
    """The parameters of both networks after rounds of a block of the guide."""
    torch.manual_seed(0)
    judge, maker = (
        wrapped(nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, out))) for size, out in ((8, 1), (4, 8))
    )
    before = copy.deepcopy([judge.module, maker.module])
    names = {"judge": judge, "maker": maker, "judge_opt": (of_judge or build)(judge), "maker_opt": build(maker)}
    names |= {"loss_function": nn.BCEWithLogitsLoss(), "ones": torch.ones(6, 1), "zeros": torch.zeros(6, 1)}
    generator = torch.Generator().manual_seed(setup.rank)
    for _ in range(4):
        for name, size in (("real", 8), ("noise", 4)):
            names[name] = torch.randn(6, size, generator=generator)
        exec(code, names)
    for ddp, model in zip((judge, maker), before, strict=True):
        assert_moved(model, ddp.module)
    return values_of(judge, maker)


GAN_MODES: tuple[dict[str, Any], ...] = ({}, {"sync": "forward"}, {"overlap": False}, {"max_grad_norm": 1e9})


@case(
    2,
    few=[(mode, 1 + place % 2, place >= 2) for place, mode in enumerate(GAN_MODES)],
    every=[*product(GAN_MODES, (1, 2), (False, True))],
)
def _the_guides_gan_with_two_averaged_passes_equals_ddp(
    setup: Setup, configurations: list[tuple[dict[str, Any], int, bool]]
) -> None:
    before, after = code_of("accumulate", "judge(fake.detach())")
    expected = played(setup, before, lambda ddp: Adam(ddp.parameters(), **OPTIONS))
    summed = played(setup, after, lambda ddp: SumOfAverages(ddp.parameters(), **OPTIONS))
    worst = max((one - other).abs().max().item() for one, other in zip(expected, summed, strict=True))
    assert 0 < worst < 1e-6, f"{worst}: what docs/numerics.md says of stage 2"
    for mode, stage, as_before in configurations:
        build = partial(shard_optimizer, optimizer_class=Adam, stage=stage, **mode, **OPTIONS)
        late = partial(shard_optimizer, optimizer_class=Adam, stage=stage, overlap=False, **OPTIONS)
        found = played(setup, before, build, late) if as_before else played(setup, after, build)
        assert_identical(expected if stage == 1 else summed, found, f"stage {stage}, {mode}, {as_before=}")


@case(2)
def _a_gan_of_the_tutorials_is_refused_with_the_remedy(setup: Setup) -> None:
    before, after = code_of("accumulate", "judge(fake.detach())")
    advice = r"all but the last in opt\.accumulate\(\) .*requires_grad_\(False\) before its forward pass"
    for mode in ({}, {"stage": 2}):
        build = partial(shard_optimizer, optimizer_class=Adam, **mode, **OPTIONS)
        with pytest.raises(RuntimeError, match=rf"once for 2 backward passes .*{advice}.*\[ZERO-307\]$"):
            played(setup, before, build)
        unfrozen = after.replace("judge.requires_grad_(False)", "...")
        assert unfrozen != after
        with pytest.raises(RuntimeError, match=rf"got opt.zero_grad\(\) .*{advice}\. \[ZERO-307\]$"):
            played(setup, unfrozen, build)


# Options that are set between backward and step


@case(2)
def _a_rate_set_before_the_step_is_refused_with_a_remedy_that_equals_ddp(setup: Setup) -> None:
    """The remedy of the message is what makes each loop equal."""

    def attached(overlaps: bool, stage: int, ddp: DistributedDataParallel) -> Any:
        opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=overlaps, stage=stage, **OPTIONS)
        opt.attach(ddp)
        return opt

    def hooked(overlaps: bool, stage: int, ddp: DistributedDataParallel) -> Any:
        opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=overlaps, stage=stage, **OPTIONS)
        if overlaps or stage == 2:
            ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, opt))
        return opt

    def train(build: Build) -> list[Tensor]:
        ddp = wrapped(build_model())
        opt = build(ddp)
        for number, batch in enumerate(batches(setup.rank, 4)):
            loss_of(ddp, *batch).backward()
            if number >= 2:
                opt.param_groups[0]["lr"] *= 0.5
            opt.step()
            opt.zero_grad()
        assert_moved(build_model(), ddp.module)
        return values_of(ddp)

    expected = train(plainly)
    with pytest.raises(
        RuntimeError, match=r"'lr' of .*overlap=False\)\): opt\.step\(\) then takes the step\. \[ZERO-304\]$"
    ):
        train(sharded())
    for build in (attached, hooked):
        for stage in (1, 2):
            more = r" Leave ddp\.register_comm_hook\(\.\.\.\) out then\." if (build, stage) == (hooked, 1) else ""
            with pytest.raises(RuntimeError, match=rf"opt\.step\(\) then takes the step\.{more} \[ZERO-304\]$"):
                train(partial(build, True, stage))
            assert_identical(expected, train(partial(build, False, stage)), f"{build.__name__}, stage {stage}")


# Norms


@case(2)
def _a_norm_by_hand_is_refused_in_stage_2_and_the_named_call_equals_it(setup: Setup) -> None:
    """Stage 2 refuses it where a gradient is missing; the call that the message names first gives the number."""

    def by_hand(ddp: Any, _: Any) -> Any:
        return sum((param.grad**2).sum() for param in ddp.parameters()) ** 0.5

    def by_call(_: Any, opt: Any) -> Any:
        return opt.clip_grad_norm_(float("inf"))

    def train(build: Build, norm_of: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        ddp = wrapped(build_model())
        opt = build(ddp)
        norms = []
        for batch in batches(setup.rank, 5):
            loss_of(ddp, *batch).backward()
            norms.append(norm_of(ddp, opt).detach().clone())
            opt.step()
            opt.zero_grad()
        return values_of(ddp), norms

    expected, norms = train(plainly, by_hand)
    for mode in ({"stage": 2}, {"stage": 2, "overlap": False}):
        with pytest.raises(RuntimeError, match=r"opt\.clip_grad_norm_\(float\('inf'\)\), .*opt\.full_grad\(param\) "):
            train(sharded(**mode), by_hand)
        found, ours = train(sharded(**mode), by_call)
        assert_identical(expected, found, f"{mode}")
        torch.testing.assert_close(ours, norms, rtol=1e-6, atol=0)


def norm_of_parts(ddp: DistributedDataParallel, opt: ZeroRedundancyOptimizer) -> Tensor:
    """The norm of norms of parameters, each in fp64 from the norms of its parts where it is cut."""
    owned = {internals.index_of(opt, param): grad.norm() for param, grad in opt.owned_gradients().items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, owned)
    norms = []
    for index in range(len(list(ddp.parameters()))):
        parts = [one[index] for one in everyone if index in one]
        norms.append(parts[0] if len(parts) == 1 else torch.stack(parts).double().norm().float())
    total: Tensor = torch.stack(norms).norm()
    return total


@case(2)
def _norms_of_gradients_that_owners_have_changed_are_as_the_page_says(setup: Setup) -> None:
    """docs/numerics.md: to the bit where parameters are whole; of a cut one, the norm of the norms of its parts."""

    def train(build: Build) -> tuple[list[Tensor], list[float]]:
        ddp = wrapped(build_model())
        opt = build(ddp)
        norms = []
        for batch in batches(setup.rank, 6):
            loss_of(ddp, *batch).backward()
            is_ours = isinstance(opt, ZeroRedundancyOptimizer)
            grads: Any = opt.owned_gradients().values() if is_ours else [param.grad for param in ddp.parameters()]
            for grad in grads:
                grad.mul_(3.7)
            if not is_ours:
                norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            elif internals.cuts_parameters(opt):
                norm = norm_of_parts(ddp, opt)
            opt.step()
            norms.append(opt.last_step.grad_norm if is_ours else norm.item())
            if is_ours and internals.cuts_parameters(opt):
                assert norms[-1] == norm.item(), "not the norm of the norms of parts"
            opt.zero_grad()
        return values_of(ddp), norms

    expected = train(plainly)
    assert_identical(expected, train(sharded(max_grad_norm=0.1, partition="parameters")), "whole parameters")
    cut = train(sharded(max_grad_norm=0.1, partition="elements"))
    torch.testing.assert_close(cut, expected, rtol=1e-5, atol=1e-6)


# Gradients after a scaler's step


@case(2, marks=[pytest.mark.nightly])
def _param_grad_after_scaler_step_is_unscaled_as_in_a_plain_loop(setup: Setup) -> None:
    def train(build: Build, unscales: bool) -> list[Any]:
        ddp = wrapped(build_model())
        opt = build(ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        shown: list[Any] = []
        for number, batch in enumerate(batches(setup.rank, 6)):
            scaler.scale(loss_of(ddp, *batch) * (float("inf") if number == 3 else 1.0)).backward()
            if unscales:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            grads = {index: param.grad for index, param in enumerate(ddp.parameters())}
            here = {index: grad for index, grad in grads.items() if not isinstance(grad, AbsentGradient)}
            shown.append({index: grad.clone() for index, grad in here.items() if grad is not None})
            shown.append(values_of(ddp))
            opt.zero_grad()
        return shown

    modes: dict[str, Build] = {
        "class": standalone,
        "stage 1": sharded(),
        "stage 1, no overlap": sharded(overlap=False),
        "stage 1, elements": sharded(partition="elements"),
        "stage 1, fp32 sums": sharded(accumulate_in_fp32=True),
        "stage 2": sharded(stage=2),
        "stage 2, no overlap": sharded(stage=2, overlap=False),
        "stage 2, clipped": sharded(stage=2, max_grad_norm=1e9),
    }
    for unscales in (False, True):
        expected = train(plainly, unscales)
        for name, build in modes.items():
            found = train(build, unscales)
            assert any(found[0]) or "stage 2" in name
            for before, after in zip(expected, found, strict=True):
                if isinstance(before, dict):
                    before = {index: before[index] for index in after}
                assert_identical(before, after, f"{name}, unscale_ {unscales}")


# Exceptions in backward


class Fuse(torch.autograd.Function):
    """Raises in the backward pass, if it is told to."""

    blows = False

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fuse.blows:
            raise FloatingPointError("the fuse has blown")
        return grad


@contextmanager
def fuse_blown() -> Iterator[None]:
    Fuse.blows = True
    yield
    Fuse.blows = False


class Fused(nn.Module):
    """Four layers, and a fuse behind the first: gradients of several buckets are there when it blows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            inputs = torch.tanh(layer(inputs))
            if number == 0:
                inputs = Fuse.apply(inputs)  # type: ignore[no-untyped-call]
        return inputs


def wrapped_small(module: nn.Module, **_: Any) -> DistributedDataParallel:
    """A bucket for each layer."""
    return DistributedDataParallel(module, bucket_cap_mb=0.003, gradient_as_bucket_view=True)


class Inputs(list[Tensor]):
    """Batches, of which one is bad: the fuse blows in its backward pass."""

    bad: int | None = None

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(len(self)):
            Fuse.blows = number == self.bad
            yield self[number]
        Fuse.blows = False


class Trained:
    """A model, its optimizer, and the guide's loop."""

    def __init__(self, build: Build) -> None:
        model = wrapped_small(Fused())
        self.names = {"model": model, "opt": build(model), "DistributedDataParallel": wrapped_small}
        opt: Any = self.names["opt"]
        if isinstance(opt, AdamW):
            vars(opt).update(reset=nullcontext, attach=lambda ddp: None)

    def train(self, setup: Setup, steps: int, bad: int | None, seed: int) -> None:
        (code,) = code_of("restart", "except FloatingPointError")
        generator = torch.Generator().manual_seed(10 * seed + setup.rank)
        self.names["batches"] = Inputs(torch.randn(4, 32, generator=generator) for _ in range(steps))
        self.names["batches"].bad = bad
        exec(code, self.names)

    @property
    def values(self) -> list[Tensor]:
        return values_of(self.names["model"])


GO_ON: dict[str, Build] = {
    "class": standalone,
    "stage 1": sharded(),
    "stage 1, late": sharded(sync="forward"),
    "stage 1, no overlap": sharded(overlap=False),
    "stage 1, elements": sharded(partition="elements"),
    "stage 1, fp32 sums": sharded(accumulate_in_fp32=True),
    "stage 2, not interleaved": sharded(stage=2, interleaved=False),
    "stage 2, late, not interleaved": sharded(stage=2, sync="forward", interleaved=False),
    "stage 2, no overlap": sharded(stage=2, overlap=False),
    "stage 2, clipped": sharded(stage=2, max_grad_norm=1e9),
}
HALF_UPDATED: dict[str, Build] = {
    "stage 1, interleaved": sharded(interleaved=True),
    "stage 2": sharded(stage=2),
    "stage 2, late": sharded(stage=2, sync="forward"),
    "stage 2, elements": sharded(stage=2, partition="elements"),
}


@case(2, few=[((0, 1, 4)[place % 3], name) for place, name in enumerate(GO_ON)], every=[*product((0, 1, 4), GO_ON)])
def _training_after_an_exception_in_backward_on_all_ranks_equals_ddp(
    setup: Setup, configurations: list[tuple[int, str]]
) -> None:
    expected = {bad: Trained(plainly) for bad in (0, 1, 4)}
    for bad, plain in expected.items():
        plain.train(setup, 6, bad, 0)
        assert_moved(Fused(), plain.names["model"].module)
    for bad, name in configurations:
        found = Trained(GO_ON[name])
        found.train(setup, 6, bad, 0)
        assert_identical(expected[bad].values, found.values, f"{name}, batch {bad}")


@case(2)
def _an_exception_in_backward_after_buckets_were_stepped(setup: Setup) -> None:
    plain = Trained(plainly)
    plain.train(setup, 4, None, 0)
    state = copy.deepcopy([plain.names["model"].module.state_dict(), plain.names["opt"].state_dict()])
    plain.train(setup, 3, 2, 1)
    plain.names["model"].module.load_state_dict(state[0])
    plain.names["opt"].load_state_dict(state[1])
    plain.train(setup, 4, None, 2)
    for number, (name, build) in enumerate(HALF_UPDATED.items()):
        found, folder = Trained(build), setup.folder / str(number)
        found.train(setup, 4, None, 0)
        checkpoint.save(folder, found.names["model"], found.names["opt"], step=3)
        with pytest.warns(UserWarning, match=r"stepped some buckets and not the others .*\[ZERO-308\]$"):
            found.train(setup, 3, 2, 1)
        checkpoint.load(folder, found.names["model"], found.names["opt"])
        found.train(setup, 4, None, 2)
        assert_identical(plain.values, found.values, name)


@case(2)
def _a_checkpoint_after_an_exception_in_backward_over_a_mesh_resumes_as_ddp(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plain = Trained(plainly)
    plain.train(setup, 4, None, 0)
    expected = copy.deepcopy([plain.names["model"].module.state_dict(), plain.names["opt"].state_dict()])
    plain.train(setup, 4, None, 1)
    for stage in (1, 2):
        build = sharded(stage=stage, overlap=False, mesh=mesh, data_parallel_dim="dp")
        found, folder = Trained(build), setup.folder / str(stage)
        found.train(setup, 4, None, 0)
        checkpoint.save(folder, found.names["model"], found.names["opt"], step=3)
        with fuse_blown(), pytest.raises(FloatingPointError):
            found.names["model"](torch.randn(4, 32)).square().mean().backward()
        found.names["model"] = model = wrapped_small(found.names["model"].module)
        found.names["opt"] = build(model)
        checkpoint.load(folder, model, found.names["opt"])
        assert_identical(list(expected[0].values()), found.values, f"stage {stage}, loaded")
        found.train(setup, 4, None, 1)
        assert_identical(plain.values, found.values, f"stage {stage}")


def _interrupted(setup: Setup, build: Build) -> Trained:
    """Trained for three steps, and then interrupted in backward, which `step()` tells."""
    found = Trained(build)
    found.train(setup, 3, None, 0)
    with fuse_blown(), pytest.raises(FloatingPointError):
        found.names["model"](torch.randn(4, 32)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Wrap the module again|wrap the module again"):
        found.names["opt"].step()
    return found


@case(2)
def _training_an_interrupted_model_in_stage_1_is_refused(setup: Setup) -> None:
    """In stage 1, where DDP's own reducer waits for gradients that never came."""
    found = _interrupted(setup, sharded())
    model = found.names["model"]
    found.names["opt"].reset()
    with torch.no_grad():
        model(torch.randn(4, 32))
    with pytest.raises(RuntimeError, match=r"Expected a new DDP model .*Wrap the module again\. .*\[ZERO-308\]$"):
        model(torch.randn(4, 32))


@case(2)
def _stage_2_trains_the_interrupted_model_as_ddp(setup: Setup) -> None:
    expected = Trained(plainly)
    expected.train(setup, 3, None, 0)
    expected.train(setup, 3, None, 1)
    assert_moved(Fused(), expected.names["model"].module)
    for options in ({"interleaved": False}, {"overlap": False}, {"max_grad_norm": 1e9}):
        found = _interrupted(setup, sharded(stage=2, **options))
        found.names["opt"].reset()
        found.names["opt"].zero_grad()
        found.train(setup, 3, None, 1)
        assert_identical(expected.values, found.values, str(options))


test_guide_loops = case.each()
