"""Muon for matrices and AdamW for the rest, in one optimizer, beside DDP with the two plain optimizers."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer, wrap
from ddp_zero.core.local.mixed import name_of
from ddp_zero.core.plan.ownership import is_cut
from ddp_zero.options import PartitionName
from tests.internals import owners_of, plan_of
from tests.multiproc.cases import ToyAdam8bit, assert_equal_models, assert_identical, step_on
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.multiproc.mixed_classes import CAP, MUON, Pair, assert_moved, ddp_of, groups_of, is_matrix, language, train

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
case = Cases()

PARTITIONS: tuple[PartitionName, ...] = ("auto", "elements", "parameters")


def by_class(name: str, param: nn.Parameter) -> dict[str, Any] | None:
    """What users pass as ``params``."""
    return {"optimizer_class": torch.optim.Muon, **MUON} if is_matrix(name, param) else None


def owned_by_several(opt: ZeroRedundancyOptimizer) -> set[int]:
    """Indices of parameters that are cut."""
    return {index for index, pieces in enumerate(plan_of(opt).pieces) if is_cut(pieces)}


def assert_same_state(setup: Setup, opt: ZeroRedundancyOptimizer, pair: Pair) -> None:
    """Each class's group and its states are those of its plain optimizer."""
    found = opt.state_dict()
    for plain, name in ((pair.adamw, None), (pair.muon, name_of(torch.optim.Muon))):
        expected = plain.state_dict()
        (group,) = (one for one in found["param_groups"] if one.get("optimizer_class") == name)
        options = {
            key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer_class")
        }
        assert options == {key: value for key, value in expected["param_groups"][0].items() if key != "params"}
        states = [found["state"][index] for index in group["params"]]
        assert_identical([expected["state"][index] for index in range(len(states))], states, f"states of {name}")


# The same numbers


@case(2, 4)
def _shard_optimizer_with_two_classes_inside_backward_equals_the_plain_pair(setup: Setup) -> None:
    for stage in (1, 2):
        for place, partition in enumerate(PARTITIONS):
            plain, ddp = ddp_of(language(), stage, is_plain=True), ddp_of(language(), stage)
            pair = Pair(plain)
            opt = shard_optimizer(
                ddp,
                AdamW,
                by_class,
                lr=3e-3,
                stage=stage,
                partition=partition,
                sync="forward" if place else "step",
                interleaved=bool(place % 2),
            )
            train(setup, [plain, ddp], [pair, opt], 4)
            opt.finish_sync()
            assert_moved(ddp)
            assert "overlapped (" in opt.explain()
            assert "AdamW+Muon" in opt.explain()
            matrices = {i for i, one in enumerate(opt.param_groups[1]["params"], len(opt.param_groups[0]["params"]))}
            cut = owned_by_several(opt)
            assert not cut & matrices
            assert bool(cut) == (partition == "elements")
            assert_same_state(setup, opt, pair)


@case(3)
def _standalone_lists_of_groups_of_two_classes_equal_the_plain_pair(setup: Setup) -> None:
    for partition in PARTITIONS[1:]:
        for views in (True, False):
            plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
            pair = Pair(plain)
            opt = ZeroRedundancyOptimizer(
                groups_of(ddp), AdamW, lr=3e-3, partition=partition, parameters_as_bucket_view=views
            )
            train(setup, [plain, ddp], [pair, opt], 4)
            assert_moved(ddp)
            assert_same_state(setup, opt, pair)


@case(2, 3)
def _one_bucket_and_a_frozen_parameter_equal_the_plain_pair(setup: Setup) -> None:
    """Stage 2 with one bucket of everything, which whole parameters level out, and with buckets that cut some."""
    for cap in (25, CAP):
        plain = ddp_of(language(), 2, is_plain=True, bucket_cap_mb=cap)
        ddp = ddp_of(language(), 2, bucket_cap_mb=cap)
        pair, opt = Pair(plain), shard_optimizer(ddp, AdamW, by_class, lr=3e-3, stage=2, partition="elements")
        train(setup, [plain, ddp], [pair, opt], 2)
        for model in (plain, ddp):
            model.module.tokens.requires_grad_(False)
        plain, ddp = (ddp_of(model.module, 2, is_plain=model is plain, bucket_cap_mb=cap) for model in (plain, ddp))
        opt.reset()
        opt.attach(ddp)
        train(setup, [plain, ddp], [pair, opt], 3, first=2)
        assert owned_by_several(opt) or cap != CAP


