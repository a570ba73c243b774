"""A case on one rank: the plain side, which leaves a trace, then the sharded side."""

import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.backward import ddp_buckets, planned_reducer
from ddp_zero.core.ddp import registered_hook
from ddp_zero.core.ddp.reducer import bucket_options, give_back_reducer, registered_hooks
from ddp_zero.core.ddp.registered_hook import RegisteredHook, register
from tests.fuzz.before.case import BeforeCase
from tests.fuzz.before.draw import MODES, STEPS_INSIDE
from tests.fuzz.late_values import MESSAGE, read_again
from tests.fuzz.run_case import BOTH_RAISED, DIFFERENCE, ERROR, FAILED, OK, REFUSED, SILENT, Ask, Report
from tests.fuzz.sides import Place
from tests.multiproc.cases import sum_in_rank_order

STEPS = 4
_OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}

CODES = {
    "no_sync": {302, 308, 404},
    "pass around": {301, 302, 308, 404},
    "plain optimizer": {302, 304, 305, 307, 308, 309, 403, 404},
    "reduced pass": {302, 304, 305, 307, 308, 309, 403, 404},
    "forward pass": {302, 308},
    "interrupted, wrapped again": {301, 302, 308, 309, 403},
    "keep reducer": {301, 302, 308},
    "comm hook": {206},
    "kept": {206, 307, 401, 402},  # another optimizer trains its model
    "zeros": {308},
    "late hook": {206},
}
"""The codes of refusals that fit, by event."""

_WRAPS = {"wrap", "interrupted, wrapped again", "comm hook"}


def _keeps_reducer_of_dropped(events: list[str]) -> bool:
    """Whether the reducer that is kept is that of an earlier model, and an earlier optimizer has a hook on it."""
    kept, spans = -1, list[set[str]]()
    for event in events:
        if event in _WRAPS or not spans:
            spans.append(set())
        spans[-1].add(event)
        kept = len(spans) - 1 if event == "keep reducer" else kept
    return 0 <= kept < len(spans) - 1 and bool(spans[kept] & {"dropped", "kept"})


class _Blown(Exception):
    """An exception in the user's code."""


class _Blows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise _Blown


class _Net(nn.Module):
    def __init__(self, has_unused: bool, late_value: tuple[str, str] | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 70), nn.Linear(70, 70), nn.Linear(70, 3)])
        self.spare = nn.Linear(3, 3) if has_unused else None
        self.blows = False
        self.late_value = late_value

    def forward(self, value: Tensor) -> Tensor:
        value = self._read_again(value, "input")
        for place, layer in enumerate(self.layers):
            value = layer(value).tanh()
            value = self._read_again(value, "first") if place == 0 else value
            if self.blows and place == 1:
                value = _Blows.apply(value)  # type: ignore[no-untyped-call]
        return value

    def _read_again(self, value: Tensor, place: str) -> Tensor:
        if self.late_value is None or self.late_value[1] != place:
            return value
        return read_again(self.late_value[0], value, self.layers[-1].get_parameter("weight"))


