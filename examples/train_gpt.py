"""Train a small byte-level GPT with DistributedDataParallel and a sharded optimizer, on text that Python ships.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --compare --plot run.png
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --dtype bf16 --master-weights --clip 1 --accumulate 4
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --save-every 100 --resume runs/1
    python examples/train_gpt.py --text my_book.txt --steps 2000

`MODES` holds the few lines in which plain and sharded training differ: ``--optimizer zero1-overlap`` steps inside
backward, ``zero1-interleaved`` while backward still computes, ``zero2`` shards gradients as well. ``--clip`` and
``--master-weights`` are options of the sharded optimizer; `step_by_hand` is the same with torch's own parts, for plain
training. All ranks draw the same windows of text, and each trains on its share of them: the data does not depend on how
many ranks there are. So the line with ``--resume``, given again after an interruption, goes on to the same end, at any
number of ranks that divides the batch. The text is Python's language reference, unless ``--text`` names another file.
"""

import math
import os
import resource
import sys
import time
import zlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Imported before there is a process group. DDP would import it later, and default arguments in it would then keep the
# group alive: Gloo's threads would outlive destroy_process_group, and some exits would abort ("terminate called without
# an active exception").
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step, hook_with_zero_step_interleaved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VOCABULARY = 256  # a token is a byte
EVAL_WINDOWS = 256  # over all ranks
PROMPT = b"The "
SAMPLE_BYTES = 200
LOG_LINES = 20
PEAK_NOTE = "peak memory: of the process so far, Python and torch included; on a GPU, allocated there in this training"
BUCKETS = 8  # about as many gradient buckets as DDP makes of the model
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECIPE = ("steps", "accumulate", "heads", "lr", "clip", "seed")  # what shapes and dtypes do not show


# Modes


def build_ddp(model: DistributedDataParallel, options: Namespace) -> Optimizer:
    """AdamW as it is: every rank keeps the whole optimizer state, and masters of all parameters if there are any."""
    groups = parameter_groups(model)
    if options.master_weights:
        for group in groups:
            group["params"] = [(name, nn.Parameter(param.detach().float())) for name, param in group["params"]]
    return AdamW(groups, lr=options.lr, betas=(0.9, 0.95))


def build_zero1(model: DistributedDataParallel, options: Namespace) -> Optimizer:
    """ZeRO stage 1: every rank keeps the optimizer state of its own parameters only."""
    return ZeroRedundancyOptimizer(
        parameter_groups(model),
        AdamW,
        parameters_as_bucket_view=True,
        max_grad_norm=options.clip,
        master_weights=options.master_weights,
        lr=options.lr,
        betas=(0.9, 0.95),
    )


def build_overlapped(
    build_hook: Callable[..., Any], stage: int, model: DistributedDataParallel, options: Namespace
) -> Optimizer:
    """The same, stepped inside backward; in stage 2 every rank keeps gradients of its own parameters only, too.

    With a single parameter group, `ddp_zero.shard_optimizer` does all of this.
    """
    optimizer = ZeroRedundancyOptimizer(
        parameter_groups(model),
        AdamW,
        stage=stage,
        parameters_as_bucket_view=True,
        overlap_with_ddp=True,
        max_grad_norm=options.clip,
        master_weights=options.master_weights,
        lr=options.lr,
        betas=(0.9, 0.95),
    )
    model.register_comm_hook(None, build_hook(None, model, optimizer, shard_buckets=True))
    return optimizer


