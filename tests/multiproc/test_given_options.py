"""Ranks that are given different options, or leave out different parameters, are told, whatever they have in common."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, batches, build_model, loss_of
from tests.multiproc.cut_models import is_cut
from tests.multiproc.experts import cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.parallel_models import blocks, cut_groups, parallelized, squared, tied_group
from tests.multiproc.stages import Stages

MODES: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"stage": 2},
    "not overlapped": {"overlap": False},
    "stage 2, not overlapped": {"stage": 2, "overlap": False},
    "clipped": {"stage": 2, "max_grad_norm": 1.0},
    "cut": {"stage": 2, "partition": "elements"},
    "in forward": {"sync": "forward"},
    "in forward, stage 2": {"stage": 2, "sync": "forward"},
    "masters": {"master_weights": True},
}

# a rank that waited for the time-out of its group would fail the test
case = Cases(timeout=300, group_timeout=600)


@contextmanager
def refused_on_all(*told: str) -> Iterator[None]:
    """A block that raises on every rank, at once."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        yield
    for text in told:
        assert text in str(caught.value), str(caught.value)
    dist.barrier()


def wrapped(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        build_model() if model is None else model, gradient_as_bucket_view=True, bucket_cap_mb=0.0015, **options
    )


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def halves(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]


# Ranks that hold the same


def _groups(odd: bool, **options: Any) -> Callable[[nn.Module], dict[str, Any]]:
    def groups(model: nn.Module) -> dict[str, Any]:
        first, second = halves(model)
        return {"params": [first, {**second, **(options if odd else {})}]}

    return groups


def _one_group(odd: bool) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"params": list(model.parameters()) if odd else halves(model)}


GIVEN: list[tuple[str, Callable[[bool], Any]]] = [
    ("the same 'lr' of parameter group 0", lambda odd: {"lr": 0.5 if odd else 0.001}),
    ("the same 'lr' of parameter group 0", lambda odd: {"lr": torch.tensor(0.5 if odd else 0.001)}),
    ("the same 'lr' of parameter group 0", lambda odd: {"lr": torch.tensor(0.5) if odd else 0.5}),
    ("the same 'betas' of parameter group 0", lambda odd: {"betas": (0.9, 0.95 if odd else 0.999)}),
    ("the same 'amsgrad' of parameter group 0", lambda odd: {"amsgrad": odd}),
    ("the same 'weight_decay' of parameter group 1", lambda odd: _groups(odd, weight_decay=0.2)),
    ("the same 'max_grad_norm' of parameter group 1", lambda odd: _groups(odd, max_grad_norm=1.0)),
    ("the same 'lr_scale' of parameter group 1", lambda odd: _groups(odd, lr_scale=0.5)),
    ("the same number of parameter groups", _one_group),
]


@case(2, 3)
def _different_options_are_refused_when_the_optimizer_is_built(setup: Setup) -> None:
    odd = setup.rank == setup.world_size - 1
    for told, given in GIVEN:
        for build in (_standalone, _sharded):
            ddp, arguments = wrapped(), given(odd)
            with refused_on_all(told, f"rank {setup.world_size - 1}"):
                build(ddp, arguments(ddp.module) if callable(arguments) else arguments)
    with refused_on_all("the same optimizer class"):
        shard_optimizer(wrapped(), SGD if odd else AdamW, lr=0.1)
    with refused_on_all("the same stage on", "got 1 on rank 0"):
        shard_optimizer(wrapped(), AdamW, stage=1 + odd)
    with refused_on_all("max_grad_norm on every rank in building ZeroRedundancyOptimizer, got 1.0 on rank 0"):
        shard_optimizer(wrapped(), AdamW, max_grad_norm=1.0 + odd)
    ddp = wrapped()
    names = [
        {"params": one["params"], "name": f"rank {setup.rank}", "number": setup.rank} for one in halves(ddp.module)
    ]
    _sharded(ddp, {"params": names, "lr": 1})  # of the loop's own


def _standalone(ddp: DistributedDataParallel, arguments: dict[str, Any]) -> None:
    arguments = {"params": ddp.parameters(), **arguments}
    ZeroRedundancyOptimizer(arguments.pop("params"), AdamW, **arguments)


