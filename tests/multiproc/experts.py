"""A mixture of experts whose experts are spread over ranks, for tests; and the same model whole."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, loss_of, sum_in_rank_order
from tests.multiproc.harness import Setup
from tests.multiproc.parity import Parity

WIDTH = 8


class Exchange(torch.autograd.Function):
    """Rows to ranks and rows from ranks, as many as the lists say; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received = ctx.sizes
        rows = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(rows, grads[0].contiguous(), sent, received, group=ctx.group)
        return rows, None, None, None


class Experts(nn.Module):
    """The experts of this rank, and the exchange of tokens with the ranks that hold the others.

    Args:
        numbers: of the experts here, out of ``total``.
        total: how many experts there are; every rank of the group holds as many.
        group: the ranks that hold one copy of all experts; None: all are here.
    """

    def __init__(self, numbers: range, total: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self.total, self.group = total, group
        self.runs_empty = False  # experts without a token, too, as a DDP model over them requires
        self.local = nn.ModuleList(_expert(number) for number in numbers)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.total)
        sent, received = tokens[order], counts[None]
        if self.group is not None:
            parts = dist.get_world_size(self.group)
            every = [torch.empty_like(counts) for _ in range(parts)]
            dist.all_gather(every, counts, group=self.group)
            mine = slice(dist.get_rank(self.group) * len(self.local), (dist.get_rank(self.group) + 1) * len(self.local))
            received = torch.stack(every)[:, mine]
            out, into = counts.view(parts, -1).sum(1).tolist(), received.sum(1).tolist()
            arrived = Exchange.apply(sent, out, into, self.group)  # type: ignore[no-untyped-call]
        else:
            arrived = sent
        results = arrived * 0  # also where no token has arrived, backward must send gradients back
        number = torch.arange(len(self.local)).repeat(len(received)).repeat_interleave(received.flatten())
        for index, expert in enumerate(self.local):
            places = (number == index).nonzero().flatten()
            if len(places) or self.runs_empty:
                results = results.index_copy(0, places, expert(arrived[places]))
        if self.group is not None:
            results = Exchange.apply(results, into, out, self.group)  # type: ignore[no-untyped-call]
        return torch.zeros_like(tokens).index_copy(0, order, results)


class Mixture(nn.Module):
    """A dense layer, a gate and experts, and a dense layer; the same weights on every rank and in every cut."""

    def __init__(self, numbers: range, total: int, group: ProcessGroup | None = None) -> None:
        super().__init__()
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        self.enter, self.gate, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, total), nn.Linear(WIDTH, 3)
        self.gate.weight.data.mul_(4)
        torch.random.set_rng_state(state)
        self.experts = Experts(numbers, total, group)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(inputs))
        weight, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
        result: Tensor = self.leave(hidden + weight[:, None] * self.experts(hidden, chosen))
        return result


def _expert(number: int) -> nn.Module:
    state = torch.random.get_rng_state()
    torch.manual_seed(100 + number)
    expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
    torch.random.set_rng_state(state)
    return expert


def expert_groups(
    rank: int, world_size: int, expert_ranks: int, backend: str | None = None
) -> tuple[ProcessGroup, ProcessGroup]:
    """This rank's group of ranks with other experts, and of those with the same; every rank calls it."""
    found: list[Any] = [None, None]
    spread = [range(start, start + expert_ranks) for start in range(0, world_size, expert_ranks)]
    same = [range(start, world_size, expert_ranks) for start in range(expert_ranks)]
    for place, groups in enumerate((spread, same)):
        for members in groups:
            group = dist.new_group(list(members), backend=backend)
            if rank in members:
                found[place] = group
    return found[0], found[1]


def cut_mixture(rank: int, expert_ranks: int, total: int, group: ProcessGroup) -> Mixture:
    """The part of the model that a rank holds."""
    each = total // expert_ranks
    first = rank % expert_ranks * each
    return Mixture(range(first, first + each), total, group)


def wrapped_without_experts(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP model that leaves the experts' parameters alone."""
    ignored = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)


def dense_and_experts(model: nn.Module, group: ProcessGroup) -> list[dict[str, Any]]:
    """Parameter groups with the experts' process group."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if "experts." not in name]},
        {"params": [(name, param) for name, param in named if "experts." in name], "process_group": group},
    ]


STEPS = 4
CLIP = 0.05
OPTIONS: dict[str, Any] = {"lr": 1e-2}


EXPERT_MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"overlap": False},
    "stage 1, overlapped": {},
    "stage 1, clipped": {"max_grad_norm": CLIP},
    "stage 2, overlapped": {"stage": 2},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": CLIP},
    "stage 2, clipped in the loop": {"stage": 2, "overlap": False},
}


def average_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What a plain loop does: sums over the ranks with the same expert, divided by the number of all."""
    for name, param in model.named_parameters():
        if "experts." in name:
            has = torch.tensor([float(param.grad is not None)])
            dist.all_reduce(has, group=group)
            if has.item():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad.mul_(1.0 / dist.get_world_size())
                dist.all_reduce(param.grad, group=group)


