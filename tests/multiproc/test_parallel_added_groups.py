"""Groups added to a `ParallelOptimizer` after some steps, beside the plain optimizer to which the same were added."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import DynamicLossScale, checkpoint
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import (
    Twins,
    assert_identical,
    assert_same_on_all_ranks,
    batches,
    loss_of,
    record_of,
    sum_in_rank_order,
)
from tests.multiproc.cut_models import CutBlock, is_cut
from tests.multiproc.experts import cut_mixture, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.mesh_twins import DDP_OPTIONS, mesh_of_4
from tests.multiproc.parallel_models import OPTIONS, local_part, parallelized, squared, tied_group
from tests.multiproc.stages import Stages
from tests.multiproc.whole_matrices import (
    MUON,
    assert_equal_parts,
    blocks,
    groups_by_hand,
    lend_gradients,
    options_of,
    wrapped,
)

CLIP = 0.05
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 2},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
    {"overlap": False},
    {"loss_scale": DynamicLossScale(1024.0, growth_interval=2)},
    {"partition": "elements"},
)


# a rank that waited for the time-out of its group would fail the test
case = Cases(timeout=400, group_timeout=800)


class Added(Twins):
    """Both sides begin with some of the groups, and get the rest later.

    Args:
        build: makes this rank's part of the model.
        wrap: makes it a DDP model or leaves it as it is.
        groups: its groups, in order; those in ``late`` are added. Options that only ours has are in `OURS`.
        late: positions of the added groups.
        loss: of a model and a batch.
        reduce: averages gradients of the plain model as DDP would.
        norms: the square of the gradients' norm over the whole model, from this rank's parameters.
        freezes: ``"first"``, before the model is wrapped, ``"later"``, or ``""``: late parameters train, unused.
        **options: of ours.
    """

    OURS = ("process_group", "sharded_over", "shard_group")
    opt: Any
    plain_model: Any

    def __init__(
        self,
        build: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], nn.Module],
        groups: Callable[[nn.Module], list[dict[str, Any]]],
        late: Sequence[int],
        loss: Callable[[nn.Module, Any], Tensor],
        reduce: Callable[[nn.Module], None],
        norms: Callable[[nn.Module], Tensor],
        freezes: str = "first",
        optimizer_class: Any = AdamW,
        **options: Any,
    ) -> None:
        self.norms, self.optimizer_class, self.limit = norms, optimizer_class, options.get("max_grad_norm")
        self._late = late
        models = []
        for _ in range(2):
            model = build()
            self._freeze(groups(model), freezes == "first")
            models.append(wrap(model))
            self._freeze(groups(models[-1]), freezes == "later")
        model, plain_model = models
        if options.get("stage") == 2 and isinstance(plain_model, DistributedDataParallel):
            plain_model.register_comm_hook(plain_model.process_group, sum_in_rank_order)
        self.groups, theirs = groups(model), groups(plain_model)
        self.their_groups = [{key: group[key] for key in group if key not in self.OURS} for group in theirs]
        early = [place for place in range(len(self.groups)) if place not in late]
        plain = optimizer_class([dict(self.their_groups[place]) for place in early], **OPTIONS)
        mine = [dict(self.groups[place]) for place in early]
        opt = ParallelOptimizer(model, optimizer_class, mine, **options, **OPTIONS)
        super().__init__(plain_model, model, plain, opt, loss=loss, reduce=reduce)

    def _freeze(self, groups: list[dict[str, Any]], freezes: bool) -> None:
        for place in self._late if freezes else ():
            for _, param in groups[place]["params"]:
                param.requires_grad_(False)

    def add(self) -> None:
        """Thaw the late parameters of both models, and add their groups."""
        for place in self._late:
            for group in (self.groups[place], self.their_groups[place]):
                for _, param in group["params"]:
                    param.requires_grad_(True)
            self.plain.add_param_group(dict(self.their_groups[place]))
            names, params = zip(*self.groups[place]["params"], strict=True)
            nameless = {"params": iter(params)} if place % 2 else {}  # the plain one takes them beside others without
            self.opt.add_param_group({**self.groups[place], **nameless})
            assert self.opt.param_groups[-1]["param_names"] == [*names]

    def backward(self, *batch: Any, loss: Any = None) -> None:
        super().backward(*batch, loss=self._scaled)
        for param in self.plain_model.parameters():
            if param.grad is not None:
                param.grad.mul_(1.0 / (self.opt.loss_scale or 1.0))

    def _scaled(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        return loss if self.opt.loss_scale is None else self.opt.scale(loss)

    def train_and_compare(self, feed: Any, steps: int) -> None:
        for step in range(steps):
            self.zero_grad()
            self.backward(next(feed))
            self.opt.step()
            record = record_of(self.opt)
            assert record.stepped
            if self.limit is not None:
                assert record.grad_norm is not None
                norm, expected = torch.tensor(record.grad_norm), self.norms(self.plain_model).sqrt()
                torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, check_dtype=False)
                factor = torch.clamp(self.limit / (norm + 1e-6), max=1.0)
                assert factor < 1
                for param in self.stepped():
                    if param.grad is not None:
                        local_part(param.grad).mul_(factor)
            self.plain.step()
            self.assert_equal(f"after step {step}")

    def stepped(self) -> list[Tensor]:
        return [param for group in self.plain.param_groups for param in group["params"]]


def squares(params: Sequence[Tensor]) -> Tensor:
    grads = [local_part(param.grad).double() for param in params if param.grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *(grad.square().sum() for grad in grads)]).sum()


def all_reduced(value: Tensor, group: Any = None) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


def average(params: Sequence[Tensor], group: Any) -> None:
    """Over all four ranks, as one tensor: its place there decides in which order ranks are added up."""
    has = all_reduced(torch.tensor([float(param.grad is not None) for param in params]), group)
    used = [param for param, ranks in zip(params, has.tolist(), strict=True) if ranks]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in used]
    if grads:
        flat = all_reduced(torch.cat([grad.reshape(-1) for grad in grads]).mul_(0.25), group)
        for param, part in zip(used, flat.split([grad.numel() for grad in grads]), strict=True):
            param.grad = part.view(param.shape)


def run(pair: Added, place: int) -> None:
    feed = batches(place, 6)
    pair.train_and_compare(feed, 3)
    pair.add()
    pair.train_and_compare(feed, 3)
    pair.assert_moved()


# Experts


def experts_pair(late: str, freezes: str, mode: dict[str, Any], **ddp: Any) -> Added:
    rank = dist.get_rank()
    spread, same = expert_groups(rank, 4, 2)
    is_late = {"experts": (2, 3), "dense": (1,), "both": (1, 2, 3)}[late]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        own: list[list[Any]] = [[], [], [], []]
        for name, param in named:
            place = 2 + ("local.1" in name) if "experts." in name else int("enter" in name)
            own[place].append((name, param))
        return [
            {"params": own[0]},
            {"params": own[1], "lr": 3e-2},
            {"params": own[2], "process_group": same},
            {"params": own[3], "process_group": same, "weight_decay": 0.5},
        ]

    def reduce(model: nn.Module) -> None:
        own: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, param in model.named_parameters():
            is_averaged = "experts." in name or ("enter" in name and freezes == "first" and late != "experts")
            if param.requires_grad and is_averaged:
                own["experts." in name].append(param)
        for params, group in zip(own, (None, same), strict=True):
            average(params, group)

    def norms(model: nn.Module) -> Tensor:
        stepped = set(map(id, pair.stepped()))
        own = [(name, param) for name, param in model.named_parameters() if id(param) in stepped]
        experts = [param for name, param in own if "experts." in name]
        dense = [param for name, param in own if "experts." not in name]
        return all_reduced(squares(experts) if rank < 2 else torch.zeros((), dtype=torch.float64)) + squares(dense)

    pair = Added(
        lambda: cut_mixture(rank, 2, 4, spread),
        lambda model: wrapped_without_experts(model, **DDP_OPTIONS, **ddp),
        groups,
        is_late,
        lambda model, batch: loss_of(model, *batch),
        reduce,
        norms,
        freezes,
        **mode,
    )
    return pair


LATE = (("experts", "first"), ("dense", "first"), ("both", "first"), ("dense", "later"))


@case(4, few=[*zip(LATE, MODES[3::-1], strict=True)][1:], every=[*product(LATE, MODES)])
def _experts_and_dense_layers_that_are_thawed_and_added_later_equal_the_plain_optimizer(
    setup: Setup, configurations: list[tuple[tuple[str, str], dict[str, Any]]]
) -> None:
    for (late, freezes), mode in configurations:
        run(experts_pair(late, freezes, mode, find_unused_parameters=freezes == "later"), setup.rank)


# Parts


def cut_pair(mesh: DeviceMesh, wraps: bool, freezes: str, optimizer_class: Any = AdamW, **mode: Any) -> Added:
    """Two blocks cut over the tensor dimension, the second of which is added in three groups."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        found: list[dict[str, Any]] = []
        for block in ("0.", "1."):
            own = [(name, param) for name, param in named if name.removeprefix("module.").startswith(block)]
            found += [
                {"params": [one for one in own if not one[0].endswith(("up", "down"))], "lr": 3e-2},
                {"params": [one for one in own if one[0].endswith("up")], "sharded_over": {"tensor": 0}},
                {"params": [one for one in own if one[0].endswith("down")], "sharded_over": {"tensor": 1}},
            ]
        return found

    def wrap(model: nn.Module) -> nn.Module:
        finds: dict[str, Any] = {"find_unused_parameters": freezes == "later"}
        return DistributedDataParallel(model, process_group=data, **DDP_OPTIONS, **finds) if wraps else model

    def reduce(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            is_averaged = not wraps or (freezes == "first" and "1." in name)
            if is_averaged and param.grad is not None:
                dist.all_reduce(param.grad.mul_(0.5), group=data)

    def norms(model: nn.Module) -> Tensor:
        parts = [param for name, param in model.named_parameters() if name.endswith(("up", "down"))]
        rest = [param for name, param in model.named_parameters() if not name.endswith(("up", "down"))]
        return all_reduced(squares(parts), tensor) + squares(rest)

    def build() -> nn.Module:
        return nn.Sequential(CutBlock(tensor, seed=1), CutBlock(tensor, seed=2))

    arguments = {"mesh": mesh, "data_parallel_dim": "data"}
    late = (3, 4, 5)
    return Added(build, wrap, groups, late, squared, reduce, norms, freezes, optimizer_class, **arguments, **mode)


@case(4, marks=[pytest.mark.nightly])
def _cut_parameters_that_are_thawed_and_added_later_equal_the_plain_optimizer(setup: Setup) -> None:
    mesh = mesh_of_4()
    place = mesh.get_local_rank("data")
    for mode in MODES:
        run(cut_pair(mesh, True, "first", **mode), place)
        if mode.get("stage") != 2:
            run(cut_pair(mesh, False, "first", **mode), place)
            run(cut_pair(mesh, True, "later", **mode), place)


WAITING: tuple[dict[str, Any], ...] = ({}, {"overlap": False}, {"max_grad_norm": 1e-4})


@case(4, few=WAITING[2:], every=WAITING)
def _distributed_tensors_that_are_thawed_and_added_later_equal_the_plain_optimizer(
    setup: Setup, configurations: Sequence[dict[str, Any]]
) -> None:
    mesh = mesh_of_4()
    place, data = mesh.get_local_rank("data"), mesh.get_group("data")

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.3}]

    def reduce(model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(local_part(param.grad).mul_(0.5), group=data)

    def norms(model: nn.Module) -> Tensor:
        norms: list[Any] = [one.grad.norm().square() for one in pair.stepped() if one.grad is not None]
        return torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).sum()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = (model(batch[0]) - 0.1).pow(4).mean()
        return found

    for mode in configurations:
        pair = Added(
            lambda: parallelized(mesh["tensor"]),
            lambda model: model,
            groups,
            (1,),
            loss,
            reduce,
            norms,
            mesh=mesh,
            data_parallel_dim="data",
            foreach=False,
            **mode,
        )
        run(pair, place)


