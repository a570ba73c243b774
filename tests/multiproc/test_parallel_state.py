"""Checkpoints, doors and refusals of a `ParallelOptimizer`: experts, tensor parallel parts and pipeline stages."""

import copy
import json
import pickle
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ddp_zero
from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import STATE_WRITES, assert_identical, batches
from tests.multiproc.cut_models import CutBlock
from tests.multiproc.experts import cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.mesh_twins import MeshTwins, mesh_of_4
from tests.multiproc.moved_state import OPTIONS, TOTAL, Spread, Staged, move_experts, move_stages

case = Cases(timeout=120, group_timeout=30)


@case(4)
def _experts_load_at_any_number_of_expert_parallel_ranks(setup: Setup) -> None:
    move_experts(setup, 2, (2, 4, 1))


@case(4)
def _an_expert_without_a_global_name_is_refused_and_both_ranks_are_named(setup: Setup) -> None:
    nameless = Spread(setup, 2, named=False)
    ambiguous = (
        r"Two parameters have the name 'experts\.local\.0\.0\.weight' on rank 0 \(global rank 0\) and rank 1 \(global "
        r"rank 1\), with different values: one belongs to ranks \[0, 2\], the other to ranks \[1, 3\]"
    )
    with pytest.raises(ValueError, match=ambiguous):
        checkpoint.save(setup.folder / "nameless", nameless.ddp, nameless.opt)
    with pytest.raises(
        ValueError, match="the same parameters that DDP ignores, or their ParallelOptimizer, on every rank"
    ):
        checkpoint.save(setup.folder / "nameless", nameless.ddp)
    named = Spread(setup, 2)
    named.train(setup.rank, 0)
    checkpoint.save(setup.folder / "named", named.ddp, named.opt)
    before = copy.deepcopy(nameless.model.state_dict())
    with pytest.raises(ValueError, match=ambiguous):
        checkpoint.load(setup.folder / "named", nameless.ddp, nameless.opt)
    assert_identical(before, nameless.model.state_dict(), "after a load that was refused")
    for param in nameless.model.experts.parameters():
        assert param.requires_grad
    frozen = Frozen(setup)
    with pytest.raises(ValueError, match=r"'experts\.local\.0\.0\.weight' is in no parameter group.*rank 1"):
        checkpoint.save(setup.folder / "frozen", frozen.ddp, frozen.opt)
    with pytest.raises(ValueError, match=r"names in global_names= that the model has, got \['expert'\]"):
        checkpoint.save(setup.folder / "misspelt", named.ddp, misnamed(named, {"expert": "other"}))
    collides = {"experts.local.0": "experts.local.1"}
    with pytest.raises(
        ValueError,
        match=r"global_names= to give every parameter a name of its own, got several parameters of the model under",
    ):
        checkpoint.save(setup.folder / "collides", named.ddp, misnamed(named, collides))
    assert not any((setup.folder / name).exists() for name in ("nameless", "frozen", "misspelt", "collides"))
    as_function = misnamed(named, named.whole_name)
    checkpoint.load(setup.folder / "named", named.ddp, as_function)
    with pytest.raises(TypeError, match="global_names to map names"):
        misnamed(named, 3)


class Frozen:
    """A mixture whose experts are in no group and have no names."""

    def __init__(self, setup: Setup) -> None:
        spread, _ = expert_groups(setup.rank, 4, 2)
        self.ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, TOTAL, spread))
        dense = [(name, param) for name, param in self.ddp.named_parameters() if "experts" not in name]
        self.opt = shard_optimizer(self.ddp, AdamW, dense, data_parallel_group=dist.group.WORLD, **OPTIONS)


def misnamed(spread: Spread, names: Any) -> ParallelOptimizer:
    """Another optimizer over the same parameters, which says otherwise what they are in the whole model."""
    groups = dense_and_experts(spread.model, spread.opt.members[1].process_group)
    options: Any = {"data_parallel_group": dist.group.WORLD, "global_names": names, **OPTIONS}
    return ParallelOptimizer(spread.model, AdamW, groups, **options)


