"""Trainings on the simulated accelerator."""

import os
import warnings
from typing import Any

import torch

from tests.accelerator import simulation
from tests.accelerator.modes import GROUPS, MODES, Report, run
from tests.multiproc.harness import Setup

BY_NAME = {mode.name: mode for mode in (*MODES, GROUPS)}


def train(
    setup: Setup,
    name: str,
    is_late: bool,
    drop: tuple[str, str] | None = None,
    has_beside: bool = False,
    moves: bool | None = None,
) -> Report:
    """Train in a mode.

    Args:
        setup: of this rank.
        name: of the mode.
        is_late: see `simulation.load`.
        drop: see `engine.h`.
        has_beside: see `run`.
        moves: None if the current device is this rank's, as the mode says. Else it is another one: always, or it
            changes between the points of an iteration.
    """
    extension = loaded(setup, is_late)
    if drop is not None:
        extension.drop(*drop)
    index = setup.rank + (moves is not None)
    extension.train_on(index)
    currents = () if moves is None else (0, index, 0) if moves else (0,)
    return run(BY_NAME[name], setup, extension, torch.device("sim", index), None, has_beside, currents)


def loaded(setup: Setup, is_late: bool = False) -> Any:
    """The simulation, ready for this rank."""
    # what torch says of any device that is not CUDA, and of a group without a backend for the CPU
    warnings.filterwarnings("ignore", "Time stats are currently only collected")
    warnings.filterwarnings("ignore", "No backend of type 0 found")
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")  # training on an own stream
    os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
    return simulation.load(4, is_late)