def _sharded(ddp: DistributedDataParallel, arguments: dict[str, Any]) -> None:
    arguments = dict(arguments)
    shard_optimizer(ddp, AdamW, arguments.pop("params", None), stage=2, **arguments)


Change = Callable[[Optimizer], None]


def _set(name: str, value: Any) -> Change:
    def change(opt: Optimizer) -> None:
        opt.param_groups[1][name] = value

    return change


def _add(opt: Optimizer) -> None:
    opt.param_groups[1]["lr_scale"] = 0.5


CHANGES: dict[str, Change] = {
    "'lr'": _set("lr", 0.05),
    "'betas'": _set("betas", (0.8, 0.999)),
    "'weight_decay'": _set("weight_decay", 0.0),
    "'maximize'": _set("maximize", True),
    "'lr_scale'": _add,
}


def train(setup: Setup, ddp: nn.Module, opt: Optimizer, steps: int, changed: Callable[[int], None]) -> None:
    for step, batch in enumerate(batches(setup.rank, steps)):
        changed(step)
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        opt.step()
    if isinstance(opt, ZeroRedundancyOptimizer):
        opt.finish_sync()


@case(2, 3, few=[*zip(MODES, cycle(CHANGES), strict=False)], every=[*product(MODES, CHANGES)])
def _an_option_that_one_rank_changes_later_is_refused_in_that_step(
    setup: Setup, configurations: list[tuple[str, str]]
) -> None:
    """Long after the first steps; and parameters of all ranks are still the same."""
    last = setup.world_size - 1
    for mode, name in configurations:
        ddp = wrapped()
        opt = shard_optimizer(ddp, AdamW, halves(ddp.module), lr=0.01, **MODES[mode])
        seen: list[int] = []

        def changed(step: int, opt: Any = opt, change: Change = CHANGES[name], seen: list[int] = seen) -> None:
            seen.append(step)
            if step == 10 and setup.rank == last:
                change(opt)

        with refused_on_all(name, "of parameter group 1", f"rank {last}", "[ZERO-820]"):
            train(setup, ddp, opt, 11, changed)
        assert seen[-1] == 10, (mode, name)
        every: list[Any] = [None] * setup.world_size
        dist.all_gather_object(every, [param.detach().clone() for param in ddp.parameters()])
        for theirs in every:
            assert_identical(theirs, every[0], f"{mode}, {name}")


@case(2, few=["stage 1", "not overlapped", "clipped", "cut", "in forward, stage 2", "masters"], every=[*MODES])
def _options_that_all_ranks_change_alike_are_accepted(setup: Setup, configurations: list[str]) -> None:
    """Also a rate that is a tensor, and one that numpy has computed, and whatever a load brings."""
    for options in map(MODES.__getitem__, configurations):
        models = wrapped(), wrapped()
        plain = AdamW(halves(models[0].module), lr=torch.tensor(0.01), foreach=False)
        opt = shard_optimizer(
            models[1], AdamW, halves(models[1].module), lr=torch.tensor(0.01), foreach=False, **options
        )
        schedulers = [ExponentialLR(one, 0.9) for one in (plain, opt)]
        feed = list(batches(setup.rank, 12))
        for step, batch in enumerate(feed):
            for ddp, one, scheduler in zip(models, (plain, opt), schedulers, strict=True):
                one.zero_grad()
                loss_of(ddp, *batch).backward()
                if one is plain and "max_grad_norm" in options:
                    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                one.step()
                scheduler.step()
                if step == 9:
                    one.load_state_dict(one.state_dict())
        opt.finish_sync()
        assert_identical(list(models[0].parameters()), list(models[1].parameters()), f"{options}")
        assert not torch.equal(next(models[1].parameters()), next(build_model().parameters()))


