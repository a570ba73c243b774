"""Write the table of docs/accelerators.md: ``python -m tests.accelerator``."""

from tests.accelerator import page, simulation
from tests.accelerator.modes import MODES
from tests.accelerator.training import train
from tests.multiproc.harness import run_ranks

if __name__ == "__main__":
    simulation.compiled()
    page.write([(mode, run_ranks(train, 2, mode.name, False)[0]) for mode in MODES])
