"""`state_dict()` on any ranks alone, while the others go on; and state dicts that only one rank has to load."""

import copy
import gc
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer, state_class
from ddp_zero.core.comm.requests import NAME
from ddp_zero.core.state.frames import receive_tree, send_tree
from ddp_zero.core.step.coupling import CouplingWatch
from ddp_zero.options import Sync
from tests import internals
from tests.multiproc.cases import (
    LargestLiveBytes,
    Twins,
    assert_equal_models,
    assert_identical,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
    optimizer_case,
    step_on,
    sum_in_rank_order,
)
from tests.multiproc.harness import Cases, Outcome, Setup, kill_this_process, run_ranks, run_ranks_to_end
from tests.pairwise import every_other

case = Cases()

ADAMW = optimizer_case("AdamW foreach")
SGD = optimizer_case("SGD momentum")


def at_stage_2(build: Callable[..., Twins], *args: Any, **options: Any) -> Twins:
    with at_stage(2):
        return build(*args, **options)


Builds = dict[str, Callable[[], Twins]]
MODES: Builds = {
    "SGD": partial(build_twins, SGD, 2),
    "AdamW": partial(build_twins, ADAMW, 2, parameters_as_bucket_view=True),
    "8 bits": partial(build_twins, optimizer_case("toy 8-bit Adam")),
    "clipped": partial(build_twins, ADAMW, max_grad_norm=1e9),
    "Adagrad": partial(build_overlapped_twins, optimizer_case("Adagrad"), 2),
    "overlapped": partial(build_overlapped_twins, ADAMW, 2, interleaved=True),
    "late sync": partial(build_overlapped_twins, ADAMW, 2, interleaved=True, zero_options={"sync": "forward"}),
    "stage 2": partial(at_stage_2, build_overlapped_twins, ADAMW, 2, interleaved=True),
    "stage 2, standalone": partial(at_stage_2, build_overlapped_twins, SGD, 2, overlap=False),
}


def subsets(world_size: int) -> list[set[int]]:
    return [{0}, {1}, set(range(world_size)), {1, world_size - 1}]


def check(twins: Twins, what: str) -> None:
    assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), what)


# Which ranks ask, and when


@case(2, 3)
def _masters_in_a_state_dict_before_the_first_step_equal_the_model(setup: Setup) -> None:
    model = build_model().to(torch.bfloat16)
    params = list(model.parameters())
    opt = ZeroRedundancyOptimizer(params[:6], torch.optim.Adagrad, lr=0.1, master_weights=True)
    opt.add_param_group({"params": params[6:]})  # Adagrad creates no state for these yet
    with torch.no_grad():
        for param in params:
            param.mul_(2)
    if setup.rank == 1:
        found = opt.state_dict()["state"]
        assert [list(state) for state in found.values()] == 6 * [["step", "sum", "master_weight"]] + [
            ["master_weight"]
        ] * (len(params) - 6)
        for index, param in enumerate(params):
            assert torch.equal(found[index]["master_weight"], param.detach().float())
    dist.barrier()


@case(2, 4, few=every_other(MODES), every=MODES)
def _any_ranks_get_the_plain_state_dict_while_the_others_train_on(setup: Setup, configurations: Builds) -> None:
    for name, build in configurations.items():
        twins = build()
        if setup.rank == 1:
            check(twins, f"{name}, as built")
        for seed, asking in enumerate(subsets(setup.world_size)):
            twins.train(setup, 1 + (seed == 0), seed)
            if setup.rank in asking:
                time.sleep(0.05 * (seed % 2))  # the others wait in their next backward pass by then
                check(twins, f"{name}, ranks {asking}")
        twins.assert_moved()
        saved = copy.deepcopy(twins.plain.state_dict())
        twins.plain.load_state_dict(saved)  # which gives states the dtype of their parameter
        twins.opt.load_state_dict(saved)
        if setup.rank == 0:
            check(twins, f"{name}, loaded")
            twins.opt.state_dict()["param_groups"][0]["lr"] = 1e6
        twins.train(setup, 1, 9)
        assert internals.shard_of(twins.opt).snapshot is None, "a result is not kept"
        twins.opt.consolidate_state_dict(to=1)
        found = twins.opt.state_dict()
        assert_identical(twins.plain.state_dict(), found, f"{name}, after a gather")
        dist.barrier()