@case(2)
def _wrap_with_max_grad_norm_equals_the_clipped_plain_pair(setup: Setup) -> None:
    ddp, opt = wrap(language(), AdamW, params=by_class, lr=3e-3, stage=2, max_grad_norm=0.05, partition="parameters")
    plain = DistributedDataParallel(language())
    pair = Pair(plain)

    class Clipping:
        def step(self) -> None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            assert norm > 0.05
            pair.step()

        def zero_grad(self) -> None:
            pair.zero_grad()

    train(setup, [plain, ddp], [Clipping(), opt], 4)
    assert_moved(ddp)


# Costs


@case(4)
def _costs_decide_owners_within_the_limit_on_bytes(setup: Setup) -> None:
    def by_rows(param: Tensor, group: Any) -> float:
        return float(param.shape[0]) ** 2 if param.ndim == 2 else 0.5

    found = {}
    for cost in ("auto", "bytes", by_rows):
        opt = ZeroRedundancyOptimizer(groups_of(language()), AdamW, lr=3e-3, cost=cost, max_byte_imbalance=4.0)
        plan = plan_of(opt)
        found[cost if isinstance(cost, str) else "rows"] = owners_of(opt), plan.cost_loads()
        costs = [spec.cost for spec in plan.specs]
        expected = [by_rows(param, {}) * 2**16 for group in opt.param_groups for param in group["params"]]
        assert cost != by_rows or costs == expected
        text = opt.explain()
        assert (cost == "bytes") == ("cost" not in text), text
    assert found["rows"][0] != found["bytes"][0]
    assert max(found["rows"][1]) == 150**2 * 2**16  # two parameters have most of the cost, and a rank each
    assert found["bytes"][1] == [0, 0, 0, 0]


@case(2)
def _costs_that_differ_between_ranks_or_are_no_costs_are_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match=r"the same parameter 0 .*cost 65536\).*cost 131072\).*ZERO-506"):
        ZeroRedundancyOptimizer(groups_of(language()), AdamW, cost=lambda param, group: 1 + setup.rank)
    with pytest.raises(ValueError, match=r"at least 0, got -1. It was asked for parameter 0 .*ZERO-127"):
        ZeroRedundancyOptimizer(groups_of(language()), AdamW, cost=lambda param, group: -1)
    with pytest.raises(TypeError, match=r"return a number, got 'many'.*ZERO-127"):
        ZeroRedundancyOptimizer(groups_of(language()), AdamW, cost=lambda param, group: "many")  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"'auto', 'bytes' or a function, got 'flops'.*ZERO-127"):
        ZeroRedundancyOptimizer(groups_of(language()), AdamW, cost="flops")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"at least 1, got 0.5.*ZERO-127"):
        ZeroRedundancyOptimizer(groups_of(language()), AdamW, max_byte_imbalance=0.5)


# State


@case(2)
def _a_state_dict_resumes_with_other_owners(setup: Setup) -> None:
    for partition in PARTITIONS[:0:-1]:
        plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
        pair = Pair(plain)
        opt = shard_optimizer(ddp, AdamW, by_class, lr=3e-3, partition=partition)
        train(setup, [plain, ddp], [pair, opt], 3)
        saved = opt.state_dict()
        again = ddp_of(copy.deepcopy(ddp.module), 1)
        other = shard_optimizer(again, AdamW, by_class, lr=1.0, cost="bytes", overlap=False)
        other.load_state_dict(saved if setup.rank == 0 else None)
        train(setup, [plain, ddp, again], [pair, opt, other], 3, first=3)
        assert_same_state(setup, other, pair)


