"""Waits before a forward pass for parameters that are still in flight (``sync="forward"``).

Most uses of a parameter wait by themselves, see `ddp_zero.values.placeholders`. This file waits where a use does not.

Some functions pass a tensor to C++ without checking its type: `torch.func.vmap` and ``grad``,
`torch.sparse_coo_tensor`, `torch.tensor`, extensions. So each module waits for its direct parameters.

Compiled code is specialized for one type of parameters. So evaluation, and models with compiled parts, wait for all
parameters. If DDP itself is compiled, no hook runs before compiled code; then steps wait again.

Steps wait from the start if waiting before forward is not enough: TorchScript reads parameters in C++, and the
attention of `torch.nn` has a faster evaluation path, with different last bits, only for plain parameters in modules
without hooks.
"""

import weakref
from collections.abc import Callable
from itertools import chain, compress, repeat
from operator import attrgetter, contains, is_not, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.local.compiler import callback_of_compiler, never_compiled, not_compiled
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import wait_for

_STEPS_WAIT_FOR = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, torch.jit.ScriptModule)


def wait_before_forward(model: nn.Module, shard: Shard) -> None:
    """Register hooks that wait before forward passes of a model and its parts, so that steps need not wait."""
    modules = list(model.modules())
    if any(isinstance(module, _STEPS_WAIT_FOR) for module in modules):
        return
    for module in (model, model.module) if isinstance(model, DistributedDataParallel) else (model,):
        module.register_forward_pre_hook(_BeforeForward(shard))
    for module in modules:
        if module._parameters and _wait_for_own not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_wait_for_own)
    shard.syncs_outlast_step = True


@never_compiled
def _wait_for_own(module: nn.Module, args: Any) -> None:
    """A forward pre-hook; it does nothing if all parameters have arrived, as in copies of the model."""
    if not torch.compiler.is_compiling():
        for param in module._parameters.values():
            wait_for(param)


class _BeforeForward:
    """A forward pre-hook of the whole model; it does nothing in copies of the model."""

    def __init__(self, shard: Shard | None = None) -> None:
        self._shard = (lambda: None) if shard is None else weakref.ref(shard)  # a model outlives its optimizer
        self._is_being_compiled = _at_compile_time(self._shard)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _BeforeForward, ()

    @not_compiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._is_being_compiled()
        else:
            self._before(module, callback_of_compiler() is not None)

    @never_compiled
    def _before(self, module: nn.Module, will_be_compiled: bool) -> None:
        if will_be_compiled:  # DDP itself is not compiled, parts of its module are
            self._is_being_compiled()
        shard = self._shard()
        is_evaluation = not (module.training and torch.is_grad_enabled())
        if shard is not None and (is_evaluation or _is_ddp_of_compiled_parts(module)):
            shard.pending_syncs.complete()


def _at_compile_time(reference: Callable[[], Shard | None]) -> Callable[[], None]:
    """A function that the compiler calls instead of compiling it, see `torch.compiler.assume_constant_result`."""

    def note() -> None:
        """Make steps wait from now on."""
        shard = reference()
        if shard is not None:
            shard.syncs_outlast_step = False
            shard.pending_syncs.complete()

    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note


def _is_ddp_of_compiled_parts(module: nn.Module) -> bool:
    """True if a DDP model has compiled parts; runs before every forward pass, where ``modules()`` would be slower."""
    level: list[Any] = [module] if isinstance(module, DistributedDataParallel) else []
    parts_of = attrgetter("_modules")
    compiled = attrgetter("_compiled_call_impl")
    values = methodcaller("values")
    while level:
        parts = [*map(parts_of, level)]
        if any(map(contains, parts, repeat("_orig_mod"))) or any(map(is_not, map(compiled, level), repeat(None))):
            return True
        found = [*chain.from_iterable(map(values, parts))]
        level = [*compress(found, map(is_not, found, repeat(None)))]
    return False
