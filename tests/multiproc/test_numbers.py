"""Last bits: where parameters start in memory, in which order norms add up, in which dtype passes accumulate."""

import contextlib
import copy
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved, shard_optimizer
from tests import internals
from tests.multiproc.cases import assert_equal_models, build_model, loss_of, sum_in_rank_order
from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.recipes import Batches, low_precision_model, micro_batches

MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"overlap": False},
    "stage 1, after the last bucket": {},
    "stage 1, interleaved": {"interleaved": True},
    "stage 1, sync in forward": {"sync": "forward"},
    "stage 2, in opt.step()": {"stage": 2, "overlap": False},
    "stage 2, after the last bucket": {"stage": 2, "interleaved": False},
    "stage 2, interleaved": {"stage": 2},
}


def wrap(model: nn.Module, mode: dict[str, Any]) -> DistributedDataParallel:
    """The model as a mode needs it, in several buckets."""
    is_stage_2 = mode.get("stage") == 2
    return DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=is_stage_2)


def assert_moved(before: list[Tensor], model: nn.Module, where: str) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    for value, param in zip(before, trained, strict=True):
        assert not torch.equal(value, param), f"{where}: a parameter has not moved"


# Alignment


def odd_mlp() -> nn.Sequential:
    """Layers whose weights and biases fill no multiple of 64 bytes."""
    sizes = (5, 7, 33, 17, 9, 1)
    layers: list[nn.Module] = []
    for size, next_size in itertools.pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.Tanh()]
    return nn.Sequential(*layers)


def spectral_mlp() -> nn.Module:
    """Layers whose weights are divided by their largest singular value, which products with vectors find."""
    layers = [nn.Linear(5, 29), nn.Tanh(), nn.Linear(29, 13), nn.Tanh(), nn.Linear(13, 3)]
    return nn.Sequential(*(nn.utils.spectral_norm(one) if isinstance(one, nn.Linear) else one for one in layers))


def large_odd_mlp() -> nn.Module:
    """Segments so large that their gaps travel."""
    return nn.Sequential(nn.Linear(5, 301), nn.Tanh(), nn.Linear(301, 203, bias=False), nn.Tanh(), nn.Linear(203, 3))


def _odd_sizes(setup: Setup, dtype: torch.dtype) -> None:
    for build in (odd_mlp, spectral_mlp, large_odd_mlp):
        for name, mode in MODES.items():
            torch.manual_seed(0)
            model = build().to(dtype)
            before = [param.detach().clone() for param in model.parameters()]
            plain_model = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
            plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
            ddp = wrap(model, mode)
            opt = shard_optimizer(ddp, torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-2, **mode)
            generator = torch.Generator().manual_seed(setup.rank)
            for step in range(4):
                inputs = torch.randn(1, 5, generator=generator).to(dtype)
                for trained, optimizer in ((plain_model, plain), (ddp, opt)):
                    optimizer.zero_grad()
                    trained(inputs).square().sum().backward()
                    optimizer.step()
                if mode.get("sync") == "forward":
                    if step % 2 == 0:
                        continue  # the next forward pass waits
                    opt.finish_sync()
                assert_equal_models(plain_model, ddp, f"{build.__name__}, {name}, step {step}")
            assert_moved(before, model, f"{build.__name__}, {name}")
            for place in [param.data_ptr() for param in model.parameters()]:
                assert place % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.nightly)], ids=str)
def test_layers_of_odd_sizes_are_bit_equal_in_flat_storage(dtype: torch.dtype) -> None:
    run_ranks(_odd_sizes, 2, dtype)