def _saved(setup: Setup, folder: str) -> list[list[float]]:
    ddp = ddp_of(language(), 2)
    opt = shard_optimizer(ddp, AdamW, by_class, lr=3e-3, stage=2, partition="elements")
    train(setup, [ddp], [opt], 3)
    checkpoint.save(folder, ddp, opt, step=3)
    _run_on_rank_0s_data(ddp, opt)
    return [param.detach().flatten().tolist() for param in ddp.parameters()]


def _resumed(setup: Setup, folder: str) -> list[list[float]]:
    ddp = ddp_of(language(), 1)
    opt = shard_optimizer(ddp, AdamW, by_class, lr=1.0, partition="parameters", cost="bytes")
    assert checkpoint.load(folder, ddp, opt) is not None
    _run_on_rank_0s_data(ddp, opt)
    return [param.detach().flatten().tolist() for param in ddp.parameters()]


def _run_on_rank_0s_data(ddp: nn.Module, opt: ZeroRedundancyOptimizer) -> None:
    """The same gradients at any number of ranks that is a power of two."""
    for step in range(2):
        tokens = torch.randint(0, 150, (2, 12), generator=torch.Generator().manual_seed(step))
        step_on(opt, nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
    opt.finish_sync()


def test_a_checkpoint_resumes_at_another_number_of_ranks_with_another_plan(tmp_path: Any) -> None:
    expected = run_ranks(_saved, 4, str(tmp_path))[0]
    for found in run_ranks(_resumed, 2, str(tmp_path)):
        assert_identical(expected, found, "resumed")


@case(2)
def _an_added_group_has_the_defaults_of_its_class_and_a_copy_steps_alike(setup: Setup) -> None:
    plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
    later = [[p for p in model.module.blocks[2].parameters() if p.ndim == 2] for model in (plain, ddp)]
    pair = Pair(plain)
    first = [p for p in pair.muon.param_groups[0]["params"] if all(p is not one for one in later[0])]
    pair.muon = torch.optim.Muon(first, **MUON)
    groups = groups_of(ddp)
    groups[1]["params"] = [param for param in groups[1]["params"] if all(param is not one for one in later[1])]
    opt = shard_optimizer(ddp, AdamW, groups, lr=3e-3, overlap=False)
    train(setup, [plain, ddp], [pair, opt], 2)
    pair.muon.add_param_group({"params": later[0], **MUON, "lr": 0.01})
    opt.add_param_group({"params": later[1], **MUON, "lr": 0.01, "optimizer_class": torch.optim.Muon})
    assert opt.param_groups[2]["momentum"] == 0.95
    assert "betas" not in opt.param_groups[2]
    train(setup, [plain, ddp], [pair, opt], 3, first=2)
    assert_moved(ddp)
    with pytest.raises(TypeError, match=r"was built with, AdamW\+Muon, got torch.optim.sgd.SGD"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "optimizer_class": SGD})
    before = [param.detach().clone() for param in ddp.module.parameters()]
    copied_model, copied = copy.deepcopy((ddp.module, opt))
    for param, own in zip(copied_model.parameters(), ddp.module.parameters(), strict=True):
        param.grad, own.grad = torch.ones_like(param), torch.ones_like(own)
    copied.step()  # moves nothing of the original, and then as that does
    assert_identical(before, [param.detach() for param in ddp.module.parameters()], "the original")
    opt.step()
    assert_equal_models(ddp.module, copied_model, "of the copy")


# Other classes


class Counting(AdamW):
    """Counts steps on itself, keeps a number that a method changes."""

    calls = 0
    factor = 1.0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = self.factor * 1e-3 / self.calls
        return super().step(closure)

    def soften(self) -> None:
        """A method that torch's optimizers do not have."""
        self.factor = 0.5


