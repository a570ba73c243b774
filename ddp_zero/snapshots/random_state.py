"""The states of the random number generators that training scripts use, as plain values."""

import random
import sys
from typing import Any

import torch
from torch import nn

from ddp_zero.values import Tree


def random_states(model: nn.Module) -> Tree:
    """States of Python's generator, torch's on the CPU and on an accelerator, and NumPy's if it is in use.

    The accelerator is the model's, or the current one for a model on the CPU.
    """
    version, words, gauss = random.getstate()
    # tensors, not hundreds of numbers in JSON: this runs in the training loop
    states: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    device = _accelerator(model)
    if device is not None:
        with torch.accelerator.device_index(device.index):
            states[device.type] = torch.get_device_module(device).get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist()), *(int(rest[0]), int(rest[1]), float(rest[2])))
    return states


def set_random_states(states: Any, model: nn.Module) -> None:
    """Restore `random_states`; generators missing on a side keep theirs. ValueError for a state that does not fit."""
    try:
        if "python" in states:
            version, words, gauss = states["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        device = _accelerator(model)
        if device is not None and device.type in states:
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).set_rng_state(states[device.type])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in states:
            kind, keys, *rest = states["numpy"]
            numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise ValueError(f"Expected states of random number generators, got {error}. [ZERO-644]") from error


def _accelerator(model: nn.Module) -> torch.device | None:
    """The model's accelerator or else the current one, unless it is not in use yet: a state would initialise it."""
    own = (param.device for param in model.parameters() if param.device.type != "cpu")
    device = next(own, torch.accelerator.current_accelerator())
    if device is None:
        return None
    module = torch.get_device_module(device)
    return device if getattr(module, "is_initialized", lambda: True)() else None
