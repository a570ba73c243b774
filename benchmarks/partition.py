"""How long it takes to decide who owns what: ``python benchmarks/partition.py``."""

import random
import statistics
import time

from ddp_zero.partition import partition_greedy
from ddp_zero.plan import ParameterSpec, plan_standalone


def main() -> None:
    """Print median milliseconds of the partition and of the whole plan, for several numbers of ranks."""
    generator = random.Random(0)
    sizes = [generator.randrange(1, 10_000_000) for _ in range(10_000)]
    specs = [ParameterSpec(numel=size, nbytes=4 * size, kind="cpu/float32") for size in sizes]
    cap = 25 << 20
    print(f"{'parameters':>10} {'ranks':>6} {'partition ms':>13} {'plan ms':>9} {'buckets':>8}")
    for num_ranks in (1, 8, 128, 1024):
        partition_ms, plan_ms = [], []
        for _ in range(5):
            started = time.perf_counter()
            owners = partition_greedy([spec.nbytes for spec in specs], num_ranks)
            partitioned = time.perf_counter()
            plan = plan_standalone(specs, owners, num_ranks, cap * num_ranks)
            partition_ms.append(1000 * (partitioned - started))
            plan_ms.append(1000 * (time.perf_counter() - partitioned))
        print(
            f"{len(sizes):>10,} {num_ranks:>6,} {statistics.median(partition_ms):>13.1f} "
            f"{statistics.median(plan_ms):>9.1f} {len(plan.buckets):>8,}"
        )


if __name__ == "__main__":
    main()
