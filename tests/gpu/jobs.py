"""Jobs on GPUs."""

import os

JOBS = [("gloo", 2), ("nccl", 1), ("nccl", 2)]


def keep_workspaces_small() -> None:
    """Before the first product: the workspaces of cuBLAS, 32 MiB for each stream, count as allocated memory."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
