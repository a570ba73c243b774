"""The report of a `GradScaler`: found among the callers, shown to members, extended by averages, and written back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from ddp_zero.parallel.grad_scaler import ScalerReport


class SteppedByScaler(SGD):
    """Takes the report of the scaler that steps it, shows it to a member, and writes back whether it has stepped."""

    _step_supports_amp_scaling = True
    steps = True
    averages: tuple[Any, ...] = ()
    report: Any = None

    @property
    def found_inf(self) -> Any:
        return self.report

    @found_inf.setter
    def found_inf(self, found: Any) -> None:
        self.report = ScalerReport(self, found)

    @found_inf.deleter
    def found_inf(self) -> None:
        self.report = None

    def step(self, closure: Any = None) -> Any:
        self.report.look_again(self.averages)
        member: Any = SGD([torch.ones(1)])
        with self.report.shown_to([member], None):
            self.seen = float(member.found_inf)
        self.report.write_back(self.steps)


def scaled(gradient: float | None) -> tuple[GradScaler, SteppedByScaler]:
    param = nn.Parameter(torch.ones(2))
    param.grad = None if gradient is None else torch.full((2,), gradient)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    return scaler, SteppedByScaler([param], lr=1.0)


def test_look_again_finds_averages_with_a_nan_that_the_scaler_has_not_seen() -> None:
    finite, with_nan = torch.ones(3), torch.tensor([1.0, float("nan")])
    for averages, found in (((), 0.0), ((None, finite), 0.0), ((finite, None, with_nan), 1.0), ((None,), 0.0)):
        scaler, opt = scaled(1.0)
        opt.averages = averages
        scaler.step(opt)
        assert opt.seen == found


def test_a_report_finds_the_scale_of_the_scaler_that_calls() -> None:
    scaler, opt = scaled(1.0)
    seen: list[float] = []
    opt.step = lambda closure=None: seen.append(opt.report.scale)  # type: ignore[method-assign]
    scaler.step(opt)
    assert seen == [64.0]


def test_a_report_without_a_scaler_among_its_callers_is_refused() -> None:
    _, opt = scaled(1.0)
    with pytest.raises(RuntimeError, match=r"got no scaler among its callers\..*\[ZERO-812\]"):
        ScalerReport(opt, torch.zeros(()))


def test_members_have_found_inf_and_grad_scale_only_within_shown_to() -> None:
    scaler, opt = scaled(float("inf"))
    members = [SGD([torch.ones(1)]), SGD([torch.ones(1)])]
    divisor = torch.tensor(64.0)

    def step(closure: Any = None) -> None:
        with opt.report.shown_to(members, divisor):
            assert [(float(member.found_inf), member.grad_scale) for member in members] == [(1.0, divisor)] * 2  # type: ignore[attr-defined]
            raise ArithmeticError("of a member")

    opt.step = step  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="of a member"):
        scaler.step(opt)
    assert not any({"found_inf", "grad_scale"} & vars(member).keys() for member in members)
