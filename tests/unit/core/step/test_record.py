"""The record of a step: facts that are there at once, numbers that wait for the device only when asked."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ddp_zero.core.step.record import StepRecord, StepRegime


class Watched(Tensor):
    """Writes down what is called with it, as a tensor on an accelerator would wait for it."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def watched(value: float) -> Watched:
    return torch.tensor(value).as_subclass(Watched)


@pytest.fixture(autouse=True)
def nothing_called() -> Iterator[None]:
    Watched.calls.clear()
    yield
    Watched.calls.clear()


def on_device() -> StepRecord:
    """Of a step whose numbers are tensors."""
    return StepRecord(
        stepped=True, regime=StepRegime.DEFERRED, norm=watched(3.0), coefficient=watched(0.25), scale=watched(1024.0)
    )


def skipped() -> StepRecord:
    return StepRecord(
        stepped=False,
        regime=StepRegime.STANDALONE,
        reason="the gradient of w is not finite",
        nonfinite_parameter="w",
        nonfinite_rank=2,
        norm=float("inf"),
        scale=512.0,
    )


def test_making_comparing_and_printing_a_record_reads_no_value_from_the_device() -> None:
    record = on_device()
    assert record == on_device()
    assert hash(record) == hash(on_device())
    assert "stepped=True" in repr(record)
    assert record.stepped
    assert dataclasses.replace(record, reason="x").reason == "x"
    assert [name for name in Watched.calls if name not in ("as_subclass", "__get__")] == []


@pytest.mark.parametrize(("name", "value"), [("grad_norm", 3.0), ("clip_coefficient", 0.25), ("loss_scale", 1024.0)])
def test_a_number_is_read_when_it_is_asked_for_and_no_other(name: str, value: float) -> None:
    record = on_device()
    Watched.calls.clear()
    number = getattr(record, name)
    assert (number, type(number)) == (value, float)
    assert Watched.calls == ["item"]


# In one line


def test_the_line_of_a_step_has_when_it_was_taken_and_its_numbers() -> None:
    assert str(on_device()) == "stepped (deferred, grad_norm 3, clip_coefficient 0.25, loss_scale 1024)"
    assert str(StepRecord(stepped=True, regime=StepRegime.OVERLAPPED)) == "stepped (overlapped)"


def test_the_line_of_a_skipped_step_has_the_reason() -> None:
    expected = "not stepped: the gradient of w is not finite (standalone, grad_norm inf, loss_scale 512)"
    assert str(skipped()) == expected
