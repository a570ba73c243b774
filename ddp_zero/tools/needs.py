"""Requirements of PyTorch; `ddp_zero` imports this file first, so that an unusable build is refused with the reason.

Features are probed; version numbers play no role. Those of one mode are probed when an optimizer is built in it, as by
`check_torch`, or at their use; all by `check`.
"""

import warnings

with warnings.catch_warnings():
    # torch says so once in a process, at the first of these imports; nothing here uses NumPy
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch.distributed as dist

if not dist.is_available():
    raise ImportError(
        "ddp_zero needs a PyTorch with torch.distributed, and this build is without it. Install a build of PyTorch "
        "that has it, such as those for Linux; ddp_zero has nothing to do without process groups. [ZERO-910]"
    )
try:
    import ddp_zero.core.ddp  # noqa: F401
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"Expected a PyTorch that has what ddp_zero relies on, got {torch.__version__}, which lacks it: {error}. "
        "Install one of the versions in docs/status.md, such as torch==2.13.0. [ZERO-910]"
    ) from error