def norm_of_one_device(model: nn.Module, world_size: int, step: int) -> Tensor:
    """The norm of the gradients of the whole model, from the inputs of all ranks."""
    model.zero_grad()
    every = [list(batches(rank, step + 1))[step] for rank in range(world_size)]
    inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
    loss_of(model, inputs, targets).backward()
    norms = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None])
    total: Tensor = norms.norm()
    counted = (norms / total).square()
    assert counted.min() > 1e-5, f"a parameter that is left out, or counted twice, would not show: {counted}"
    return total


def clip(model: nn.Module, total: Tensor) -> None:
    factor = torch.clamp(CLIP / (total + 1e-6), max=1.0)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def train_mixture(setup: Setup, mode: dict[str, Any], in_loop: bool, expert_ranks: int, total: int) -> Parity:
    """Train beside the same cut model with the plain optimizer, and beside the whole model on one device."""
    parity = Parity()
    spread, same = expert_groups(setup.rank, setup.world_size, expert_ranks)
    model = cut_mixture(setup.rank, expert_ranks, total, spread)
    ddp_options = {"bucket_cap_mb": 0.0004, "gradient_as_bucket_view": True}
    twin = cut_mixture(setup.rank, expert_ranks, total, spread)
    expected = wrapped_without_experts(twin, **ddp_options)
    ddp = wrapped_without_experts(model, **ddp_options)
    if mode.get("stage") == 2:
        expected.register_comm_hook(None, sum_in_rank_order)
    plain = AdamW(expected.parameters(), **OPTIONS)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), **mode, **OPTIONS)
    whole = Mixture(range(total), total)
    one = AdamW(whole.parameters(), **OPTIONS)
    before = [param.detach().clone() for param in model.parameters()]
    for step, batch in enumerate(batches(setup.rank, STEPS)):
        plain.zero_grad()
        loss_of(expected, *batch).backward()
        average_experts(expected, same)
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        clipped = opt.clip_grad_norm_(CLIP) if in_loop else None
        opt.step()
        norm = norm_of_one_device(whole, setup.world_size, step)
        assert opt.last_step is not None
        assert opt.last_step.stepped
        if in_loop or "max_grad_norm" in mode:
            found = torch.tensor(opt.last_step.grad_norm)
            parity.note_norm(found, norm)
            assert clipped is None or torch.equal(clipped, found)
            clip(expected, found)
            clip(whole, norm)
            assert opt.last_step.clip_coefficient is not None
            assert opt.last_step.clip_coefficient < 1
        plain.step()
        one.step()
        assert_equal_models(expected.module, ddp.module, f"after step {step}: {mode}")
        parity.note_plain(expected.parameters(), ddp.parameters())
    for (name, param), old in zip(model.named_parameters(), before, strict=True):
        assert not torch.equal(param, old), f"{name} has not moved: {mode}"
    for name, param in model.named_parameters():
        number, _, rest = name.removeprefix("experts.local.").partition(".")
        first = setup.rank % expert_ranks * (total // expert_ranks)
        name = f"experts.local.{first + int(number)}.{rest}" if "experts." in name else name
        parity.note_one_device(param, whole.get_parameter(name))
    check_shares(opt, setup.world_size, expert_ranks)
    check_state(opt, plain, ddp, same)
    return parity


def check_shares(opt: ParallelOptimizer, world_size: int, expert_ranks: int) -> None:
    """Every parameter's state is on one of the ranks that hold the parameter."""
    for member, ranks in zip(opt.members, (world_size, world_size // expert_ranks), strict=True):
        assert member.world_size == ranks
        held = torch.tensor([float(len(member.state))])
        dist.all_reduce(held, group=member.process_group)
        assert held.item() == sum(len(group["params"]) for group in member.param_groups)


def check_state(opt: ParallelOptimizer, plain: AdamW, ddp: nn.Module, same: dist.ProcessGroup) -> None:
    """State dicts are those of the plain optimizer over the same groups, and load again."""
    found = opt.state_dict()
    dense, experts = (group["params"] for group in dense_and_experts(ddp, same))
    order = [name for name, _ in (*dense, *experts)]
    place = {name: index for index, (name, _) in enumerate(ddp.named_parameters())}
    expected = plain.state_dict()["state"]
    for number, name in enumerate(order):
        assert_identical(
            dict(sorted(expected[place[name]].items())), dict(sorted(found["state"][number].items())), name
        )
    opt.load_state_dict(found)
    again = opt.state_dict()
    assert again["state"].keys() == found["state"].keys()
    assert_identical(found["state"][0], again["state"][0], "after loading")
    dist.barrier()  # ranks ask each other
