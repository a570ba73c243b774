"""The part of a checkpoint that is neither model nor optimizer: where a training stands, and what it began with."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from gpt.corpus import Corpus

RECIPE = ("steps", "accumulate", "heads", "lr", "clip", "seed")  # what shapes and dtypes do not show


class Refusal(Exception):
    """An error that a different command line avoids. It is shown without a traceback."""


@dataclass
class Position:
    """Where a training stands.

    Attributes:
        windows: how many windows of text all ranks together see in a backward pass.
        generator: what draws those windows.
        scheduler: what sets the learning rate.
        train_losses: the mean loss of every step so far.
        validation_losses: steps, and the loss on held-out text after each of them.
    """

    windows: int
    generator: torch.Generator
    scheduler: LambdaLR
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the kinds of values that a checkpoint takes."""
        return {
            "windows": self.windows,
            "generator": self.generator.get_state(),
            "scheduler": self.scheduler.state_dict(),
            "train_losses": self.train_losses,
            "validation_losses": self.validation_losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to where `state_dict` was called."""
        self.windows = state["windows"]
        self.generator.set_state(state["generator"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.train_losses = state["train_losses"]
        self.validation_losses = state["validation_losses"]


def recipe(options: Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return what must not change when a training is resumed."""
    return {**{f"--{name}": getattr(options, name) for name in RECIPE}, "a text with CRC-32": corpus.checksum}


def check_recipe(saved: Mapping[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume the checkpoint in ``folder`` with a recipe that it was not saved with."""
    for what, expected in saved.items():
        if given[what] != expected:
            raise Refusal(
                f"Expected {what} {expected} as in {folder}, got {given[what]}. Give what the run began with."
            )
