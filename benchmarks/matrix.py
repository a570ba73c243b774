"""The step of Muon beside AdamW: balance over ranks, and CPU time of the slowest rank, beside others.

    python -m benchmarks.matrix --model 26m --ranks 2 4 8
    python -m benchmarks.matrix --costs

Gloo ranks of one thread each on this machine train a GPT, matrices by Muon and the rest by AdamW. Time is CPU time of
the rank's main thread, which runs the optimizer, so neither other load nor the number of cores counts. *planned* is the
largest share of cost of a rank over the mean, *measured* the same of the CPU time inside the optimizer classes, each
the median over steps. *slowest rank* is the CPU time of a whole ``opt.step()``, messages included, on the rank with
most. *iteration* is the CPU time of forward, backward and ``opt.step()`` on the rank with most, and *wall* the seconds
that all ranks take for one, which means something where each rank has a core.

`MuonWithAuxAdam` is the distributed Muon of the package ``muon-optimizer`` (K. Jordan): it deals matrices in turn,
sorted by size, and steps the rest on every rank. It is run if the package is installed, and where the matrices of each
shape are a multiple of the ranks: else it gathers matrices of different shapes in one collective, and Gloo refuses.

``--costs`` measures the unit of `ddp_zero.core.local.costs`: nanoseconds per multiply-add of a step of Muon, and how
many of them a step of AdamW costs per element.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.race.models import gpt
from ddp_zero import shard_optimizer
from ddp_zero.core.local.costs import known_cost
from ddp_zero.optimizer import ZeroRedundancyOptimizer, shard_of

RESULTS = Path(__file__).parent / "results"
CONTEXT, FIRST_STEPS = 64, 2
MODELS = {"small": (2, 64, 256), "26m": (8, 512, 256), "125m": (12, 768, 50_304)}
"""Layers, width and vocabulary."""
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}


class Timed:
    """Adds up CPU seconds of this thread inside calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return timed

    def take(self) -> float:
        """The seconds so far; begins again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Contestant:
    """Optimizers that step together.

    Args:
        optimizers: called in this order.
        classes: the optimizers that compute, without messages.
    """

    def __init__(self, optimizers: list[Optimizer], classes: list[Optimizer]) -> None:
        self.optimizers, self.computing = optimizers, Timed()
        for one in classes:
            one.step = self.computing.around(one.step)  # type: ignore[method-assign]

    def step(self) -> None:
        """Step all."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for one in self.optimizers:
            one.zero_grad()


