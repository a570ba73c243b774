"""What this library cannot be imported without; `ddp_zero` imports this file first, so that the error says why."""

import torch.distributed as dist

if not dist.is_available():
    raise ImportError(
        "Expected a PyTorch with torch.distributed, got one that was built without it. Install a build of PyTorch "
        "that has it, such as those for Linux; ddp_zero has nothing to do without process groups."
    )
