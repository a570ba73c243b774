"""Time to plan ownership: ``python -m benchmarks.partition``."""

import random
import statistics
import time
from dataclasses import dataclass

from ddp_zero.core.plan.partition import partition_greedy
from ddp_zero.core.plan.shard_plan import ParameterSpec, plan_standalone

PARAMETERS = 10_000
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of CPU time of the partition and of the plan that follows it."""

    partition: float
    plan: float
    buckets: int


def measure(num_params: int, num_ranks: int, repeats: int = 5) -> Timing:
    """Plan a model of random sizes."""
    generator = random.Random(0)
    sizes = [generator.randrange(1, 10_000_000) for _ in range(num_params)]
    specs = [ParameterSpec(numel=size, nbytes=4 * size, kind="cpu/float32") for size in sizes]
    partition_ms, plan_ms = [], []
    for _ in range(repeats):
        started = time.process_time()
        owners = partition_greedy([spec.nbytes for spec in specs], num_ranks)
        partitioned = time.process_time()
        plan = plan_standalone(specs, owners, num_ranks, BUCKET_BYTES * num_ranks)
        partition_ms.append(1000 * (partitioned - started))
        plan_ms.append(1000 * (time.process_time() - partitioned))
    return Timing(statistics.median(partition_ms), statistics.median(plan_ms), len(plan.buckets))


def main() -> None:
    """Print median milliseconds of CPU time of the partition and of the whole plan, for several numbers of ranks."""
    print(f"{'parameters':>10} {'ranks':>6} {'partition ms':>13} {'plan ms':>9} {'buckets':>8}")
    for num_ranks in (1, 8, 128, 1024):
        timing = measure(PARAMETERS, num_ranks)
        print(f"{PARAMETERS:>10,} {num_ranks:>6,} {timing.partition:>13.1f} {timing.plan:>9.1f} {timing.buckets:>8,}")


if __name__ == "__main__":
    main()