@case(8, 16, marks=[pytest.mark.nightly])
def _state_dict_asked_for_by_many_ranks_at_once_is_the_plain_one(setup: Setup) -> None:
    twins = MODES["stage 2"]()
    for asking in (set(range(setup.world_size)), {setup.world_size - 1}):
        twins.train(setup, 1)
        dist.barrier()
        if setup.rank in asking:
            check(twins, f"ranks {asking}")
    twins.assert_moved()
    dist.barrier()


def _check_until_it_raises(twins: Twins, what: str) -> None:
    while True:
        check(twins, what)


@case(2, 4)
def _state_dict_between_backward_and_step_is_the_plain_one_or_refused(setup: Setup) -> None:
    joined = r"got opt\.state_dict\(\) \(rank 0.*Call opt\.step\(\), then save.*\[ZERO-307\]$"
    moved_on = r"Expected rank 1 .* moved on, .* call opt\.step\(\) first.*\[ZERO-602\]$"
    for name in ("AdamW", "clipped", "overlapped", "late sync", "stage 2, standalone"):
        twins = MODES[name]()
        twins.train(setup, 6)  # gradients are compared up to the eighth step: ranks wait for each other
        steps_inside = name in ("overlapped", "late sync")
        for number in range(4):
            twins.plain.zero_grad()
            twins.opt.zero_grad()
            for model in (twins.plain_model, twins.model):
                loss_of(model, *next(batches(setup.rank, 1, number))).backward()
            if number < 3 and not steps_inside:  # all ask, in turn; none steps before the last has asked
                time.sleep(0.1 * ((setup.rank + number) % setup.world_size))
                check(twins, name)
            elif setup.rank == 0:
                time.sleep(0.1)
                if name in ("clipped", "stage 2, standalone"):  # the others need this rank for norms and flags
                    check(twins, name)
                else:
                    with pytest.raises(RuntimeError, match=joined if steps_inside else moved_on):
                        _check_until_it_raises(twins, name)
            twins.plain.step()
            twins.opt.step()
        if setup.rank == 0:
            check(twins, name)
        dist.barrier()


class Projector:
    """As GaLore's: an object in the state."""

    def __init__(self, grad: Tensor) -> None:
        self.basis, self.used = grad.sign(), 0

    def __call__(self, grad: Tensor) -> Tensor:
        self.used += 1
        return self.basis * grad.abs() / self.used


