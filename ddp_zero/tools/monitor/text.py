"""The lines that a `Monitor` prints."""

from collections.abc import Mapping

_MIB = 1 << 20

_NAMES = {"fwd": "forward", "bwd": "backward", "bwd_allreduce": "wait_reduce", "step_inner": "local_step"}


def means(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Means over the steps between two readings of `opt.stats()`: of each ``total_x``, as ``mean_x``."""
    steps = max(after["step"] - before.get("step", 0), 1)
    totals = [name for name in after if name.startswith("total_")]
    return {name.replace("total_", "mean_", 1): (after[name] - before.get(name, 0)) / steps for name in totals}


def breakdown(rank: int, step: int, seconds: Mapping[str, float]) -> str:
    """Where the time of a step goes, in the words of DeepSpeed's ``wall_clock_breakdown``.

    ``bwd_allreduce`` is what backward waits for reductions, ``bwd_inner`` the rest of backward without what a step
    inside it takes; ``step`` is the local step and all that the step waits for.

    Args:
        rank: this rank.
        step: the last of the steps.
        seconds: by phase, on average over some steps.
    """
    found = {name: seconds.get(phase, 0.0) for name, phase in _NAMES.items()}
    waits = sum(seconds.get(phase, 0.0) for phase in ("wait_sync", "wait_errors", "share_errors"))
    found["step_allgather"] = waits
    found["step"] = found["step_inner"] + waits + seconds.get("decide", 0.0)
    inside = found["bwd_allreduce"] + seconds.get("inside_backward", 0.0)
    found["bwd_inner"] = max(found["bwd"] - inside, 0.0)
    order = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step", "step_inner", "step_allgather")
    return f"[Rank {rank}] step {step}, time (ms) | " + " | ".join(f"{name}: {found[name] * 1e3:.2f}" for name in order)


def memory_line(rank: int, step: int, phase: str, nbytes: Mapping[str, float]) -> str:
    """Memory at the end of a phase, by part, in MiB."""
    parts = " | ".join(f"{name.removesuffix('_bytes')}: {number / _MIB:.2f}" for name, number in nbytes.items())
    return f"[Rank {rank}] step {step}, after {phase}, memory (MiB) | {parts}"
