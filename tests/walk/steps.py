"""Counts the files, calls and calls into a different file that a function passes within the library."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "ddp_zero"
_IN_FUTURES = {"_value_or_named_error"}  # runs in a future's callback: on this thread if the future is done already
_INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}  # not calls in every version of Python


@dataclass
class Walk:
    """What was called while something ran, on this thread.

    Attributes:
        calls: how often each function of the library was called, by file and name.
        crossings: how often one was called from a different file of the library, directly or through other code.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def files(self) -> set[str]:
        """The files in which functions were called."""
        return {file for file, _ in self.calls}

    @property
    def packages(self) -> set[str]:
        """The packages of these files."""
        return {file.rpartition("/")[0] for file in self.files}

    def __sub__(self, other: "Walk") -> "Walk":
        return Walk(self.calls - other.calls, self.crossings - other.crossings)

    def summary(self) -> dict[str, int]:
        """Plain numbers."""
        return {
            "files": len(self.files),
            "packages": len(self.packages),
            "calls": self.calls.total(),
            "crossings": self.crossings.total(),
        }


def walk(act: Callable[[], object]) -> Walk:
    """Run a function and count what it calls in the library."""
    found = Walk()
    prefix = str(PACKAGE)

    def name_of(frame: FrameType) -> str:
        return frame.f_code.co_filename[len(prefix) + 1 :]

    def is_ours(frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.startswith(prefix) and code.co_name not in _INLINED | _IN_FUTURES

    def caller_of(frame: FrameType) -> FrameType | None:
        outer = frame.f_back
        while outer is not None and not is_ours(outer):
            outer = outer.f_back
        return outer

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        called = name_of(frame), getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        found.calls[called] += 1
        outer = caller_of(frame)
        if outer is not None and outer.f_code.co_filename != frame.f_code.co_filename:
            found.crossings[called] += 1

    gc.collect()  # finalizers of what was dropped before, at moments that vary, are no part of it
    was_on = gc.isenabled()
    gc.disable()
    sys.setprofile(on_event)
    try:
        act()
    finally:
        sys.setprofile(None)
        if was_on:
            gc.enable()
    return found