class _World:
    """One side: a module, what wraps it and what was kept.

    Args:
        case: which.
        rank: this process's.
        is_ours: whether it is the sharded side.
    """

    def __init__(self, case: BeforeCase, rank: int, is_ours: bool) -> None:
        self.case, self.rank, self.is_ours = case, rank, is_ours
        self.net = _Net(case.unused, case.late_value)
        self.ddp: Any = None
        self.reducer: Any = None
        self.kept: list[Any] = []
        self.batches = 0

    def loss(self, model: nn.Module) -> Tensor:
        self.batches += 1
        generator = torch.Generator().manual_seed(100 * self.batches + self.rank)
        self.inputs = torch.randn(5, 6, generator=generator)
        if self.case.late_value is not None and self.case.late_value[1] == "input":
            self.inputs.requires_grad_()
        outputs: Tensor = model(self.inputs)
        return outputs.square().mean()

    def optimizer(self, kind: Any, mode: str, door: str = "shard_optimizer", **options: Any) -> Any:
        if not self.is_ours:
            return kind(self.ddp.parameters(), **options)
        if door == "shard_optimizer":
            return shard_optimizer(self.ddp, kind, **MODES[mode], **options)
        given = dict(MODES[mode])
        overlap = given.pop("overlap", True)
        opt = ZeroRedundancyOptimizer(
            self.ddp.parameters(), kind, overlap_with_ddp=overlap, parameters_as_bucket_view=True, **given, **options
        )
        opt.attach(self.ddp)
        return opt

    # Events

    def wrap(self) -> None:
        self.wrap_without_hook()
        self.sum_in_rank_order()

    def wrap_without_hook(self) -> None:
        options = {"static_graph": self.case.static, "find_unused_parameters": self.case.unused}
        options |= bucket_options(self.case.cap)
        self.ddp = DistributedDataParallel(self.net, gradient_as_bucket_view=self.case.views, **options)  # type: ignore[arg-type]

    def sum_in_rank_order(self) -> None:
        """With more than two ranks, as stage 2 sums: DDP's order depends on its buckets."""
        if self.case.ranks == 2 or registered_hooks(self.ddp):
            return
        if self.is_ours:
            _register_sum_in_rank_order(self.ddp)
        else:
            self.ddp.register_comm_hook(None, sum_in_rank_order)

    def pass_around(self) -> None:
        self.loss(self.net).backward()

    def pass_around_zeroed(self) -> None:
        self.pass_around()
        self.net.zero_grad()

    def no_sync(self) -> None:
        with self.ddp.no_sync():
            self.loss(self.ddp).backward()

    def reduced_pass(self) -> None:
        self.loss(self.ddp).backward()

    def forward_pass(self) -> None:
        self.loss(self.ddp)

    def interrupted(self) -> None:
        self.net.blows = True
        with suppress(_Blown):
            self.loss(self.ddp).backward()
        self.net.blows = False
        self.wrap()

    def zero(self) -> None:
        self.net.zero_grad()

    def zeros(self) -> None:
        self.net.zero_grad(set_to_none=False)

    def keep_gradients(self) -> None:
        self.kept += [param.grad for param in self.net.parameters() if param.grad is not None]

    def keep_reducer(self) -> None:
        self.reducer = self.ddp.reducer

    def backward_hooks(self) -> None:
        for param in self.net.parameters():
            param.register_hook(lambda grad: grad * 0.5)

    def comm_hook(self) -> None:
        self.wrap_without_hook()  # DDP takes one hook in its life, which an earlier optimizer may have registered
        self.ddp.register_comm_hook(None, allreduce_hook)

    def plain_optimizer(self) -> None:
        """A step of averages: replicas agree after it."""
        self.net.zero_grad()
        self.reduced_pass()
        torch.optim.SGD(self.net.parameters(), lr=0.1).step()

    def earlier(self, how: str, mode: str) -> None:
        self.net.zero_grad()
        opt = self.optimizer(torch.optim.SGD, mode, lr=0.1, momentum=0.9)
        for _ in range(2):
            self.loss(self.ddp).backward()
            opt.step()
            opt.zero_grad()
        if how == "detached" and self.is_ours:
            opt.detach()
            self.sum_in_rank_order()
        if how != "dropped":
            self.kept.append(opt)

    # The loop

    def train(self, shows: Callable[[list[Tensor]], None]) -> None:
        for event in self.case.events:
            how, _, mode = event.partition(":")
            if mode:
                self.earlier(how, mode)
            else:
                EVENTS[event](self)
        start = [param.detach().clone() for param in self.net.parameters()]
        opt = self.optimizer(torch.optim.AdamW, self.case.mode, self.case.door, **_OPTIONS)
        shows(start)
        for step in range(STEPS):
            if step == self.case.late_hook:
                self.ddp.register_comm_hook(None, allreduce_hook)
            if self.case.zeroes != "after":
                opt.zero_grad(set_to_none=self.case.zeroes == "start")
            if self.reducer is None:
                loss = self.loss(self.ddp)
            else:  # as libraries that hold a reference to it
                loss = self.loss(self.net)
                self.reducer.prepare_for_backward([loss] if self.case.unused else [])
            loss.backward()
            opt.step()
            if self.case.zeroes == "after":
                opt.zero_grad()
            asked = [] if self.inputs.grad is None else [self.inputs.grad]
            shows([*(param.detach().clone() for param in self.net.parameters()), *asked])
        for grad in filter(torch.is_tensor, self.kept):
            _ = grad.shape