# The state as a mapping


@case(4, few=["experts", "distributed tensors"])
def _states_that_the_loop_drops_or_sets_are_those_of_the_next_step(setup: Setup, configurations: list[str]) -> None:
    for kind in configurations:
        mesh = mesh_of_4()
        modes: list[dict[str, Any]] = [{}, {"partition": "elements"}]
        for mode in modes:
            twins = MeshTwins(kind, mesh, **mode)
            feed: Any = zip(batches(twins.place, 100), strict=True)
            twins.feed = feed
            held = twins.opt.state
            for write in STATE_WRITES:
                twins.go_on(1)
                for (model, optimizer), end in product(twins.sides, (0, -1)):
                    write(optimizer, [*model.parameters()][end])
            twins.go_on(2)
            assert held.keys() == twins.opt.state.keys() == {*held} > set(), "what was held follows"
            assert len(held) == sum(len(member.state) for member in twins.opt.members)
            assert all(twins.opt.state[param] is state for param, state in held.items())
            assert isinstance(copy.deepcopy(held), dict)
            twins.opt.members[-1].optim.state["of none"] = 3
            assert twins.opt.state.pop("of none") == 3
            twins.opt.state["of none"] = 4
            assert "of none" in twins.opt.members[0].optim.state


# Tensor parallel parts


def grid(data: int, other: int, name: str = "tensor") -> DeviceMesh:
    """A mesh of its own name for each case with distributed tensors: they remember an equal one."""
    return init_device_mesh("cpu", (data, other), mesh_dim_names=("data", name))


