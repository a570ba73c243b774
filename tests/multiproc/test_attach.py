"""The building blocks for frameworks: `attach`, `needs_hook`, wrappers, and what torch's norms find in stage 2."""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.ddp.reducer import registered_hooks
from tests import internals
from tests.internals import owners_of
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, build_model, loss_of, step_on
from tests.multiproc.harness import Cases, Setup
from tests.pairwise import Modes, every_other

case = Cases()

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
MODES: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 1, overlapped": {"overlap_with_ddp": True},
    "stage 1, clipped": {"max_grad_norm": 0.1},
    "stage 2, overlapped": {"stage": 2, "overlap_with_ddp": True},
    "stage 2, clipped": {"stage": 2, "overlap_with_ddp": True, "max_grad_norm": 0.1},
    "stage 2": {"stage": 2},
}
EVERY_MODE: dict[str, dict[str, Any]] = {
    "stage 1, no overlap": {"overlap": False},
    "stage 1": {},
    "stage 1, watched": {"overlap": False, "nonfinite": "skip"},
    "stage 1, fp32 sums": {"accumulate_in_fp32": True},
    "stage 2": {"stage": 2},
    "stage 2, no overlap": {"stage": 2, "overlap": False},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 1e9},
    "stage 2, cut": {"stage": 2, "partition": "elements"},
    "stage 2, late syncs": {"stage": 2, "sync": "forward"},
}
MORE_MODES: dict[str, dict[str, Any]] = {
    "stage 1, clipped": {"max_grad_norm": 1e9},
    "stage 1, interleaved": {"interleaved": True},
    "stage 1, cut": {"partition": "elements"},
    "stage 1, late syncs": {"sync": "forward"},
}
ALL_MODES = EVERY_MODE | MORE_MODES
STEPS_INSIDE = {name for name in ALL_MODES if not any(word in name for word in ("overlap", "watched", "clipped"))}