IN_STAGES: list[tuple[bool, dict[str, Any]]] = [
    (False, {"max_grad_norm": CLIP}),
    (True, {}),
    (True, {"stage": 2}),
    (False, {}),
    (True, {"max_grad_norm": CLIP}),
]


@case(4, few=[IN_STAGES[0], IN_STAGES[2]], every=IN_STAGES)
def _groups_added_on_one_stage_alone_equal_plain_stages(
    setup: Setup, configurations: list[tuple[bool, dict[str, Any]]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    for wraps, mode in configurations:
        ours, plain = (Stages(mesh, Schedule1F1B, wraps, learns_shapes=False) for _ in range(2))
        is_late = ours.number == 0 and "stage" not in mode
        late = [name for name, _ in ours.part.named_parameters() if is_cut(name)] if is_late else []
        later = [[(name, param) for name, param in stages.part.named_parameters()] for stages in (ours, plain)]
        early, blocks, shared = (
            [[one for one in named if belongs(one[0])] for named in later]
            for belongs in (
                lambda name, late=late: name not in (*late, "embedding"),
                lambda name, late=late: name in late,
                lambda name: name == "embedding",
            )
        )
        if mode.get("stage") == 2:
            plain.model.register_comm_hook(plain.data, sum_in_rank_order)  # type: ignore[operator]
        arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
        opt = ParallelOptimizer(ours.model, AdamW, [{"params": early[0]}], **arguments, **mode, **OPTIONS)
        expected = AdamW([param for _, param in early[1]], **OPTIONS)
        before = [param.detach().clone() for param in ours.part.parameters()]
        for step in range(6):
            if step == 2:
                opt.add_param_group({"params": blocks[0], "lr": 3e-2})
                expected.add_param_group({"params": [param for _, param in blocks[1]], "lr": 3e-2})
            if step == 4:
                opt.add_param_group({"params": shared[0], "process_group": tied})
                expected.add_param_group({"params": [param for _, param in shared[1]]})
            for stages in (plain, ours):
                stages.part.zero_grad()
                stages.run(step)
            plain.reduce_by_hand(tied)
            opt.step()
            assert opt.last_step is not None
            if "max_grad_norm" in mode:
                assert opt.last_step.grad_norm is not None
                if step >= 4:
                    torch.testing.assert_close(torch.tensor(opt.last_step.grad_norm), plain.norm(), rtol=1e-5, atol=0)
                factor = torch.clamp(CLIP / (torch.tensor(opt.last_step.grad_norm) + 1e-6), max=1.0)
                assert factor < 1
                for group in expected.param_groups:
                    for param in group["params"]:
                        param.grad.mul_(factor)
            expected.step()
            for (name, mine), other in zip(ours.part.named_parameters(), plain.part.parameters(), strict=True):
                assert_identical(other.detach(), mine.detach(), f"{name} after step {step}: {mode}, {wraps}")
        for (name, param), old in zip(ours.part.named_parameters(), before, strict=True):
            assert not torch.equal(param, old), f"{name} has not moved: {mode}"
        assert len(opt.param_groups) == 3


# Matrices that are stepped whole


@case(4, few=[(True, (2,), 1), (False, (1, 2), 2)], every=[(False, (2,), 1)])
def _parts_of_added_matrices_equal_one_device(
    setup: Setup, configurations: list[tuple[bool, tuple[int, ...], int]]
) -> None:
    mesh = mesh_of_4()
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    for wraps, late, members in configurations:
        model = wrapped(mesh) if wraps else blocks(tensor)
        groups, whole = groups_by_hand(model, muon=True), blocks(None)
        theirs = groups_by_hand(whole, muon=False, whole=True)
        early = [one for place, one in enumerate(groups) if place not in late]
        opt = ParallelOptimizer(model, AdamW, early, **options_of(mesh))
        plain = AdamW([theirs[0]], lr=1e-2)
        muon = torch.optim.Muon([theirs[place] for place in (1, 2) if place not in late] or [{"params": []}], **MUON)
        for step, (inputs, _) in enumerate(batches(mesh.get_local_rank("data"), 6)):
            if step == 2:
                for place in late:
                    opt.add_param_group(groups[place])
                    muon.add_param_group(theirs[place])
            model(inputs).square().mean().backward()
            lend_gradients(model, whole, tensor, None if wraps else data)
            opt.step()
            opt.zero_grad()
            plain.step()
            muon.step()
            assert_equal_parts(whole, getattr(model, "module", model), tensor, f"after step {step}")
        assert len(opt.members) == members
        for (name, before), after in zip(blocks(None).named_parameters(), whole.parameters(), strict=True):
            assert not torch.equal(before, after), name
    ddp = wrapped(mesh)
    groups = groups_by_hand(ddp, muon=True)
    opt = ParallelOptimizer(ddp, AdamW, groups[:1], **options_of(mesh))
    with pytest.raises(NotImplementedError, match=r"elementwise optimizer for parameter 0 of parameter group 1.*812"):
        opt.add_param_group(groups[1])
    ddp(torch.ones(2, 8)).square().mean().backward()
    opt.step()
    assert len(opt.param_groups) == 1


# Errors


@case(4, few=["later"], every=["first", "later"])
def _an_error_on_one_rank_leaves_the_optimizer_as_it_was_on_all(setup: Setup, configurations: list[str]) -> None:
    rank = setup.rank
    for freezes in configurations:
        pair = experts_pair("both", freezes, {"nonfinite": "step"}, find_unused_parameters=freezes == "later")
        feed, opt = batches(rank, 12), pair.opt
        pair.train_and_compare(feed, 2)
        spread, same = expert_groups(rank, 4, 2)
        dense, experts = ({**pair.groups[place]} for place in (1, 2))

        def refused(message: str, group: dict[str, Any], opt: ParallelOptimizer = opt) -> None:
            before = [len(one.param_groups) for one in opt.members]
            with pytest.raises((ValueError, RuntimeError), match=message):
                opt.add_param_group(group)
            assert [len(one.param_groups) for one in opt.members] == before
            assert [len(one.optim.param_groups) for one in opt.members] == before
            assert len(opt.param_groups) == 1
            dist.barrier()

        twice = {"params": [("again", opt.param_groups[0]["params"][0])]}
        refused("in more than one parameter group|same parameter|twice", twice if rank == 1 else dense)
        refused("the same .max_grad_norm. of parameter group 1", {**dense, "max_grad_norm": 1.0 if rank == 3 else None})
        refused("process group and shard group", experts if rank != 2 else {"params": experts["params"]})
        refused("process_group of parameter group 1", {**experts, "process_group": same if rank else spread})
        both = {"params": [*dense["params"], *opt_params(pair, "leave.weight")]}
        refused("more than one parameter group", both)
        cut = [(name, nn.Parameter(param[:1].detach().clone())) for name, param in dense["params"]]
        refused("rank 2", {**dense, "params": cut} if rank == 2 else dense)
        with changed([param for _, param in experts["params"]] if rank == 3 else []):
            refused("different values on rank 0|different values on .*rank 3|failure on", experts)
        pair.train_and_compare(feed, 2)
        pair.add()
        pair.train_and_compare(feed, 3)
        pair.assert_moved()


@case(4)
def _parameters_that_ddp_reduces_and_others_are_two_groups(setup: Setup) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 3)]
    layers[0].requires_grad_(False)
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    opt = ParallelOptimizer(ddp, AdamW, layers[2].parameters(), **OPTIONS)
    layers[0].requires_grad_(True)
    params: list[Tensor] = [layers[1].weight, layers[0].weight]
    with pytest.raises(ValueError, match=r"that train of an added group, or none, got parameter 1 of .*ZERO-803"):
        opt.add_param_group({"params": params})
    opt.add_param_group({"params": [layers[1].weight, layers[0].bias.requires_grad_(False)]})
    opt.add_param_group({"params": [layers[0].weight]})
    told = opt.explain()
    assert "member 0: parameter groups [0, 1], 4 parameters" in told
    assert "member 1: parameter groups [2], 1 parameters" in told
    assert [line.rpartition(" averaged ")[2] for line in told.splitlines() if " averaged " in line] == [
        "by DDP",
        "in opt.step()",
    ]
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    before = [param.detach().clone() for param in params]
    opt.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    assert_same_on_all_ranks(params)
    before = [param.detach().clone() for param in params]
    with Join([ddp, opt]):
        for batch in batches(setup.rank, (2, 0, 3, 1)[setup.rank]):
            opt.zero_grad()
            loss_of(ddp, *batch).backward()
            opt.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    assert_same_on_all_ranks(params)
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    opt = ParallelOptimizer(model, AdamW, [model.weight], **OPTIONS)
    with pytest.raises(RuntimeError, match=r"inside Join is not supported.*ZERO-310"), Join([opt]):
        opt.add_param_group({"params": [model.bias]})


