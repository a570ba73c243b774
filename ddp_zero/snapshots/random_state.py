"""The states of the random number generators that training scripts use, as plain values."""

import random
import sys
from typing import Any

import torch

from ddp_zero.values import Tree


def random_states() -> Tree:
    """States of Python's generator, torch's on the CPU and on the current accelerator, and NumPy's if it is in use."""
    version, words, gauss = random.getstate()
    # tensors, not hundreds of numbers in JSON: this runs in the training loop
    states: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    device = _accelerator()
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist()), *(int(rest[0]), int(rest[1]), float(rest[2])))
    return states


def set_random_states(states: Any) -> None:
    """Restore `random_states`; generators missing on a side keep theirs. ValueError for a state that does not fit."""
    try:
        if "python" in states:
            version, words, gauss = states["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        device = _accelerator()
        if device is not None and device.type in states:
            torch.get_device_module(device).set_rng_state(states[device.type])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in states:
            kind, keys, *rest = states["numpy"]
            numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise ValueError(f"Expected states of random number generators, got {error}. [ZERO-644]") from error


def _accelerator() -> torch.device | None:
    """The current accelerator, unless it is not in use yet: a state would initialise it."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    return device if getattr(module, "is_initialized", lambda: True)() else None