class Outer(nn.Module):
    """Holds a model and nothing else, as the modules of frameworks do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inside(inputs)
        return result


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)


def trained_plainly(setup: Setup, max_grad_norm: float | None) -> nn.Module:
    model = wrapped(build_model())
    opt = AdamW(model.parameters(), **OPTIONS)
    for inputs, targets in batches(setup.rank, 5):
        loss_of(model, inputs, targets).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        opt.step()
        opt.zero_grad()
    inner: nn.Module = model.module
    return inner


@case(2, few=every_other(MODES), every=MODES)
def _an_optimizer_that_was_built_first_equals_the_plain_one(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        expected = trained_plainly(setup, mode.get("max_grad_norm"))
        inner = build_model()
        before = [param.detach().clone() for param in inner.parameters()]
        opt = ZeroRedundancyOptimizer(inner.parameters(), AdamW, **mode, **OPTIONS)
        needs = "stage" in mode or "overlap_with_ddp" in mode
        assert opt.needs_hook is needs, name
        model = Outer(wrapped(inner))
        opt.attach(model)
        assert not opt.needs_hook, name
        for inputs, targets in batches(setup.rank, 5):
            step_on(opt, loss_of(model, inputs, targets))
        assert_equal_models(expected, inner, name)
        assert not any(map(torch.equal, before, inner.parameters())), "nothing moved"
        assert opt.last_step is not None
        if "max_grad_norm" in mode:
            assert opt.last_step.grad_norm is not None


@case(3)
def _attach_before_the_first_step_changes_owners_without_messages(setup: Setup) -> None:
    """One message for each of thousands of parameters takes seconds."""
    with mock.patch.object(Communicator, "send_tree", side_effect=AssertionError("sent")):
        ddp = DistributedDataParallel(build_model(), bucket_cap_mb=2e-4)
        opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, stage=2, overlap_with_ddp=True, **OPTIONS)
        before = owners_of(opt)
        opt.attach(ddp)
    assert owners_of(opt) != before


@case(2)
def _forward_of_a_model_whose_optimizer_was_dropped_is_refused(setup: Setup) -> None:
    """In a loop that leaves the steps to backward; before the pass, so that the next optimizer can be built."""
    for mode in ({"stage": 1}, {"stage": 1, "interleaved": True}, {"stage": 2}, {"stage": 2, "sync": "forward"}):
        ddp = wrapped(build_model())
        opt: Any = shard_optimizer(ddp, AdamW, **mode, **OPTIONS)
        *before, after = batches(setup.rank, 3)
        for batch in before:
            loss_of(ddp, *batch).backward()
            opt.zero_grad()
        del opt
        with pytest.raises(
            RuntimeError, match=r"was dropped\. Keep it .* wrap the module .*opt\.detach\(\).*\[ZERO-208\]$"
        ):
            ddp(after[0])
        shard_optimizer(ddp, AdamW, **mode, **OPTIONS)


@case(2, few=every_other(ALL_MODES, 1), every=ALL_MODES)
def _a_model_whose_optimizer_was_dropped_takes_another_optimizer(setup: Setup, configurations: Modes) -> None:
    """Passes are averaged, and nobody steps; then another optimizer comes."""
    for name, mode in configurations.items():
        models = [wrapped(build_model()) for _ in range(2)]

        def train(optimizers: list[Any], seed: int, models: list[nn.Module] = models) -> None:  # type: ignore[assignment]
            for model, opt in zip(models, optimizers, strict=True):
                for batch in batches(setup.rank, 3, seed=seed):
                    step_on(opt, loss_of(model, *batch))

        train([AdamW(models[0].parameters(), **OPTIONS), shard_optimizer(models[1], AdamW, **mode, **OPTIONS)], 0)
        for number, batch in enumerate(batches(setup.rank, 2, seed=1)):
            grads = []
            for model in models:
                with model.no_sync() if number else nullcontext():
                    loss_of(model, *batch).backward()
                grads.append([param.grad for param in model.parameters()])
            assert_identical(grads[0], grads[1], name)
        for model in models:
            model.zero_grad()
        last = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        train(last, 2)
        train([last[0], shard_optimizer(models[1], torch.optim.SGD, lr=0.1, **mode)], 3)
        assert_equal_models(models[0], models[1], name)


@case(2)
def _another_hook_on_a_sharded_model_is_refused_and_works_after_detach(setup: Setup) -> None:
    """Refused, and the remedy works: once the optimizer has left DDP may still have its hook."""
    refused = r"hook of an optimizer.*hook= .*wrap the module again.*\[ZERO-206\]$"
    for name, mode in (EVERY_MODE | MORE_MODES).items():
        models = [wrapped(build_model()) for _ in range(2)]
        opt: Any = shard_optimizer(models[1], AdamW, **mode, **OPTIONS)
        if mode != {"overlap": False}:  # which has no hook
            with pytest.raises(ValueError, match=refused):
                models[1].register_comm_hook(dist.group.WORLD, allreduce_hook)
        opt.detach()
        if mode.get("stage", 1) == 1 and mode != {"overlap": False}:
            with pytest.raises(ValueError, match=refused):
                models[1].register_comm_hook(dist.group.WORLD, allreduce_hook)
            models[1] = wrapped(models[1].module)
        for model in models:
            model.register_comm_hook(dist.group.WORLD, allreduce_hook)
            plain = AdamW(model.parameters(), **OPTIONS)
            for batch in batches(setup.rank, 2):
                loss_of(model, *batch).backward()
                plain.step()
        assert_equal_models(models[0], models[1], name)


@case(2)
def _attach_of_other_models_or_of_models_with_a_hook_is_refused(setup: Setup) -> None:
    inner = build_model()
    opt = ZeroRedundancyOptimizer(inner.parameters(), AdamW, stage=2, **OPTIONS)
    with pytest.raises(TypeError, match=r"Expected a DistributedDataParallel model.* got Sequential"):
        opt.attach(inner)
    ddp = wrapped(inner)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"This DDP model already has a communication hook"):
        opt.attach(ddp)
    mixed = DistributedDataParallel(build_model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"without mixed_precision=, which registers one.*\[ZERO-206\]$"):
        opt.attach(mixed)
    assert opt.needs_hook
    ddp = wrapped(inner)
    loss = loss_of(ddp, *next(batches(setup.rank, 1)))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"has no communication hook, which .* Call opt.attach\(ddp\)"):
        opt.step()
    opt.zero_grad()
    with pytest.raises(ValueError, match="has none of the parameters of this DDP model"):
        opt.attach(wrapped(build_model()))
    opt.attach(wrapped(inner))
    with pytest.raises(ValueError, match=r"This optimizer already has a communication hook"):
        opt.attach(wrapped(inner))


@case(2, few=every_other(MODES), every=MODES)
def _a_module_wrapped_again_after_three_steps_equals_ddp(setup: Setup, configurations: Modes) -> None:
    """The reducer of a model that is gone still calls its hook, for it hangs on the parameters."""
    for name, options in configurations.items():
        expected = trained_plainly(setup, options.get("max_grad_norm"))
        module = build_model()
        ddp = wrapped(module)
        opt = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, **OPTIONS, **options)
        takes_hook = opt.needs_hook
        opt.attach(ddp)
        for step, batch in enumerate(batches(setup.rank, 5)):
            if step == 3:
                ddp = wrapped(module)
                if takes_hook:
                    with pytest.raises(
                        ValueError, match=r"already has a communication hook.* opt\.reset\(\) and opt\.attach\(model\)"
                    ):
                        opt.attach(ddp)
                if options.get("overlap_with_ddp"):
                    before = [param.detach().clone() for param in module.parameters()]
                    with pytest.raises(RuntimeError, match=r"opt\.reset\(\) and opt\.attach\(model\)"):  # noqa: PT012
                        loss_of(ddp, *batch).backward()
                        opt.step()
                    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
                    ddp = wrapped(module)  # that one's reducer waits for the rest of its gradients
                opt.reset()
                opt.zero_grad()
                opt.attach(ddp)
            step_on(opt, loss_of(ddp, *batch))
        for one, other in zip(expected.parameters(), module.parameters(), strict=True):
            assert torch.equal(one, other), name


@case(2)
def _attach_after_wrapping_again_keeps_the_hook_its_state_and_interleaved(setup: Setup) -> None:
    """However the first hook was built."""
    states: list[Any] = []

    def own(state: Any, bucket: Any) -> Any:
        states.append(state)
        group: Any = dist.group.WORLD
        return allreduce_hook(group, bucket)

    def by_hand(ddp: DistributedDataParallel) -> ZeroRedundancyOptimizer:
        opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, hook_with_zero_step(own, ddp, opt))
        return opt

    def built(**options: Any) -> Callable[[DistributedDataParallel], ZeroRedundancyOptimizer]:
        return lambda ddp: shard_optimizer(ddp, AdamW, lr=0.1, **options)

    for name, build in {
        "a hook": built(hook=own, hook_state="its state"),
        "a hook, no overlap": built(hook=own, hook_state="its state", overlap=False),
        "a hook by hand": by_hand,
        "stage 2": built(stage=2, interleaved=False),
    }.items():
        module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        first, *_, last = module.parameters()
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
        opt = build(ddp)
        for _ in range(2):
            for step in range(3):
                last_before, kept = last.detach().clone(), list[bool]()
                handle = first.register_hook(lambda _: kept.append(torch.equal(last, last_before)))  # noqa: B023
                states.clear()
                ddp(torch.ones(1, 32)).sum().backward()
                handle.remove()
                opt.step()
                opt.zero_grad()
                assert kept == [True], f"{name}, step {step}: a bucket was stepped while backward computed"
                assert not torch.equal(last, last_before), "nothing moved"
                if name != "stage 2":
                    assert states, f"{name}, step {step}: the hook was not called"
                    assert ("hand" in name) or set(states) == {"its state"}, name
            ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
            opt.reset()
            opt.attach(ddp)
        opt.detach()
        opt.attach(ddp)
        states.clear()
        before = last.detach().clone()
        ddp(torch.ones(1, 32)).sum().backward()
        opt.step()
        assert not states, f"{name}: detached, an optimizer forgets the hook"
        assert not torch.equal(last, before)


@case(2)
def _torchs_norms_in_stage_2_are_refused_with_the_line_and_the_remedy(setup: Setup) -> None:
    """A collective in their place could hang: a rank that has all gradients it is asked for would not take part."""
    ddp = wrapped(build_model())
    kept = shard_optimizer(ddp, AdamW, stage=2, overlap=False, **OPTIONS)
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    calls: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(ddp.parameters(), 0.1),
        lambda: nn.utils.get_total_norm([param.grad for param in ddp.parameters() if param.grad is not None]),
    ]
    for call in calls:
        line = f"{__file__}:{call.__code__.co_firstlineno}: "
        with pytest.raises(RuntimeError, match=rf"opt.clip_grad_norm_\(max_norm\) clips .*{re.escape(line)}lambda: nn"):
            call()
    assert kept.last_step is None


def _from_before(how: str, setup: Setup, mode: dict[str, Any] | None) -> tuple[nn.Module, list[Tensor]]:
    """Train with something of DDP's that is there before the optimizer; None: nothing. Returns what was kept."""
    module, (first, *rest) = build_model(), list(batches(setup.rank, 6))
    if how != "reducer kept":
        loss_of(module, *first).backward()
    ddp = wrapped(module)
    if how == "wrapped twice":
        ddp = wrapped(module)
    reducer = ddp.reducer if how.startswith("reducer") else None
    kept = [param.grad for param in module.parameters() if param.grad is not None] if how == "gradients kept" else []
    if mode is None:
        opt: Any = AdamW(module.parameters(), **OPTIONS)
    else:
        opt = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, **mode, **OPTIONS)
        opt.attach(ddp)
    norm = (mode or {}).get("max_grad_norm")
    if reducer is None and "stage" in (mode or {}):
        assert internals.own_reducer_is_gone(ddp)
    for inputs, targets in rest:
        if reducer is None:
            loss = loss_of(ddp, inputs, targets)
        else:
            loss = loss_of(module, inputs, targets)
            reducer.prepare_for_backward([])
        step_on(opt, loss)
    assert norm is None or opt.last_step.grad_norm is not None
    return module, kept