class WithObjects(torch.optim.Optimizer):
    """Keeps an object and a deque, as GaLore and AdaShift do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                state = self.state[param]
                if not state:
                    state["projector"], state["window"] = Projector(param.grad), deque(maxlen=2)
                state["window"].append(state["projector"](param.grad))
                param -= group["lr"] * sum(state["window"])


def _plain_values(state_dict: dict[str, Any]) -> Any:
    states = copy.deepcopy([state for _, state in sorted(state_dict["state"].items())])
    return [[vars(state["projector"]), list(state["window"])] for state in states]


@case(3)
def _declared_objects_in_the_state_are_sent_and_undeclared_ones_refused(setup: Setup) -> None:
    undeclared = r"(?s)got .*Projector at \['projector'\].*ddp_zero\.state_class.*\[ZERO-611\]$"
    modes: tuple[dict[str, Any], ...] = ({"overlap": False}, {}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1e9})
    for place, mode in enumerate(modes):
        models = [DistributedDataParallel(build_model(seed), bucket_cap_mb=0.0015) for seed in (0, 0, 1)]
        if mode.get("stage") == 2:
            models[0].register_comm_hook(None, sum_in_rank_order)
        plain = WithObjects(models[0].parameters())
        opt, again = (shard_optimizer(model, WithObjects, **mode) for model in models[1:])

        def train(number: int, *pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
            for model, optimizer in pairs:
                step_on(optimizer, loss_of(model, *next(batches(setup.rank, 1, number))))

        train(0, (models[0], plain))
        with pytest.warns(UserWarning, match=undeclared) if not place else nullcontext() as told:
            train(0, (models[1], opt))
        for number in (1, 2):
            train(number, (models[0], plain), (models[1], opt))
        if not place:  # told once, in the first step; then declared in the middle of the run
            assert told is not None
            assert len(told) == 1
            with pytest.raises(TypeError, match=undeclared):
                opt.state_dict()
            state_class(Projector)
        expected = _plain_values(plain.state_dict())
        assert_identical(expected, _plain_values(opt.state_dict()), f"{mode}")
        whole = opt.state_dict() if setup.rank == 1 else None
        checkpoint.save(setup.folder / f"{place}", models[1], opt)
        checkpoint.load(setup.folder / f"{place}", models[2], again)
        assert_identical(expected, _plain_values(again.state_dict()), f"{mode}, loaded")
        train(3, (models[2], again))
        plain.load_state_dict(plain.state_dict())  # a load by torch leaves deques without a limit
        if mode.get("stage") != 2:  # as new as the other: until DDP rebuilds its buckets, a ring sums in another order
            models[0] = DistributedDataParallel(models[0].module, bucket_cap_mb=0.0015)
        train(3, (models[0], plain))
        assert_equal_models(models[0], models[2], f"{mode}, after a load")
        again.load_state_dict(whole)
        assert_identical(expected, _plain_values(again.state_dict()), f"{mode}, from one rank")
        dist.barrier()


@case(2)
def _state_dict_during_another_ranks_computation_is_the_plain_one(setup: Setup) -> None:
    twins = MODES["AdamW"]()
    twins.train(setup, 1)
    done = setup.folder / "done"
    if setup.rank == 0:
        for _ in range(3):
            check(twins, "of a busy rank")
        done.touch()
    else:
        while not done.exists():
            sum(range(1000))
    twins.train(setup, 1)


@case(2, 4)
def _state_dict_of_one_rank_has_masters_and_the_loss_scale(setup: Setup) -> None:
    syncs: tuple[Sync, ...] = ("step", "forward")
    for sync in syncs:
        model = DistributedDataParallel(build_model().to(torch.bfloat16), gradient_as_bucket_view=True)
        opt = shard_optimizer(
            model,
            AdamW,
            lr=0.1,
            overlap=False,
            sync=sync,
            master_weights=True,
            loss_scale=DynamicLossScale(),
            parameters_as_bucket_view=True,
        )
        for inputs, targets in batches(setup.rank, 3):
            step_on(opt, opt.scale(loss_of(model, inputs.bfloat16(), targets.bfloat16())))
        found = opt.state_dict() if setup.rank == 1 else {}
        opt.consolidate_state_dict(to=1)
        if setup.rank == 1:
            assert len(found["state"]) == 10
            assert all("master_weight" in state for state in found["state"].values())
            assert_identical(opt.state_dict(), found, "masters")
        opt.refresh_master_weights()
        found = opt.state_dict() if setup.rank == 0 else {}
        opt.consolidate_state_dict(to=0)
        if setup.rank == 0:
            assert_identical(opt.state_dict(), found, "refreshed masters")
        dist.barrier()


@case(4)
def _state_dict_of_a_subgroup_and_of_a_rank_without_parameters_is_the_plain_one(setup: Setup) -> None:
    group = dist.new_group([1, 3])
    if setup.rank in (1, 3):
        twins = build_twins(ADAMW, process_group=group)
        twins.train(setup, 2)
        if setup.rank == 3:
            check(twins, "of a sub-group")
        dist.barrier(group)
    model = nn.Linear(8, 3, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    twins = build_twins(SGD, model=model)
    twins.train(setup, 2)
    check(twins, "of one parameter")
    twins.train(setup, 1)


@case(2, 3)
def _state_dict_with_added_groups_frozen_and_strided_parameters_is_the_plain_one(setup: Setup) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    torch.manual_seed(0)
    model(torch.randn(2, 2, 8, 8))
    for param in model.parameters():
        nn.init.normal_(param)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(2)]
    plain = AdamW(models[0].module[0].parameters(), lr=0.01)
    opt = ZeroRedundancyOptimizer(models[1].module[0].parameters(), AdamW, lr=0.01)
    for module in (1, 3):
        for step in range(2):
            torch.manual_seed(10 * step + setup.rank)
            inputs = torch.randn(2, 2, 8, 8)
            for one, optimizer in zip(models, (plain, opt), strict=True):
                optimizer.zero_grad()
                one(inputs).square().mean().backward()
                optimizer.step()
            if setup.rank == step:
                assert_identical(plain.state_dict(), opt.state_dict(), f"before group {module}")
                strides = [state["exp_avg"].stride() for state in opt.state_dict()["state"].values()]
                assert strides == [state["exp_avg"].stride() for state in plain.state_dict()["state"].values()]
        for one, optimizer in zip(models, (plain, opt), strict=True):
            for param in one.module[0].parameters():
                param.grad = None
                param.requires_grad_(False)
            optimizer.add_param_group({"params": list(one.module[module].parameters()), "lr": 0.1})
        if setup.rank == 1:
            assert_identical(plain.state_dict(), opt.state_dict(), f"with group {module}")
        dist.barrier()
        models = [DistributedDataParallel(one.module) for one in models]


@case(2, 3)
def _state_dict_under_join_has_the_state_of_its_step(setup: Setup) -> None:
    model = DistributedDataParallel(build_model())
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    found: list[dict[str, Any]] = []
    with Join([model, opt]):
        for inputs, targets in batches(setup.rank, 2 + 2 * setup.rank):
            opt.zero_grad()
            loss_of(model, inputs, targets).backward()
            opt.step()
            found.append(opt.state_dict())
    opt.consolidate_state_dict(to=setup.world_size - 1)
    if setup.rank == setup.world_size - 1:
        assert [one["state"][0]["step"].item() for one in found] == list(range(1, len(found) + 1))
        assert_identical(opt.state_dict(), found[-1], "under Join")


@case(2)
def _state_dict_during_background_saves_is_the_plain_one(setup: Setup) -> None:
    twins = MODES["overlapped"]()
    for step in range(4):
        twins.train(setup, 1, step)
        checkpoint.save(setup.folder, twins.model, twins.opt, step=step, background=True)
        if step % 2 == setup.rank:
            check(twins, f"step {step}")
    checkpoint.wait()
    other = build_overlapped_twins(ADAMW, 2, build_model(1), interleaved=True)
    checkpoint.load(setup.folder, other.model, other.opt)
    if setup.rank == 0:
        assert_identical(twins.plain.state_dict(), other.opt.state_dict(), "loaded")
    dist.barrier()


@case(2)
def _state_dict_after_a_method_of_the_inner_class_has_its_writes(setup: Setup) -> None:
    model = build_model()
    opt: Any = ZeroRedundancyOptimizer(model.parameters(), Swapping, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    opt.eval()
    if setup.rank == 0:
        time.sleep(0.1)  # the other one waits in train() by then, before it changes anything
        found = opt.state_dict()
        assert [group["swapped"] for group in found["param_groups"]] == [True]
        for index, state in found["state"].items():
            assert torch.equal(state["kept"], list(model.parameters())[index] + 1)
    opt.train()
    dist.barrier()


class Swapping(torch.optim.Optimizer):
    """An optimizer whose ``eval()`` changes state, and whose ``train()`` undoes that."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "swapped": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad)
                self.state[param]["kept"] = param.detach().clone()

    def eval(self) -> None:
        self._add(1.0)

    def train(self) -> None:
        self._add(-1.0)

    @torch.no_grad()
    def _add(self, value: float) -> None:
        for group in self.param_groups:
            group["swapped"] = value > 0
            for param in group["params"]:
                self.state[param]["kept"].add_(value)