@case(2)
def _counters_and_methods_of_both_classes_equal_the_plain_pair(setup: Setup) -> None:
    plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
    rest, matrices = (group["params"] for group in groups_of(plain))
    pair = Pair(plain)
    pair.adamw, pair.muon = Counting(rest), ToyAdam8bit(matrices)  # type: ignore[assignment]
    groups = groups_of(ddp)
    groups[1] = {"params": groups[1]["params"], "optimizer_class": ToyAdam8bit}
    opt: Any = shard_optimizer(ddp, Counting, groups)
    train(setup, [plain, ddp], [pair, opt], 3)
    pair.adamw.soften()
    opt.soften()
    train(setup, [plain, ddp], [pair, opt], 2, first=3)
    assert opt.calls == 5


class KeepsStray(SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        return super().step(closure)


class OwnFactor(SGD):
    """Takes an option that it does not put into groups."""

    def __init__(self, params: Any, lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__(params, lr)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.factor)
        return super().step(closure)


@case(2)
def _options_that_a_class_keeps_to_itself_reach_its_constructor(setup: Setup) -> None:
    plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
    pair: Any = Pair(plain)
    pair.muon = OwnFactor(groups_of(plain)[1]["params"], lr=0.05, factor=0.25)
    rest, matrices = groups_of(ddp)
    groups = [
        {"params": members, "optimizer_class": OwnFactor, "lr": 0.05, "factor": 0.25}
        for members in (matrices["params"][:2], matrices["params"][2:])
    ]
    opt = shard_optimizer(ddp, AdamW, [rest, *groups], lr=3e-3)
    train(setup, [plain, ddp], [pair, opt], 3)
    groups[1]["factor"] = 0.5
    with pytest.raises(TypeError, match=r"'factor' to be the same in all groups of OwnFactor.*ZERO-128"):
        ZeroRedundancyOptimizer([rest, *groups], AdamW)


class Wraps(SGD):
    """Holds another optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.inside = SGD([nn.Parameter(torch.ones(1))], lr)


class OwnNames(Optimizer):
    """Has options with names of this library's; clips each gradient by its own norm."""

    def __init__(self, params: Any, lr: float = 0.1, max_grad_norm: float = 9.0, norm_type: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm, "norm_type": norm_type})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    size = torch.linalg.vector_norm(param.grad, group["norm_type"])
                    param.sub_(param.grad * (group["max_grad_norm"] / (size + group["max_grad_norm"])) * group["lr"])


@case(2)
def _options_with_names_of_this_librarys_reach_their_class(setup: Setup) -> None:
    own = {"max_grad_norm": 0.05, "norm_type": 1.0}
    doors: list[Callable[[Any, int], Any]] = [
        lambda ddp, stage: shard_optimizer(ddp, OwnNames, [{"params": ddp.parameters(), **own}], stage=stage),
        lambda ddp, stage: shard_optimizer(ddp, partial(OwnNames, **own), stage=stage),
        lambda ddp, stage: shard_optimizer(ddp, OwnNames(ddp.parameters(), **own), stage=stage),
    ]
    for build, stage in product(doors, (1, 2)):
        plain, ddp = ddp_of(language(), 1), ddp_of(language(), stage)
        opt = build(ddp, stage)
        train(setup, [plain, ddp], [OwnNames(plain.parameters(), **own), opt], 3)
        assert_equal_models(plain.module, ddp.module, f"stage {stage}")
        assert_moved(ddp)
        assert {name: opt.param_groups[0][name] for name in own} == own
    with pytest.raises(ValueError, match=r"functools.partial.*ZERO-105"):
        shard_optimizer(ddp_of(language(), 1), OwnNames, max_grad_norm=0.05)


class SameOptions(AdamW):
    """Another class with the same options."""