FROM_BEFORE = ("gradients", "gradients kept", "wrapped twice", "reducer kept", "reducer and gradients kept")
MODES_OF_BEFORE = {name: mode for name, mode in MODES.items() if "max_grad_norm" not in mode} | {
    "stage 2, clipped": {"stage": 2, "overlap_with_ddp": True, "max_grad_norm": 1e9},
    "stage 2, cut": {"stage": 2, "overlap_with_ddp": True, "partition": "elements"},
    "stage 2, late": {"stage": 2, "overlap_with_ddp": True, "sync": "forward", "parameters_as_bucket_view": True},
}


@case(
    2,
    few=[(how, every_other(MODES_OF_BEFORE, place % 2)) for place, how in enumerate(FROM_BEFORE)],
    every=[(how, MODES_OF_BEFORE) for how in FROM_BEFORE],
)
def _gradients_and_references_kept_from_before_the_optimizer_stay_intact(
    setup: Setup, configurations: Sequence[tuple[str, Modes]]
) -> None:
    """Memory of DDP's that somebody still views, or whose reducer somebody may wake, stays."""
    for how, modes in configurations:
        expected, _ = _from_before(how, setup, None)
        for name, mode in modes.items():
            found, kept = _from_before(how, setup, mode)
            assert_equal_models(expected, found, f"{name}, {how}")
            assert all(bool(grad.isfinite().all()) for grad in kept)


