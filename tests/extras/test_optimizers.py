"""Optimizers of other libraries next to DDP with the plain one, in every mode; each runs where it is installed.

Classes that couple parameters, such as Prodigy, are refused. Methods such as ``train()`` of
schedule-free ones: `tests/multiproc/test_forwarding.py`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import check_shardable, shard_optimizer
from ddp_zero.core.engine import shardable
from tests.multiproc.cases import OptimizerCase, Twins, at_stage, build_model, build_overlapped_twins, build_twins
from tests.multiproc.harness import Setup, run_ranks

MODES: dict[str, Callable[..., Twins]] = {
    "standalone": build_twins,
    "stage 1, inside backward": partial(build_overlapped_twins, interleaved=True),
    "stage 2": partial(build_overlapped_twins, interleaved=True),
    "stage 2, not overlapped": partial(build_overlapped_twins, overlap=False),
}
MATRICES: dict[str, dict[str, Any]] = {
    "SOAP": {"lr": 3e-3, "precondition_frequency": 2},
    "Shampoo": {"lr": 3e-3, "preconditioning_compute_steps": 2},
}
"""They multiply gradients as matrices where they lie, and last bits of a product depend on where that is."""

OTHERS: dict[str, dict[str, Any]] = {
    "ScalableShampoo": {"lr": 3e-3, "start_preconditioning_step": 2},
    "Lion": {"lr": 1e-3},
    "ADOPT": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
    "AdEMAMix": {"lr": 1e-2},
    "StableAdamW": {"lr": 1e-2},
    "AdaBelief": {"lr": 1e-2},
}


def _equal(setup: Setup, case: OptimizerCase, mode: str) -> None:
    warnings.simplefilter("ignore")  # of other libraries
    with at_stage(2 if mode.startswith("stage 2") else 1):
        twins = MODES[mode](case, model=build_model(matrices_only=case.matrices_only))
    if mode.startswith("stage 2"):  # next to DDP's own gradients, which begin where memory does
        twins.plain_model = DistributedDataParallel(twins.plain_model.module, bucket_cap_mb=0.0015)
    try:
        twins.train(setup, 6)
        twins.assert_moved()
    except AssertionError as error:
        raise AssertionError(f"{case.name}, {mode}: {error}") from error


def _pytorch_optimizer(setup: Setup) -> None:
    import pytorch_optimizer as real

    for name, options in (OTHERS | MATRICES).items():
        for mode in MODES:
            _equal(setup, OptimizerCase(name, getattr(real, name), options), mode)


def _matrix_classes_beside_adamw(setup: Setup) -> None:
    import pytorch_optimizer as real

    from tests.multiproc.mixed_classes import Pair, assert_moved, ddp_of, groups_of, language, train

    warnings.simplefilter("ignore")
    for name, options in (MATRICES | {"ScalableShampoo": OTHERS["ScalableShampoo"]}).items():
        kind = getattr(real, name)
        plain, ddp = ddp_of(language(), 1), ddp_of(language(), 1)
        pair: Any = Pair(plain)
        pair.muon = kind(groups_of(plain)[1]["params"], **options)
        rest, matrices = groups_of(ddp)
        groups = [rest, {"params": matrices["params"], "optimizer_class": kind, **options}]
        opt = shard_optimizer(ddp, torch.optim.AdamW, groups, lr=3e-3, partition="elements")
        train(setup, [plain, ddp], [pair, opt], 4)
        assert_moved(ddp)
        assert "cost / mean" in opt.explain(), name


def test_matrix_classes_beside_adamw() -> None:
    pytest.importorskip("pytorch_optimizer")
    run_ranks(_matrix_classes_beside_adamw, 2, timeout=400)


def test_pytorch_optimizer() -> None:
    pytest.importorskip("pytorch_optimizer")
    run_ranks(_pytorch_optimizer, 2, timeout=400)


def _muon(setup: Setup) -> None:
    for mode in MODES:
        _equal(setup, OptimizerCase("Muon", torch.optim.Muon, {"lr": 1e-2}, matrices_only=True), mode)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_of_torch() -> None:
    run_ranks(_muon, 2)


def test_real_classes_that_couple_parameters_are_refused_and_others_pass() -> None:
    real = pytest.importorskip("pytorch_optimizer")
    coupled = ("Prodigy", "DAdaptAdam", "AdamS", "Kron", "Gravity", "DASH")
    cases: list[tuple[str, dict[str, Any]]] = [*((name, {}) for name in coupled), ("Lamb", {"pre_norm": True})]
    for name, options in cases:
        with pytest.raises(NotImplementedError, match="stepped by 2 owners"):
            check_shardable(getattr(real, name), **options)
        with pytest.raises(NotImplementedError, match="stepped by 2 owners"):
            shardable.check_unknown(getattr(real, name), options)
    for name in ("Lamb", "Lion", "ADOPT"):
        check_shardable(getattr(real, name))


def test_schedule_free_classes_pass() -> None:
    real = pytest.importorskip("schedulefree")
    check_shardable(real.AdamWScheduleFree, warmup_steps=3)
    check_shardable(real.SGDScheduleFree)
