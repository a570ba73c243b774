"""What the library says while it runs: one logger, and profiler labels in one shape."""

import logging

import torch

logger = logging.getLogger("ddp_zero")


def label(verb: str, **where: int) -> torch.profiler.record_function:
    """A profiler range such as ``ddp_zero::local_step (bucket 3)``; the labels are part of the interface."""
    place = ", ".join(f"{name} {value}" for name, value in where.items())
    return torch.profiler.record_function(f"ddp_zero::{verb} ({place})" if place else f"ddp_zero::{verb}")