@contextmanager
def changed(params: Sequence[Tensor]) -> Iterator[None]:
    kept = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.add_(1)
        yield
        for param, old in zip(params, kept, strict=True):
            param.copy_(old)


def opt_params(pair: Added, name: str) -> list[tuple[str, Tensor]]:
    return [(own, param) for own, param in pair.model.named_parameters() if own.endswith(name)]


@case(4)
def _a_group_added_between_clipping_and_step_is_refused(setup: Setup) -> None:
    pair = experts_pair("experts", "first", {"overlap": False})
    feed, opt = batches(setup.rank, 12), pair.opt
    pair.train_and_compare(feed, 1)
    pair.add()
    pair.train_and_compare(feed, 1)

    def late() -> dict[str, Any]:
        return {"params": [("new", nn.Parameter(torch.ones(3)))]}

    with pytest.raises(ValueError, match=r"Expected nonfinite= in the constructor, .* first max_grad_norm.*ZERO-105"):
        opt.add_param_group({**late(), "max_grad_norm": 1.0})
    pair.zero_grad()
    pair.backward(next(feed))
    opt.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"Gradients of parameter groups 2, 3 have been averaged.*ZERO-309"):
        opt.add_param_group(late())
    opt.zero_grad()
    opt.offload_state()
    with pytest.raises(RuntimeError, match=r"reload_state\(\)"):
        opt.add_param_group(late())
    opt.reload_state()
    opt.add_param_group(late())
    assert len(opt.param_groups[-1]["params"]) == 1
    assert "parameter groups [4]" in opt.explain()


# State


@case(4, few=["checkpoint"], every=["state dict", "checkpoint"])
def _state_with_added_groups_goes_on_in_a_new_optimizer(setup: Setup, configurations: list[str]) -> None:
    first = setup.rank % 2 * 2
    names = {f"experts.local.{one}": f"experts.local.{first + one}" for one in range(2)}
    for how in configurations:
        one = experts_pair("both", "first", {"global_names": names})
        feed = batches(setup.rank, 12)
        one.train_and_compare(feed, 2)
        one.add()
        one.train_and_compare(feed, 2)
        other = experts_pair("both", "first", {"global_names": names})
        other.add()
        if how == "state dict":
            other.model.load_state_dict(one.model.state_dict())
            other.opt.load_state_dict(one.opt.state_dict())
        else:
            checkpoint.save(setup.folder / "added", model=one.model, optimizer=one.opt)
            checkpoint.load(setup.folder / "added", model=other.model, optimizer=other.opt)
        other.plain_model.load_state_dict(one.plain_model.state_dict())
        other.plain.load_state_dict(one.plain.state_dict())
        other.train_and_compare(feed, 3)
        other.assert_moved()


test_parallel_added_groups = case.each()
