"""Optimizers of other libraries: the numbers of DDP with the plain one, or refused; each runs where it is installed.

Their own tests of what couples parameters, and of train and eval modes, are in `tests/multiproc`.
"""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.multiproc.cases import HAS_MUON, OptimizerCase, at_stage, build_overlapped_twins, build_twins, optimizer_case
from tests.multiproc.harness import Setup, run_ranks

MODES: dict[str, Callable[..., Any]] = {
    "standalone": build_twins,
    "stage 1, inside backward": partial(build_overlapped_twins, interleaved=True),
    "stage 2": partial(build_overlapped_twins, interleaved=True),
    "stage 2, not overlapped": partial(build_overlapped_twins, overlap=False),
}

ONLY_MATRICES = True
EQUAL: list[tuple[str, str, dict[str, Any], bool]] = [
    ("pytorch_optimizer", "SOAP", {"lr": 3e-3, "precondition_frequency": 2}, False),
    ("pytorch_optimizer", "Shampoo", {"lr": 3e-3, "preconditioning_compute_steps": 2}, False),
    ("pytorch_optimizer", "ScalableShampoo", {"lr": 3e-3, "start_preconditioning_step": 2}, False),
    ("pytorch_optimizer", "Lion", {"lr": 1e-3}, False),
    ("pytorch_optimizer", "ADOPT", {"lr": 1e-2}, False),
    ("pytorch_optimizer", "Lamb", {"lr": 1e-2}, False),
    ("pytorch_optimizer", "AdEMAMix", {"lr": 1e-2}, False),
    ("pytorch_optimizer", "StableAdamW", {"lr": 1e-2}, False),
]


def cases_of(library: str) -> list[OptimizerCase]:
    module = importlib.import_module(library)
    return [
        OptimizerCase(name, getattr(module, name), options, matrices_only)
        for owner, name, options, matrices_only in EQUAL
        if owner == library
    ]


def _equal(setup: Setup, case: OptimizerCase, mode: str) -> None:
    warnings.simplefilter("ignore")  # of libraries
    with at_stage(2 if mode.startswith("stage 2") else 1):
        twins = MODES[mode](case)
    twins.train(setup, 6)
    twins.assert_moved()


def _each(setup: Setup, library: str) -> list[str]:
    problems = []
    for case in cases_of(library):
        for mode in MODES:
            try:
                _equal(setup, case, mode)
            except Exception as error:
                problems.append(f"{case.name}, {mode}: {type(error).__name__} {error}")
    return problems


def test_probe():
    pytest.importorskip("pytorch_optimizer")
    print("\n".join(run_ranks(_each, 2, "pytorch_optimizer")[0]))
