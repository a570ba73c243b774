"""The library's logger, its warnings, and `Trace`: events of the flight record that a profiler shows as ranges."""

import logging
import sys
import warnings
from contextlib import AbstractContextManager

import torch

from ddp_zero.core.comm.recorder import Label, Recorder

logger = logging.getLogger("ddp_zero")

_INSIDE = ("ddp_zero", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn at the user's line: the nearest line outside of this library, of torch and of their decorators."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


class Trace(Recorder):
    """Records the events of one optimizer. The names of their profiler ranges are part of the interface."""

    is_profiling = staticmethod(torch.autograd._profiler_enabled)  # type: ignore[attr-defined]

    def open_range(self, label: Label) -> AbstractContextManager[object]:
        name = label.phase if label.bucket < 0 else f"{label.phase} (bucket {label.bucket})"
        opened = torch.profiler.record_function(f"ddp_zero::{name}")
        opened.__enter__()
        return opened
