"""What keeps `torch.compile` out of the library where a whole training step is compiled."""

from types import FunctionType
from typing import TypeVar, cast

import torch

_marks = torch._C._dynamo.eval_frame
_Function = TypeVar("_Function")


def never_compiled(function: _Function) -> _Function:
    """A decorator for functions that torch calls from C++: neither they nor what they call is ever compiled.

    In a compiled step the compiler would look at each of them, and they communicate. A mark on their code costs nothing
    per call, where `torch.compiler.disable` costs microseconds for every bucket and gradient. It has no effect where
    compiled code calls the function itself.
    """
    skip = _marks._FrameAction.SKIP
    _marks.set_code_exec_strategy(cast(FunctionType, function).__code__, _marks._FrameExecStrategy(skip, skip))
    return function
