"""The command line."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def positive(text: str) -> int:
    """Read a positive number."""
    if int(text) < 1:
        raise ArgumentTypeError(f"Expected at least 1, got {text}.")
    return int(text)


def limit(text: str) -> float:
    """Read an upper limit."""
    if not float(text) > 0:
        raise ArgumentTypeError(f"Expected a number above 0, got {text}.")
    return float(text)


def parse_options(modes: Iterable[str]) -> Namespace:
    """Read the command line, or exit with a message.

    Args:
        modes: the choices of ``--optimizer``.
    """
    parser = ArgumentParser(
        description="Train a small byte-level GPT with DDP and a sharded optimizer.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", choices=list(modes), default="zero1", help="how the optimizer state is kept")
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
    check_options(options, parser)
    return options


def check_options(options: Namespace, parser: ArgumentParser) -> None:
    """Exit with a message if options do not go together."""
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