@case(2)
def _of_many_groups_the_one_that_differs_is_named(setup: Setup) -> None:
    ddp = wrapped()
    groups = [{"params": [param], "lr": 0.01 + 0.001 * place} for place, param in enumerate(ddp.parameters())]
    opt = shard_optimizer(ddp, AdamW, groups)
    last = len(groups) - 1

    def changed(step: int) -> None:
        for group in opt.param_groups:
            group["lr"] *= 0.9
        if step == 9 and setup.rank:
            opt.param_groups[last]["weight_decay"] = 0.5

    with refused_on_all(f"'weight_decay' of parameter group {last}", "0.5 on rank 1"):
        train(setup, ddp, opt, 12, changed)


@case(2)
def _an_added_group_whose_options_differ_between_ranks_is_refused(setup: Setup) -> None:
    for options in (None, {}, {"overlap": False}):
        ddp = wrapped()
        params: list[Any] = list(ddp.parameters())
        opt: Any
        if options is None:
            opt = ZeroRedundancyOptimizer(params[1:], AdamW, lr=0.01)
        else:
            opt = shard_optimizer(ddp, AdamW, params[1:], lr=0.01, **options)
        for name, value in (("lr", 0.1 + setup.rank), ("betas", (0.9, 0.99 + 0.001 * setup.rank))):
            with refused_on_all(f"the same {name!r} of the added group", "rank 1"):
                opt.add_param_group({"params": params[:1], name: value})
        opt.add_param_group({"params": params[:1], "lr": 0.1})
        assert len(opt.param_groups) == 2


@case(4)
def _an_option_that_one_replica_of_shards_changes_is_refused(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (1, 2):
        ddp = wrapped()
        opt = shard_optimizer(ddp, AdamW, halves(ddp.module), shard_group=mesh.get_group("shard"), stage=stage, lr=0.01)

        def changed(step: int, opt: Any = opt) -> None:
            if step == 10 and setup.rank >= 2:
                opt.param_groups[0]["lr"] = 0.5

        with refused_on_all("'lr' of parameter group 0", "[ZERO-820]"):
            train(setup, ddp, opt, 11, changed)


# Ranks that hold different parts


def tensor_mesh() -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return mesh, {"mesh": mesh, "data_parallel_dim": "data"}


def without(name: str, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "params": [pair for pair in one["params"] if pair[0] != name]} for one in groups]


Groups = list[dict[str, Any]]


def _other_rate(groups: Groups) -> Groups:
    return [groups[0], {**groups[1], "lr": 0.5}]


def _one_less(groups: Groups) -> Groups:
    return [{**groups[0], "params": groups[0]["params"] + groups[1]["params"]}]


def _other_class(groups: Groups) -> Groups:
    return [{**groups[0], "optimizer_class": SGD}, groups[1]]


CHANGED: list[tuple[str, Callable[[Groups], Groups]]] = [
    ("the same 'lr' of parameter group 1", _other_rate),
    ("the same number of parameter groups", _one_less),
    ("the same optimizer_class of parameter group 0", _other_class),
    ("parameter 0.norm.bias of parameter group 0", partial(without, "0.norm.bias")),
    ("parameter 1.bias of parameter group 0", partial(without, "1.bias")),
]


@case(4)
def _along_the_tensor_dimension_options_and_parameters_are_compared_at_once(setup: Setup) -> None:
    mesh, arguments = tensor_mesh()
    tensor = mesh.get_group("tensor")
    for odd in (setup.rank == 3, mesh.get_local_rank("tensor") == 1):
        keywords: list[dict[str, Any]] = [
            {"lr": 0.5 if odd else 0.001},
            {"lr": torch.tensor(0.5 if odd else 0.001)},
            {"betas": (0.9, 0.95 if odd else 0.999)},
        ]
        for given in keywords:
            model = blocks(tensor)
            with refused_on_all(f"the same argument {next(iter(given))}=", "rank 1"):
                ParallelOptimizer(model, AdamW, cut_groups(model, "tensor"), **arguments, **given)
        for told, change in CHANGED:
            model = blocks(tensor)
            groups = cut_groups(model, "tensor")
            with refused_on_all(told, "rank 1"):
                ParallelOptimizer(model, AdamW, change(groups) if odd else groups, **arguments, lr=0.1)
    model = blocks(mesh.get_group("tensor"))
    model.get_parameter("0.norm.bias").requires_grad_(mesh.get_local_rank("tensor") == 0)
    with refused_on_all("parameter 0.norm.bias of parameter group 0", "frozen"):
        ParallelOptimizer(model, AdamW, cut_groups(model, "tensor"), **arguments, lr=0.1)
    model = blocks(mesh.get_group("tensor"))
    model.get_parameter("1.bias").data.add_(mesh.get_local_rank("tensor"))
    with refused_on_all("values of parameter 1.bias of parameter group 0", "replicated along 'tensor'"):
        ParallelOptimizer(model, AdamW, cut_groups(model, "tensor"), **arguments, lr=0.1)
    own = parallelized(mesh["tensor"])
    with refused_on_all("the same argument lr="):
        shard_optimizer(own, AdamW, **arguments, lr=0.1 + mesh.get_local_rank("tensor"))
    shard_optimizer(own, AdamW, **arguments, lr=0.1)