def _bytes_of_a_step(setup: Setup, seed: int) -> tuple[int, int]:
    generator = random.Random(seed)
    largest = generator.choice([3, 100, 2_000, 50_000])
    params = [nn.Parameter(torch.ones(generator.randint(0, largest))) for _ in range(60)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    assert all(torch.equal(param, torch.full_like(param, 0.9)) for param in params)
    owned = sum(param.nbytes for group in opt.optim.param_groups for param in group["params"])
    return int(opt.stats()["total_sent_bytes"]), owned * (setup.world_size - 1)


def _bytes(setup: Setup) -> list[tuple[int, int]]:
    return [_bytes_of_a_step(setup, seed) for seed in range(24)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_alignment_costs_at_most_half_a_percent_of_the_bytes_of_any_model(world_size: int) -> None:
    counts = [count for of_rank in run_ranks(_bytes, world_size) for count in of_rank]
    assert all(formula <= sent <= formula * 1.005 for sent, formula in counts), counts
    assert {sent == formula for sent, formula in counts} == {True, False}, "some gaps travel, some do not"


# Norms


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not: another order than the model's. Those of the first layer come later."""
    params = list(model.parameters())[2:]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


def build_with_groups(
    ddp: DistributedDataParallel, groups: list[dict[str, Any]], mode: dict[str, Any], **options: Any
) -> ZeroRedundancyOptimizer:
    """As `shard_optimizer`, with parameter groups."""
    options = {"lr": 1e-2, "parameters_as_bucket_view": True, "overlap_with_ddp": mode.get("overlap", True)} | options
    opt = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, stage=mode.get("stage", 1), **options)
    if mode != MODES["stage 1, standalone"]:
        build = hook_with_zero_step_interleaved if mode.get("interleaved") else hook_with_zero_step
        ddp.register_comm_hook(ddp.process_group, build(None, ddp, opt, shard_buckets=True))
    return opt


def _clip(setup: Setup, by_call: bool) -> int:
    """Train with groups that reorder the parameters, clipped; in how many steps the order of groups would differ."""
    differing = 0
    for name in ("stage 1, after the last bucket", *list(MODES)[4:]):
        mode = MODES[name] | ({"overlap": False} if by_call and MODES[name].get("stage") == 2 else {})
        torch.manual_seed(0)
        model = odd_mlp()
        model.append(nn.Linear(1, 40))
        list(model.parameters())[3].requires_grad_(False)
        before = [param.detach().clone() for param in model.parameters()]
        plain_model = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
        plain = torch.optim.AdamW(decay_groups(plain_model), lr=1e-2)
        ddp = wrap(model, mode)
        groups, added = decay_groups(ddp), {"params": list(ddp.parameters())[:2]}
        is_whole = mode.get("stage") == 2  # which takes no parameters that DDP reduces and the optimizer does not have
        opt = build_with_groups(
            ddp, [*groups, added] if is_whole else groups, mode, **({} if by_call else {"max_grad_norm": 0.1})
        )
        generator = torch.Generator().manual_seed(setup.rank)
        for step in range(6):
            inputs = torch.randn(3, 5, generator=generator)
            if step == (0 if is_whole else 4):
                plain.add_param_group({"params": list(plain_model.parameters())[:2]})
                if not is_whole:
                    opt.add_param_group(added)
            for trained, optimizer in ((plain_model, plain), (ddp, opt)):
                optimizer.zero_grad()
                for param in trained.parameters():
                    param.grad = None  # those that are in no optimizer, too
                trained(inputs).square().sum().backward()
            members = [param for group in plain.param_groups for param in group["params"]]
            in_order_of_groups = nn.utils.get_total_norm([p.grad for p in members if p.grad is not None])
            of_model = [param for param in plain_model.parameters() if any(param is member for member in members)]
            expected = nn.utils.clip_grad_norm_(of_model, 0.1)
            differing += int(in_order_of_groups.item() != expected.item())
            plain.step()
            norm = opt.clip_grad_norm_(0.1) if by_call else None
            opt.step()
            assert opt.last_step is not None
            where = f"{name}, step {step}"
            assert opt.last_step.grad_norm == expected.item(), where
            assert norm is None or norm.item() == expected.item(), where
            assert_equal_models(plain_model, ddp, where)
        trained_ones = [param.requires_grad for param in model.parameters()]
        assert_moved(list(itertools.compress(before, trained_ones)), model, name)
    return differing


@pytest.mark.parametrize("by_call", [False, True], ids=["max_grad_norm", "clip_grad_norm_"])
def test_norms_add_up_in_the_order_of_the_model_whatever_the_groups(by_call: bool) -> None:
    for differing in run_ranks(_clip, 2, by_call):
        assert differing > 0, "the order never mattered"


# Adafactor's epsilon


def mixed_params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (4,), (6, 6), (7,)]
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, itertools.cycle(dtypes), strict=False)
    ]


