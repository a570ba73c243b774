"""Optimizers and models that multi-process tests share, and the reference they compare with."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_zero import (
    StepRecord,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    shard_optimizer,
)
from ddp_zero.core.ddp.registered_hook import CommHook
from tests.multiproc.harness import Setup

Groups = list[dict[str, Any]]


class ToyLAMB(Optimizer):
    """Adam with a trust ratio per parameter: wrong at once if a parameter were cut or mixed with another."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                state["m"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * param
                ratio = param.norm().clamp(min=1e-3) / update.norm().clamp(min=1e-3)
                param.add_(update * ratio, alpha=-group["lr"])


class ToyAdam8bit(Optimizer):
    """Adam whose moments are bytes with one scale per block; counts steps in the group and on itself, as some do."""

    block = 16
    calls = 0  # a copy of a torch optimizer loses what is set on it

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                moment = self._dequantize(state, param) if state else torch.zeros_like(param)
                moment.mul_(0.9).add_(param.grad, alpha=0.1)
                param.add_(moment / (1 - 0.9 ** group["k"]), alpha=-group["lr"] / (1 + 0.01 * self.calls))
                self._quantize(state, moment)

    def _quantize(self, state: dict[str, Any], moment: Tensor) -> None:
        flat = moment.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block)
        scale = padded.abs().amax(dim=1).clamp(min=1e-12)
        state["codes"] = (padded / scale[:, None] * 127).round().to(torch.int8)
        state["blocks"] = {"scale": scale, "signed": True, "shape": tuple(moment.shape)}

    def _dequantize(self, state: dict[str, Any], param: Tensor) -> Tensor:
        values = state["codes"].to(param.dtype) * (state["blocks"]["scale"] / 127)[:, None]
        flat: Tensor = values.reshape(-1)[: param.numel()]
        return flat.view(param.shape)


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer class with options, and whether it takes only matrices."""

    name: str
    build: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    matrices_only: bool = False


HAS_MUON = hasattr(torch.optim, "Muon")
"""Since torch 2.9."""

OPTIMIZERS = [
    OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.05}),
    OptimizerCase("SGD momentum", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    OptimizerCase("SGD maximize foreach", torch.optim.SGD, {"lr": 1e-3, "maximize": True, "foreach": True}),
    OptimizerCase("Adam", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    OptimizerCase("Adam tensor lr", torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    OptimizerCase("AdamW foreach", torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    OptimizerCase("AdamW fused", torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    OptimizerCase("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    OptimizerCase("Adadelta", torch.optim.Adadelta, {"lr": 0.5}),
    OptimizerCase("Adamax", torch.optim.Adamax, {"lr": 1e-2}),
    OptimizerCase("ASGD", torch.optim.ASGD, {"lr": 1e-2}),
    OptimizerCase("NAdam", torch.optim.NAdam, {"lr": 1e-2}),
    OptimizerCase("RAdam", torch.optim.RAdam, {"lr": 1e-2}),
    OptimizerCase("RMSprop", torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    OptimizerCase("Rprop", torch.optim.Rprop, {"lr": 1e-3}),
    OptimizerCase("Adafactor", torch.optim.Adafactor, {"lr": 1e-2}),
    *([OptimizerCase("Muon", torch.optim.Muon, {"lr": 1e-2}, matrices_only=True)] if HAS_MUON else []),
    OptimizerCase("toy LAMB", ToyLAMB),
    OptimizerCase("toy 8-bit Adam", ToyAdam8bit),
]


def optimizer_case(name: str) -> OptimizerCase:
    return next(case for case in OPTIMIZERS if case.name == name)


def build_model(seed: int = 0, matrices_only: bool = False) -> nn.Module:
    """A small network whose parameters differ much in size; the same weights for the same seed on every rank."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    bias = not matrices_only
    layers: list[nn.Module] = [
        nn.Linear(8, 31, bias=bias),
        nn.Tanh(),
        *([] if matrices_only else [nn.LayerNorm(31)]),
        nn.Linear(31, 17, bias=bias),
        nn.Tanh(),
        nn.Linear(17, 5, bias=bias),
        nn.Tanh(),
        nn.Linear(5, 3, bias=bias),
    ]
    torch.random.set_rng_state(state)
    return nn.Sequential(*layers)