@case(2, 4)
def _state_dict_needs_memory_of_one_parameter_besides_the_result(setup: Setup) -> None:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)]))
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    own = [value for state in opt.optim.state.values() for value in state.values()]
    with LargestLiveBytes(own) as memory:
        found = opt.state_dict()
    whole = sum(value.untyped_storage().nbytes() for state in found["state"].values() for value in state.values())
    one = 3 * 64 * 64 * 4
    assert len(found["state"]) == 12
    assert whole <= memory.largest <= whole + one
    dist.barrier()


# What is refused


@case(2)
def _a_rank_that_has_moved_on_is_named(setup: Setup) -> None:
    twins = MODES["AdamW"]()
    twins.train(setup, 1)
    changes = internals.shard_of(twins.opt).changes
    for may_be_overwritten in (False, True):
        if setup.rank == 1:
            changes.begin()
            if may_be_overwritten:
                changes.end()
        dist.barrier()
        if setup.rank == 0:
            with pytest.raises(RuntimeError, match=r"Expected rank 1 \(global rank 1\) .* moved on, to change"):
                twins.opt.state_dict()
            changes.begin()
            with pytest.raises(RuntimeError, match="called within a step"):
                twins.opt.state_dict()
        dist.barrier()
        changes.end()
        check(twins, "both have moved on")
        dist.barrier()