PARALLEL_MODES: tuple[dict[str, Any], ...] = (
    {"wraps": False},
    {"wraps": False, "max_grad_norm": 1.0},
    {},
    {"stage": 2},
    {"stage": 2, "max_grad_norm": 1.0},
    {"overlap": False},
)


def _freeze(model: nn.Module) -> None:
    model.get_parameter("0.norm.bias").requires_grad_(False)


def _drop(model: nn.Module) -> None:
    model.get_parameter("0.norm.bias").grad = None


OPTION_CHANGES: list[tuple[str, int, Any]] = [("lr", 0, 0.5), ("betas", 1, (0.5, 0.9))]


@case(
    4,
    few=[
        (mode, place % 2 == 0, OPTION_CHANGES[place // 2 % 2])
        for place, mode in enumerate([*PARALLEL_MODES, PARALLEL_MODES[0]])
    ],
    every=[*product(PARALLEL_MODES, (False, True), OPTION_CHANGES)],
)
def _along_the_tensor_dimension_later_changes_are_refused_in_that_step(
    setup: Setup, configurations: list[tuple[dict[str, Any], bool, tuple[str, int, Any]]]
) -> None:
    """Of one rank, or of all at one place of the dimension."""
    mesh, arguments = tensor_mesh()
    for mode, is_place, (name, group, value) in configurations:
        odd = mesh.get_local_rank("tensor") == 1 if is_place else setup.rank == 3
        opt, model, iteration = _tensor_parallel(mesh, mode, arguments)
        for step in range(10):
            if step == 9 and odd:
                opt.param_groups[group][name] = value
            iteration()
            if step < 9:
                opt.step()
        before = values(model)
        with refused_on_all(f"{name!r} of parameter group {group}", "[ZERO-820]"):
            opt.step()
        if not mode.get("wraps", True) or "max_grad_norm" in mode or mode.get("overlap") is False:
            assert_identical(before, values(model), f"{mode}: refused before anything is stepped")


def _tensor_parallel(
    mesh: DeviceMesh, mode: dict[str, Any], arguments: dict[str, Any]
) -> tuple[ParallelOptimizer, nn.Module, Callable[[], None]]:
    options = dict(mode)
    model = blocks(mesh.get_group("tensor"))
    if options.pop("wraps", True):
        model = wrapped(model, process_group=mesh.get_group("data"))
    opt = ParallelOptimizer(model, AdamW, cut_groups(model, "tensor"), **arguments, **options, lr=0.01)
    feed = batches(mesh.get_local_rank("data"), 20)

    def iteration() -> None:
        opt.zero_grad()
        squared(model, next(feed)).backward()

    return opt, model, iteration


@case(4)
def _along_the_tensor_dimension_replicated_parameters_train_on_all_ranks_or_none(setup: Setup) -> None:
    mesh, arguments = tensor_mesh()
    for change, told in ((_freeze, "got with a gradient on"), (_drop, "without a gradient on rank 1")):
        for mode in ({"wraps": False}, {"wraps": False, "max_grad_norm": 1.0}, {"overlap": False}):
            opt, model, iteration = _tensor_parallel(mesh, mode, arguments)
            inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
            iteration()
            opt.step()
            iteration()
            if mesh.get_local_rank("tensor") == 1:
                change(inner)
            before = values(model)
            with refused_on_all("0.norm.bias", told, "[ZERO-821]"):
                opt.step()
            assert_identical(before, values(model), f"{mode}")


EXPERT_MODES: list[dict[str, Any]] = [{"overlap": False}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1.0}]


@case(4, few=[*zip((True, False, True), EXPERT_MODES, strict=True)], every=[*product((True, False), EXPERT_MODES)])
def _experts_are_compared_with_each_other_and_with_their_copies(
    setup: Setup, configurations: list[tuple[bool, dict[str, Any]]]
) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    odd_ones = {True: setup.rank == 3, False: setup.rank % 2 == 1}
    for odd in odd_ones.values():
        rate: dict[str, Any] = {"lr": 0.5 if odd else 0.1}
        for told, options, changed in (
            ("the same argument lr=", rate, {}),
            ("the same 'lr' of parameter group 1", {}, rate),
        ):
            ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
            groups = dense_and_experts(ddp, same)
            with refused_on_all(told):
                ParallelOptimizer(ddp, AdamW, [groups[0], {**groups[1], **changed}], **options)
    for is_one_rank, mode in configurations:
        ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), **mode, lr=0.01)
        with refused_on_all("'lr' of parameter group 1", "[ZERO-820]"):
            for step, batch in enumerate(batches(setup.rank, 11)):
                if step == 10 and odd_ones[is_one_rank]:
                    opt.param_groups[1]["lr"] = 0.5
                opt.zero_grad()
                loss_of(ddp, *batch).backward()
                opt.step()


