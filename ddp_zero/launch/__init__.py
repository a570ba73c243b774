"""Starting a job: torchrun on every host with ``ddp-zero launch``, and the process group in the script.

Importing this package imports `init_process_group` for scripts, and not the launcher. torch, which takes seconds, is
imported by the first call.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["init_process_group"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(
    backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    device_id: torch.device | int | None = None,
) -> None:
    """As `torch.distributed.init_process_group` from the environment, but safe with ``torchrun --max-restarts``.

    torchrun keeps the addresses of the previous attempt, and torch's own function may take them for addresses of this
    attempt, especially if ranks start at different times. This function finds only the ranks of this attempt. Without
    torchrun it is torch's function.

    Args:
        backend: such as ``"gloo"`` or ``"nccl"``; None lets torch choose by the available devices.
        timeout: time-out of the process group's operations, and of waiting for all ranks here; None for torch's
            defaults.
        device_id: the accelerator that this process uses, as for torch's function.

    Raises:
        RuntimeError: if the environment does not specify this rank and the address of its peers, or if a rank has not
            arrived within the time-out.
    """
    from torch.distributed import init_process_group as init_default_group
    from torch.distributed import is_torchelastic_launched
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    from ddp_zero.core.comm import store_of_this_attempt

    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"torchrun's variables are missing from the environment: {', '.join(missing)} of {', '.join(_VARIABLES)}. "
            "Start the script with torchrun, or call torch.distributed.init_process_group() with an init_method. "
            "[ZERO-501]"
        )
    if not is_torchelastic_launched():
        init_default_group(backend, timeout=timeout, device_id=device_id)
        return
    limit = timeout or default_pg_timeout
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    init_default_group(
        backend,
        store=store_of_this_attempt(store, rank, world_size, limit),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )
