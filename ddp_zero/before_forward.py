"""What a model does before a forward pass with parameters that are on their way (``sync="forward"``).

Most uses wait by themselves, see `awaited`. This is for those that look at the type of a parameter first: compiled code
is made for one type, and `torch.nn`'s attention has a faster way, with other last bits, only for parameters that are
nothing special, and only in evaluation. So evaluation and compiled parts of a model wait for all parameters. Where the
whole model with DDP around it is compiled, nothing runs before compiled code; then steps wait again.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.sharded_step import ShardedStep

_HAVE_A_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def complete_before_forward(ddp: DistributedDataParallel, sharded: ShardedStep) -> None:
    """Register what waits before a forward pass of the model, or of one of its parts in evaluation."""
    parts = [module for module in ddp.modules() if isinstance(module, _HAVE_A_FAST_PATH)]
    for module in (ddp, ddp.module, *parts):
        module.register_forward_pre_hook(_BeforeForward(sharded))
    sharded.leaves_syncs = True


class _BeforeForward:
    """A forward pre-hook; one that does nothing in copies of the model."""

    def __init__(self, sharded: ShardedStep | None = None) -> None:
        self._sharded = (lambda: None) if sharded is None else weakref.ref(sharded)  # a model outlives its optimizer
        self._is_being_compiled = _at_compile_time(self._sharded)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _BeforeForward, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._is_being_compiled()
            return
        sharded = self._sharded()
        if sharded is not None and (_evaluates(module) or _is_ddp_of_compiled_parts(module)):
            sharded.binding.sync.complete()


def _at_compile_time(reference: Callable[[], ShardedStep | None]) -> Callable[[], None]:
    """What the compiler calls instead of compiling it, as `torch.compiler.assume_constant_result` does it."""

    def note() -> None:
        sharded = reference()
        if sharded is not None:
            sharded.leaves_syncs = False
            sharded.binding.sync.complete()

    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note


def _evaluates(module: nn.Module) -> bool:
    return not (module.training and torch.is_grad_enabled())


def _is_ddp_of_compiled_parts(module: nn.Module) -> bool:
    """Walks over all modules before every forward pass: `torch.nn.Module.modules` would take several times as long."""
    parts: list[nn.Module | None] = [module] if isinstance(module, DistributedDataParallel) else []
    for part in parts:
        if part is not None:
            if "_orig_mod" in part._modules or part._compiled_call_impl is not None:
                return True
            parts.extend(part._modules.values())
    return False
