"""Memory that an optimizer and its model hold on this rank, by part. Nothing here waits for a device."""

import resource
from pathlib import Path

import torch

from ddp_zero.core.local.placeholders import on_this_rank, untouched
from ddp_zero.core.step.report import state_bytes
from ddp_zero.tools.insight.optimizer_parts import OptimizerParts

_PAGE = resource.getpagesize()
_STATM = Path("/proc/self/statm")


def parts(running: OptimizerParts) -> dict[str, int]:
    """Bytes now: parameters, masters, state, gradients, and buffers that buckets share.

    Parameters count whole, gradients as far as they are on this rank.
    """
    sharded = running.sharded
    gradients = 0
    with untouched():
        params = list(sharded.table.params)
        for grad in (param.grad for param in params):
            held = None if grad is None else on_this_rank(grad)
            gradients += 0 if held is None else held.numel() * held.element_size()
        parameters = sum(param.numel() * param.element_size() for param in params)
    buffers = 0 if running.hook is None else running.hook.gradients.buffer_bytes()[0]
    return {
        "parameter_bytes": parameters,
        "master_bytes": state_bytes(dict(sharded.stepped.masters)),
        "state_bytes": state_bytes(sharded.inner_state),
        "gradient_bytes": gradients,
        "buffer_bytes": buffers,
    }


def of_process(device: torch.device) -> tuple[int, int]:
    """Bytes in use and at most: allocated on an accelerator, or resident in the process; 0 where that is unknown."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not _STATM.exists():
        return 0, most
    now = int(_STATM.read_text().split()[1]) * _PAGE
    return now, max(now, most)
