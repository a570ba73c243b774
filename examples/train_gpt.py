"""Train a small byte-level GPT with DistributedDataParallel and a sharded optimizer, on text that Python ships.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --compare --plot run.png
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --dtype bf16 --master-weights --clip 1 --accumulate 4
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --save-every 100 --resume runs/1
    python examples/train_gpt.py --text my_book.txt --steps 2000

This file shows the library: `MODES` builds the optimizer of each mode, and `train` uses it. The folder ``gpt`` next to
it has the rest: model, text, processes, command line and reports.

Plain and sharded training differ in few lines. ``--optimizer zero1-overlap`` steps inside backward,
``zero1-interleaved`` while backward still computes, and ``zero2`` shards gradients as well. ``--clip`` and
``--master-weights`` are options of the sharded optimizer; for plain training, `step_by_hand` does the same with torch's
own parts.

All ranks draw the same windows of text, and each trains on its share of them, so the data does not depend on how many
ranks there are. After an interruption, the command with ``--resume``, given again, continues to the same end, at any
number of ranks that divides the batch. The text is Python's language reference unless ``--text`` names another file.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from gpt.adamw import BETAS, Outcome, lr_factor, parameter_groups, step_by_hand
from gpt.corpus import Corpus
from gpt.measuring import copy_parameters, evaluate, forget_peak_memory, gradient_bytes, measure
from gpt.model import GPT
from gpt.options import DTYPES, parse_options
from gpt.position import Position, Refusal, check_recipe, recipe
from gpt.report import Result, compare, printable, report_step, table
from gpt.world import World

PROMPT = b"The "
SAMPLE_BYTES = 200
BUCKETS = 8  # about as many gradient buckets as DDP makes of the model


# Modes


def build_ddp(model: DistributedDataParallel, options: Namespace) -> Optimizer:
    """Build AdamW as it is: every rank keeps the state of all parameters, and masters of all if there are any."""
    groups = parameter_groups(model)
    if options.master_weights:
        for group in groups:
            group["params"] = [(name, nn.Parameter(param.detach().float())) for name, param in group["params"]]
    return AdamW(groups, lr=options.lr, betas=BETAS)


def build_sharded(
    model: DistributedDataParallel,
    options: Namespace,
    stage: int = 1,
    overlap: bool = True,
    interleaved: bool | None = None,
) -> Optimizer:
    """Build ZeRO: a rank keeps optimizer state, and in stage 2 gradients, only for the parameters it owns."""
    return shard_optimizer(
        model,
        AdamW,
        params=parameter_groups(model),
        stage=stage,
        overlap=overlap,
        interleaved=interleaved,
        max_grad_norm=options.clip,
        master_weights=options.master_weights,
        lr=options.lr,
        betas=BETAS,
    )


MODES: Mapping[str, Callable[[DistributedDataParallel, Namespace], Optimizer]] = {
    "ddp": build_ddp,
    "zero1": partial(build_sharded, overlap=False),
    "zero1-overlap": partial(build_sharded, interleaved=False),
    "zero1-interleaved": partial(build_sharded, interleaved=True),
    "zero2": partial(build_sharded, stage=2),
}


# Training


def train(mode: str, options: Namespace, corpus: Corpus, world: World) -> Result:
    """Train from the seed, or from a checkpoint. A collective."""
    torch.manual_seed(options.seed)
    model = GPT(options.context, options.layers, options.width, options.heads).to(world.device, DTYPES[options.dtype])
    initial = copy_parameters(model)
    forget_peak_memory(world.device)
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
        report_step(position, outcome, (time.perf_counter() - begin) / (step - behind), options, world)
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


def backward(ddp: DistributedDataParallel, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Average gradients over batches and ranks. A collective.

    All passes but the last only add to ``param.grad``, which is whole in every mode. In stage 2, ``opt.accumulate()``
    instead of ``no_sync()`` keeps only this rank's part, but it sends every pass, and rounds its sums differently than
    DDP.

    Returns:
        This rank's mean loss.
    """
    mean = torch.zeros((), device=ddp.device)
    for number, (inputs, targets) in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else ddp.no_sync():
            loss = ddp(inputs, targets) / len(batches)
            loss.backward()
        mean += loss.detach()
    return mean


def take_step(ddp: DistributedDataParallel, optimizer: Optimizer, clip: float | None) -> Outcome:
    """Take one step of either optimizer. A collective."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return step_by_hand(ddp, optimizer, clip)
    optimizer.step()
    record = optimizer.last_step
    assert record is not None, "there was a step"
    return Outcome(record.grad_norm, None if record.stepped else record.reason)


def resume(
    position: Position,
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    options: Namespace,
    corpus: Corpus,
    world: World,
) -> None:
    """Load the newest checkpoint, if there is one. A collective."""
    try:
        loaded = checkpoint.load(options.resume, ddp, optimizer)
    except FileNotFoundError:
        world.say(f"no checkpoint in {options.resume} yet: training from the beginning")
        return
    except ValueError as error:  # damaged, or another model or optimizer
        raise Refusal(str(error)) from error
    if loaded.folder == options.resume:
        raise Refusal(f"Expected --resume to name a folder of checkpoints, got one of them: {loaded.folder}.")
    check_recipe(loaded.extra["recipe"], recipe(options, corpus), loaded.folder)
    position.load_state_dict(loaded.extra["position"])
    if position.windows % world.size:
        raise Refusal(
            f"Expected a number of ranks that divides the {position.windows} windows per backward pass in "
            f"{loaded.folder}, got {world.size}."
        )
    world.say(f"resumed after step {loaded.step} with {position.windows // world.size} windows per rank")


# Main


def run(options: Namespace, corpus: Corpus, world: World) -> bool:
    """Train once, or twice to compare, and report. A collective.

    Returns:
        False if the two trainings differ.
    """
    reference = None
    if options.compare:
        world.be_deterministic()
        world.say("training with ddp, to compare")
        reference = train("ddp", options, corpus, world)
        world.say(f"\n{table(reference)}\n")
    world.say(f"training with {options.optimizer} on {world.size} x {world.device.type}")
    result = train(options.optimizer, options, corpus, world)
    world.say(f"\nsample, after {PROMPT!r}:\n{printable(result.sample)}\n")
    world.say(f"{table(result)}\n")
    if options.plot is not None and world.rank == 0:
        from gpt.plots import draw  # matplotlib is optional

        draw(options.plot, result, reference)
    return reference is None or compare(result, reference, world)


def main() -> int:
    """Read the command line, train, and return the exit code."""
    options = parse_options(MODES)
    try:
        corpus = Corpus.load(options.text, options.context)
    except (OSError, ValueError) as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    world = World.join()
    try:
        if options.compare and options.optimizer == "zero2" and world.size > 2:
            world.say(
                "train_gpt.py: error: Expected at most 2 ranks for --optimizer zero2 --compare: at more, zero2 sums "
                "in\nrank order, which is another order than DDP's. "
                "tests/multiproc/test_overlap_parity.py compares those."
            )
            return 2
        return 0 if run(options, corpus, world) else 1
    except Refusal as error:
        if world.rank == 0:
            print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        world.leave()


if __name__ == "__main__":
    sys.exit(main())