def batches(rank: int, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets that differ on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss that tests train with."""
    return nn.functional.mse_loss(model(inputs), targets)


def step_on(opt: Any, loss: Tensor) -> None:
    """Backward, a step, and gradients dropped."""
    loss.backward()
    opt.step()
    opt.zero_grad()


def record_of(opt: Any) -> StepRecord:
    """The record of the last step, of which there must have been one."""
    record = opt.last_step
    assert isinstance(record, StepRecord)
    return record


def assert_overlapped(opt: ZeroRedundancyOptimizer) -> None:
    """The last iteration stepped as its buckets arrived, with the final plan."""
    assert "regime: overlapped (" in opt.explain(), opt.explain()


def split_groups(model: nn.Module, groups: int, **of_second: Any) -> Groups:
    """The model's parameters in one group, or in two with options of their own."""
    params = list(model.parameters())
    if groups == 1:
        return [{"params": params}]
    return [{"params": params[::2]}, {"params": params[1::2], **(of_second or {"lr": 3e-3})}]


Sides = Callable[[Any, Any], object]
"""Of a model and its optimizer."""


class Twins:
    """The same model twice: one trained by the plain optimizer, and one by the sharded one.

    Attributes:
        plain_model: that of the plain optimizer.
        model: ours.
        plain: the plain optimizer.
        opt: ours.
        loss: of a model and a batch.
        reduce: averages gradients of the plain model that no DDP model averages, as a plain loop does.
        clip: clips the plain model's gradients before its step, where ours clips in the step.
        before: our parameters at first.
        feed: batches of this rank for `go_on`.
    """

    def __init__(
        self,
        plain_model: Any,
        model: Any,
        plain: Any,
        opt: Any,
        *,
        loss: Callable[..., Tensor] = loss_of,
        reduce: Callable[[Any], object] = lambda _: None,
        clip: Callable[[], object] | None = None,
    ) -> None:
        self.plain_model: DistributedDataParallel = plain_model
        self.model: DistributedDataParallel = model
        self.plain: Optimizer = plain
        self.opt: ZeroRedundancyOptimizer = opt
        self.loss, self.reduce, self.clip = loss, reduce, clip
        self.before = self.values()
        self.feed = batches(dist.get_rank(), 1000)

    @property
    def sides(self) -> list[tuple[Any, Any]]:
        """Each model with its optimizer; the plain one first."""
        return [(self.plain_model, self.plain), (self.model, self.opt)]

    def backward(self, *batch: Any, loss: Callable[..., Tensor] | None = None) -> None:
        for model, _ in self.sides:
            (loss or self.loss)(model, *batch).backward()
        self.reduce(self.plain_model)

    def both(self, what: Sides) -> None:
        """Do it to each side, the plain one first."""
        for model, optimizer in self.sides:
            what(model, optimizer)

    def iterate(self, *batch: Any, loss: Callable[..., Tensor] | None = None, between: Sides | None = None) -> None:
        """An iteration of both; ``between`` is done after backward and before the step."""
        self.zero_grad()
        self.backward(*batch, loss=loss)
        if between is not None:
            self.both(between)
        self.opt.step()
        if self.clip is not None:
            self.clip()
        self.plain.step()

    def step(self, when: str) -> None:
        """Step both, compare bit for bit, and drop the gradients."""
        for _, optimizer in self.sides:
            optimizer.step()
        self.assert_equal(when)
        self.zero_grad()

    def train(
        self,
        setup: Setup,
        steps: int,
        seed: int = 0,
        after_step: Callable[[int], object] | None = None,
        *,
        loss: Callable[..., Tensor] | None = None,
        between: Sides | None = None,
        where: object = "",
    ) -> None:
        """Train both on the same data, comparing bit for bit after every step.

        Args:
            setup: of this rank.
            steps: how many.
            seed: of the data.
            after_step: called with the number of each step.
            loss: see `iterate`.
            between: see `iterate`.
            where: said when they differ.
        """
        for step, batch in enumerate(batches(setup.rank, steps, seed)):
            self.iterate(*batch, loss=loss, between=between)
            self.assert_equal(f"after step {step} {where}")
            if after_step is not None:
                after_step(step)

    def go_on(self, steps: int, *, between: Sides | None = None, compares: bool = True) -> None:
        """Train both on data that goes on from call to call."""
        for step in range(steps):
            self.iterate(*next(self.feed), between=between)
            if compares:
                self.assert_equal(f"after step {step}")
        self.zero_grad()

    def zero_grad(self) -> None:
        for _, optimizer in self.sides:
            optimizer.zero_grad()

    def wrap_again(self, **ddp_options: Any) -> None:
        """Put both models into new DDP wrappers."""
        views = self.opt.stage == 2
        self.plain_model = DistributedDataParallel(self.plain_model.module, **ddp_options)
        if views and dist.get_world_size() > 2:
            self.plain_model.register_comm_hook(None, sum_in_rank_order)
        self.model = DistributedDataParallel(self.model.module, gradient_as_bucket_view=views, **ddp_options)

    def values(self) -> list[Tensor]:
        """Copies of our parameters."""
        return [_held(param).clone() for param in self.model.parameters()]

    def assert_equal(self, when: object) -> None:
        """Both models have the same bits; reading a parameter that is on its way waits for it."""
        for (name, one), other in zip(self.plain_model.named_parameters(), self.model.parameters(), strict=True):
            assert_identical(_held(one), _held(other), f"{name} {when}")

    def assert_same_state(self, what: str, to: int = 0) -> None:
        """The state dict that a rank gathers is the plain optimizer's, bit for bit and in its order."""
        self.opt.consolidate_state_dict(to=to)
        if dist.get_rank() == to:
            assert_identical(self.plain.state_dict(), self.opt.state_dict(), what)

    def assert_moved(self, before: list[Tensor] | None = None) -> None:
        """Guard against a test that passes because nothing was stepped.

        Args:
            before: the parameters of then; None: at first.
        """
        pairs = zip(self.model.parameters(), self.before if before is None else before, strict=True)
        stuck = [
            param.shape
            for param, old in pairs
            if old.numel() and param.requires_grad and torch.equal(_held(param), old)
        ]
        assert not stuck, f"not moved: {stuck}"


class LooseTwins(Twins):
    """Parameters in no model, with the same gradients on every rank: also what DDP would not take."""

    model: Any
    plain_model: Any

    def __init__(
        self,
        tensors: list[Tensor],
        build: Callable[..., Any] = torch.optim.AdamW,
        as_views: bool = True,
        **options: Any,
    ) -> None:
        self.plain_params, self.params = ([nn.Parameter(one.clone()) for one in tensors] for _ in range(2))
        plain = build(self.plain_params, **options)
        opt = ZeroRedundancyOptimizer(self.params, build, parameters_as_bucket_view=as_views, **options)
        super().__init__(nn.ParameterList(self.plain_params), nn.ParameterList(self.params), plain, opt)

    def set_gradients(self, seed: int, skip: tuple[int, ...] = ()) -> None:
        """None for the parameters in ``skip``; those that are frozen keep theirs."""
        generator = torch.Generator().manual_seed(seed)
        for index, (one, other) in enumerate(zip(self.plain_params, self.params, strict=True)):
            grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            if one.requires_grad:
                one.grad = None if index in skip else grad.to(one.dtype)
                other.grad = None if one.grad is None else one.grad.clone()

    def step_from(self, seed: int, skip: tuple[int, ...] = ()) -> None:
        """A step of both, compared, with `set_gradients`."""
        self.set_gradients(seed, skip)
        self.plain.step()
        self.opt.step()
        self.assert_equal(f"after the step of seed {seed}")


def _held(param: Tensor) -> Tensor:
    """What this rank holds of a parameter; a distributed tensor's type takes a third of a second to import."""
    value: Any = param.detach()
    held: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return held


def _set_all(one: Optimizer, _: Tensor) -> None:
    """States in the shape of the parameters, as a loop sets them that knows nothing of shards."""
    for param in (param for group in one.param_groups for param in group["params"]):
        moments = {"exp_avg": torch.full_like(param, 0.125), "exp_avg_sq": torch.full_like(param, 0.25)}
        one.state[param] = {"step": torch.tensor(3.0), **moments}


STATE_WRITES: list[Callable[[Optimizer, Tensor], object]] = [
    lambda one, _: one.state.clear(),
    lambda one, first: one.state.pop(first, None),  # of which another rank may be the owner
    lambda one, _: one.state.update((param, {}) for param in [*one.state]),
    _set_all,
    lambda one, _: setattr(one, "state", defaultdict(dict)),
    lambda one, first: setattr(one, "state", defaultdict(dict, {first: {}})),
]
"""Of loops that drop or set states of an AdamW by hand, given the optimizer and a parameter."""


def sharded_twins(
    model: nn.Module | None = None,
    build: Callable[..., Optimizer] = torch.optim.AdamW,
    *,
    loss: Callable[..., Tensor] = loss_of,
    ddp: Mapping[str, Any] | None = None,
    groups: Callable[[nn.Module], Any] | None = None,
    options: Mapping[str, Any] = MappingProxyType({"lr": 1e-2}),
    plain_hook: Any = None,
    **mode: Any,
) -> Twins:
    """DDP with the plain optimizer, and `shard_optimizer` with the options of a mode.

    In stage 2 the plain model sums gradients in the order of ours where the order can matter.

    Args:
        model: None: `build_model`.
        build: the optimizer class.
        loss: see `Twins`.
        ddp: options of both DDP models.
        groups: parameter groups of a model; None: all parameters.
        options: of the optimizer class.
        plain_hook: of the plain model, instead of a sum in the order of ours.
        **mode: of ours.
    """
    model = build_model() if model is None else model
    is_stage_2 = mode.get("stage") == 2
    ddp_options = {"bucket_cap_mb": 0.0015, "gradient_as_bucket_view": is_stage_2, **(ddp or {})}
    plain_model = DistributedDataParallel(copy.deepcopy(model), **ddp_options)
    ours = DistributedDataParallel(model, **ddp_options)
    hook = plain_hook or (_sum_of(plain_model.process_group, mode) if is_stage_2 else None)
    if hook is not None:
        plain_model.register_comm_hook(plain_model.process_group, hook)
    theirs, own = (copy.deepcopy(dict(options)) for _ in range(2))
    plain = build(plain_model.parameters() if groups is None else groups(plain_model), **theirs)
    opt = shard_optimizer(ours, build, None if groups is None else groups(ours), **mode, **own)
    twins = Twins(plain_model, ours, plain, opt, loss=loss)
    limit = mode.get("max_grad_norm")
    if limit is not None:
        twins.clip = partial(_clip, plain_model, limit, mode.get("norm_type", 2.0))
    return twins


def _clip(model: nn.Module, limit: float, norm_type: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)


def _sum_of(group: dist.ProcessGroup, mode: Mapping[str, Any]) -> Any:
    if mode.get("shard_group") is not None:
        size = dist.get_world_size(mode["shard_group"])
        return SumByGroup(size, mode.get("gradient_predivide_factor")).average
    return sum_in_rank_order if dist.get_world_size(group) > 2 else None


def build_twins(
    case: OptimizerCase,
    groups: int = 1,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
    **zero_options: Any,
) -> Twins:
    model = model if model is not None else build_model(matrices_only=case.matrices_only)
    plain_model = DistributedDataParallel(copy.deepcopy(model), process_group=process_group)
    sharded_model = DistributedDataParallel(model, process_group=process_group)
    plain = case.build(split_groups(plain_model, groups), **copy.deepcopy(case.options))
    opt = ZeroRedundancyOptimizer(
        split_groups(sharded_model, groups),
        case.build,
        process_group=process_group,
        **zero_options,
        **copy.deepcopy(case.options),
    )
    return Twins(plain_model, sharded_model, plain, opt)


def build_overlapped_twins(
    case: OptimizerCase,
    groups: int = 1,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    wrapped: CommHook | None = None,
    states: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    split: bool = True,
    as_views: bool = True,
    bucket_cap_mb: float = 0.0015,
    overlap: bool = True,
    stage: int | None = None,
    zero_options: Mapping[str, Any] | None = None,
    **ddp_options: Any,
) -> Twins:
    """As `build_twins`, with the sharded optimizer stepped inside backward and the same hook on both models.

    In stage 2 (None: see `at_stage`) the plain model sums gradients in rank order where the order can matter.
    """
    stage = _stage if stage is None else stage
    if stage == 2:
        ddp_options.setdefault("gradient_as_bucket_view", True)
        zero_options = {"stage": 2, **(zero_options or {})}
    model = model if model is not None else build_model(matrices_only=case.matrices_only)
    ddp_options |= {"process_group": process_group, "bucket_cap_mb": bucket_cap_mb}
    plain_model = DistributedDataParallel(copy.deepcopy(model), **ddp_options)
    sharded_model = DistributedDataParallel(model, **ddp_options)
    plain = case.build(split_groups(plain_model, groups), **copy.deepcopy(case.options))
    opt = ZeroRedundancyOptimizer(
        split_groups(sharded_model, groups),
        case.build,
        process_group=process_group,
        parameters_as_bucket_view=as_views,
        overlap_with_ddp=overlap,
        **(zero_options or {}),
        **copy.deepcopy(case.options),
    )
    build = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    plain_state, state = states if states is not None else (process_group, process_group)
    if wrapped is not None:
        plain_model.register_comm_hook(plain_state, unnamed(wrapped))
    elif stage == 2 and dist.get_world_size(process_group) > 2:
        plain_model.register_comm_hook(process_group, sum_in_rank_order)
    sharded_model.register_comm_hook(state, build(wrapped, sharded_model, opt, split))
    return Twins(plain_model, sharded_model, plain, opt)


class LargestLiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside it held at once, besides those that were there before."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.live: dict[int, Any] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.existing:
                self.live[tensor.untyped_storage().data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(
                    tensor.untyped_storage()
                )
        held = 0
        for pointer, reference in list(self.live.items()):
            if reference.expired():
                del self.live[pointer]
            else:
                held += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
        self.largest = max(self.largest, held)
        return result


_stage = 1


@contextmanager
def at_stage(stage: int) -> Iterator[None]:
    """What `build_overlapped_twins` builds meanwhile."""
    global _stage
    before, _stage = _stage, stage
    try:
        yield
    finally:
        _stage = before


def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The tensors of all ranks, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


def assert_same_on_all_ranks(tensors: Iterable[Tensor], group: Any = None, when: object = "") -> None:
    mine = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    assert all(torch.equal(mine, other) for other in gathered(mine, group)), f"ranks differ {when}"


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in their order; those of 16 bits are added up in fp32."""
    total = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def ready(value: Tensor) -> torch.futures.Future[Tensor]:
    """What a communication hook returns that has waited."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def sum_in_rank_order(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's averaging with a sum in rank order, written with an all-gather: the reference for stage 2."""
    group = state if state is not None else dist.distributed_c10d._get_default_group()
    return ready(added(gathered(bucket.buffer().mul_(1.0 / dist.get_world_size(group)), group)))


class SumByGroup:
    """DDP's averaging with sums of groups of ranks first: the reference for stage 2 with shard groups.

    Args:
        size: ranks per group.
        predivide: what gradients are divided by before the sum; None: the number of ranks.
    """

    def __init__(self, size: int, predivide: float | None = None) -> None:
        self.size, self.predivide = size, predivide

    def average(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group = state if isinstance(state, dist.ProcessGroup) else None
        ranks = dist.get_world_size(group)
        divisor = self.predivide or ranks
        parts = gathered(bucket.buffer().mul_(1.0 / divisor), group)
        sums = [added(parts[start : start + self.size]) for start in range(0, ranks, self.size)]
        return ready(added(sums) * (divisor / ranks))


def unnamed(hook: CommHook) -> CommHook:
    """DDP refuses some hooks on some backends by their name alone."""
    return lambda state, bucket: hook(state, bucket)


def assert_equal_models(expected: nn.Module, actual: nn.Module, when: str) -> None:
    for (name, one), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert_identical(one.detach(), other.detach(), f"{name} {when}")


def assert_identical(expected: Any, actual: Any, where: str) -> None:
    """Equal to the last bit, and in type, dtype, device, shape and order of keys."""
    assert type(expected) is type(actual), f"{where}: {type(expected)} and {type(actual)}"
    if isinstance(expected, Tensor):
        assert expected.dtype == actual.dtype, f"{where}: {expected.dtype} and {actual.dtype}"
        assert expected.device == actual.device, f"{where}: {expected.device} and {actual.device}"
        if not torch.equal(expected, actual):  # NaNs are equal here, but assert_close takes twenty times as long
            difference = f"{where}: differs by {_largest_difference(expected, actual)}"
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda _: difference)
    elif isinstance(expected, dict):
        assert list(expected) == list(actual), f"{where}: keys {list(expected)} and {list(actual)}"
        for key in expected:
            assert_identical(expected[key], actual[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), f"{where}: lengths {len(expected)} and {len(actual)}"
        for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_identical(one, other, f"{where}[{position}]")
    else:
        assert expected == actual, f"{where}: {expected} and {actual}"


def _largest_difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"shape: {list(one.shape)} and {list(other.shape)}"
    return str((one.detach() - other.detach()).abs().max().item()) if one.numel() else "nothing"


def train_step(pair: tuple[nn.Module, Any], batch: tuple[Any, Any], clip: float | None = None) -> None:
    model, optimizer = pair
    loss_of(model, *batch).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def assert_moved(before: nn.Module, after: nn.Module) -> None:
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert all(not torch.equal(one, other) for one, other in pairs), "nothing moved"