def build_model(name: str) -> nn.Module:
    """A GPT; the same weights on every rank."""
    layers, width, vocabulary = MODELS[name]
    torch.manual_seed(0)
    model: Any = gpt(context=CONTEXT, layers=layers, width=width, heads=width // 64).build()
    if vocabulary != 256:
        model.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(model.tokens.weight, std=0.5 / width**0.5)
    built: nn.Module = model
    return built


def by_class(name: str, param: nn.Parameter) -> dict[str, Any] | None:
    """Muon for the matrices of blocks."""
    return {"optimizer_class": Muon, **MUON} if "blocks" in name and param.ndim == 2 else None


def divided(ddp: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    named = list(ddp.named_parameters())
    return [p for n, p in named if by_class(n, p)], [p for n, p in named if not by_class(n, p)]


def plain(ddp: nn.Module) -> Contestant:
    """Both optimizers, whole, on every rank."""
    matrices, rest = divided(ddp)
    pair: list[Optimizer] = [Muon(matrices, **MUON), AdamW(rest, **ADAMW)]
    return Contestant(pair, pair)


def torch_zero(ddp: nn.Module) -> Contestant:
    """Torch's ZeroRedundancyOptimizer, one for each class."""
    matrices, rest = divided(ddp)
    pair = [TorchZero(matrices, Muon, **MUON), TorchZero(rest, AdamW, **ADAMW)]
    return Contestant([*pair], [one.optim for one in pair])


def with_aux_adam(ddp: nn.Module) -> Contestant:
    """The public distributed Muon; its computation is not separable from its messages."""
    from muon import MuonWithAuxAdam  # type: ignore[import-not-found,unused-ignore]

    matrices, rest = divided(ddp)
    groups = [{"params": matrices, "use_muon": True, **MUON}, {"params": rest, "use_muon": False, **ADAMW}]
    one: Optimizer = MuonWithAuxAdam(groups)
    return Contestant([one], [one])


def ours(**options: Any) -> Callable[[nn.Module], Contestant]:
    """This library, in one line."""

    def build(ddp: nn.Module) -> Contestant:
        opt = shard_optimizer(ddp, AdamW, by_class, overlap=False, **options, **ADAMW)
        assert isinstance(opt, ZeroRedundancyOptimizer)
        return Contestant([opt], [opt.optim])

    return build


BASE = "DDP, Muon and AdamW"
BY_COST, BY_BYTES = "ddp_zero, by cost, AdamW cut", "ddp_zero, by bytes"
CONTESTANTS: dict[str, Callable[[nn.Module], Contestant]] = {
    BASE: plain,
    "torch's ZeRO of each": torch_zero,
    "MuonWithAuxAdam": with_aux_adam,
    BY_BYTES: ours(cost="bytes", partition="parameters"),
    "ddp_zero, by cost": ours(partition="parameters"),
    BY_COST: ours(partition="elements"),
}


def planned_share(opt: Optimizer) -> float | None:
    """The largest cost of a rank over the mean, by the library's costs whatever the plan was made by."""
    if not isinstance(opt, ZeroRedundancyOptimizer):
        return None
    plan, params = shard_of(opt).plan, [(p, group) for group in opt.param_groups for p in group["params"]]
    costs = [0.0] * plan.world_size
    for (param, group), pieces in zip(params, plan.pieces, strict=True):
        cost = known_cost(Muon if "optimizer_class" in group else AdamW, param.shape, group)
        for piece in pieces:
            costs[piece.owner] += cost * (piece.stop - piece.start) / param.numel()
    return max(costs) * len(costs) / sum(costs)


def measure(rank: int, folder: str, model: str, ranks: int, steps: int, names: list[str]) -> None:
    """The program of a rank; the first writes the results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(Path(folder) / "rendezvous").as_uri(), rank=rank, world_size=ranks)
    vocabulary = MODELS[model][2]
    found: dict[str, Any] = {}
    for name in names:
        module = build_model(model)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        contestant, whole = CONTESTANTS[name](ddp), Timed()
        step = whole.around(contestant.step)
        mine: dict[str, list[float]] = {"computing": [], "step": [], "iteration": [], "wall": []}
        for number in range(FIRST_STEPS + steps):
            generator = torch.Generator().manual_seed(1000 * number + rank)
            tokens = torch.randint(vocabulary, (1, CONTEXT + 1), generator=generator)
            dist.barrier()
            started, begun = time.perf_counter(), time.thread_time()
            contestant.zero_grad()
            loss_of(ddp, tokens).backward()
            step()
            iteration = time.thread_time() - begun
            dist.barrier()
            taken = contestant.computing.take(), whole.take(), iteration, time.perf_counter() - started
            if number >= FIRST_STEPS:
                for key, seconds in zip(mine, taken, strict=True):
                    mine[key].append(seconds)
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, mine)
        found[name] = {"ranks": every, "planned": planned_share(contestant.optimizers[0])}
        del ddp, module, contestant, step
        gc.collect()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def loss_of(ddp: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of one sequence."""
    loss: Tensor = ddp(tokens[:, :-1], tokens[:, 1:])
    return loss


_TIMES = ("step", "iteration", "wall")


def by_rank(one: dict[str, Any], key: str) -> list[float]:
    """Each rank's median over steps, in seconds."""
    return [statistics.median(rank[key]) for rank in one["ranks"]]


def rows_of(found: dict[str, Any], ranks: int) -> list[str]:
    """Markdown rows of one number of ranks."""
    rows = []
    for name, one in found.items():
        computing = by_rank(one, "computing")
        planned = "" if one["planned"] is None else f"{one['planned']:.3f}"
        measured = max(computing) * len(computing) / sum(computing)
        times = [max(by_rank(one, key)) for key in _TIMES]
        of_base = [seconds / max(by_rank(found[BASE], key)) for key, seconds in zip(_TIMES, times, strict=True)]
        shown = [f"{1e3 * seconds:.0f} | {ratio:.3f}" for seconds, ratio in zip(times, of_base, strict=True)]
        rows.append(f"| {ranks} | {name} | {planned} | {measured:.3f} | {' | '.join(shown)} |")
    return rows


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    head = [
        "| ranks | optimizer | planned, slowest / mean | measured | ms of CPU, slowest rank | of DDP's "
        "| iteration | of DDP's | wall | of DDP's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(row for ranks, one in found.items() for row in rows_of(one, int(ranks)))])


def print_costs() -> None:
    """Print nanoseconds per multiply-add of Muon, and the multiply-adds that an element of AdamW costs."""
    torch.set_num_threads(1)
    print(f"{'shape':>14} {'Muon ns per unit':>18} {'AdamW units per element':>25} {'fused':>8}")
    for shape in ((512, 512), (1536, 512), (2048, 512), (512, 2048), (768, 768), (3072, 768)):
        units = known_cost(Muon, shape, {})
        muon, adamw, fused = (
            min(_seconds(kind, shape, options) for _ in range(5))
            for kind, options in ((Muon, {}), (AdamW, {}), (AdamW, {"fused": True}))
        )
        per_unit = muon / units
        of_element = [one / (shape[0] * shape[1]) / per_unit for one in (adamw, fused)]
        print(f"{shape!s:>14} {1e9 * per_unit:>18.4f} {of_element[0]:>25.0f} {of_element[1]:>8.0f}")


def _seconds(kind: Callable[..., Optimizer], shape: tuple[int, int], options: dict[str, Any]) -> float:
    param = nn.Parameter(torch.randn(shape))
    opt = kind([param], **options)
    param.grad = torch.randn(shape)
    opt.step()
    started = time.thread_time()
    opt.step()
    return time.thread_time() - started


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix")
    parser.add_argument("--model", choices=MODELS, default="26m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), help="these beside DDP; nothing is stored")
    parser.add_argument("--costs", action="store_true", help="measure the unit of costs instead")
    options = parser.parse_args()
    if options.costs:
        print_costs()
        return
    names = [name for name in CONTESTANTS if options.only is None or name in (BASE, *options.only)]
    if find_spec("muon") is None:
        names = [name for name in names if name != "MuonWithAuxAdam"]
    found = {}
    for ranks in options.ranks:
        layers = MODELS[options.model][0]
        running = [name for name in names if name != "MuonWithAuxAdam" or layers % ranks == 0]
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, args=(folder, options.model, ranks, options.steps, running), nprocs=ranks)
            found[str(ranks)] = json.loads((Path(folder) / "found.json").read_text())
    command = f"python -m benchmarks.matrix --model {options.model} --ranks {' '.join(map(str, options.ranks))}"
    facts = [f"- date: {date.today()}", f"- command: {command} --steps {options.steps}", f"- torch {torch.__version__}"]
    text = "\n".join([*facts, "", table(found), ""])
    print(text)
    if options.only is None:
        (RESULTS / f"matrix-{options.model}.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / f"matrix-{options.model}.md").write_text(text)


if __name__ == "__main__":
    main()