class Cut:
    """Two blocks cut by hand, in DDP over the data dimension."""

    sizes: Mapping[int, Sequence[int]] = MappingProxyType({})  # of parts, by the number of ranks; else equal ones
    hidden = 16

    def __init__(
        self, mesh: DeviceMesh, states_dims: bool = True, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.mesh, self.dim = mesh, (mesh.mesh_dim_names or ())[1]
        group = mesh.get_group(self.dim)
        self.model = nn.Sequential(*[CutBlock(group, seed, self.sizes.get(group.size())) for seed in (1, 2)])
        self.model.register_buffer("seen", torch.zeros(2))
        self.model.to(dtype)
        self.ddp: nn.Module = DistributedDataParallel(
            self.model, process_group=mesh.get_group("data"), gradient_as_bucket_view=True
        )
        named = list(self.ddp.named_parameters())
        groups: list[dict[str, Any]] = [{"params": [one for one in named if one[0][-2:] not in ("up", "wn")]}]
        for end, dim in (("up", 0), ("down", -1)):
            params = [one for one in named if one[0].endswith(end)]
            groups.append({"params": params, "sharded_over": {self.dim: dim} if states_dims else self.dim})
        options = {**OPTIONS, **options}
        self.opt = shard_optimizer(self.ddp, AdamW, groups, mesh=mesh, data_parallel_dim="data", **options)

    def train(self, seed: int) -> None:
        for inputs, _ in batches(self.mesh.get_local_rank("data"), 2, seed):
            self.opt.zero_grad()
            loss = self.ddp(inputs.to(next(self.model.parameters()).dtype)).square().mean()
            (loss if self.opt.loss_scale is None else self.opt.scale(loss)).backward()
            self.opt.step()


class Parallelized(Cut):
    """Linear layers of distributed tensors, without DDP."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        self.mesh, self.dim = mesh, (mesh.mesh_dim_names or ())[1]
        torch.manual_seed(0)
        wide, narrow = nn.Linear(8, self.hidden), nn.Linear(self.hidden, 8)
        self.model = nn.Sequential(wide, nn.Tanh(), narrow, nn.LayerNorm(8))
        self.ddp = parallelize_module(self.model, mesh[self.dim], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        options = {"foreach": False, **OPTIONS, **options}
        self.opt = shard_optimizer(self.ddp, AdamW, mesh=mesh, data_parallel_dim="data", **options)


def check_parts(made: Cut, expected: nn.Module, plain: AdamW) -> None:
    """Parameters and states are the parts of whole tensors."""
    rank, ranks = made.mesh.get_local_rank(made.dim), made.mesh[made.dim].size()
    state, number = made.opt.state_dict()["state"], 0
    whole = dict(expected.named_parameters())
    names = {id(param): name for name, param in made.model.named_parameters()}
    sources = {id(one): names[id(source)] for one, source in internals.given_for(made.opt).items()}
    for group in made.opt.param_groups:
        for param in group["params"]:
            name = sources[id(param)]
            dims = [dim for dim, (a, b) in enumerate(zip(whole[name].shape, param.shape, strict=True)) if a != b]
            assert len(dims) <= 1

            def here(one: Tensor, dims: list[int] = dims) -> Tensor:
                return one.chunk(ranks, dims[0])[rank].contiguous() if dims and one.dim() else one

            assert_identical(here(whole[name].detach()), param.detach(), name)
            for key, value in plain.state[whole[name]].items():
                assert_identical(here(value), state[number][key], f"{key} of {name}")
            number += 1
    assert number == len(whole)
    dist.barrier()  # ranks ask each other


@case(4, few=[Cut], every=[Parallelized])
def _tensor_parallel_parts_have_the_shapes_of_the_whole_in_checkpoints(
    setup: Setup, configurations: list[type[Cut]]
) -> None:
    for build in configurations:
        folder = setup.folder / build.__name__
        saved = build(grid(2, 2, "column"))
        saved.train(0)
        checkpoint.save(folder, saved.ddp, saved.opt)
        whole: nn.Module = nn.Sequential(CutBlock(None, 5), CutBlock(None, 6))
        whole.register_buffer("seen", torch.ones(2))
        if build is Parallelized:
            whole = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
        ddp = DistributedDataParallel(whole)
        plain = AdamW(ddp.parameters(), **OPTIONS, foreach=None if build is Cut else False)
        checkpoint.load(folder, ddp, plain)
        check_parts(saved, whole, plain)
        for shape in ((1, 4), (4, 1)):
            other = build(grid(*shape, "column"))
            for param in other.model.parameters():
                param.data.zero_()
            checkpoint.load(folder, other.ddp, other.opt)
            check_parts(other, whole, plain)
            other.train(1)
        checkpoint.save(setup.folder / f"whole {build.__name__}", ddp, plain)
        back = build(grid(1, 4, "column"))
        checkpoint.load(setup.folder / f"whole {build.__name__}", back.ddp, back.opt)
        check_parts(back, whole, plain)
        read_by_torch(folder / "step-00000001", whole, build is Cut)
    vague = Cut(grid(2, 2, "column"), states_dims=False)
    with pytest.raises(
        ValueError, match=r"Expected sharded_over=\{'column': <dimension .* module\.0\.up of parameter gr"
    ):
        checkpoint.save(setup.folder / "vague", vague.ddp, vague.opt)
    groups = [{"params": vague.model.parameters(), "sharded_over": {"column": "0"}}]
    with pytest.raises(TypeError, match=r"sharded_over= of parameter group 0 to name mesh dimensions"):
        shard_optimizer(vague.model, AdamW, groups, mesh=grid(2, 2, "column"), data_parallel_dim="data")

    distributed = Parallelized(grid(4, 1, "column"))
    options: dict[str, Any] = {"mesh": distributed.mesh, "data_parallel_dim": "data", "parameters_as_bucket_view": True}
    with pytest.raises(ValueError, match=r"distributed tensors, got True and parameter 0\.weight of parameter group 0"):
        ParallelOptimizer(distributed.model, AdamW, **options)


class CutUnevenly(Cut):
    """Parts of which no two are alike, also a part without elements."""

    hidden = 10
    sizes = MappingProxyType({1: [10], 2: [7, 3], 4: [1, 5, 4, 0]})


class CutInChunks(Cut):
    """Parts as a distributed tensor has them."""

    hidden = 10
    sizes = MappingProxyType({1: [10], 2: [5, 5], 4: [3, 3, 3, 1]})


class ParallelizedUnevenly(Parallelized):
    """Six rows on four ranks: the last has none. torch (2.13.0) cannot run these layers there, only hold them."""

    hidden = 6


@case(4, few=[CutUnevenly], every=[CutInChunks, ParallelizedUnevenly])
def _parts_of_unequal_sizes_load_on_any_mesh(setup: Setup, configurations: list[type[Cut]]) -> None:
    for build in configurations:
        root = setup.folder / build.__name__
        by_hand = build is not ParallelizedUnevenly

        def whole(name: str, root: Path = root, build: Any = build, by_hand: bool = by_hand) -> tuple[Any, Any]:
            """The model on one device as a checkpoint has it, and the state of its optimizer."""
            rows = build.hidden
            made: nn.Module = nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8), nn.LayerNorm(8))
            if by_hand:
                made = nn.Sequential(CutBlock(None, 5, [rows]), CutBlock(None, 6, [rows]))
                made.register_buffer("seen", torch.ones(2))
            ddp = DistributedDataParallel(made)
            plain = AdamW(ddp.parameters(), **OPTIONS, foreach=None if by_hand else False)
            checkpoint.load(root / name, ddp, plain)
            return ddp, plain

        saved = build(grid(2, 2, f"dim_{build.__name__}"))
        saved.train(0)
        checkpoint.save(root / "first", saved.ddp, saved.opt)
        ddp, plain = whole("first")
        expected = copy.deepcopy((dict(ddp.state_dict()), plain.state_dict()["state"]))
        assert len(expected[1]) == len(list(ddp.parameters()))
        checkpoint.save(root / "whole", ddp, plain)
        for number, (folder, shape) in enumerate(
            (("first", (1, 4)), ("whole", (1, 4)), ("first", (4, 1)), ("0", (2, 2)))
        ):
            other = build(grid(*shape, f"dim_{build.__name__}"))
            for param in other.model.parameters():
                param.data.zero_()
            checkpoint.load(root / folder, other.ddp, other.opt)
            checkpoint.save(root / str(number), other.ddp, other.opt)
            ddp, plain = whole(str(number))
            assert_identical(expected, (dict(ddp.state_dict()), plain.state_dict()["state"]), f"{build} on {shape}")
        saved.train(1)
        other.train(1)
        for mine, theirs in zip(saved.model.parameters(), other.model.parameters(), strict=True):
            one, two = (each.to_local() if isinstance(each, DTensor) else each for each in (mine, theirs))
            assert_identical(one.detach(), two.detach(), f"{build}, trained on")
        shapes = ((1, 4), (2, 2)) if by_hand else ((2, 2), (1, 4))
        packed, again = (build(grid(*shape, f"dim_{build.__name__}")) for shape in shapes)
        packed.train(0)
        if build is CutUnevenly:
            with pytest.raises(
                NotImplementedError, match=r"as torch\.chunk cuts dimension 0, \[3, 3, 3, 1\], .*ZERO-608"
            ):
                packed.opt.sharded_state_dict(packed.ddp)
            continue
        state_dict_saver.save({"optim": packed.opt.sharded_state_dict(packed.ddp)}, checkpoint_id=root / "dcp")
        checkpoint.save(root / "packed", packed.ddp, packed.opt)
        nested = {"optim": again.opt.sharded_state_dict(again.ddp, init_missing=True)}
        state_dict_loader.load(nested, checkpoint_id=root / "dcp")
        same = build(grid(*shapes[1], f"dim_{build.__name__}"))
        checkpoint.load(root / "packed", same.ddp, same.opt)
        again.opt.load_sharded_state_dict(nested["optim"], again.ddp)
        one, two = same.opt.state_dict()["state"], again.opt.state_dict()["state"]
        assert_identical({key: one[key] for key in sorted(one)}, two, f"{build}, by torch")
        dist.barrier()


@case(4, marks=[pytest.mark.nightly])
def _masters_loss_scales_and_cut_state_load_on_another_mesh(setup: Setup) -> None:
    modes: list[dict[str, Any]] = [
        {"stage": 2, "partition": "elements"},
        {"stage": 2, "master_weights": True, "dtype": torch.bfloat16},
        {"loss_scale": DynamicLossScale(initial=8.0, growth_interval=1), "max_grad_norm": 1.0},
    ]
    for number, options in enumerate(modes):
        saved = Cut(grid(2, 2), **options)
        before = [param.detach().clone() for param in saved.model.parameters()]
        saved.train(0)
        assert all(not torch.equal(*pair) for pair in zip(before, saved.model.parameters(), strict=True))
        cuts = [saved, *(Cut(grid(*shape), **options) for shape in ((1, 4), (4, 1), (2, 2)))]
        for place, (one, other) in enumerate(pairwise(cuts)):
            folder = setup.folder / f"{number}-{place}"
            checkpoint.save(folder, one.ddp, one.opt)
            checkpoint.load(folder, other.ddp, other.opt)
        expected, found = saved.opt.state_dict(), cuts[-1].opt.state_dict()
        assert_identical(expected["state"], found["state"], f"{options}")
        assert expected["param_groups"] == found["param_groups"]
        assert expected.get("loss_scale") == found.get("loss_scale")
        assert saved.opt.loss_scale == cuts[-1].opt.loss_scale
        assert_identical(dict(saved.model.state_dict()), dict(cuts[-1].model.state_dict()), f"{options}")
        dist.barrier()
        saved.train(1)
        cuts[-1].train(1)
        assert_identical(dict(saved.model.state_dict()), dict(cuts[-1].model.state_dict()), f"{options}, resumed")


def read_by_torch(folder: Path, whole: nn.Module, is_cut: bool) -> None:
    """`torch.distributed.checkpoint` reads it into distributed tensors over four ranks, cut in another way."""
    name = "0.up" if is_cut else "0.weight"
    mesh = init_device_mesh("cpu", (4,))
    expected = whole.get_parameter(name).detach()
    empty = DTensor.from_local(torch.zeros(16, 2), mesh, [Shard(1)], run_check=False)
    state = {f"model.{name}": empty, "model.1.bias" if is_cut else "model.2.bias": torch.zeros(8)}
    state_dict_loader.load(state, checkpoint_id=folder)
    assert_identical(expected, empty.full_tensor(), "as torch reads it")


@case(4, few=[Parallelized], every=[Cut, Parallelized])
def _torchs_own_checkpoints_load_on_another_mesh(setup: Setup, configurations: list[type[Cut]]) -> None:
    for build in configurations:
        saved = build(grid(2, 2, "part"))
        saved.train(0)
        state = saved.opt.sharded_state_dict(saved.ddp)
        cut = [value for value in state.values() if isinstance(value, DTensor)]
        assert cut or not saved.opt.state
        checkpoint.save(setup.folder / build.__name__, saved.ddp, saved.opt)
        state_dict_saver.save({"optim": state}, checkpoint_id=setup.folder / f"dcp {build.__name__}")
        expected, other = (build(grid(1, 4, "part")) for _ in range(2))
        checkpoint.load(setup.folder / build.__name__, expected.ddp, expected.opt)
        with torch.no_grad():
            for ours, theirs in zip(other.model.parameters(), expected.model.parameters(), strict=True):
                ours.copy_(theirs)
        nested = {"optim": other.opt.sharded_state_dict(other.ddp, init_missing=True)}
        state_dict_loader.load(nested, checkpoint_id=setup.folder / f"dcp {build.__name__}")
        other.opt.load_sharded_state_dict(nested["optim"], other.ddp)
        one, two = expected.opt.state_dict(), other.opt.state_dict()
        assert_identical({key: one["state"][key] for key in sorted(one["state"])}, two["state"], "state")
        assert one["param_groups"] == two["param_groups"]
        dist.barrier()
        expected.train(1)
        other.train(1)
        for a, b in zip(expected.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(
                a.to_local() if isinstance(a, DTensor) else a, b.to_local() if isinstance(b, DTensor) else b
            )


# Pipeline stages


@case(4)
def _pipeline_stages_load_as_one_model_and_back(setup: Setup) -> None:
    mesh = grid(2, 2, "pipe")
    move_stages(setup, mesh, dist.group.WORLD)
    nameless = Staged(mesh, dist.group.WORLD, named=False)
    stages = r"'block\.\w+.*' on rank 0 .* and rank 1 .* one belongs to data, pipe \[\[0, 0\], \[1, 0\]\], the other to"
    with pytest.raises(ValueError, match=stages):
        checkpoint.save(setup.folder / "nameless", nameless.model, nameless.opt)


@case(4)
def _groups_without_parameters_on_a_stage_have_the_options_of_the_others(setup: Setup) -> None:
    """Otherwise such a group would keep the rate that it was built with, and the next step would be refused."""
    mesh = grid(2, 2, "pipe")
    data = mesh.get_group("data")
    for tied, ties in ((dist.group.WORLD, True), (data, False)):  # or the first stage alone has a group of its own
        saved = Staged(mesh, tied, empties_last=True, ties=ties)
        own = [group["lr"] for group in saved.opt.param_groups][1:-1]
        rates = [0.001, *(0.002 for _ in own), 0.003]
        for group, rate in zip(saved.opt.param_groups, rates, strict=True):
            group["lr"] = rate
        if ties:
            saved.train(0)
        checkpoint.save(setup.folder / f"run {ties}", saved.model, saved.opt)
        back = Staged(mesh, tied, empties_last=True, ties=ties)
        checkpoint.load(setup.folder / f"run {ties}", back.model, back.opt)
        assert [group["lr"] for group in back.opt.param_groups] == rates
        for one in (saved, back) if ties else ():
            one.train(2)
        assert_identical(dict(saved.model.state_dict()), dict(back.model.state_dict()), "resumed")


# What is damaged


@case(4)
def _damaged_and_missing_files_are_refused_with_their_names_before_anything_changes(setup: Setup) -> None:
    saved = Cut(grid(2, 2))
    saved.train(0)
    for case_name in ("damaged", "missing", "smaller"):
        checkpoint.save(setup.folder / case_name, saved.ddp, saved.opt)
    folder = setup.folder / "damaged" / "step-00000001"
    victim = folder / "__1_0.distcp"
    if setup.rank == 0:
        raw = bytearray(victim.read_bytes())
        offset = json.loads((folder / "part-1.json").read_text())["tensors"][0][3]
        raw[offset] ^= 1
        victim.write_bytes(raw)
        (setup.folder / "missing" / "step-00000001" / victim.name).unlink()
    dist.barrier()
    before = copy.deepcopy((saved.model.state_dict(), saved.opt.members[0].optim.state_dict()))
    for case_name, found in (("damaged", r"damaged .*{}\. There is '\d\.\w+' of the model"), ("missing", r".*{}")):
        with pytest.raises((ValueError, RuntimeError, OSError), match=found.format(victim.name)):
            checkpoint.load(setup.folder / case_name, saved.ddp, saved.opt)
    wider = Cut(grid(2, 2))
    wider.model[0].bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ValueError, match=r"lacks parameter .*'module\.0\.bias'|not in the model|state_dict"):
        checkpoint.load(setup.folder / "smaller", wider.ddp, wider.opt)
    after = (saved.model.state_dict(), saved.opt.members[0].optim.state_dict())
    assert_identical(before, after, "after loads that were refused")


# Doors, refusals and the roster


@case(4)
def _shard_optimizer_takes_meshes_and_other_constructors_name_it(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    mesh = grid(2, 2)
    ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, TOTAL, spread), gradient_as_bucket_view=True)
    groups = dense_and_experts(ddp, same)
    by_mesh = shard_optimizer(ddp.module, AdamW, groups, mesh=mesh, data_parallel_dim="data", overlap=False, **OPTIONS)
    assert type(by_mesh) is ParallelOptimizer
    opt = shard_optimizer(ddp, AdamW, groups, stage=2, max_grad_norm=1.0, **OPTIONS)
    assert type(opt) is ParallelOptimizer
    assert [member.stage for member in opt.members] == [2, 1]
    dense = DistributedDataParallel(nn.Linear(8, 3))
    assert type(shard_optimizer(dense, AdamW, list(dense.parameters()), **OPTIONS)) is ZeroRedundancyOptimizer
    door = r"Call ddp_zero\.shard_optimizer\(model, AdamW, groups, mesh=\.\.\., data_parallel_dim"
    cut = nn.Parameter(distribute(torch.ones(4, 4), mesh["tensor"]))
    for wrong in (
        lambda: ZeroRedundancyOptimizer(ddp.parameters(), AdamW, mesh=mesh, **OPTIONS),
        lambda: ZeroRedundancyOptimizer(ddp.parameters(), AdamW, data_parallel_dim="data", **OPTIONS),
        lambda: ZeroRedundancyOptimizer(groups, AdamW, **OPTIONS),
        lambda: ZeroRedundancyOptimizer([{"params": ddp.parameters(), "sharded_over": "tensor"}], AdamW, **OPTIONS),
        lambda: ZeroRedundancyOptimizer([cut], AdamW, **OPTIONS),
        lambda: ddp_zero.wrap(nn.Linear(2, 2), AdamW, mesh=mesh, **OPTIONS),
        lambda: shard_optimizer(dense, AdamW, lambda name, param: {"process_group": same}, **OPTIONS),
    ):
        with pytest.raises(TypeError, match=door):
            wrong()
    with pytest.raises(ValueError, match=r"mesh= needs data_parallel_dim="):
        shard_optimizer(ddp, AdamW, groups, mesh=mesh, **OPTIONS)


def distribute(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, [Shard(0)])


@case(4)
def _copies_and_pickles_of_a_parallel_optimizer_are_refused(setup: Setup) -> None:
    made = Spread(setup, 2)
    opt = made.opt
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises((NotImplementedError, TypeError), match="ParallelOptimizer cannot be"):
            copied(opt)
    with pytest.raises(TypeError, match=r"cannot be pickled: .* Save state_dict\(\)"):
        pickle.dumps(opt)


@case(4)
def _the_roster_has_the_groups_of_every_rank_of_the_mesh(setup: Setup) -> None:
    text = Staged(grid(2, 2, "pipe"), dist.group.WORLD).opt.explain()
    for rank in range(4):
        shared = f"{rank % 2} {rank % 2 + 2}"
        assert f"  global rank {rank} (data {rank // 2}, pipe {rank % 2})\n    groups [0]: 5 parameters" in text
        assert (
            f"shared by global ranks {shared}\n    groups [1]: 1 parameters, 352 bytes, shared by global ranks 0 1 2 3"
            in text
        )
    spread = Spread(setup, 2)
    for rank in range(4):
        assert f"  global rank {rank}\n    groups [0]: 6 parameters" in spread.opt.explain()


test_parallel_state = case.each()
