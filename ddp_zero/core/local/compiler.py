"""What keeps `torch.compile` out of the library where a whole training step is compiled."""

from types import FunctionType
from typing import Any, TypeVar, cast

import torch

_marks = torch._C._dynamo.eval_frame
_Function = TypeVar("_Function")


def never_compiled(function: _Function) -> _Function:
    """A decorator for functions that torch calls from C++: neither they nor what they call is ever compiled.

    In a compiled step the compiler would look at each of them, and they communicate. A mark on their code costs nothing
    per call, where `torch.compiler.disable` costs microseconds for every bucket and gradient. It has no effect where
    compiled code calls the function itself.
    """
    return _mark(function, _marks._FrameAction.SKIP)


def not_compiled(function: _Function) -> _Function:
    """As `never_compiled`, but its callees may be compiled: it asks `callback_of_compiler`."""
    return _mark(function, _marks._FrameAction.DEFAULT)


callback_of_compiler = _marks.get_eval_frame_callback
"""None unless Python functions that are called now will be compiled."""


def _mark(function: _Function, callees: Any) -> _Function:
    strategy = _marks._FrameExecStrategy(_marks._FrameAction.SKIP, callees)
    _marks.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function
