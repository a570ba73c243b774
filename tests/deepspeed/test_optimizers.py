"""Lion, Lamb and Muon next to DeepSpeed's own classes, step by step, on the same gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

pytest.importorskip("deepspeed", minversion="0.17")

from deepspeed.accelerator import get_accelerator

from ddp_zero.deepspeed.optimizers import Lamb, Lion, MuonWithAdam

STEPS = 20
Params = list[nn.Parameter]
SHAPES = ((7, 5), (5,), (4, 9), (6, 6))


def parameters() -> Params:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients() -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(12)
    for _ in range(STEPS):
        yield [torch.randn(shape, generator=generator) for shape in SHAPES]


def assert_alike(mine: Callable[[Params], Optimizer], theirs: Callable[[Params], Optimizer]) -> None:
    """Step both on copies of the same gradients, and compare every parameter after every step."""
    start, *pairs = (parameters() for _ in range(3))
    optimizers = [build(params) for build, params in zip((mine, theirs), pairs, strict=True)]
    for grads in gradients():
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert not any(map(torch.equal, start, pairs[0])), "everything has moved"


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_equals_deepspeeds(weight_decay: float) -> None:
    from deepspeed.ops.lion import DeepSpeedCPULion

    options: dict[str, Any] = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=weight_decay)
    assert_alike(lambda params: Lion(params, **options), lambda params: DeepSpeedCPULion(params, **options))


def warming_up(params: Params, **options: Any) -> Optimizer:
    """`OnebitLamb` without its process group, in the phase before it compresses: Lamb without bias correction.

    `FusedLamb` is a kernel for GPUs, so this is the one Lamb of DeepSpeed that runs here. DeepSpeed 0.19 dropped it.
    """
    lamb: Any = pytest.importorskip("deepspeed.runtime.fp16.onebit.lamb", reason="DeepSpeed 0.19 has no 1-bit Lamb")

    class Warming(lamb.OnebitLamb):  # type: ignore[misc]
        def __init__(self) -> None:
            Optimizer.__init__(self, params, {"bias_correction": False, **options})
            self.initialize, self.lamb_freeze_key, self.freeze_step = True, False, STEPS + 1
            self.coeff_beta = 0.9
            self.lamb_coeffs = list[float]()
            self.exp_avg_flat = self.worker_errors = [None]  # what it compresses, made once

    found: Optimizer = Warming()
    return found


@pytest.mark.parametrize(("least", "most"), [(0.01, 10.0), (0.3, 0.5)])
def test_lamb_equals_deepspeeds(least: float, most: float) -> None:
    options: dict[str, Any] = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    options |= dict(max_coeff=most, min_coeff=least)
    assert_alike(
        lambda params: Lamb(params, bias_correction=False, **options), lambda params: warming_up(params, **options)
    )


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_muon_with_adam_equals_deepspeeds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 and fp16, as DeepSpeed computes where a device has them; not compiled, which would round elsewhere."""
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    shared: dict[str, Any] = dict(lr=0.02, weight_decay=0.1)

    def groups(params: Params) -> list[dict[str, Any]]:
        adam = {"params": [params[1]], "use_muon": False, "betas": (0.9, 0.95), "eps": 1e-10, **shared}
        matrices = {"params": [params[0], *params[2:]], "use_muon": True, "momentum": 0.9, "ns_method": method}
        return [{**matrices, **shared}, adam]

    with torch.compiler.set_stance("force_eager"):
        assert_alike(lambda params: MuonWithAdam(groups(params)), lambda params: muon.MuonWithAuxAdam(groups(params)))
