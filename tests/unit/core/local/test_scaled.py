"""Gradients as the inner optimizer gets them."""

import torch
from torch import Tensor

from ddp_zero.core.local.parameters import ALIGNMENT, AlignedGradients, GradientSource


class _Buckets(GradientSource):
    """Gradients that begin where those before them end."""

    def __init__(self, *grads: Tensor | None) -> None:
        self._grads = grads

    def gradient(self, index: int) -> Tensor | None:
        return self._grads[index]

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        grad = self._grads[index]
        return None if grad is None or index == 0 else grad.double()[1:]


def test_gradients_that_begin_at_no_multiple_of_the_alignment_are_copied() -> None:
    memory = torch.arange(64.0)
    first, second = memory[:16].view(4, 4), memory[17:33].view(4, 4).t()
    aligned = AlignedGradients(_Buckets(first, second, None))
    assert aligned.gradient(0) is first, "it begins where memory does"
    copied, exact = aligned.gradient(1), aligned.in_accumulation_dtype(1)
    assert copied is not None, "a gradient"
    assert copied.data_ptr() % ALIGNMENT == 0, "it begins where its memory does"
    assert copied.stride() == second.stride(), "it lies as it did"
    assert torch.equal(copied, second), "it is the same"
    assert exact is not None, "a sum"
    assert exact.data_ptr() % ALIGNMENT == 0, "sums as well"
    assert aligned.in_accumulation_dtype(0) is aligned.gradient(2) is None, "nothing stays nothing"