EVENTS: dict[str, Callable[[_World], None]] = {
    "pass around": _World.pass_around,
    "pass around, zeroed": _World.pass_around_zeroed,
    "wrap": _World.wrap,
    "no_sync": _World.no_sync,
    "reduced pass": _World.reduced_pass,
    "forward pass": _World.forward_pass,
    "interrupted, wrapped again": _World.interrupted,
    "zero": _World.zero,
    "zeros": _World.zeros,
    "keep gradients": _World.keep_gradients,
    "keep reducer": _World.keep_reducer,
    "backward hooks": _World.backward_hooks,
    "comm hook": _World.comm_hook,
    "plain optimizer": _World.plain_optimizer,
}


def run_before_case(case: BeforeCase, place: Place, ask: Ask) -> None:
    """Run a case and free what it has held."""
    try:
        trace: list[list[Tensor]] = []
        plain_error = None
        try:
            _World(case, place.rank, is_ours=False).train(trace.append)
        except Exception as error:
            plain_error = error
        gc.collect()
        if ask(Report(-1, OK)):
            with averages_in_rank_order() if case.ranks > 2 else nullcontext():
                ask(_compare(case, place, trace, plain_error))
    finally:
        gc.collect()


@contextmanager
def averages_in_rank_order() -> Iterator[None]:
    """The library's own all-reduces in stage 1, and those for parameters of no optimizer, add up as stage 2 does.

    So does DDP where stage 2 has left it a new reducer, which has no hook.
    """

    def give_back(ddp: DistributedDataParallel, *args: Any) -> None:
        give_back_reducer(ddp, *args)
        if not registered_hooks(ddp):
            _register_sum_in_rank_order(ddp)

    with ExitStack() as patches:
        for user in (registered_hook, ddp_buckets, planned_reducer):
            patches.enter_context(mock.patch.object(user, "average_as_ddp", sum_in_rank_order))
        patches.enter_context(mock.patch.object(planned_reducer, "give_back_reducer", give_back))
        yield


def _register_sum_in_rank_order(ddp: DistributedDataParallel) -> None:
    """In the place of an optimizer that has left, which the next one takes."""
    register(ddp, RegisteredHook(sum_in_rank_order)).free(ddp.process_group)


def _compare(case: BeforeCase, place: Place, trace: list[list[Tensor]], plain_error: Exception | None) -> Report:
    count, started = 0, time.monotonic()
    differs: list[str] = []

    def show(params: list[Tensor]) -> None:
        nonlocal count
        expected = trace[count] if count < len(trace) else None
        count += 1
        if expected is not None and not differs and not all(map(torch.equal, expected, params)):
            worst = max(float((one - other).abs().max()) for one, other in zip(expected, params, strict=True))
            differs.append(f"after step {count - 1} by {worst:.3g}")

    error: Exception | None = None
    try:
        _World(case, place.rank, is_ours=True).train(show)
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - started
    if differs:
        return Report(0, FAILED, DIFFERENCE, differs[0], seconds=seconds)
    if error is not None:
        text = "".join(traceback.format_exception(error))
        if plain_error is not None:
            return Report(0, BOTH_RAISED, type(plain_error).__name__, text, seconds=seconds)
        reads_late = case.late_value == ("saved", "input") and not case.modes.isdisjoint(STEPS_INSIDE)
        if reads_late and MESSAGE in str(error):
            return Report(0, REFUSED, "late value", text, seconds=seconds)
        code = re.search(r"\[ZERO-(\d+)\]", str(error))
        events = [event.partition(":")[0] for event in case.events]
        names = {*events, *(["late hook"] if case.late_hook is not None else [])}
        fitting = {one for name, codes in CODES.items() if name in names for one in codes}
        fitting |= {208} if _keeps_reducer_of_dropped(events) else set()
        if code is not None and int(code.group(1)) in fitting:
            return Report(0, REFUSED, f"ZERO-{code.group(1)}", text, seconds=seconds)
        return Report(0, FAILED, ERROR, text, seconds=seconds)
    if case.late_value == ("saved", "input") and case.mode in STEPS_INSIDE and plain_error is None:
        return Report(0, FAILED, f"{SILENT}, late value", seconds=seconds)
    if plain_error is None and count > 1 and all(map(torch.equal, trace[0], trace[-1])):
        return Report(0, FAILED, SILENT, "nothing moved", seconds=seconds)
    return Report(0, OK, compared=count - 1, seconds=seconds)
