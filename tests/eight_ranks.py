"""The cuts of eight ranks: data x expert 2 x 4, and data x pipeline x tensor 2 x 2 x 2.

    python -m tests.eight_ranks

Eight processes are slow on a few cores, so the default test run has the same bodies at four ranks.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.test_parallel import MODES, train_mixture
from tests.multiproc.test_parallel_meshes import tied_group, train_stages
from tests.multiproc.test_parallel_state import move_experts, move_stages


def train_experts(setup: Setup) -> None:
    """Four expert-parallel ranks with an expert each, twice."""
    for name, mode in MODES.items():
        train_mixture(setup, mode, "in the loop" in name, expert_ranks=4, total=4)


def train_in_three_dimensions(setup: Setup) -> None:
    """Two stages of two parts each, twice."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    train_stages(mesh, mesh.get_group("tensor"), (ScheduleGPipe, Schedule1F1B))


def move_checkpoints(setup: Setup) -> None:
    """Save at 2 x 4 and at 2 x 2 x 2, and load at other cuts and the whole model."""
    move_experts(setup, 4, (4, 2))
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    move_stages(setup, mesh, tied_group(mesh))


if __name__ == "__main__":
    for body in (train_in_three_dimensions, train_experts, move_checkpoints):
        run_ranks(body, 8, timeout=1200, group_timeout=300)
        print(f"{body.__name__}: passed", flush=True)
