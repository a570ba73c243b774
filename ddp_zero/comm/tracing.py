"""The library's logger, and its labels: each is an event of the flight record and, if there is a profiler, a range."""

import logging
from contextlib import AbstractContextManager

import torch

from ddp_zero.record.recorder import Recorder, Span

logger = logging.getLogger("ddp_zero")


class Trace(Recorder):
    """The events of one optimizer. The names of their ranges in a profiler are part of the interface."""

    is_profiling = staticmethod(torch.autograd._profiler_enabled)  # type: ignore[attr-defined]

    def in_range(self, span: Span) -> AbstractContextManager[object]:
        """An event that is a range of the profiler, too."""
        return _Profiled(span, span.phase if span.bucket < 0 else f"{span.phase} (bucket {span.bucket})")


class _Profiled:
    """An event that is a range of the profiler, too."""

    def __init__(self, span: Span, name: str) -> None:
        self._span = span
        self._range = torch.profiler.record_function(f"ddp_zero::{name}")

    def __enter__(self) -> None:
        self._range.__enter__()
        self._span.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._span.__exit__(kind, error, traceback)
        self._range.__exit__(kind, error, traceback)