@case(2)
def _backward_after_prepare_for_backward_of_a_kept_reducer_is_refused(setup: Setup) -> None:
    ddp = wrapped(build_model())
    reducer = ddp.reducer
    opt = shard_optimizer(ddp, AdamW, stage=2, **OPTIONS)
    loss = loss_of(ddp, *next(batches(setup.rank, 1)))
    reducer.prepare_for_backward([])
    with pytest.raises(
        RuntimeError, match=r"a reference to ddp\.reducer was kept .* Leave out that call.*\[ZERO-301\]"
    ):
        loss.backward()
    opt.reset()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError


class _Answer:
    """An output in which nobody finds the tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Answers(nn.Sequential):
    def forward(self, value: Tensor) -> Any:
        return _Answer(super().forward(value))  # type: ignore[no-untyped-call]


AGAIN: Modes = {name: EVERY_MODE[name] for name in ("stage 1, no overlap", *list(EVERY_MODE)[4:8])}


@case(
    2,
    few=[("interrupted", True, every_other(AGAIN)), ("no_sync", False, every_other(AGAIN, 1))],
    every=[(how, as_views, AGAIN) for how, as_views in product(("interrupted", "no_sync"), (True, False))],
)
def _a_model_wrapped_again_with_gradients_of_an_interrupted_pass_equals_ddp(
    setup: Setup, configurations: Sequence[tuple[str, bool, Modes]]
) -> None:
    """As DDP leaves them: a loop that zeroes after its step has them in the next one."""

    def loss_of(ddp: DistributedDataParallel, inputs: Tensor, targets: Tensor) -> Tensor:
        found = ddp(inputs)
        return nn.functional.mse_loss(found.value if isinstance(found, _Answer) else found, targets)

    def trained(how: str, mode: dict[str, Any] | None, as_views: bool, in_objects: bool = False) -> Any:
        module: Any = build_model()
        module = _Answers(*module) if in_objects else module
        data = list(batches(setup.rank, 5))
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
        opt: Any = (
            AdamW(ddp.parameters(), **OPTIONS) if mode is None else shard_optimizer(ddp, AdamW, **mode, **OPTIONS)
        )
        for step, batch in enumerate(data):
            if step == 2:
                if how == "no_sync":
                    with ddp.no_sync():
                        loss_of(ddp, *batch).backward()
                else:
                    breaks = module[3].register_forward_hook(lambda _, __, output: _Fails.apply(output))  # type: ignore[no-untyped-call]
                    with pytest.raises(ValueError):  # noqa: PT011
                        loss_of(ddp, *batch).backward()
                    breaks.remove()
                assert any(param.grad is not None for param in module.parameters())
                ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
                if mode is not None:
                    opt.reset()
                    opt.attach(ddp)
            step_on(opt, loss_of(ddp, *batch))
        return module

    for how, as_views, modes in configurations:
        expected = trained(how, None, as_views)
        for name, mode in modes.items():
            assert_equal_models(expected, trained(how, mode, as_views), f"{how}, views: {as_views}, {name}")
    expected = trained("interrupted", None, True, in_objects=True)
    for mode in ({"overlap": False}, {}, {"stage": 2}):
        found = trained("interrupted", mode, True, in_objects=True)
        assert_equal_models(expected, found, f"outputs in objects, {mode}")


@case(
    2,
    few=[(True, 0.0015, every_other(ALL_MODES)), (False, 0.0015, every_other(ALL_MODES, 1))],
    every=[(as_views, cap, ALL_MODES) for as_views, cap in product((True, False), (0.0015, 25))],
)
def _gradients_of_a_pass_interrupted_between_buckets_equal_ddp_or_are_refused(
    setup: Setup, configurations: list[tuple[bool, float, Modes]]
) -> None:
    """Some buckets are reduced already. A hook divides later than DDP does; stage 2 has moved gradients to owners."""
    refused = r"^Expected gradients of earlier passes, or none, got .* 'module\..*\[ZERO-308\]$"

    def trained(mode: dict[str, Any] | None, as_views: bool, cap: float, zeroes: bool) -> nn.Module:
        module: Any = build_model()
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_views, bucket_cap_mb=cap)
        opt: Any = (
            AdamW(ddp.parameters(), **OPTIONS) if mode is None else shard_optimizer(ddp, AdamW, **mode, **OPTIONS)
        )
        for step, batch in enumerate(batches(setup.rank, 5)):
            if step == 2:
                breaks = module[0].register_forward_hook(lambda _, __, output: _Fails.apply(output))  # type: ignore[no-untyped-call]
                with pytest.raises(ValueError):  # noqa: PT011
                    loss_of(ddp, *batch).backward()
                breaks.remove()
                for _ in range(20):  # reductions that nobody waits for end meanwhile
                    dist.barrier()
                ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_views, bucket_cap_mb=cap)
                if mode is not None:
                    opt.reset()
                    opt.attach(ddp)
                if zeroes:
                    ddp.zero_grad()  # which the optimizer does not see
            step_on(opt, loss_of(ddp, *batch))
        return module  # type: ignore[no-any-return]

    for as_views, cap, modes in configurations:
        kept, zeroed = (trained(None, as_views, cap, zeroes) for zeroes in (False, True))
        for name, mode in modes.items():
            where = f"{name}, {as_views}, {cap}"
            if mode.get("stage") == 2 and cap < 1:
                with pytest.raises(RuntimeError, match=refused):
                    trained(mode, as_views, cap, zeroes=False)
                assert_equal_models(zeroed, trained(mode, as_views, cap, zeroes=True), where)
            else:
                assert_equal_models(kept, trained(mode, as_views, cap, zeroes=False), where)


@case(
    2,
    few=[(True, every_other(ALL_MODES)), (False, every_other(ALL_MODES, 1))],
    every=[(True, ALL_MODES), (False, ALL_MODES)],
)
def _gradients_of_other_parameters_after_an_interrupted_pass_equal_ddp(
    setup: Setup, configurations: list[tuple[bool, Modes]]
) -> None:
    """Their averages are on their way: DDP shows those where it shows its buckets, else what the rank itself has."""
    warnings.filterwarnings("ignore", "The interrupted backward pass has stepped all buckets", UserWarning)

    def trained(mode: dict[str, Any] | None, as_views: bool) -> list[Tensor]:
        module: Any = build_model()
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
        own = list(module[2:].parameters())
        opt: Any = AdamW(own, **OPTIONS) if mode is None else shard_optimizer(ddp, AdamW, own, **mode, **OPTIONS)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 3)):
            if step < 2:
                loss_of(ddp, inputs, targets).backward()
                opt.step()
                ddp.zero_grad()
                opt.zero_grad()
                continue
            with pytest.raises(ValueError):  # noqa: PT011
                loss_of(ddp, _Fails.apply(inputs.requires_grad_()), targets).backward()  # type: ignore[no-untyped-call]
        if mode is not None:
            opt.reset()
        for _ in range(20):  # reductions that nobody waits for end meanwhile
            dist.barrier()
        assert all(param.grad is not None for param in module[0].parameters()), mode
        return [param.grad.clone() for param in module[0].parameters()]

    for as_views, modes in configurations:
        expected = trained(None, as_views)
        for name, mode in modes.items():
            assert_identical(expected, trained(mode, as_views), f"{name}, views: {as_views}")


@case(2, few=every_other(EVERY_MODE, 1), every=EVERY_MODE)
def _an_earlier_optimizer_that_still_exists_is_named(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        if name == "stage 1, no overlap":  # it has no hook
            continue
        model = wrapped(build_model())
        opt = shard_optimizer(model, AdamW, **mode, **OPTIONS)
        loss_of(model, *next(batches(setup.rank, 1))).backward()
        with pytest.raises(
            ValueError, match=r"an optimizer: AdamW over 10 parameters.*earlier\.detach\(\).*\[ZERO-206\]"
        ):
            shard_optimizer(model, torch.optim.SGD, lr=0.1, **mode)
        opt.step()
        if mode.get("stage") == 2:
            with pytest.raises(RuntimeError, match=r"got that of .*model\.zero_grad\(\).*\[ZERO-309\]"):
                opt.detach()
        opt.zero_grad()
        opt.detach()
        if opt.needs_hook:
            with pytest.raises(RuntimeError, match=r"Call opt\.attach\(ddp\).*\[ZERO-203\]"):
                opt.step()
        opt.attach(model)
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, *next(batches(setup.rank, 1))).backward()
        opt.step()
        opt.finish_sync()
        assert not any(map(torch.equal, before, model.parameters())), "nothing moved"


@case(2)
def _a_hook_that_is_built_into_ddp_is_refused_before_anything_is_registered(setup: Setup) -> None:
    """DDP has it in no list, and its reducer would refuse ours after DDP has listed that."""
    for name, mode in EVERY_MODE.items():
        if name == "stage 1, no overlap":  # it registers none
            continue
        ddp = wrapped(build_model())
        ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        with pytest.raises(ValueError, match=r"already has a communication hook.*\[ZERO-206\]$"):
            shard_optimizer(ddp, AdamW, **mode, **OPTIONS)
        assert registered_hooks(ddp) == [], name
    ddp = wrapped(build_model())
    kept = ddp.reducer
    shard_optimizer(ddp, AdamW, stage=2, **OPTIONS).detach()
    assert ddp.reducer is kept
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    shard_optimizer(ddp, AdamW, stage=2, **OPTIONS)


@case(2)
def _a_hook_of_a_static_graph_stays_when_its_reducer_is_built_anew(setup: Setup) -> None:
    """After passes in `no_sync()` of an optimizer that has left, also if that has failed once."""

    def register(ddp: DistributedDataParallel, kind: str) -> None:
        if kind == "built in":
            ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        else:
            ddp.register_comm_hook(None, fp16_compress_hook)

    def trained(kind: str, *, is_sharded: bool, fails: bool) -> nn.Module:
        # DDP itself fails if the first pass of a static graph is in `no_sync()`
        ddp = DistributedDataParallel(build_model(), static_graph=is_sharded)
        if is_sharded:
            opt: Any = shard_optimizer(ddp, AdamW, stage=2, **OPTIONS)
            opt.detach()
        register(ddp, kind)
        plain, (first, *others) = torch.optim.SGD(ddp.parameters(), lr=0.1), list(batches(setup.rank, 4))
        with ddp.no_sync():
            loss_of(ddp, *first).backward()
        if fails:
            error = RuntimeError("in between")
            build = mock.patch.object(DistributedDataParallel, "_ddp_init_helper", side_effect=error)
            with build, pytest.raises(RuntimeError, match="in between"):
                loss_of(ddp, *others[0])
        for batch in others:
            step_on(plain, loss_of(ddp, *batch))
        inner: nn.Module = ddp.module
        return inner

    for kind in ("built in", "in Python"):
        expected = trained(kind, is_sharded=False, fails=False)
        for fails in (False, True):
            assert_equal_models(expected, trained(kind, is_sharded=True, fails=fails), f"{kind}, fails: {fails}")


@case(2, few=every_other(ALL_MODES), every=ALL_MODES)
def _another_optimizer_trains_the_model_of_one_that_has_not_left(setup: Setup, configurations: Modes) -> None:
    """Equal to DDP where the earlier one waits for its own step; else told in the first one, and what to do works."""
    refused = r"got a step of SGD .*\(rank \d.*of an earlier AdamW.*\[ZERO-307\]$"
    absent = r"(used up|is not on this rank).*To train the model by another .*opt\.detach\(\).*\[ZERO-40[12]\]$"
    for name, mode in configurations.items():
        models = [wrapped(build_model()) for _ in range(2)]
        opt = shard_optimizer(models[1], AdamW, **mode, **OPTIONS)
        for model, earlier in zip(models, [AdamW(models[0].parameters(), **OPTIONS), opt], strict=True):
            for batch in batches(setup.rank, 3):
                step_on(earlier, loss_of(model, *batch))
        plain, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        for step, batch in enumerate(batches(setup.rank, 3, seed=1)):
            step_on(plain, loss_of(models[0], *batch))
            loss_of(models[1], *batch).backward()
            if step or not (name in STEPS_INSIDE or mode.get("stage") == 2):
                other.step()
            else:
                with pytest.raises(RuntimeError, match=absent if mode.get("stage") == 2 else refused):
                    other.step()
                models[1].zero_grad()
                opt.reset()
                opt.detach()
                models[1].load_state_dict(models[0].state_dict())
            other.zero_grad()
            assert_equal_models(models[0], models[1], f"{name}, step {step}")


@case(2, few=every_other(ALL_MODES, 1), every=ALL_MODES)
def _a_step_inside_backward_is_not_joined_when_the_next_optimizer_is_built(setup: Setup, configurations: Modes) -> None:
    """The module is wrapped again, so the next one does not meet the hook of the earlier one."""
    for name, mode in configurations.items():
        models = [wrapped(build_model()) for _ in range(2)]
        opt = shard_optimizer(models[1], AdamW, **mode, **OPTIONS)
        for model, earlier in zip(models, [AdamW(models[0].parameters(), **OPTIONS), opt], strict=True):
            for batch in batches(setup.rank, 3):
                earlier.zero_grad()
                loss_of(model, *batch).backward()
                earlier.step()
            earlier.zero_grad()
            loss_of(model, *next(batches(setup.rank, 1, seed=1))).backward()
            model.zero_grad()
        models = [wrapped(model.module) for model in models]
        if name in STEPS_INSIDE:
            with pytest.raises(RuntimeError, match=r"got a new optimizer .*an earlier AdamW.*\[ZERO-307\]$"):
                shard_optimizer(models[1], torch.optim.SGD, lr=0.1, **mode)
            opt.reset()
            opt.detach()
            models[1].load_state_dict(models[0].state_dict())
        plain, later = (
            torch.optim.SGD(models[0].parameters(), lr=0.1),
            shard_optimizer(models[1], torch.optim.SGD, lr=0.1, **mode),
        )
        for batch in batches(setup.rank, 3, seed=2):
            for model, one in zip(models, [plain, later], strict=True):
                step_on(one, loss_of(model, *batch))
            assert_equal_models(models[0], models[1], name)


@case(2, few=every_other(ALL_MODES), every=ALL_MODES)
def _groups_that_were_taken_out_by_hand_are_named(setup: Setup, configurations: Modes) -> None:
    """Also where `zero_grad()` no longer reaches their gradients, in stage 2."""
    for mode in configurations.values():
        for edit in ("popped", "filtered"):
            ddp = wrapped(build_model())
            *others, last = ddp.parameters()
            opt = shard_optimizer(ddp, AdamW, [{"params": others}, {"params": [last]}], **mode, **OPTIONS)
            data = batches(setup.rank, 5)
            for _ in range(2):
                step_on(opt, loss_of(ddp, *next(data)))
            loss_of(ddp, *next(data)).backward()
            opt.step()
            if edit == "popped":
                popped = opt.param_groups.pop()
            else:
                opt.param_groups[0]["params"] = [param for param in others if param.ndim > 1]
            opt.zero_grad()
            with pytest.raises(RuntimeError, match=r"Expected the parameters .*\[ZERO-117\]$"):  # noqa: PT012
                loss_of(ddp, *next(data)).backward()
                opt.step()
                opt.finish_sync()
            # it was raised outside of backward: DDP can go on
            if edit == "popped":
                opt.param_groups.append(popped)
            else:
                opt.param_groups[0]["params"] = others
            opt.zero_grad()
            before = [param.detach().clone() for param in ddp.parameters()]
            loss_of(ddp, *next(data)).backward()
            opt.step()
            opt.finish_sync()
            assert not any(map(torch.equal, before, ddp.parameters())), mode


GRADIENTS_MODES = ALL_MODES | {"stage 1, fp32 sums, waiting": {"accumulate_in_fp32": True, "overlap": False}}


@case(2, few=every_other(GRADIENTS_MODES, 1), every=GRADIENTS_MODES)
def _autograd_grad_around_a_step_leaves_training_equal_to_ddp(setup: Setup, configurations: Modes) -> None:
    """After every step, and in odd steps between backward and the step, too; both pass DDP's reducer by."""
    for name, mode in configurations.items():
        models = [wrapped(build_model()) for _ in range(2)]
        opts: list[Any] = [
            AdamW(models[0].parameters(), **OPTIONS),
            shard_optimizer(models[1], AdamW, **mode, **OPTIONS),
        ]
        for step, batch in enumerate(batches(setup.rank, 5)):
            found = []
            for model, opt in zip(models, opts, strict=True):
                loss_of(model, *batch).backward()
                if step % 2:
                    torch.autograd.grad(loss_of(model.module, *batch), list(model.parameters()))
                opt.step()
                found.append(torch.autograd.grad(loss_of(model.module, *batch), list(model.parameters())))
                opt.zero_grad()
            assert_identical(list(found[0]), list(found[1]), f"{name}, step {step}")
            assert_equal_models(models[0], models[1], f"{name}, step {step}")


test_attach = case.each()
