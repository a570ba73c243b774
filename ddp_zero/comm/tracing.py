"""The library's logger, and its labels: each is an event of the flight record and, if there is a profiler, a range."""

import logging
from contextlib import AbstractContextManager, ExitStack

import torch

from ddp_zero.record.recorder import Recorder

logger = logging.getLogger("ddp_zero")


class Trace(Recorder):
    """The events of one optimizer."""

    def label(self, verb: str, bucket: int = -1) -> AbstractContextManager[object]:
        """An event, and a profiler range such as ``ddp_zero::local_step (bucket 3)``; part of the interface."""
        span = self.span(verb, bucket)
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return span
        both = ExitStack()
        both.enter_context(torch.profiler.record_function(f"ddp_zero::{verb}{_of(bucket)}"))
        both.push(span)
        span.__enter__()
        return both


def _of(bucket: int) -> str:
    return "" if bucket < 0 else f" (bucket {bucket})"
