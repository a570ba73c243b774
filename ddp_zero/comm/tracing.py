"""The library's logger, and its profiler labels."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

logger = logging.getLogger("ddp_zero")


def label(verb: str, **where: int) -> AbstractContextManager[object]:
    """A profiler range such as ``ddp_zero::local_step (bucket 3)``, if there is a profiler; part of the interface."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    place = ", ".join(f"{name} {value}" for name, value in where.items())
    return torch.profiler.record_function(f"ddp_zero::{verb} ({place})" if place else f"ddp_zero::{verb}")