MODES: Mapping[str, Callable[[DistributedDataParallel, Namespace], Optimizer]] = {
    "ddp": build_ddp,
    "zero1": build_zero1,
    "zero1-overlap": partial(build_overlapped, hook_with_zero_step, 1),
    "zero1-interleaved": partial(build_overlapped, hook_with_zero_step_interleaved, 1),
    "zero2": partial(build_overlapped, hook_with_zero_step_interleaved, 2),
}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    params = list(model.named_parameters())  # named, so that messages can say which
    return [
        {"params": [(name, p) for name, p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


# Options


def positive(text: str) -> int:
    """A number of something."""
    if int(text) < 1:
        raise ArgumentTypeError(f"Expected at least 1, got {text}.")
    return int(text)


def limit(text: str) -> float:
    """The most that something may be."""
    if not float(text) > 0:
        raise ArgumentTypeError(f"Expected a number above 0, got {text}.")
    return float(text)


def parse_options() -> Namespace:
    """Read the command line, or leave with a message."""
    parser = ArgumentParser(
        description="Train a small byte-level GPT with DDP and a sharded optimizer.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", choices=list(MODES), default="zero1", help="how the optimizer state is kept")
    add("--steps", type=positive, default=500, help="optimizer steps")
    add("--batch-size", type=positive, default=8, help="windows of text per rank and backward pass, at the start")
    add("--context", type=positive, default=128, help="bytes that the model sees at once")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--width", type=positive, default=128, help="features per position")
    add("--heads", type=positive, default=4, help="attention heads per block")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of the model's parameters")
    add("--master-weights", action="store_true", help="step bf16 parameters in fp32 copies of them")
    add("--clip", type=limit, metavar="NORM", help="largest norm of all gradients; skips steps where it is not finite")
    add("--accumulate", type=positive, default=1, help="backward passes per step; all but the last send nothing")
    add("--seed", type=int, default=0, help="seed of weights and data")
    add("--eval-every", type=positive, default=100, help="steps between validations")
    add("--text", type=Path, help="train on this file; Python's language reference if not given")
    add("--save-every", type=positive, metavar="N", help="steps between checkpoints, of which the newest two are kept")
    add("--resume", type=Path, metavar="DIR", help="where checkpoints are; goes on from the newest if there is one")
    add("--compare", action="store_true", help="train with DDP + AdamW first; fail unless the parameters are equal")
    add("--plot", type=Path, metavar="FILE.png", help="draw losses and memory")
    options = parser.parse_args()
    if options.width % options.heads:
        parser.error(f"Expected --width to be a multiple of --heads {options.heads}, got {options.width}.")
    if options.master_weights and options.dtype == "fp32":
        parser.error("Expected --dtype bf16 with --master-weights, got fp32: such parameters are their own masters.")
    if options.save_every is not None and options.resume is None:
        parser.error("Expected --resume DIR with --save-every, got none: it says where to save, too.")
    if options.resume is not None and options.resume.exists() and not options.resume.is_dir():
        parser.error(f"Expected --resume to name a folder, or none yet, got {options.resume}.")
    if options.resume is not None and options.compare:
        parser.error("Expected --resume or --compare, got both: what is compared is trained from the beginning.")
    if options.resume is not None and options.master_weights and options.optimizer == "ddp":
        parser.error(
            "Expected a sharded --optimizer with --resume and --master-weights, got ddp: its masters are no parameters "
            "of the model, and would not be saved."
        )
    if options.plot is not None and (options.plot.suffix != ".png" or not options.plot.parent.is_dir()):
        parser.error(f"Expected --plot to name a .png file in a folder that exists, got {options.plot}.")
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("Expected matplotlib for --plot, got none. Run: pip install -e '.[plot]'")
    return options


# World


@dataclass(frozen=True)
class World:
    """This process's place among the others."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> "World":
        """Join the job that torchrun started, or a job of one process if there is none."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus, device = torch.cuda.device_count(), torch.device("cpu")
        if gpus:
            device = torch.device("cuda", local_rank % gpus)
            torch.cuda.set_device(device)
        backend = "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's values, in a new first dimension, on the CPU. A collective."""
        mine = values.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def say(self, text: str) -> None:
        """Print on rank 0 only; on a terminal, over the updating line."""
        if self.rank == 0:
            print(f"\r{text:<79}" if sys.stdout.isatty() else text, flush=True)

    def update(self, text: str, is_due: bool) -> None:
        """Report progress on rank 0: one updating line on a terminal, a plain line in a log when one is due."""
        if self.rank == 0 and sys.stdout.isatty():
            print(f"\r{text[:79]:<79}", end="", flush=True)
        elif is_due:
            self.say(text)


# Data


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, and the length of the windows that are cut from them."""

    train: Tensor
    validation: Tensor
    context: int
    checksum: int

    @classmethod
    def load(cls, path: Path | None, context: int) -> "Corpus":
        """Read ``path``, or Python's language reference; the last tenth is held out."""
        data = "\n\n".join(topics[name] for name in sorted(topics)).encode() if path is None else path.read_bytes()
        needed = 10 * (context + 1)
        if len(data) < needed:
            source = "Python's language reference" if path is None else f"--text {path}"
            raise ValueError(
                f"Expected at least {needed} bytes of text for --context {context}, got {len(data)} from {source}."
            )
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        return cls(tokens[:cut], tokens[cut:], context, zlib.crc32(data))

    def draw(self, windows: int, generator: torch.Generator, world: World) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of random windows, which all ranks draw alike."""
        starts = torch.randint(len(self.train) - self.context, (windows,), generator=generator)
        return self._windows(self.train, starts[world.rank :: world.size], world.device)

    def held_out(self, batch_size: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of the validation windows, which lie at equal distances over the held-out text."""
        starts = torch.linspace(0, len(self.validation) - self.context - 1, EVAL_WINDOWS).long()
        for batch in starts[world.rank :: world.size].split(batch_size):
            yield self._windows(self.validation, batch, world.device)

    def _windows(self, source: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        windows = source[starts[:, None] + torch.arange(self.context + 1)].to(device).long()
        return windows[:, :-1], windows[:, 1:]


# Model


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result have shape (batch, positions, width)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.contract(F.gelu(self.expand(self.norm_2(x))))
        return result


class GPT(nn.Module):
    """Predicts the next byte. The embedding of bytes is also the output layer."""

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, param in self.named_parameters():
            if param.ndim >= 2:
                ends_a_branch = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(param, std=0.5 / math.sqrt(2 * layers * width if ends_a_branch else width))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats per byte."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1).float(), targets.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        """Scores of the next byte, at every position."""
        here = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.tokens(inputs) + self.positions(here))
        return F.linear(self.norm(x), self.tokens.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> bytes:
        """``prompt`` and ``count`` bytes after it; fewer if the model has diverged."""
        device = self.tokens.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)], device=device)
        for _ in range(count):
            scores = self.logits(text[:, -self.context :])[:, -1].float().cpu()
            if not scores.isfinite().all():
                break
            drawn = torch.multinomial(F.softmax(scores / temperature, dim=-1), 1, generator=generator)
            text = torch.cat([text, drawn.to(device)], dim=1)
        return bytes(text[0].tolist())


# Training


@dataclass(frozen=True)
class Usage:
    """What one rank holds at the end, in numbers and bytes."""

    parameters: int
    elements: int
    state: int
    gradients: int
    peak: int


@dataclass(frozen=True)
class Result:
    """A finished training. Losses are means over the ranks; the parameters are copies on the CPU."""

    mode: str
    train_losses: list[float]
    validation_losses: list[tuple[int, float]]
    initial: list[Tensor]
    final: list[Tensor]
    usages: list[Usage]
    sample: bytes

    @property
    def unsharded_state(self) -> int:
        """Bytes of optimizer state for the whole model, measured: the sum over all ranks, each parameter once."""
        times_held = sum(usage.elements for usage in self.usages) // sum(param.numel() for param in self.final)
        return sum(usage.state for usage in self.usages) // times_held


@dataclass(frozen=True)
class Outcome:
    """What became of a step: the norm of all gradients, if they are clipped, and why it was skipped, if it was."""

    norm: float | None
    skipped: str | None

    def __str__(self) -> str:
        if self.norm is None:
            return ""
        return f"  grad norm {self.norm:.3g}, {'stepped' if self.skipped is None else 'not stepped'}"


class Refusal(Exception):
    """What the command line can put right: told without a traceback."""


@dataclass
class Position:
    """Where a training stands, but for model and optimizer.

    ``windows`` is how many windows of text all ranks together see in a backward pass.
    """

    windows: int
    generator: torch.Generator
    scheduler: LambdaLR
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """The same in numbers, lists, tuples and tensors."""
        return {
            "windows": self.windows,
            "generator": self.generator.get_state(),
            "scheduler": self.scheduler.state_dict(),
            "train_losses": self.train_losses,
            "validation_losses": self.validation_losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was called."""
        self.windows = state["windows"]
        self.generator.set_state(state["generator"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.train_losses = state["train_losses"]
        self.validation_losses = state["validation_losses"]


def train(mode: str, options: Namespace, corpus: Corpus, world: World) -> Result:
    """Train from the seed, or from a checkpoint. A collective."""
    torch.manual_seed(options.seed)
    model = GPT(options.context, options.layers, options.width, options.heads).to(world.device, DTYPES[options.dtype])
    initial = copy_parameters(model)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    bucket_mb = sum(param.nbytes for param in model.parameters()) / BUCKETS / 2**20
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer = MODES[mode](ddp, options)
    scheduler = LambdaLR(optimizer, partial(lr_factor, steps=options.steps))
    position = Position(options.batch_size * world.size, torch.Generator().manual_seed(options.seed), scheduler)
    if options.resume is not None:
        resume(position, ddp, optimizer, options, corpus, world)
    behind = len(position.train_losses)
    gradients = 0
    begin = time.perf_counter()

    for step in range(behind + 1, options.steps + 1):
        batches = [corpus.draw(position.windows, position.generator, world) for _ in range(options.accumulate)]
        loss = backward(ddp, batches)
        gradients = gradient_bytes(ddp)
        outcome = take_step(ddp, optimizer, options.clip)
        scheduler.step()
        optimizer.zero_grad()
        position.train_losses.append(world.gather(loss).mean().item())
        is_due = step == 1 or step % max(1, options.steps // LOG_LINES) == 0
        world.update(progress(position, outcome, (time.perf_counter() - begin) / (step - behind), options), is_due)
        if outcome.skipped is not None:
            world.say(f"step {step:>5}/{options.steps}  not stepped: {outcome.skipped}")
        if step % options.eval_every == 0 or step == options.steps:
            validation_loss = evaluate(model, position.windows // world.size, corpus, world)
            position.validation_losses.append((step, validation_loss))
            world.say(f"step {step:>5}/{options.steps}  validation loss {validation_loss:.3f}")
        if options.save_every is not None and step % options.save_every == 0:
            extra = {"recipe": recipe(options, corpus), "position": position.state_dict()}
            checkpoint.save(options.resume, ddp, optimizer, extra=extra, step=step, keep=2, background=True)

    if options.save_every is not None:
        checkpoint.wait()
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        for line in optimizer.explain().splitlines():
            if line.startswith(("regime", "gradients")):
                world.say(line)
    usages = measure(model, optimizer, gradients, world)
    sample = model.generate(PROMPT, SAMPLE_BYTES, options.seed) if world.rank == 0 else b""
    losses = position.train_losses, position.validation_losses
    return Result(mode, *losses, initial, copy_parameters(model), usages, sample)


def resume(
    position: Position,
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    options: Namespace,
    corpus: Corpus,
    world: World,
) -> None:
    """Go on from the newest checkpoint, if there is one. A collective."""
    try:
        loaded = checkpoint.load(options.resume, ddp, optimizer)
    except FileNotFoundError:
        world.say(f"no checkpoint in {options.resume} yet: training from the beginning")
        return
    except ValueError as error:  # damaged, or another model or optimizer
        raise Refusal(str(error)) from error
    if loaded.folder == options.resume:
        raise Refusal(f"Expected --resume to name a folder of checkpoints, got one of them: {loaded.folder}.")
    for what, expected in loaded.extra["recipe"].items():
        got = recipe(options, corpus)[what]
        if got != expected:
            raise Refusal(f"Expected {what} {expected} as in {loaded.folder}, got {got}. Give what the run began with.")
    position.load_state_dict(loaded.extra["position"])
    if position.windows % world.size:
        raise Refusal(
            f"Expected a number of ranks that divides the {position.windows} windows per backward pass in "
            f"{loaded.folder}, got {world.size}."
        )
    world.say(f"resumed after step {loaded.step} with {position.windows // world.size} windows per rank")


def recipe(options: Namespace, corpus: Corpus) -> dict[str, Any]:
    """What must not change when a training is resumed."""
    return {**{f"--{name}": getattr(options, name) for name in RECIPE}, "a text with CRC-32": corpus.checksum}


def backward(ddp: DistributedDataParallel, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Average gradients over batches and ranks; returns this rank's mean loss. A collective.

    All passes but the last only add to ``param.grad``, whole in every mode. In stage 2 ``opt.accumulate()`` instead of
    ``no_sync()`` keeps this rank's part only, but sends every pass, and rounds its sums differently than DDP.
    """
    mean = torch.zeros((), device=ddp.device)
    for number, (inputs, targets) in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else ddp.no_sync():
            loss = ddp(inputs, targets) / len(batches)
            loss.backward()
        mean += loss.detach()
    return mean


def take_step(ddp: DistributedDataParallel, optimizer: Optimizer, clip: float | None) -> Outcome:
    """One step of either optimizer. A collective."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return step_by_hand(ddp, optimizer, clip)
    optimizer.step()
    record = optimizer.last_step
    assert record is not None, "there was a step"
    return Outcome(record.grad_norm, None if record.stepped else record.reason)


@torch.no_grad()
def step_by_hand(ddp: DistributedDataParallel, optimizer: Optimizer, clip: float | None) -> Outcome:
    """What the sharded optimizer does in its step, with torch's own parts: fp32 masters, clipping, skipping."""
    params = [param for group in parameter_groups(ddp) for _, param in group["params"]]
    stepped = [param for group in optimizer.param_groups for param in group["params"]]  # parameters, or their masters
    for param, master in zip(params, stepped, strict=True):
        if master is not param:
            master.grad, param.grad = param.grad.float(), None
    norm = None
    if clip is not None:  # as clip_grad_norm_ does, but that would compute the norm of bf16 gradients in bf16
        total = nn.utils.get_total_norm([param.grad.float() for param in stepped])
        nn.utils.clip_grads_with_norm_(stepped, clip, total)
        norm = total.item()
        if not math.isfinite(norm):
            return Outcome(norm, "the norm of all gradients is not finite")
    optimizer.step()
    for param, master in zip(params, stepped, strict=True):
        param.copy_(master)
    return Outcome(norm, None)


def lr_factor(steps_done: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth of the highest rate."""
    warm_up = max(1, steps // 10)
    if steps_done < warm_up:
        return (steps_done + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (steps_done - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def evaluate(model: GPT, batch_size: int, corpus: Corpus, world: World) -> float:
    """The mean loss on held-out text, of which every rank reads its part. A collective."""
    total = torch.zeros((), device=world.device)
    for inputs, targets in corpus.held_out(batch_size, world):
        total += model(inputs, targets) * len(inputs)
    return world.gather(total / EVAL_WINDOWS).sum().item()


def measure(model: nn.Module, optimizer: Optimizer, gradients: int, world: World) -> list[Usage]:
    """What every rank holds; masters count as state. A collective."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer  # owns a part, or all
    params = [param for group in local.param_groups for param in group["params"]]
    state = [value for values in local.state.values() for value in values.values() if isinstance(value, Tensor)]
    state += set(params).difference(model.parameters())
    mine = [
        len(params),
        sum(param.numel() for param in params),
        sum(value.numel() * value.element_size() for value in state),
        gradients,
        peak_memory(world.device),
    ]
    return [Usage(*row) for row in world.gather(torch.tensor(mine)).tolist()]


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the memory that ``param.grad`` keeps alive, each storage once."""
    storages = [param.grad.untyped_storage() for param in model.parameters() if param.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_memory(device: torch.device) -> int:
    """The most bytes so far: allocated on the GPU since training began, or else resident in the process ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters as they are now, on the CPU."""
    return [param.detach().cpu().clone() for param in model.parameters()]


# Report


def progress(position: Position, outcome: Outcome, pace: float, options: Namespace) -> str:
    """Step, loss, what clipping saw, speed and time left at this pace, in seconds per step."""
    step, loss = len(position.train_losses), position.train_losses[-1]
    speed = options.accumulate * position.windows * options.context / pace
    left = pace * (options.steps - step)
    return f"step {step:>5}/{options.steps}  train loss {loss:.3f}{outcome}  {speed:,.0f} tokens/s  {left:.0f} s left"


def table(result: Result) -> str:
    """What every rank holds, and what it would hold unsharded."""
    row = "{:>4} {:>11} {:>12} {:>14} {:>16} {:>15} {:>14}".format
    lines = [row("rank", "parameters", "elements", "state bytes", "unsharded bytes", "gradient bytes", "peak memory")]
    for rank, usage in enumerate(result.usages):
        numbers = (
            usage.parameters,
            usage.elements,
            usage.state,
            result.unsharded_state,
            usage.gradients,
            usage.peak,
        )
        lines.append(row(rank, *(f"{number:,}" for number in numbers)))
    lines.append("parameters, elements: what the rank's optimizer owns; state bytes: what it keeps for them")
    lines.append("gradient bytes: what param.grad keeps after backward; zero2 uses the buffers named above besides")
    lines.append(PEAK_NOTE)
    return "\n".join(lines)


def printable(data: bytes) -> str:
    """Text that is safe to print, whatever the model wrote and whatever the terminal can show."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in data.decode(errors="replace"))
    return text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)


def compare(result: Result, reference: Result, world: World) -> bool:
    """Say how far apart two trainings ended, over all parameters and ranks, and whether that is as it must be."""
    pairs = zip(result.final, reference.final, strict=True)
    apart = torch.stack([(ours.double() - theirs).abs().max() for ours, theirs in pairs]).max()  # NaN stays NaN
    moved = sum(not torch.equal(old, new) for old, new in zip(result.initial, result.final, strict=True))
    largest = world.gather(apart).max().item()
    all_moved = int(world.gather(torch.tensor(moved)).min())
    world.say(f"parameters that moved from their initial values: {all_moved} of {len(result.initial)}")
    world.say(f"largest parameter difference to DDP + AdamW: {largest}")
    return all_moved == len(result.initial) and largest == 0.0


def draw(path: Path, result: Result, reference: Result | None) -> None:
    """Losses, optimizer state and peak memory as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, state, peak = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    draw_losses(losses, result, reference)
    draw_bars(state, [usage.state / 2**20 for usage in result.usages], "optimizer state per rank (MiB)")
    state.axhline(result.unsharded_state / 2**20, color="black", linestyle="--", label="unsharded")
    state.set_ylim(0, 1.3 * result.unsharded_state / 2**20)
    state.legend(loc="upper right")
    draw_bars(peak, [usage.peak / 2**20 for usage in result.usages], "peak memory per rank (MiB)")
    figure.supxlabel(PEAK_NOTE, fontsize="small")
    figure.savefig(path)


def draw_losses(axes: "Axes", result: Result, reference: Result | None) -> None:
    """Training and validation loss by step; the reference lies under them, wider and paler."""
    steps = range(1, len(result.train_losses) + 1)
    if reference is not None:
        axes.plot(steps, reference.train_losses, color="orange", alpha=0.4, linewidth=4, label="training, DDP + AdamW")
    axes.plot(steps, result.train_losses, color="tab:blue", linewidth=0.8, label=f"training, {result.mode}")
    axes.plot(*zip(*result.validation_losses, strict=True), "o-", color="tab:red", label=f"validation, {result.mode}")
    axes.set(title="loss (nats per byte)", xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_bars(axes: "Axes", values: Sequence[float], title: str) -> None:
    """One bar per rank, with its number."""
    ranks = [str(rank) for rank in range(len(values))]
    axes.bar_label(axes.bar(ranks, values, color="tab:blue", width=0.6), fmt="%.2f")
    axes.margins(y=0.15)
    axes.set(title=title, xlabel="rank")


# Main


def run(options: Namespace, corpus: Corpus, world: World) -> bool:
    """Train once, or twice to compare, and report; whether all is as it must be. A collective."""
    reference = None
    if options.compare:
        if world.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
            torch.use_deterministic_algorithms(True)
        world.say("training with ddp, to compare")
        reference = train("ddp", options, corpus, world)
        world.say(f"\n{table(reference)}\n")
    world.say(f"training with {options.optimizer} on {world.size} x {world.device.type}")
    result = train(options.optimizer, options, corpus, world)
    world.say(f"\nsample, after {PROMPT!r}:\n{printable(result.sample)}\n")
    world.say(f"{table(result)}\n")
    if options.plot is not None and world.rank == 0:
        draw(options.plot, result, reference)
    return reference is None or compare(result, reference, world)


def main() -> int:
    """Everything between the command line and the exit code."""
    options = parse_options()
    try:
        corpus = Corpus.load(options.text, options.context)
    except (OSError, ValueError) as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    world = World.join()
    if options.compare and options.optimizer == "zero2" and world.size > 2:
        world.say(
            "train_gpt.py: error: Expected at most 2 ranks for --optimizer zero2 --compare: at more, zero2 sums in\n"
            "rank order, which is another order than DDP's. tests/multiproc/test_overlap_parity.py compares those."
        )
        dist.destroy_process_group()
        return 2
    try:
        return 0 if run(options, corpus, world) else 1
    except Refusal as error:
        if world.rank == 0:
            print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