@case(4, few=[(True, {"stage": 2})], every=[(False, {}), (True, {"max_grad_norm": 1.0})])
def _stages_are_compared_where_they_were_built_alike(
    setup: Setup, configurations: list[tuple[bool, dict[str, Any]]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied, number = tied_group(mesh), mesh.get_local_rank("pipe")
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    for wraps, mode in configurations:
        stages = Stages(mesh, Schedule1F1B, wraps, learns_shapes=False)
        with refused_on_all("the same argument lr="):
            ParallelOptimizer(stages.model, AdamW, stages.groups(tied), **arguments, lr=0.1 + number)
        for has_own in (False, True):
            stages = Stages(mesh, Schedule1F1B, wraps, learns_shapes=False)
            groups = stages.groups(tied)
            for group in groups[:2] if has_own else ():
                group["lr"] = 0.01 * (1 + number)
            opt = ParallelOptimizer(stages.model, AdamW, groups, **arguments, **mode, lr=0.01)
            for step in range(11):
                for group in opt.param_groups:
                    group["lr"] *= 0.9
                if step == 10 and not has_own and number:
                    opt.param_groups[0]["lr"] = 0.5
                opt.zero_grad()
                stages.run(step)
                if step < 10 or has_own:
                    opt.step()
            if not has_own:
                with refused_on_all("'lr' of parameter group 0", "[ZERO-820]"):
                    opt.step()


@case(4)
def _groups_added_over_a_mesh_must_be_alike(setup: Setup) -> None:
    mesh, arguments = tensor_mesh()
    second = mesh.get_local_rank("tensor")
    model = blocks(mesh.get_group("tensor"))
    groups = cut_groups(model, "tensor")
    late = [one for one in groups[0]["params"] if one[0].startswith("1.")]
    groups[0]["params"] = [one for one in groups[0]["params"] if not one[0].startswith("1.")]
    opt = ParallelOptimizer(model, AdamW, groups, **arguments, lr=0.01)
    with refused_on_all("the same 'lr' of parameter group 2"):
        opt.add_param_group({"params": late, "lr": 0.1 + second})
    with refused_on_all(f"parameter {late[-1][0]} of parameter group 2"):
        opt.add_param_group({"params": late[: len(late) - second], "lr": 0.1})
    opt.add_param_group({"params": late, "lr": 0.1})
    squared(model, next(batches(mesh.get_local_rank("data"), 1))).backward()
    if second:
        opt.param_groups[2]["lr"] = 0.2
    with refused_on_all("'lr' of parameter group 2", "[ZERO-820]"):
        opt.step()
    assert not any(is_cut(name) for name, _ in late)


test_given_options = case.each()