def every_nth(params: list[nn.Parameter], groups: int) -> list[dict[str, Any]]:
    return [{"params": params[start::groups]} for start in range(groups)]


def _refuses_mixed_dtypes(setup: Setup) -> None:
    bf16, fp32, eps = torch.bfloat16, torch.float32, (None, 1e-3)
    told = r"in group 0 of Adafactor.*'layer0'.*bfloat16 and.*'layer1'.*float32: for all"
    named = [(f"layer{index}", param) for index, param in enumerate(mixed_params(bf16, fp32))]
    with pytest.raises(ValueError, match=told):
        ZeroRedundancyOptimizer(named, torch.optim.Adafactor)
    opt = ZeroRedundancyOptimizer(mixed_params(fp32), torch.optim.Adafactor)
    before = repr(opt)
    with pytest.raises(ValueError, match="in group 1 of Adafactor"):
        opt.add_param_group({"params": mixed_params(fp32, torch.float64)})
    assert repr(opt) == before
    opt.add_param_group({"params": mixed_params(fp32, bf16), "eps": (1e-30, 1e-3)})
    saved = torch.optim.Adafactor(opt.param_groups).state_dict()
    opt.load_state_dict(saved)
    with pytest.raises(ValueError, match="in group 1 of Adafactor"):
        opt.load_state_dict({**saved, "param_groups": [{**group, "eps": eps} for group in saved["param_groups"]]})
    assert opt.param_groups[1]["eps"] == (1e-30, 1e-3)
    ZeroRedundancyOptimizer(mixed_params(bf16, fp32), torch.optim.AdamW, eps=1e-8)


def _follows_with_the_remedies(setup: Setup) -> None:
    for remedy in ("groups", "a number", "masters"):
        for foreach in (False, True):
            plain_params, params = (mixed_params(torch.bfloat16, torch.float32) for _ in range(2))
            stepped = [nn.Parameter(p.detach().float()) for p in plain_params] if remedy == "masters" else plain_params
            options: dict[str, Any] = {"lr": 0.1, "foreach": foreach}
            if remedy == "a number":
                options["eps"] = (torch.finfo(torch.float32).eps, 1e-3)

            groups = 2 if remedy == "groups" else 1
            plain = torch.optim.Adafactor(every_nth(stepped, groups), **options)
            opt = ZeroRedundancyOptimizer(
                every_nth(params, groups),
                torch.optim.Adafactor,
                parameters_as_bucket_view=True,
                master_weights=remedy == "masters",
                **options,
            )
            for step in range(6):
                for index, (one, other) in enumerate(zip(stepped, params, strict=True)):
                    grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step)) * 1e-4 ** (index % 2)
                    other.grad = grad.to(other.dtype)
                    one.grad = other.grad.to(one.dtype)
                plain.step()
                opt.step()
                for one, other in zip(stepped, params, strict=True):
                    assert torch.equal(one.detach().to(other.dtype), other), f"{remedy}, foreach {foreach}, step {step}"


def _adafactor(setup: Setup) -> None:
    _refuses_mixed_dtypes(setup)
    _follows_with_the_remedies(setup)


def test_adafactor_refuses_an_epsilon_that_depends_on_the_first_of_several_dtypes() -> None:
    run_ranks(_adafactor, 2)


# Accumulation


