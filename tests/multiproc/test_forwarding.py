"""Public methods of the inner class: called on every rank, they do what they do to the unsharded optimizer."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests import internals
from tests.multiproc.cases import (
    OptimizerCase,
    Twins,
    assert_identical,
    assert_same_on_all_ranks,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
)
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.multiproc.small_models import TOY, ToyScheduleFree

case = Cases(group_timeout=30)


MODES: dict[str, Callable[[], Twins]] = {
    "standalone": lambda: build_twins(TOY, 2, parameters_as_bucket_view=True),
    "copied": lambda: build_twins(TOY, parameters_as_bucket_view=False),
    "overlapped": lambda: build_overlapped_twins(TOY, 2),
    "interleaved": lambda: build_overlapped_twins(TOY, interleaved=True),
    "waits": lambda: build_overlapped_twins(TOY, zero_options={"max_grad_norm": 1e9}),
    "in forward": lambda: build_overlapped_twins(TOY, zero_options={"sync": "forward"}),
}
STAGE_2 = {name: build for name, build in MODES.items() if name not in ("standalone", "copied")} | {
    "reduces only": lambda: build_overlapped_twins(TOY, overlap=False)
}


def _assert_equal(expected: nn.Module, actual: nn.Module, when: str) -> None:
    """To the last bit; parameters on their way are waited for."""
    for (name, one), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"{name} {when}"


def _call(twins: Twins, name: str) -> None:
    """Call a method of both."""
    for optimizer in (twins.plain, twins.opt):
        getattr(optimizer, name)()


def _switch(twins: Twins, name: str) -> None:
    """Call a method of both, which returns the optimizer."""
    getattr(twins.plain, name)()
    assert getattr(twins.opt, name)() is twins.opt


def _train(twins: Twins, setup: Setup, steps: int, seed: int) -> None:
    for step, (inputs, targets) in enumerate(batches(setup.rank, steps, seed)):
        losses = []
        for model, optimizer in twins.sides:
            optimizer.zero_grad()
            losses.append(loss_of(model, inputs, targets))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses), f"loss of step {step}"
        _assert_equal(twins.plain_model, twins.model, f"after step {step}")


@case(2, 3)
def _train_and_eval_equal_the_plain_optimizers_in_stage_1(setup: Setup) -> None:
    _epochs(setup, 1, MODES)


@case(2, 3)
def _train_and_eval_equal_the_plain_optimizers_in_stage_2(setup: Setup) -> None:
    _epochs(setup, 2, STAGE_2)


def _epochs(setup: Setup, stage: int, modes: dict[str, Callable[[], Twins]]) -> None:
    for name, build in modes.items():
        with at_stage(stage):
            twins = build()
        for epoch in range(3):
            _switch(twins, "train")
            _train(twins, setup, 3, epoch)
            before = [param.detach().clone() for param in twins.plain_model.parameters()]
            _switch(twins, "eval")
            assert not all(map(torch.equal, before, twins.plain_model.parameters())), "eval() does nothing"
            _assert_equal(twins.plain_model, twins.model, f"in eval mode, {name}, epoch {epoch}")
            assert [group["train_mode"] for group in twins.opt.param_groups] == [False] * len(twins.opt.param_groups)
            _same_state(setup, twins, f"{name}, epoch {epoch}")
        twins.assert_moved()


def _same_state(setup: Setup, twins: Twins, where: str) -> None:
    """Consolidated while in eval mode; loaded by both, and trained on."""
    last = setup.world_size - 1
    twins.assert_same_state(where, to=last)
    saved = copy.deepcopy(twins.plain.state_dict())
    twins.opt.load_state_dict(saved)
    _assert_equal(twins.plain_model, twins.model, f"loaded, {where}")


# Masters


def _compare_masters(
    plain_model: nn.Module, copies: list[nn.Parameter], model: nn.Module, opt: ZeroRedundancyOptimizer, when: str
) -> None:
    with torch.no_grad():
        for shown, kept in zip(plain_model.parameters(), copies, strict=True):
            shown.copy_(kept)
    _assert_equal(plain_model, model, when)
    for param, master in opt.master_weights.items():
        assert torch.equal(master, copies[internals.index_of(opt, param)]), when


@case(2, 3)
def _train_and_eval_switch_masters_as_the_plain_optimizer_its_copies(setup: Setup) -> None:
    """A bf16 model: DDP and the optimizer over fp32 copies by hand, against master weights."""
    for overlap in (False, True):
        plain_model = DistributedDataParallel(build_model().bfloat16())
        model = DistributedDataParallel(copy.deepcopy(plain_model.module), bucket_cap_mb=0.0015)
        copies = [nn.Parameter(param.detach().float()) for param in plain_model.parameters()]
        plain = ToyScheduleFree(copies)
        opt: Any = shard_optimizer(model, ToyScheduleFree, overlap=overlap, master_weights=True)
        for epoch in range(2):
            plain.train()
            opt.train()
            _compare_masters(plain_model, copies, model, opt, "after train()")
            for inputs, targets in batches(setup.rank, 3, epoch):
                for one in (plain_model, model):
                    one.zero_grad()
                    loss_of(one, inputs.bfloat16(), targets.bfloat16()).backward()
                for param, master in zip(plain_model.parameters(), copies, strict=True):
                    assert param.grad is not None
                    master.grad = param.grad.float()
                plain.step()
                opt.step()
                _compare_masters(plain_model, copies, model, opt, "after a step")
            plain.eval()
            opt.eval()
            _compare_masters(plain_model, copies, model, opt, "after eval()")


@case(2, 3)
def _masters_that_a_method_writes_before_the_first_step_are_kept(setup: Setup) -> None:
    """What a method writes to masters is kept, whole, although the model was the truth until then."""
    model = DistributedDataParallel(build_model().bfloat16())
    opt: Any = shard_optimizer(model, ToyScheduleFree, overlap=False, master_weights=True)
    expected = [param.detach().float() * 1.001 for param in model.parameters()]
    opt.scale_all(1.001)
    opt.train()
    inputs, targets = next(batches(0, 1))
    (0 * loss_of(model, inputs.bfloat16(), targets.bfloat16())).backward()
    opt.step()
    for param, master in opt.master_weights.items():
        torch.testing.assert_close(master, expected[internals.index_of(opt, param)], rtol=1e-6, atol=0)
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach(), value.bfloat16(), rtol=0, atol=0)


# Around a call


@case(2, 3)
def _public_methods_of_the_inner_class_are_called_by_name(setup: Setup) -> None:
    twins = MODES["overlapped"]()
    opt: Any = twins.opt
    _switch(twins, "train")
    _train(twins, setup, 2, 0)
    assert opt.mode is True
    assert opt.kind == "toy"
    assert opt.twice(4) == 8
    assert opt.switches == 1
    rounds = internals.communicator_of(opt).round
    assert opt.steps_so_far() == 2
    assert internals.communicator_of(opt).round == rounds  # nothing was written, so nothing was sent
    assert opt.eval.__name__ == "eval"
    assert opt.eval.__doc__ == "Parameters become x."
    assert not hasattr(opt, "_switch")
    with pytest.raises(AttributeError, match="'lenght', nor has ToyScheduleFree"):
        opt.lenght  # noqa: B018
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(opt)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(opt)
    model, clone = copy.deepcopy((twins.model.module, opt))
    clone.eval()
    _switch(twins, "eval")
    _assert_equal(twins.plain_model.module, model, "of a copy")
    for other in (AdamW, SGD):
        plain = ZeroRedundancyOptimizer(build_model().parameters(), other, lr=0.1)
        assert [name for name in ("train", "eval", "found_inf", "grad_scale") if hasattr(plain, name)] == []


@case(2, 3)
def _an_error_of_a_method_on_one_rank_is_raised_on_all(setup: Setup) -> None:
    """Every rank raises, and what was written until then is the same on all."""
    for build in MODES.values():
        twins = build()
        opt: Any = twins.opt
        _switch(twins, "train")
        _train(twins, setup, 3, 0)
        first = next(iter(twins.model.parameters()))
        owner = internals.owners_of(opt)[internals.index_of(opt, first)]
        if setup.rank == owner:
            with pytest.raises(ArithmeticError, match="on the way"):
                opt.scale_all(2.0, fails_if=lambda param, first=first: param is first)
        else:
            with pytest.raises(RuntimeError, match=rf"ToyScheduleFree.scale_all\(\), got .*rank {owner}: Arithmetic"):
                opt.scale_all(2.0)
        assert opt.param_groups[0]["scaled"] == 2.0
        assert_same_on_all_ranks(twins.model.parameters())
        opt.eval()
        assert_same_on_all_ranks(twins.model.parameters())


@case(2, 3)
def _different_methods_on_different_ranks_are_refused(setup: Setup) -> None:
    twins = MODES["standalone"]()
    opt: Any = twins.opt
    with pytest.raises(ValueError, match=r"same operation.*ToyScheduleFree.(train|eval)\(\)"):
        (opt.eval if setup.rank else opt.train)()
    assert opt.param_groups[0]["train_mode"] is False  # nothing was called


@case(2, 3)
def _a_method_between_backward_and_step_is_refused(setup: Setup) -> None:
    twins = MODES["overlapped"]()
    opt: Any = twins.opt
    opt.train()
    loss_of(twins.model, *next(batches(setup.rank, 1, 5))).backward()
    opt.step()  # the first of all, which waits for this call
    opt.zero_grad()
    for inputs, targets in batches(setup.rank, 3):
        loss_of(twins.model, inputs, targets).backward()
        with pytest.raises(
            RuntimeError, match=r"opt.eval\(\) must be called between two steps, .*STEPPED .* Call opt.step\(\) first"
        ):
            opt.eval()
        opt.step()
        opt.zero_grad()
    opt.eval()
    assert_same_on_all_ranks(twins.model.parameters())

    twins = MODES["waits"]()
    _switch(twins, "train")
    _train(twins, setup, 2, 0)
    for inputs, targets in batches(setup.rank, 2, 1):
        for model, optimizer in twins.sides:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
        _switch(twins, "eval")
        _assert_equal(twins.plain_model, twins.model, "before the step")
        _switch(twins, "train")
        twins.plain.step()
        twins.opt.step()
        _assert_equal(twins.plain_model, twins.model, "after the step")


@case(2, 3)
def _a_method_writes_parameters_that_were_frozen(setup: Setup) -> None:
    """A parameter that does not travel any more is written to all the same."""
    for name in ("standalone", "copied"):
        twins = MODES[name]()
        _switch(twins, "train")
        _train(twins, setup, 3, 0)
        for model in (twins.plain_model, twins.model):
            for param in list(model.parameters())[:3]:
                param.requires_grad_(False)
        twins.wrap_again()
        twins.zero_grad()
        _train(twins, setup, 2, 1)
        _switch(twins, "eval")
        _assert_equal(twins.plain_model, twins.model, f"frozen, {name}")


@case(2, 3)
def _a_method_writes_parameters_outside_their_flat_storage(setup: Setup) -> None:
    """Parameters that have left their flat storage are sent from where they are now."""
    twins = MODES["standalone"]()
    _switch(twins, "train")
    _train(twins, setup, 2, 0)
    for param in twins.model.parameters():
        param.data = param.data.clone()
    _switch(twins, "eval")
    _assert_equal(twins.plain_model, twins.model, "moved")


@case(2, 3)
def _a_method_under_join_is_refused(setup: Setup) -> None:
    twins = MODES["standalone"]()
    opt: Any = twins.opt
    opt.train()
    with Join([twins.model, opt]):
        for inputs, targets in batches(setup.rank, 2 + setup.rank):
            loss_of(twins.model, inputs, targets).backward()
            opt.step()
            with pytest.raises(RuntimeError, match=r"opt.eval\(\) is not supported inside Join"):
                opt.eval()
    opt.eval()
    assert_same_on_all_ranks(twins.model.parameters())


@case(2, 3)
def _a_state_dict_after_a_method_is_not_the_consolidated_one_of_before(setup: Setup) -> None:
    twins = MODES["standalone"]()
    opt: Any = twins.opt
    opt.train()
    assert opt.state_dict()["state"] == {}  # before the first step nothing needs to be consolidated
    loss_of(twins.model, *next(batches(setup.rank, 1))).backward()
    opt.step()
    opt.consolidate_state_dict(to=0)
    stale = opt.state_dict()
    opt.eval()
    found = opt.state_dict()
    opt.consolidate_state_dict(to=1)
    if setup.rank == 1:
        assert_identical(opt.state_dict(), found, "after eval()")
    assert stale["param_groups"] != found["param_groups"]


test_forwarding = case.each()


# The real ones


def _real(setup: Setup) -> None:
    real = pytest.importorskip("schedulefree")

    for name in ("AdamWScheduleFree", "SGDScheduleFree"):
        case = OptimizerCase(name, getattr(real, name), {"lr": 0.01, "warmup_steps": 3})
        for build in (build_twins, build_overlapped_twins):
            twins = build(case)
            for epoch in range(2):
                _call(twins, "train")
                _train(twins, setup, 4, epoch)
                _call(twins, "eval")
                _assert_equal(twins.plain_model, twins.model, f"{name} in eval mode")
            twins.assert_moved()


def test_schedulefrees_own_optimizers_equal_the_plain_ones() -> None:
    """Runs where ``schedulefree`` is installed."""
    pytest.importorskip("schedulefree")
    run_ranks(_real, 2)
