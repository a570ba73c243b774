"""Matrix optimizers of another library over parts of matrices that tensor parallelism cuts; where it is installed."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_zero import checkpoint
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.whole_matrices import Cut, grid

pytest.importorskip("pytorch_optimizer")
case = Cases(timeout=120, group_timeout=30)

CLASSES: dict[str, dict[str, Any]] = {
    "SOAP": {"lr": 3e-3, "precondition_frequency": 2},
    "Shampoo": {"lr": 3e-3, "preconditioning_compute_steps": 2},
    "ScalableShampoo": {"lr": 3e-3, "start_preconditioning_step": 2},
    "Lamb": {"lr": 1e-2},
}

OF_OBJECTS = ("ScalableShampoo",)
"""Their state is objects, which no checkpoint without pickle can hold, of parts or not."""


@case(4)
def _parts_are_stepped_whole_and_go_on_from_checkpoints(setup: Setup) -> None:
    import pytorch_optimizer as real

    warnings.simplefilter("ignore")  # of the library
    for (name, options), uneven in product(CLASSES.items(), (False, True)):
        kind, folder = getattr(real, name), Path(setup.folder) / f"{name} {uneven}"
        saved = Cut(grid(2, 2), kind, False, uneven, **options)
        saved.train(range(4))
        if name in OF_OBJECTS:
            with pytest.raises((TypeError, RuntimeError), match="ZERO-611"):
                checkpoint.save(folder, saved.ddp, saved.opt)
            saved.train(range(4, 6))
            continue
        checkpoint.save(folder, saved.ddp, saved.opt)
        for shape in ((2, 2), (1, 4)):
            other = Cut(grid(*shape), kind, False, uneven and shape != (2, 2), **options)
            other.forget()
            checkpoint.load(folder, other.ddp, other.opt)
            other.continues(saved)
            other.train(range(4, 8))


test_matrix_optimizers_over_parts = case.each()