@dataclass
class SumsInFp32:
    """DDP and an unsharded optimizer; averages of several passes add up in fp32, by hand."""

    model: DistributedDataParallel
    has_masters: bool
    is_stage_2: bool
    params: list[nn.Parameter] = field(init=False)
    stepped: list[nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        if self.is_stage_2 and dist.get_world_size() > 2:
            self.model.register_comm_hook(None, sum_in_rank_order)
        self.params = list(self.model.parameters())
        self.stepped = [nn.Parameter(p.detach().float()) if self.has_masters else p for p in self.params]
        self.optimizer = torch.optim.AdamW(self.stepped, lr=1e-2)

    def step(self, data: Batches) -> None:
        sums: dict[int, Tensor] = {}
        for batch in data:
            self.model.zero_grad()
            loss_of(self.model, *batch).backward()
            for index, param in enumerate(self.params):
                if param.grad is not None:
                    grad = param.grad.float()
                    sums[index] = sums[index] + grad if index in sums else grad
        for index, stepped in enumerate(self.stepped):
            stepped.grad = sums[index].to(stepped.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for param, stepped in zip(self.params, self.stepped, strict=True):
                param.copy_(stepped)


def _follow_sums_in_fp32(setup: Setup, modes: list[str], ddp_options: dict[str, Any]) -> int:
    """Accumulate from the very first pass on; how many parameters got another owner meanwhile."""
    moved = 0
    for place, (name, has_masters) in enumerate(itertools.product(modes, (True, False))):
        passes = 2 + (place + place // 2 + setup.world_size) % 2  # two numbers of ranks have all
        mode = MODES[name] | {"shard_buckets": passes == 2, "accumulate_in_fp32": MODES[name].get("stage") != 2}
        model = low_precision_model(torch.bfloat16, is_mixed=not ddp_options.get("static_graph"))
        before = [param.detach().clone() for param in model.parameters()]
        plain_model = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015, **ddp_options)
        is_stage_2 = mode.get("stage") == 2
        plain = SumsInFp32(plain_model, has_masters, is_stage_2)
        as_views = is_stage_2 or passes == 3
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=as_views, **ddp_options)
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=1e-2, master_weights=has_masters, **mode)
        owners = internals.owners_of(opt)
        for step, data in enumerate(micro_batches(setup.rank, 5, passes)):
            where = f"{name}, masters {has_masters}, {passes} passes, {ddp_options}, step {step}"
            plain.step(data)
            opt.zero_grad()
            for number, batch in enumerate(data):
                with opt.accumulate() if number < passes - 1 else contextlib.nullcontext():
                    loss_of(ddp, *batch).backward()
            opt.step()
            assert_equal_models(plain_model, ddp, where)
        assert_moved(before, model, name)
        moved += sum(one != other for one, other in zip(owners, internals.owners_of(opt), strict=True))
    return moved


STAGE_2 = list(MODES)[4:]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "ddp_options",
    [
        pytest.param({}, id="dynamic", marks=pytest.mark.nightly),
        pytest.param({"static_graph": True}, id="static"),
        pytest.param({"find_unused_parameters": True}, id="unused"),
    ],
)
def test_stage_1_adds_averages_up_in_fp32_if_asked_to(world_size: int, ddp_options: dict[str, Any]) -> None:
    run_ranks(_follow_sums_in_fp32, world_size, list(MODES)[:3], ddp_options, timeout=240)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "ddp_options",
    [
        pytest.param({}, id="dynamic"),
        pytest.param({"static_graph": True}, id="static", marks=pytest.mark.nightly),
        pytest.param({"find_unused_parameters": True}, id="unused"),
    ],
)
def test_stage_2_adds_averages_up_in_fp32_from_the_first_pass_on(world_size: int, ddp_options: dict[str, Any]) -> None:
    moved = run_ranks(_follow_sums_in_fp32, world_size, STAGE_2, ddp_options, timeout=240)
    assert not any(moved), "owners never change"


def _plain_passes(model: DistributedDataParallel, data: Batches, policy: str) -> None:
    """Several backward passes of DDP alone, as a policy of ours adds them up."""
    sums: dict[nn.Parameter, Tensor] = {}
    model.zero_grad()
    for number, batch in enumerate(data):
        with model.no_sync() if policy == "no_sync" and number < len(data) - 1 else contextlib.nullcontext():
            loss_of(model, *batch).backward()
        if policy == "averages":
            for param in model.parameters():
                assert param.grad is not None
                sums[param] = sums[param] + param.grad if param in sums else param.grad.clone()
            model.zero_grad()
    for param, total in sums.items():
        param.grad = total