@case(2)
@mock.patch("ddp_zero.core.state.gather.MESSAGE_BYTES", 1)  # so that each parameter's state is a message
def _a_rank_that_changes_while_it_sends_is_named(setup: Setup) -> None:
    twins = MODES["AdamW"]()
    twins.train(setup, 1)
    check(twins, "in several messages")
    dist.barrier()
    sent: list[int] = []

    def send_then_step(*args: Any) -> None:
        original(*args)
        sent.append(1)
        if len(sent) == 2:
            internals.shard_of(twins.opt).changes.begin()

    original = send_tree
    with mock.patch("ddp_zero.core.state.gather.send_tree", send_then_step):
        dist.barrier()
        if setup.rank == 0:
            with pytest.raises(RuntimeError, match=r"Expected rank 1 .* moved on, to change"):
                twins.opt.state_dict()
        dist.barrier()
    assert len(sent) == (2 if setup.rank == 1 else 0)


class Opaque(torch.optim.SGD):
    """Keeps a Python object in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["odd"] = object()


@case(2)
def _a_state_that_cannot_travel_is_named(setup: Setup) -> None:
    model = build_model()
    opt = ZeroRedundancyOptimizer(model.named_parameters(), Opaque, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ZERO-611: on ranks that own one
        opt.step()
    with pytest.raises(TypeError, match=r"can be sent without pickle for parameter .*'\d\.\w+'"):
        opt.state_dict()
    dist.barrier()


# What it leaves behind


def _listening() -> int:
    """How many sockets of this process listen."""
    own = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


@case(2, few=every_other(MODES, 1), every=MODES)
def _optimizers_open_no_port_and_are_asked_in_one_thread(setup: Setup, configurations: Builds) -> None:
    if not Path("/proc/net/tcp6").exists():
        pytest.skip("needs Linux")
    before = _listening()

    def check_ports(what: str) -> None:
        deadline = time.monotonic() + 20
        # a port of an earlier connection may close meanwhile
        while (ports := _listening()) > before or _threads().count(f"{NAME} listener") != 1:
            assert time.monotonic() < deadline, (what, ports, before, _threads())
            time.sleep(0.02)

    for name, build in configurations.items():
        pair = [build(), build()]
        check_ports(f"{name}, as built")
        for twins in pair:
            twins.train(setup, 1)
            if setup.rank == 0:
                check(twins, name)
        dist.barrier()
        check_ports(f"{name}, after state_dict()")


@case(2)
def _dropped_optimizers_leave_no_thread_and_no_descriptor(setup: Setup) -> None:
    def threads() -> int:
        return sum(thread.name.startswith(NAME) for thread in threading.enumerate())

    twins = MODES["AdamW"]()  # whatever is made once
    twins.train(setup, 1)
    check(twins, "once")
    dist.barrier()
    deadline = time.monotonic() + 20
    while threads() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    assert before == 1
    model = build_model()
    for _ in range(20):
        opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        assert opt.state_dict()["state"][9]["step"] == 1
        dist.barrier()
        del opt
    gc.collect()
    deadline = time.monotonic() + 20
    while (threads(), len(os.listdir("/proc/self/fd"))) != (before, descriptors) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = threads(), len(os.listdir("/proc/self/fd"))
    dist.barrier()  # a rank that returns drops its twins, and calls one that still looks
    assert left[0] == before
    assert left[1] <= descriptors + 2, "clients of the store for lines at the same time are kept"


# Ranks that are gone


TIME_OUT = 8


def _asks_after(setup: Setup, ending: str) -> float | None:
    twins = MODES["AdamW"]()
    twins.train(setup, 1)
    shard, pids = internals.shard_of(twins.opt), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if setup.rank == 1:
        if ending == "stuck in a step":
            with mock.patch.object(shard.changes, "end", side_effect=partial(time.sleep, 60)):
                twins.train(setup, 1)
        if ending == "killed":
            kill_this_process()
        os.kill(os.getpid(), signal.SIGSTOP)
    if ending == "stuck in a step":
        with mock.patch.object(CouplingWatch, "check"):  # would wait for rank 1
            twins.train(setup, 1)
    time.sleep(0.3)
    begun = time.monotonic()
    expected = "to end its change of the state within 8 s" if ending == "stuck in a step" else "no answer"
    with pytest.raises(RuntimeError, match=rf"Expected rank 1 \(global rank 1\).*{expected}"):
        twins.opt.state_dict()
    took = time.monotonic() - begun
    if ending != "killed":
        os.kill(pids[1], signal.SIGKILL)
    return took


def test_a_rank_that_is_gone_is_named_within_the_time_out() -> None:
    def run(ending: str) -> list[Outcome]:
        group_timeout = 60 if ending == "killed" else TIME_OUT  # one that does not answer is gone after 10 s
        return run_ranks_to_end(_asks_after, 2, ending, timeout=100, group_timeout=group_timeout)

    endings = ("killed", "stopped", "stuck in a step")
    with ThreadPoolExecutor(3) as jobs:  # they mostly wait for time-outs
        found = dict(zip(endings, jobs.map(run, endings), strict=True))
    for ending, (asked, gone) in found.items():
        assert asked.error is None, (ending, asked.error)
        assert gone.killed, ending
        assert asked.result < (15 if ending == "killed" else 3 * TIME_OUT), ending


@mock.patch("ddp_zero.core.state.gather.MESSAGE_BYTES", 1)
def _reads_for_longer_than_the_time_out(setup: Setup) -> None:
    twins = MODES["AdamW"]()
    twins.train(setup, 1)
    if setup.rank == 0:

        def slowly(*args: Any) -> Any:
            time.sleep(1.5)
            return receive_tree(*args)

        begun = time.monotonic()
        with mock.patch("ddp_zero.core.state.gather.receive_tree", slowly):
            check(twins, "read slowly")
        assert time.monotonic() - begun > SHORT_TIME_OUT + 2
    done = setup.folder / "done"
    (done.touch if setup.rank == 0 else lambda: None)()
    while not done.exists():
        time.sleep(0.05)


SHORT_TIME_OUT = 4


@pytest.mark.nightly
def test_the_time_out_is_that_of_progress_not_of_the_whole() -> None:
    run_ranks(_reads_for_longer_than_the_time_out, 3, timeout=100, group_timeout=SHORT_TIME_OUT)


# Loading


@case(2, 4, few=every_other(MODES, 1), every=MODES)
def _a_state_dict_that_one_rank_loads_reaches_all_ranks(setup: Setup, configurations: Builds) -> None:
    for name, build in configurations.items():
        twins = build()
        twins.train(setup, 2)
        weights, saved = copy.deepcopy(twins.model.module.state_dict()), copy.deepcopy(twins.plain.state_dict())
        twins.train(setup, 1, 1)
        for giver in (0, setup.world_size - 1):
            for model, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):
                model.module.load_state_dict(weights)
                alone = setup.rank == giver or optimizer is twins.plain
                optimizer.load_state_dict(copy.deepcopy(saved) if alone else None)  # type: ignore[arg-type]
            if setup.rank == 1:
                check(twins, f"{name}, from rank {giver}")
            twins.train(setup, 2, 2)
        check(twins, name)
        dist.barrier()


@case(2)
def _masters_that_one_rank_loads_reach_all_ranks(setup: Setup) -> None:
    def build(seed: int) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        model = DistributedDataParallel(build_model(seed).to(torch.bfloat16))
        return model, shard_optimizer(
            model, AdamW, lr=0.1, overlap=False, master_weights=True, loss_scale=DynamicLossScale()
        )

    def train(model: nn.Module, opt: ZeroRedundancyOptimizer, seed: int) -> None:
        for inputs, targets in batches(setup.rank, 3, seed):
            step_on(opt, opt.scale(loss_of(model, inputs.bfloat16(), targets.bfloat16())))

    model, opt = build(0)
    train(model, opt, 0)
    saved = opt.state_dict()
    other, loaded = build(1)
    with pytest.raises((ValueError, RuntimeError), match="to be its master weight rounded"):
        loaded.load_state_dict(saved if setup.rank == 0 else None)
    other.load_state_dict(model.state_dict())
    before = loaded.master_weights
    loaded.load_state_dict(saved if setup.rank == 0 else None)
    assert all(loaded.master_weights[param] is not None for param in before)
    for one, optimizer in ((model, opt), (other, loaded)):
        train(one, optimizer, 1)
    assert_equal_models(model, other, "continued")
    assert_identical(opt.state_dict(), loaded.state_dict(), "continued")
    dist.barrier()


@case(2, 3)
def _a_load_succeeds_on_all_ranks_or_on_none(setup: Setup) -> None:
    twins = MODES["AdamW"]()
    twins.train(setup, 2)
    good = copy.deepcopy(twins.plain.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][0]["exp_avg"] = torch.zeros(7, 7)
    odd = copy.deepcopy(good)
    odd["state"][0]["odd"] = object()
    for given, error in (
        (bad if setup.rank == 0 else None, "to fit its shape"),
        (odd if setup.rank == 0 else None, "Expected dense tensors, numbers"),
        (bad if setup.rank == 0 else good, "to fit its shape"),
        (3 if setup.rank == 0 else None, "a state dict or None, got int"),
        (None, r"ranks \[\] of \d gave a state dict"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=error):
            twins.opt.load_state_dict(given)  # type: ignore[arg-type]
        check(twins, f"not loaded: {error}")
    if setup.world_size > 2:
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] of 3 gave a state dict"):
            twins.opt.load_state_dict(good if setup.rank < 2 else None)
    twins.train(setup, 1)


@case(2)
def _a_load_needs_one_parameter_besides_the_shard(setup: Setup) -> None:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)]))
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    saved = opt.state_dict() if setup.rank == 0 else None
    dist.barrier()
    with LargestLiveBytes([]) as memory:
        opt.load_state_dict(saved)
    own = sum(value.nbytes for state in opt.optim.state.values() for value in state.values())
    if setup.rank == 1:
        assert own <= memory.largest <= own + 3 * 64 * 64 * 4


def _trained_and_dropped(setup: Setup) -> None:
    """Rank 0 asks when the others have returned, and dropped model and optimizer."""
    model = DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
    opt = shard_optimizer(model, AdamW, stage=2)
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
    expected = opt.state_dict()
    dist.barrier()
    if setup.rank == 0:
        time.sleep(1.5)
        found = opt.state_dict()
        assert len(found["state"]) == 2
        assert_identical(expected, found, "asked when the others were gone")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in (f"{NAME} listener", "ddp_zero stay")]


@case(2, 3)
def _a_rank_that_has_dropped_its_optimizer_answers_until_all_have(setup: Setup) -> None:
    before = len(_threads())
    _trained_and_dropped(setup)
    deadline = time.monotonic() + 20
    while len(_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_threads()) <= before, "what answers must end with the last optimizer"


test_state_on_demand = case.each()
