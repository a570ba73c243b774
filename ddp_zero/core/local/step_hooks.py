"""Local steps without the hooks that torch calls around the step of every optimizer.

Global hooks see the user's optimizer, once per step, from `ZeroRedundancyOptimizer.step`. They must not see the inner
optimizers, which take that step bucket by bucket and are unknown to the user.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
_GLOBALS = {**vars(of_torch), "_global_optimizer_pre_hooks": {}, "_global_optimizer_post_hooks": {}}


def is_wrapped_by_torch(inner: Optimizer) -> bool:
    """True if ``inner.step`` is the class's own method in torch's wrapper: a profiler's range and hooks.

    A user's wrapper may copy the attributes of torch's wrapper, but not its code.
    """
    return "step" not in vars(inner) and getattr(type(inner).step, "__code__", None) is _WRAPPER


def local_step(inner: Optimizer) -> Callable[..., Any]:
    """``inner.step`` without global hooks: in a copy of torch's wrapper that has none."""
    if not is_wrapped_by_torch(inner):
        return inner.step
    step: Any = type(inner).step
    return partial(FunctionType(_WRAPPER, _GLOBALS, step.__name__, step.__defaults__, step.__closure__), inner)