@case(2)
def _options_after_the_class_are_those_of_its_groups_alone(setup: Setup) -> None:
    """Whether these name the class or not; groups of other classes have their own entries and that class's defaults."""
    ddp = ddp_of(language(), 1)
    params = list(ddp.parameters())
    kinds: list[Any] = [None, AdamW, SameOptions, SGD]
    groups: list[dict[str, Any]] = [{"params": [params[i]], "optimizer_class": kind} for i, kind in enumerate(kinds)]
    del groups[0]["optimizer_class"]
    groups[0]["params"] += params[len(kinds) :]
    opt = shard_optimizer(ddp, AdamW, groups, lr=0.5, betas=(0.5, 0.6), fused=True)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "optimizer_class": AdamW})
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "optimizer_class": SameOptions, "lr": 0.3})
    found = [(group["lr"], group.get("betas"), group.get("fused")) for group in opt.param_groups]
    ours, default = (0.5, (0.5, 0.6), True), (1e-3, (0.9, 0.999), None)
    assert found == [ours, ours, default, (1e-3, None, None), ours, (0.3, (0.9, 0.999), None)]


@case(2)
def _a_rank_without_parameters_of_a_class_resumes(setup: Setup) -> None:
    """One bias, which one rank owns: the other has matrices of Muon only."""
    for kind, stage in ((Adagrad, 2), (Adagrad, 1), (AdamW, 2)):
        runs = []
        for resumed_from in ("none", "checkpoint", "state dict"):
            torch.manual_seed(0)
            ddp = ddp_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), stage)
            muon = {"params": [ddp.module[0].weight, ddp.module[1].weight], "optimizer_class": torch.optim.Muon}
            opt = shard_optimizer(ddp, kind, [muon, {"params": [ddp.module[0].bias]}], lr=1e-2, stage=stage)
            before = [param.detach().clone() for param in ddp.parameters()]
            for step in range(4):
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + setup.rank))
                step_on(opt, ddp(inputs).square().mean())
                if step == 1 and resumed_from == "checkpoint":
                    checkpoint.save(setup.folder / f"{kind.__name__}-{stage}", ddp, opt, step=1)
                    checkpoint.load(setup.folder / f"{kind.__name__}-{stage}", ddp, opt)
                elif step == 1 and resumed_from == "state dict":
                    copy.deepcopy(opt)
                    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            assert not any(map(torch.equal, before, ddp.parameters())), "nothing moved"
            runs.append([param.detach() for param in ddp.parameters()])
        for resumed_from, run in zip(("checkpoint", "state dict"), runs[1:], strict=True):
            assert_identical(runs[0], run, f"{resumed_from}, {kind.__name__}, stage {stage}")


def _groups_with(ddp: Any, kind: Any) -> list[dict[str, Any]]:
    """The groups of a model, the second with this optimizer class."""
    groups = groups_of(ddp)
    groups[1] = {"params": groups[1]["params"], "optimizer_class": kind}
    return groups


@case(2)
def _optimizer_classes_of_a_group_that_cannot_be_sharded_are_refused(setup: Setup) -> None:
    ddp = ddp_of(language(), 1)
    with pytest.raises(NotImplementedError, match=r"got Wraps, which keeps an optimizer as 'inside'.*ZERO-128"):
        ZeroRedundancyOptimizer(_groups_with(ddp, Wraps), AdamW)
    with pytest.raises(NotImplementedError, match="LBFGS cannot be sharded"):
        ZeroRedundancyOptimizer(_groups_with(ddp, torch.optim.LBFGS), AdamW)
    with pytest.raises(TypeError, match=r"of parameter group 1 to be a torch.optim.Optimizer class.*101"):
        ZeroRedundancyOptimizer(_groups_with(ddp, "Muon"), AdamW)


@case(2)
def _muon_over_elements_is_refused(setup: Setup) -> None:
    ddp = ddp_of(language(), 1)
    with pytest.raises(TypeError, match=r"partition='elements' needs an optimizer.*Muon"):
        ZeroRedundancyOptimizer([groups_of(ddp)[1]], torch.optim.Muon, partition="elements")


@case(2)
def _state_that_belongs_to_no_parameter_is_refused_at_the_step(setup: Setup) -> None:
    ddp = ddp_of(language(), 1)
    opt = ZeroRedundancyOptimizer(_groups_with(ddp, KeepsStray), AdamW)
    ddp(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"got 'steps', which belongs to none.*ZERO-128"):
        opt.step()


test_mixed = case.each()