def _follow_policies(setup: Setup) -> bool:
    """Whether the policies have ever differed."""
    differed = False
    for name, mode in MODES.items():
        if mode.get("sync") == "forward":
            continue
        is_stage_2 = mode.get("stage") == 2
        for policy in ("no_sync", "averages" if is_stage_2 else "as without no_sync"):
            torch.manual_seed(0)
            model = build_model()
            before = [param.detach().clone() for param in model.parameters()]
            plain_model, other_model = (
                DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015) for _ in range(2)
            )
            plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=is_stage_2)
            opt = shard_optimizer(ddp, torch.optim.AdamW, lr=1e-2, **mode)
            for step, data in enumerate(micro_batches(setup.rank, 5, 3)):
                other_model.load_state_dict(plain_model.state_dict())
                _plain_passes(other_model, data, "no_sync")
                _plain_passes(plain_model, data, policy)
                grads = zip(plain_model.parameters(), other_model.parameters(), strict=True)
                differed |= any(not torch.equal(one.grad, other.grad) for one, other in grads)  # type: ignore[arg-type]
                plain.step()
                opt.zero_grad()
                for number, batch in enumerate(data):
                    context = ddp.no_sync() if policy == "no_sync" else opt.accumulate()
                    with context if number < len(data) - 1 else contextlib.nullcontext():
                        loss_of(ddp, *batch).backward()
                opt.step()
                assert_equal_models(plain_model, ddp, f"{name}, {policy}, step {step}")
            assert_moved(before, model, name)
    return differed


def test_no_sync_has_ddps_bits_and_accumulate_those_of_averages_of_each_pass() -> None:
    assert all(run_ranks(_follow_policies, 2, timeout=240)), "the policies never differed"


def _passes_that_ddp_does_not_reduce(setup: Setup) -> None:
    for mode in ({"accumulate_in_fp32": True}, {"accumulate_in_fp32": True, "overlap": False}, {"stage": 2}):
        model = low_precision_model(torch.bfloat16, is_mixed=False)
        plain_model = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015)
        ddp = wrap(model, mode)
        plain = SumsInFp32(plain_model, True, is_stage_2="stage" in mode)
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=1e-2, master_weights=True, **mode)
        for step, data in enumerate(micro_batches(setup.rank, 4, 3)):
            plain.step(data)
            opt.zero_grad()
            for number, batch in enumerate(data):
                with opt.accumulate() if number < 2 else contextlib.nullcontext():
                    loss_of(ddp, *batch).backward()
                if number < 2:
                    before = [param.grad for param in model.parameters()]
                    torch.autograd.grad(loss_of(model, *batch), list(model.parameters()))
                    is_same = [one is param.grad for one, param in zip(before, model.parameters(), strict=True)]
                    assert "stage" in mode or all(is_same), f"{mode}, step {step}, pass {number}"
            opt.step()
            assert_equal_models(plain_model, ddp, f"{mode}, step {step}")
        if "stage" not in mode:
            with pytest.raises(RuntimeError, match="would add this rank's own gradient"):
                _add_own_to_averages(ddp, opt, next(micro_batches(setup.rank, 1, 2)))


def _add_own_to_averages(ddp: DistributedDataParallel, opt: ZeroRedundancyOptimizer, data: Batches) -> None:
    opt.zero_grad()
    with opt.accumulate():
        loss_of(ddp, *data[0]).backward()
    with ddp.no_sync():
        loss_of(ddp, *data[1]).backward()


def _needs_a_hook(setup: Setup) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, accumulate_in_fp32=True, lr=0.1)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"no communication hook, which .*accumulate_in_fp32=True need"):
        opt.step()


def _accumulation_by_option(setup: Setup) -> None:
    _passes_that_ddp_does_not_reduce(setup)
    _needs_a_hook(setup)


def test_sums_of_averages_outlive_passes_that_ddp_does_not_reduce_and_refuse_own_gradients() -> None:
    run_ranks(_accumulation_by_option, 2)
