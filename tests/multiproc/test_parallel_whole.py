"""Matrices cut by tensor parallelism, stepped whole on their hosts: the bits of one device with the same gradients."""

import copy
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from ddp_zero.snapshots import Snapshots
from tests.internals import cuts_of
from tests.multiproc.cases import ToyLAMB, assert_identical, batches
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.whole_matrices import (
    CUTS,
    MUON,
    Cut,
    One,
    assembled,
    assert_equal_parts,
    blocks,
    grid,
    groups_by_hand,
    lend_gradients,
    options_of,
    squared,
    train,
    wrapped,
)

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
case = Cases(timeout=400, group_timeout=60)

STEPS = 4


def mesh_of(setup: Setup) -> DeviceMesh:
    return init_device_mesh("cpu", (2, setup.world_size // 2), mesh_dim_names=("data", "tensor"))


class ToyShampoo(Optimizer):
    """Preconditions a matrix from both sides; its state has the shape neither of the part nor of the whole."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.clone(memory_format=torch.contiguous_format)
                grad = grad.reshape(len(grad), -1)
                if not state:
                    state["left"], state["right"] = (1e-3 * torch.eye(size) for size in grad.shape)
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                left, right = (torch.linalg.inv(state[side]) for side in ("left", "right"))
                param.add_((left @ grad @ right).reshape(param.shape).tanh(), alpha=-group["lr"])


SHAPES = (((2, 2), False), ((2, 2), True), ((1, 4), True))
"""Of meshes, and whether parts are of different sizes."""


@case(
    4,
    few=[*zip([(AdamW, True), (ToyShampoo, False), (ToyLAMB, False)], SHAPES, strict=True)],
    every=[*product([(AdamW, True), (ToyLAMB, False), (ToyShampoo, False)], SHAPES)],
)
def _parts_cut_by_hand_meet_bit_equal_to_one_device(setup: Setup, configurations: list[Any]) -> None:
    for (kind, muon), (shape, uneven) in configurations:
        mesh = grid(*shape)
        ddp, whole = wrapped(mesh, uneven), blocks(None)
        one = One(whole, kind, muon)
        opt: Any = shard_optimizer(ddp, kind, groups_by_hand(ddp.module, muon), **options_of(mesh))
        assert isinstance(opt, ParallelOptimizer)
        train(mesh, ddp, opt, one, whole, range(STEPS))
        for (name, before), after in zip(blocks(None).named_parameters(), whole.parameters(), strict=True):
            assert not torch.equal(before, after), name


@case(4, few=[(False, True), (True, False)], every=[*product((False, True), (True, False))])
def _work_and_bytes_are_shared_by_formula(setup: Setup, configurations: list[tuple[bool, bool]]) -> None:
    mesh = mesh_of(setup)
    for uneven, direct in configurations:
        ddp, whole = wrapped(mesh, uneven), blocks(None)
        one = One(whole, AdamW, True)
        opt: Any = shard_optimizer(ddp, AdamW, groups_by_hand(ddp.module, True), **options_of(mesh))
        cuts = cuts_of(opt)
        comm = cuts[0].comm
        assert all(cut.comm is comm for cut in cuts)
        if not direct:
            comm.has_direct_messages = lambda device: False  # type: ignore[method-assign]
        train(mesh, ddp, opt, one, whole, range(2))
        before = comm.trace.totals["sent"]
        train(mesh, ddp, opt, one, whole, range(2, 3))
        counted = torch.tensor([comm.trace.totals["sent"] - before])
        dist.all_reduce(counted)
        # in fp32; of every whole all but the host's part is sent, as value, gradient and new value
        elsewhere = [4 * 8 * (16 - cut.sizes[cut.host]) for cut in cuts]
        assert int(counted) == 3 * sum(elsewhere)
        if not uneven:
            parts = [param for name, param in ddp.module.named_parameters() if name.rpartition(".")[2] in CUTS]
            assert sum(elsewhere) == (comm.world_size - 1) * sum(part.nbytes for part in parts)
        hosts: list[int] = [cut.host for cut in cuts]
        assert abs(hosts.count(0) - hosts.count(1)) <= 1
        if uneven:  # owners and hosts are dealt together
            pairs = Counter((cut.owner, cut.host) for cut in cuts)
            assert pairs == {(owner, host): 2 for owner in range(2) for host in range(2)}


CLIPPED: dict[str, Any] = {"max_grad_norm": 0.05}


@case(
    4,
    few=[({"stage": 2}, True), ({"stage": 2, **CLIPPED}, False)],
    every=[*product([{"stage": 2}, {"stage": 2, **CLIPPED}, CLIPPED], (False, True))],
)
def _stage_2_equals_stage_1_with_matrices_stepped_whole(
    setup: Setup, configurations: list[tuple[dict[str, Any], bool]]
) -> None:
    """The same parameters as stage 1 without a hook, which is compared with one device above."""
    mesh = mesh_of(setup)
    for mode, uneven in configurations:
        found = []
        for options in (mode, {key: value for key, value in mode.items() if key != "stage"}):
            ddp = wrapped(mesh, uneven)
            opt: Any = shard_optimizer(ddp, AdamW, groups_by_hand(ddp.module, True), **options, **options_of(mesh))
            for inputs, _ in batches(mesh.get_local_rank("data"), STEPS):
                opt.zero_grad()
                squared(ddp, inputs).backward()
                opt.step()
            found.append([param.detach().clone() for param in ddp.module.parameters()])
        by_stage, stage_1 = found
        assert_identical(stage_1, by_stage, f"{mode}, uneven: {uneven}")


@case(4)
def _a_step_that_is_skipped_moves_no_parts(setup: Setup) -> None:
    """One rank of four has an infinite gradient: all skip, and the next step is taken."""
    mesh = mesh_of(setup)
    for stage in (1, 2):
        ddp = wrapped(mesh)
        opt: Any = shard_optimizer(
            ddp, AdamW, groups_by_hand(ddp.module, True), nonfinite="skip", stage=stage, **options_of(mesh)
        )
        comm = cuts_of(opt)[0].comm
        before = [param.detach().clone() for param in ddp.module.parameters()]
        for bad in (True, False):
            sent = comm.trace.totals["sent"]
            opt.zero_grad()
            scale = float("inf") if bad and setup.rank == 3 else 1.0
            (squared(ddp, torch.ones(6, 8)) * scale).backward()
            opt.step()
            assert opt.last_step.stepped is not bad
            same = [torch.equal(*pair) for pair in zip(before, ddp.module.parameters(), strict=True)]
            assert all(same) if bad else not any(same)
            assert (comm.trace.totals["sent"] == sent) is bad


@case(4, marks=[pytest.mark.nightly])
def _masters_of_parts_equal_those_of_one_device(setup: Setup) -> None:
    mesh = mesh_of(setup)
    tensor, group = mesh.get_group("tensor"), mesh.get_group("data")
    for uneven in (False, True):
        ddp = DistributedDataParallel(blocks(tensor, uneven).bfloat16(), process_group=group)
        whole = blocks(None).bfloat16()
        with_masters: dict[str, Any] = {"master_weights": True, **options_of(mesh)}
        opt: Any = shard_optimizer(ddp, ToyLAMB, groups_by_hand(ddp.module, False), **with_masters)
        groups = groups_by_hand(whole, False, whole=True)
        one = ZeroRedundancyOptimizer(groups, ToyLAMB, process_group=group, master_weights=True, lr=1e-2)
        for step, (inputs, _) in enumerate(batches(mesh.get_local_rank("data"), STEPS)):
            opt.zero_grad()
            squared(ddp, inputs.bfloat16()).backward()
            lend_gradients(ddp.module, whole, tensor)
            opt.step()
            one.step()
            assert_equal_parts(whole, ddp.module, tensor, f"after step {step}, uneven: {uneven}")
            opt.load_state_dict(opt.state_dict())


def unparallelized(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    matrices = [nn.Linear(8, hidden, bias=False), nn.Linear(hidden, 8, bias=False)]
    return nn.Sequential(matrices[0], nn.Tanh(), matrices[1], nn.LayerNorm(8))


def parallelized(mesh: DeviceMesh, hidden: int = 16) -> nn.Module:
    # a plain tensor between the two would be taken for an equal part of the whole
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    return parallelize_module(unparallelized(hidden), mesh, plan)


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return whole


HIDDEN = [((2, 2), 16), ((2, 2), 7), ((2, 2), 3), ((1, 4), 5), ((1, 4), 3)]
"""Shapes of meshes and hidden units: 8 8, 4 3, 2 1, 2 2 1 0, 1 1 1 0 on the ranks."""


@case(4, few=[(False, HIDDEN[0]), (True, HIDDEN[1]), (False, HIDDEN[4])], every=[*product((True, False), HIDDEN)])
def _distributed_tensors_stepped_whole_equal_one_device(
    setup: Setup, configurations: list[tuple[bool, tuple[tuple[int, int], int]]]
) -> None:
    for muon, (shape, hidden) in configurations:
        mesh, start = grid(*shape), unparallelized(hidden)
        model, whole = parallelized(mesh["tensor"], hidden), copy.deepcopy(start)
        kind: Any = AdamW if muon else ToyLAMB
        matrices = [param for param in whole.parameters() if param.ndim == 2]
        rest = [param for param in whole.parameters() if param.ndim != 2]
        plain = [AdamW(rest, lr=1e-2), torch.optim.Muon(matrices, **MUON)] if muon else [ToyLAMB([*whole.parameters()])]

        def by_class(name: str, param: nn.Parameter) -> dict[str, Any] | None:
            return {"optimizer_class": torch.optim.Muon, **MUON} if muon and param.ndim == 2 else None  # noqa: B023

        opt: Any = shard_optimizer(model, kind, by_class, **options_of(mesh))
        for inputs, _ in batches(mesh.get_local_rank("data"), STEPS):
            opt.zero_grad()
            (model(inputs) - 0.1).pow(4).mean().backward()
            for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                assert mine.grad is not None
                other.grad = full(mine.grad)
                dist.all_reduce(other.grad.mul_(1 / shape[0]), group=mesh.get_group("data"))
            opt.step()
            for one in plain:
                one.step()
            for (name, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
                assert_identical(other.detach(), full(mine.detach()), f"{name}, Muon: {muon}, {hidden} units")
        assert all(not torch.equal(*pair) for pair in zip(start.parameters(), whole.parameters(), strict=True))
    # in this case, too: torch remembers operations on distributed tensors with groups that end with the case
    _move_distributed_tensors_to_other_meshes(Path(setup.folder))


@case(4)
def _state_stays_on_hosts_and_continues(setup: Setup) -> None:
    mesh = mesh_of(setup)
    ddp, whole = wrapped(mesh), blocks(None)
    one = One(whole, AdamW, True)
    opt: Any = shard_optimizer(ddp, AdamW, groups_by_hand(ddp.module, True), **options_of(mesh))
    train(mesh, ddp, opt, one, whole, range(2))
    saved = opt.state_dict()
    momenta = [state["momentum_buffer"] for state in saved["state"].values() if "momentum_buffer" in state]
    counted = torch.tensor([len(momenta)])
    dist.all_reduce(counted, group=mesh.get_group("tensor"))
    assert int(counted) == 2 * 4
    assert all(tuple(one.shape) in ((16, 8), (8, 16)) for one in momenta)
    again = wrapped(mesh)
    again.load_state_dict(ddp.state_dict())
    other: Any = shard_optimizer(again, AdamW, groups_by_hand(again.module, True), **options_of(mesh) | {"lr": 1.0})
    other.load_state_dict(saved)
    train(mesh, again, other, one, whole, range(2, 4))


@case(4)
def _state_of_wholes_that_the_loop_drops_or_sets_is_that_of_the_next_step(setup: Setup) -> None:
    mesh = mesh_of(setup)
    for uneven in (False, True):
        cut = Cut(mesh, AdamW, True, uneven)
        wholes = dict(cut.whole.named_parameters())

        def set_wholes(state: Any, params: Mapping[str, Any], wholes: Any = wholes) -> None:
            for name, param in params.items():
                if name.rpartition(".")[2] in CUTS:
                    state[param] = {"momentum_buffer": torch.full_like(wholes[name], 0.125)}

        writes: list[Any] = [
            lambda state, _: state.clear(),
            set_wholes,
            lambda state, params: state.update((param, {}) for param in params.values()),
        ]
        for step, write in enumerate(writes):
            cut.train(range(2 * step, 2 * step + 2))
            write(cut.opt.state, dict(cut.ddp.module.named_parameters()))
            for one in cut.one.all:
                stepped = {param for group in one.param_groups for param in group["params"]}
                write(one.state, {name: param for name, param in wholes.items() if param in stepped})
        part = cut.ddp.module.get_parameter("0.up")
        with pytest.raises(ValueError, match=r"fit its shape as a whole, \[16, 8\], got shape \[.*\].*ZERO-604"):
            cut.opt.state[part] = {"momentum_buffer": torch.zeros_like(part)}
        again = Cut(mesh, AdamW, True, uneven)
        again.ddp.load_state_dict(cut.ddp.state_dict())
        again.opt.load_state_dict(cut.opt.state_dict())
        again.continues(cut)
        again.train(range(6, 8))


@case(4)
def _strided_parts_of_one_column_equal_one_device(setup: Setup) -> None:
    """A column of a larger matrix keeps its stride when it is made 1-D; messages are contiguous."""
    mesh = mesh_of(setup)
    start = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    mine = slice(mesh.get_local_rank("tensor"), mesh.get_local_rank("tensor") + 1)
    model, whole = nn.ParameterList([start[:, mine].clone()]), nn.ParameterList([start.clone()])
    groups: list[dict[str, Any]] = [{"params": list(model), "sharded_over": {"tensor": 1}}]
    opt: Any = shard_optimizer(model, ToyLAMB, groups, **options_of(mesh))
    one = ToyLAMB(whole.parameters(), lr=1e-2)
    for step in range(STEPS):
        whole[0].grad = torch.randn(5, 2, generator=torch.Generator().manual_seed(step + 1))
        model[0].grad = whole[0].grad[:, mine]  # of every data-parallel rank, whose mean it is: it has a stride, too
        opt.step()
        one.step()
        assert_identical(whole[0].detach()[:, mine].clone(), model[0].detach(), f"after step {step}")
    assert not torch.equal(whole[0].detach(), start)


@case(4)
def _parameters_of_different_sizes_on_the_ranks_of_a_matrix_equal_one_device(setup: Setup) -> None:
    """Plans follow from sizes and numbers of parameters, also of those that only one rank along the dimension has."""
    mesh = mesh_of(setup)
    place, generator = mesh.get_local_rank("tensor"), torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape in ((6, 4), (9, 4), (4, 4), (7,), (5, 2))]
    sizes = [(3, 3), (0, 9), (2, 2), (6, 1), (1, 4)]  # the last two are stepped element by element
    mine = [one.split(of_ranks)[place].clone() for one, of_ranks in zip(wholes, sizes, strict=True)]
    own = [torch.randn(3 + 40 * place, generator=generator) for _ in range(1 + place)]
    model, whole = (nn.ParameterList([one.clone() for one in of]) for of in ([*own, *mine], [*own, *wholes]))
    count = len(own)

    def groups(params: list[Any], alone: Any, cut: Any) -> list[dict[str, Any]]:
        return [{"params": params[:count], **alone}, {"params": params[count + 3 :], **cut}]

    by_class: dict[str, Any] = {"sharded_over": {"tensor": 0}, "optimizer_class": torch.optim.Muon, **MUON}
    matrices = {"params": list(model)[count : count + 3], **by_class}
    groups_here = [*groups(list(model), {"sharded_over": "tensor"}, {"sharded_over": {"tensor": 0}}), matrices]
    opt: Any = shard_optimizer(model, AdamW, groups_here, **options_of(mesh))
    plain = [AdamW(groups(list(whole), {}, {}), lr=1e-2), torch.optim.Muon(list(whole)[count : count + 3], **MUON)]
    for step in range(STEPS):
        for at, (param, other) in enumerate(zip(model, whole, strict=True), start=-count):
            other.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(100 * step + at + 50))
            param.grad = (other.grad if at < 0 else other.grad.split(sizes[at])[place]).clone()
        opt.step()
        for one in plain:
            one.step()
    for at, (param, other) in enumerate(zip(model, whole, strict=True), start=-count):
        expected = other.detach() if at < 0 else other.detach().split(sizes[at])[place]
        assert_identical(expected.clone(), param.detach(), f"parameter {at}")
    assert all(not torch.equal(*pair) for pair in zip(wholes, [one.detach() for one in whole][count:], strict=True))


@case(2)
def _stages_with_different_classes_save_and_load(setup: Setup) -> None:
    """The last stage has no matrix, so no Muon: a checkpoint names the classes of all stages, as one device does."""
    values = {"matrix": torch.arange(12.0).view(4, 3), "bias": torch.arange(5.0)}

    def built(shape: tuple[int, int]) -> tuple[nn.ParameterDict, Any]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipe"))
        here = list(values)[mesh.get_local_rank("pipe") :: shape[1]]
        part = nn.ParameterDict({name: values[name].clone() for name in here})
        groups: list[dict[str, Any]] = [{"params": [(name, part[name]) for name in here if name == "bias"]}]
        if "matrix" in here:
            matrices = {"params": [("matrix", part["matrix"])], "optimizer_class": torch.optim.Muon, **MUON}
            groups = [*(group for group in groups if group["params"]), matrices]
        arguments: Any = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe", "lr": 1e-2}
        return part, shard_optimizer(part, AdamW, groups, **arguments)

    def train(part: nn.ParameterDict, opt: Any) -> None:
        for name, param in part.items():
            param.grad = values[name].sin()
        opt.step()

    saved, opt = built((1, 2))
    train(saved, opt)
    folder = Path(setup.folder) / "run"
    checkpoint.save(folder, saved, opt)
    train(saved, opt)
    for shape in ((1, 2), (2, 1)):
        loaded, other = built(shape)
        checkpoint.load(folder, loaded, other)
        train(loaded, other)
        for name, param in saved.items():
            assert_identical(param.detach(), loaded[name].detach(), f"{name} at {shape}")
        assert opt.class_name == other.class_name == "torch.optim.adamw.AdamW+torch.optim.Muon"


@case(4)
def _stages_without_hosts_load_with_those_that_have_some(setup: Setup) -> None:
    """Whether a state dict fits is agreed on by all ranks of the mesh, also where no matrix is cut."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    is_cut = mesh.get_local_rank("pipe") == 0
    params = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    models = [nn.ParameterList([param.clone() for param in params]) for _ in range(2)]
    arguments: dict[str, Any] = {**options_of(mesh), "pipeline_dim": "pipe"}
    cuts = {"sharded_over": {"tensor": 0}} if is_cut else {}
    first, second = (shard_optimizer(one, ToyLAMB, [{"params": list(one), **cuts}], **arguments) for one in models)

    def train(model: nn.ParameterList, opt: Any, steps: range) -> None:
        for step in steps:
            for param in model:
                param.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            opt.step()

    train(models[0], first, range(2))
    found = first.state_dict()
    dist.barrier()  # ranks ask each other
    for mine, other in zip(*models, strict=True):
        other.data.copy_(mine.detach())
    second.load_state_dict(found)
    for model, opt in zip(models, (first, second), strict=True):
        train(model, opt, range(2, 4))
    assert_identical([*models[0]], [*models[1]], "after loading")
    assert not torch.equal(models[0][0].detach(), params[0])


# State on other meshes


KINDS: list[tuple[Any, bool]] = [(AdamW, True), (ToyLAMB, False), (ToyShampoo, False), (Adafactor, False)]


def whole_optimizer(kind: Any, muon: bool) -> tuple[DistributedDataParallel, Any]:
    """The model in plain DDP over all ranks, with the plain optimizer, or with the one that has several classes."""
    ddp = DistributedDataParallel(blocks(None))
    groups = groups_by_hand(ddp.module, muon, whole=True)
    return ddp, shard_optimizer(ddp, kind, groups, lr=1e-2) if muon else kind(groups, lr=1e-2)


def states_by_name(one: One, model: nn.Module) -> dict[str, Any]:
    found = {param: state for plain in one.all for param, state in plain.state.items()}
    return {name: found.get(param, {}) for name, param in model.named_parameters()}


@case(4, marks=[pytest.mark.nightly])
def _checkpoints_load_on_other_meshes_and_on_one_device_and_back(setup: Setup) -> None:
    for kind, muon in KINDS:
        root = Path(setup.folder) / f"{kind.__name__}"
        saved = Cut(grid(2, 2), kind, muon)
        saved.train(range(2))
        checkpoint.save(root / "cut", saved.ddp, saved.opt)
        ddp, plain = whole_optimizer(kind, muon)
        checkpoint.load(root / "cut", ddp, plain)
        assert_identical(dict(saved.whole.state_dict()), dict(ddp.module.state_dict()), f"{kind}: whole")
        state = plain.state_dict()["state"]
        params = [param for group in plain.param_groups for param in group["params"]]
        number_of = {id(param): index for index, param in enumerate(params)}
        expected = states_by_name(saved.one, saved.whole)
        for name, param in ddp.module.named_parameters():
            assert_identical(expected[name], state.get(number_of[id(param)], {}), f"{kind}: state of {name}")
        dist.barrier()
        checkpoint.save(root / "whole", ddp, plain)
        even: list[tuple[tuple[int, int, int], bool]] = [((data, 4 // data, 1), False) for data in (2, 1, 4)]
        for folder, (shape, uneven) in product(("cut", "whole"), [*even, ((1, 2, 2), False), ((1, 4, 1), True)]):
            other = Cut(grid(*shape), kind, muon, uneven)
            other.forget()
            checkpoint.load(root / folder, other.ddp, other.opt)
            other.continues(saved)
            other.train(range(2, 4))
        for number, (shape, uneven) in enumerate([((1, 2, 2), False), ((2, 2, 1), True), ((1, 4, 1), True)]):
            again = Cut(grid(*shape), kind, muon, uneven)
            checkpoint.load(root / "cut", again.ddp, again.opt)
            checkpoint.save(root / f"again {number}", again.ddp, again.opt)
            last = Cut(grid(2, 2), kind, muon, uneven and number == 1)
            last.forget()
            checkpoint.load(root / f"again {number}", last.ddp, last.opt)
            last.continues(saved)
            last.train(range(2, 4))
        checkpoint.load(root / "again 2", ddp, plain)
        assert_identical(dict(saved.whole.state_dict()), dict(ddp.module.state_dict()), f"{kind}: whole, from parts")
        for name, param in ddp.module.named_parameters():
            found = plain.state_dict()["state"].get(number_of[id(param)], {})
            assert_identical(expected[name], found, f"{kind}: state of {name}, from parts of different sizes")
        dist.barrier()


@case(4, marks=[pytest.mark.nightly])
def _frozen_parts_with_state_are_left_out(setup: Setup) -> None:
    """Frozen after two steps: a load at any mesh leaves their values as they are, and all else goes on."""
    frozen = ["0.up", "1.down", "2.bias"]
    for (kind, muon), uneven in product([(AdamW, True), (AdamW, False), (ToyLAMB, False)], (False, True)):
        saved = Cut(grid(2, 2), kind, muon, uneven)
        saved.train(range(2))
        freeze(saved, frozen)
        folder = Path(setup.folder) / f"frozen {kind.__name__} {muon} {uneven}"
        checkpoint.save(folder, saved.ddp, saved.opt, exclude_frozen=True)
        for shape, uneven_there in (((2, 2), uneven), ((1, 4), True), ((4, 1), False)):
            other = Cut(grid(*shape), kind, muon, uneven_there)
            freeze(other, frozen)
            start = {name: param.detach().clone() for name, param in other.ddp.module.named_parameters()}
            checkpoint.load(folder, other.ddp, other.opt)
            named = dict(other.ddp.module.named_parameters())
            found = assembled(named, other.mesh.get_group("tensor"))
            for name, param in named.items():
                if name in frozen:
                    assert_identical(start[name], param.detach(), f"{name}, which was left out")
                else:
                    assert_identical(saved.whole.get_parameter(name).detach(), found[name], f"{name} at {shape}")
            stepped = {param for group in other.opt.param_groups for param in group["params"] if param.requires_grad}
            with_state = {param for param, state in other.opt.state.items() if state}
            counted = torch.tensor([len(with_state & stepped), len(with_state - stepped)])
            dist.all_reduce(counted)
            cut = 8 - 2  # of four blocks; each of the 11 others has its state on one rank of each row of the mesh
            copies = 1 if muon or kind is not AdamW else shape[1]
            assert counted.tolist() == [cut * copies + 11 * shape[1], 0]


def freeze(one: Cut, names: list[str]) -> None:
    for name in names:
        one.ddp.module.get_parameter(name).requires_grad_(False)


@case(4)
def _masters_of_parts_and_states_of_wholes_move_together(setup: Setup) -> None:
    def made(mesh: DeviceMesh) -> tuple[Any, Any]:
        model = blocks(mesh.get_group("tensor")).bfloat16()
        ddp = DistributedDataParallel(model, process_group=mesh.get_group("data"))
        groups = groups_by_hand(ddp.module, False)
        return ddp, shard_optimizer(ddp, ToyLAMB, groups, master_weights=True, **options_of(mesh))

    def trained(ddp: Any, opt: Any, steps: int) -> None:
        """With gradients of whole parameters, the same on every mesh."""
        for step in range(steps):
            for kind, dim in (("up", 0), ("down", 1), ("", None)):
                for place, (name, param) in enumerate(ddp.module.named_parameters()):
                    if (name.rpartition(".")[2] if kind else name.rpartition(".")[2] in CUTS) == (kind or False):
                        shape = [size * (parts if at == dim else 1) for at, size in enumerate(param.shape)]
                        whole = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + place))
                        own = whole if dim is None else whole.chunk(parts, dim)[part]
                        param.grad = own.to(param.dtype).contiguous()
            opt.step()

    root = Path(setup.folder) / "masters"
    first = grid(2, 2)
    parts, part = 2, first.get_local_rank("tensor")
    ddp, opt = made(first)
    checkpoint.save(root / "born", ddp, opt)  # masters, and no other state
    trained(ddp, opt, 2)
    checkpoint.save(root / "run", ddp, opt)
    second = grid(1, 4)
    ddp_2, opt_2 = made(second)
    checkpoint.load(root / "run", ddp_2, opt_2)
    for (model, one), (mesh_parts, mesh_part) in zip(
        ((ddp, opt), (ddp_2, opt_2)), ((2, part), (4, second.get_local_rank("tensor"))), strict=True
    ):
        parts, part = mesh_parts, mesh_part
        trained(model, one, 2)
        checkpoint.save(root / f"after {parts}", model, one)
    checkpoint.load(root / "after 4", ddp, opt)
    found, state = [dict(ddp.module.state_dict())], opt.state_dict()["state"]
    dist.barrier()
    checkpoint.load(root / "after 2", ddp, opt)
    assert_identical(found[0], dict(ddp.module.state_dict()), "parameters of both meshes")
    assert_identical(state, opt.state_dict()["state"], "states and masters of both meshes")
    assert any("master_weight" in one for one in state.values())
    assert any("exp_avg" in one or len(one) > 1 for one in state.values())
    dist.barrier()
    checkpoint.load(root / "born", ddp_2, opt_2)


@case(4, few=[(True, False)], every=[(True, True), (False, False)])
def _snapshots_restore_on_the_same_or_another_mesh(setup: Setup, configurations: list[tuple[bool, bool]]) -> None:
    for before, after in configurations:
        folder = Path(setup.folder) / f"snapshots of {before} and {after}"
        saved = Cut(grid(2, 2), AdamW, True, before)
        taken = Snapshots(saved.ddp, saved.opt, folder=folder, every=2)
        assert taken.load() is None
        for step in range(2):
            saved.train(range(step, step + 1))
            taken.step()
        assert taken.wait()
        taken.close(keep=True)
        for shape in ((2, 2), (1, 4)):
            other = Cut(grid(*shape), AdamW, True, after)
            other.forget()
            again = Snapshots(other.ddp, other.opt, folder=folder, every=100)
            loaded = again.load()
            assert loaded is not None
            assert loaded.step == 2
            other.continues(saved)
            other.train(range(2, 4))
            again.close(keep=True)


UNEVEN_TOO: list[tuple[Any, bool, bool]] = [(AdamW, True, True), *((*one, False) for one in KINDS)]


@case(4, few=UNEVEN_TOO[:1], every=UNEVEN_TOO[1:])
def _torchs_own_checkpoints_hold_states_of_wholes(setup: Setup, configurations: list[tuple[Any, bool, bool]]) -> None:
    for kind, muon, uneven in configurations:
        root = Path(setup.folder) / f"dcp {kind.__name__} {uneven}"
        saved = Cut(grid(2, 2), kind, muon, uneven)
        saved.train(range(2))
        state_dict_saver.save({"optim": saved.opt.sharded_state_dict(saved.ddp)}, checkpoint_id=root)
        checkpoint.save(root / "model", saved.ddp, saved.opt)
        for shape in ((2, 2), (1, 4)):
            other = Cut(grid(*shape), kind, muon, uneven)
            checkpoint.load(root / "model", other.ddp, other.opt)
            expected = copy.deepcopy(other.opt.sharded_state_dict(other.ddp))
            fresh: Any = shard_optimizer(
                other.ddp.module, kind, groups_by_hand(other.ddp.module, muon), overlap=False, **options_of(other.mesh)
            )
            nested = {"optim": fresh.sharded_state_dict(other.ddp, init_missing=True)}
            state_dict_loader.load(nested, checkpoint_id=root)
            fresh.load_sharded_state_dict(nested["optim"], other.ddp)
            found = fresh.sharded_state_dict(other.ddp)
            assert expected.keys() == found.keys()
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    one, two = (each.to_local() if isinstance(each, DTensor) else each for each in (value, found[key]))
                    assert_identical(one, two, key)
        # on the last mesh every rank owns its parts of all parameters: what it lacks is stepped elsewhere
        names = [name for name, _ in other.ddp.module.named_parameters() if name.rpartition(".")[2] in CUTS]
        elsewhere = [name for name in names if not any(key.startswith(f"state.{name}.") for key in expected)]
        wrong = {**nested["optim"], f"state.{elsewhere[0]}.momentum_buffer": torch.zeros(16, 8)}
        with pytest.raises(ValueError, match=r"Expected the state of .* which steps the whole, got state .*ZERO-817"):
            fresh.load_sharded_state_dict(wrong, other.ddp)
        dist.barrier()


@case(4, few=[(KINDS[0], True), (KINDS[2], False)], every=[*product(KINDS, (False, True))])
def _state_dicts_load_on_a_mesh_that_steps_matrices_on_other_ranks(
    setup: Setup, configurations: list[tuple[tuple[Any, bool], bool]]
) -> None:
    """The hosts depend on the number of data-parallel ranks: states that are elsewhere are sent."""
    for (kind, muon), uneven in configurations:
        saved = Cut(grid(2, 2), kind, muon, uneven)
        saved.train(range(2))
        state = saved.opt.state_dict()
        other = Cut(grid(1, 2, 2), kind, muon, uneven)
        moved = [one.host != two.host for one, two in zip(cuts_of(saved.opt), cuts_of(other.opt), strict=True)]
        assert any(moved)
        other.ddp.module.load_state_dict(saved.ddp.module.state_dict())
        other.opt.load_state_dict(state)
        assert list(other.opt.state_dict()["state"]) == sorted(other.opt.state_dict()["state"])
        back = Cut(grid(2, 2), kind, muon, uneven)
        back.ddp.module.load_state_dict(saved.ddp.module.state_dict())
        back.opt.load_state_dict(other.opt.state_dict())
        assert_identical(state["state"], back.opt.state_dict()["state"], f"{kind}, there and back")
        dist.barrier()
        for one in (other, back):
            one.continues(saved)
            one.train(range(2, 4))


@case(4)
def _one_state_from_two_ranks_is_refused_on_all(setup: Setup) -> None:
    made = Cut(grid(2, 2), AdamW, True)
    made.train(range(1))
    saved: list[Any] = [None] * setup.world_size
    dist.all_gather_object(saved, made.opt.state_dict())
    changed = made.mesh.get_local_rank("data") == 1  # the other ranks learn it from these
    state = saved[setup.rank | 1] if changed else saved[setup.rank]
    with pytest.raises((ValueError, RuntimeError), match=r"to have the state of the whole, got .*ZERO-817"):
        made.opt.load_state_dict(state)
    made.opt.load_state_dict(saved[setup.rank])
    made.train(range(1, 3))


class Failing(ToyLAMB):
    """Raises in its second step where a whole matrix is stepped."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        wholes = [param for group in self.param_groups for param in group["params"] if param.numel() == 128]
        if any(self.state.get(param) for param in wholes):
            raise ValueError("this matrix is singular")
        super().step(closure)


@case(4)
def _an_error_of_a_host_is_raised_on_all_ranks(setup: Setup) -> None:
    mesh = mesh_of(setup)
    ddp = wrapped(mesh)
    opt: Any = shard_optimizer(ddp, Failing, groups_by_hand(ddp.module, False), **options_of(mesh))
    for step, (inputs, _) in enumerate(batches(mesh.get_local_rank("data"), 2)):
        opt.zero_grad()
        squared(ddp, inputs).backward()
        if not step:
            opt.step()
    with pytest.raises(Exception, match=r"this matrix is singular|ZERO-319"):
        opt.step()


@case(4)
def _parts_that_cannot_meet_are_refused(setup: Setup) -> None:
    mesh = mesh_of(setup)
    ddp = wrapped(mesh)
    groups = groups_by_hand(ddp.module, True)
    groups[1]["sharded_over"] = "tensor"
    with pytest.raises(TypeError, match=r"holds a part, got Muon. Parts can meet where .*ZERO-113"):
        shard_optimizer(ddp, AdamW, groups, overlap=False, **options_of(mesh))
    of_sizes = wrapped(mesh, uneven=True)
    by_hand = groups_by_hand(of_sizes.module, True)
    with pytest.raises(NotImplementedError, match=r"Expected partition='parameters' .*got 'elements'.*ZERO-816"):
        shard_optimizer(of_sizes, AdamW, by_hand, partition="elements", **options_of(mesh))
    # a matrix that one rank does not have, and one with other rows than its parts on other ranks
    place = mesh.get_local_rank("tensor")
    for shapes in ([(4, 4)] if place else [], [(4, 4 + place)]):
        model = nn.ParameterList([torch.ones(shape) for shape in [(2,), *shapes]])
        params = list(model)
        some: Any = [{"params": params[:1]}, {"params": params[1:], "sharded_over": {"tensor": 0}}]
        refused = r"the same parts along 'tensor' of matrices that are stepped whole on every rank .*ZERO-506"
        with pytest.raises(ValueError, match=refused):
            shard_optimizer(model, SGDByNorm, some, **options_of(mesh))
    if mesh.get_local_rank("tensor"):
        for param in ddp.module.parameters():
            param.grad = None
    opt: Any = shard_optimizer(ddp, AdamW, groups_by_hand(ddp.module, True), **options_of(mesh))
    squared(ddp, torch.randn(6, 8)).backward()
    if mesh.get_local_rank("tensor"):
        ddp.module.get_parameter("0.up").grad = None
    with pytest.raises(RuntimeError, match=r"gradients of the same parts of matrices.*ZERO-816"):
        opt.step()


@case(4)
def _cuts_over_two_dimensions_of_the_mesh_and_strided_ones_are_refused(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "first", "second"))
    both = mesh["first", "second"]
    for dims in ({"first": 0, "second": 1}, {"first": 0, "second": 0}):
        model = nn.ParameterList([torch.ones(4, 4)])
        with pytest.raises(TypeError, match=r"each rank along \['first', 'second'\] holds a part, got .*ZERO-113"):
            shard_optimizer(model, SGDByNorm, [{"params": list(model), "sharded_over": dims}], **options_of(mesh))
        whole = nn.Parameter(distribute_tensor(torch.ones(8, 8), both, [Shard(dim) for dim in dims.values()]))
        with pytest.raises(TypeError, match=r"each rank along \['first', 'second'\] holds a part, got .*ZERO-113"):
            shard_optimizer(nn.ParameterList([whole]), SGDByNorm, **options_of(mesh))
    strided = distribute_tensor(torch.ones(8, 8), both, [_StridedShard(0, split_factor=2), Shard(0)])
    with pytest.raises(NotImplementedError, match=r"cut or replicated along 'first', got _S.*ZERO-806"):
        shard_optimizer(nn.ParameterList([nn.Parameter(strided)]), SGDByNorm, **options_of(mesh))


def _move_distributed_tensors_to_other_meshes(root: Path) -> None:
    hidden = 7  # 4 3, and 2 2 2 1

    def made(shape: tuple[int, int]) -> tuple[dict[str, Any], nn.Module, Any]:
        mesh = grid(*shape)
        model = parallelized(mesh["tensor"], hidden)
        return options_of(mesh), model, shard_optimizer(model, ToyLAMB, **options_of(mesh))

    def train(model: nn.Module, opt: Any, steps: range) -> None:
        for step in steps:
            for place, param in enumerate(model.parameters()):
                whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + place))
                own: Any = param
                is_cut = isinstance(own, DTensor)
                param.grad = distribute_tensor(whole, own.device_mesh, own.placements) if is_cut else whole
            opt.step()

    _, model, opt = made((2, 2))
    train(model, opt, range(2))
    folder = root / "distributed"
    checkpoint.save(folder, model, opt)
    state_dict_saver.save({"optim": opt.sharded_state_dict(model)}, checkpoint_id=folder / "dcp")
    train(model, opt, range(2, 4))
    expected = [full(param.detach()) for param in model.parameters()]
    for shape in ((2, 2), (1, 4)):
        for is_dcp in (False, True):
            options, other, resumed = made(shape)
            before = full(next(other.parameters()).detach())
            checkpoint.load(folder, other, resumed)
            if is_dcp:
                resumed = shard_optimizer(other, ToyLAMB, **options)
                nested = {"optim": resumed.sharded_state_dict(other, init_missing=True)}
                state_dict_loader.load(nested, checkpoint_id=folder / "dcp")
                resumed.load_sharded_state_dict(nested["optim"], other)
            train(other, resumed, range(2, 4))
            assert_identical(expected, [full(param.detach()) for param in other.parameters()], f"{shape} {is_dcp}")
            assert not torch.equal(before, expected[0])


class SGDByNorm(SGD):
    """Not element-wise."""


test_parallel_whole = case.each()
