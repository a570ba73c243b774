"""The library's logger, and its labels: each is an event of the flight record and, under a profiler, a range."""

import logging
from contextlib import AbstractContextManager

import torch

from ddp_zero.core.comm.recorder import Recorder, Span

logger = logging.getLogger("ddp_zero")


class Trace(Recorder):
    """The events of one optimizer. Their range names in a profiler are part of the interface."""

    is_profiling = staticmethod(torch.autograd._profiler_enabled)  # type: ignore[attr-defined]

    def open_range(self, span: Span) -> AbstractContextManager[object]:
        name = span.phase if span.bucket < 0 else f"{span.phase} (bucket {span.bucket})"
        opened = torch.profiler.record_function(f"ddp_zero::{name}")
        opened.__enter__()
        return opened
