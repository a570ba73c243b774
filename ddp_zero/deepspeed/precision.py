"""A model in the dtypes of a configuration: parameters cast, buffers as they are unless it says otherwise."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.keys import ConfigError
from ddp_zero.deepspeed.config.sections import DTYPES


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name of `ddp_zero.deepspeed.config.sections.DTYPES`."""
    found = getattr(torch, DTYPES[name])
    assert isinstance(found, torch.dtype), "the table names dtypes"
    return found


def cast(module: nn.Module, config: Config) -> None:
    """Cast a model's floating parameters, and its buffers where the configuration says so.

    Raises:
        ConfigError: for parameters of fp16 or bf16 if neither mode is enabled, naming one.
    """
    dtype = dtype_named(config.dtype)
    if dtype is torch.float32:
        for name, param in module.named_parameters():
            if param.dtype in (torch.float16, torch.bfloat16):
                raise ConfigError(
                    f"Expected parameters of fp32 without fp16 or bf16 enabled, got {name} of {param.dtype}. Enable "
                    "the mode in the configuration, or pass model.float()."
                )
    else:
        _apply(module, lambda tensor: tensor.to(dtype) if _is_floating_parameter(tensor) else tensor)
        _cast_buffers(module, _patterns(module, config, dtype), torch.float32)
    if config.data_types.buffer_dtype is not None:
        kept = set(map(id, _matching(module, _patterns(module, config, dtype))))
        wanted = dtype_named(config.data_types.buffer_dtype)
        _apply(
            module,
            lambda one: one if _is_parameter(one) or id(one) in kept or not one.is_floating_point() else one.to(wanted),
        )


def _apply(module: nn.Module, change: Any) -> None:
    """As `torch.nn.Module.to` does it, for parameters and buffers."""
    module._apply(change)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _is_floating_parameter(tensor: Tensor) -> bool:
    return _is_parameter(tensor) and tensor.is_floating_point()


def _cast_buffers(module: nn.Module, pattern: re.Pattern[str] | None, dtype: torch.dtype) -> None:
    chosen = set(map(id, _matching(module, pattern)))
    if chosen:
        _apply(module, lambda one: one.to(dtype) if id(one) in chosen else one)


def _matching(module: nn.Module, pattern: re.Pattern[str] | None) -> Iterator[Tensor]:
    """Floating buffers by their full names."""
    for name, buffer in module.named_buffers() if pattern is not None else ():
        if pattern is not None and buffer.is_floating_point() and pattern.search(name):
            yield buffer


def _patterns(module: nn.Module, config: Config, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names of buffers that stay in fp32: those of the configuration, or those that transformers models list."""
    setting = config.data_types.keep_in_fp32_modules
    if dtype is torch.float32:
        return None
    if setting != "auto":
        names = {name.replace("*", ".*") for name in setting}
    else:
        names = set(_listed(module, dtype))
    return re.compile("|".join(sorted(names))) if names else None


def _listed(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    attributes = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype is torch.float16)
    for path, child in module.named_modules():
        for attribute in attributes:
            for name in getattr(child, attribute, None) or ():
                pattern = name.replace("*", ".*")
                yield rf"^{re.escape(path)}\..*{pattern}" if path else pattern


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in nested lists, tuples and dicts, cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(cast_inputs(one, dtype) for one in value)
    if isinstance(value, dict):
        return {name: cast_inputs(one, dtype) for name, one in value.items()}
    return value


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """`torch.autocast` if the configuration enables it."""
    return torch.autocast(device.type, torch.bfloat16) if config.autocast.enabled else nullcontext()
