"""Snapshots in the memory of the hosts, so that a job that has crashed goes on from a few steps before.

    snapshots = Snapshots(ddp, opt, folder="/dev/shm/run-1", every=10, fallback="runs/1", extra={"scheduler": sched})
    snapshots.load()
    while snapshots.steps < steps:
        ...  # forward, backward, opt.step(), scheduler.step()
        snapshots.step()

Every few steps each rank copies its shard into a memory-backed file of its host, and a thread sends it to a different
host. After a restart, at the same or another number of ranks, the ranks find the newest snapshot of which every part is
left somewhere, fetch the parts that a host has lost, and load it.
"""

from ddp_zero.snapshots.snapshots import Snapshots

__all__ = ["Snapshots"]
