"""The position of a training, saved with model and optimizer: its progress, and the recipe that it began with."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from gpt.corpus import Corpus

RECIPE = ("steps", "accumulate", "heads", "lr", "clip", "seed")  # not visible in shapes and dtypes


class Refusal(Exception):
    """An error that a different command line avoids. It is shown without a traceback."""


@dataclass
class Position:
    """The progress of a training.

    Attributes:
        windows: number of windows of text that all ranks together see in a backward pass.
        generator: random number generator of those windows.
        scheduler: schedule of the learning rate.
        train_losses: mean loss of every step so far.
        validation_losses: steps, and the loss on held-out text after each of them.
    """

    windows: int
    generator: torch.Generator
    scheduler: LambdaLR
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as values that a checkpoint accepts."""
        return {
            "windows": self.windows,
            "generator": self.generator.get_state(),
            "scheduler": self.scheduler.state_dict(),
            "train_losses": self.train_losses,
            "validation_losses": self.validation_losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position of `state_dict`."""
        self.windows = state["windows"]
        self.generator.set_state(state["generator"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.train_losses = state["train_losses"]
        self.validation_losses = state["validation_losses"]


def recipe(options: Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return the values that must not change when a training is resumed."""
    return {**{f"--{name}": getattr(options, name) for name in RECIPE}, "a text with CRC-32": corpus.checksum}


def check_recipe(saved: Mapping[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume the checkpoint in ``folder`` with a recipe other than its own."""
    for what, expected in saved.items():
        if given[what] != expected:
            raise Refusal(
                f"Expected {what} {expected} as in {folder}, got {given[what]}. Give what the run began with."
            )
