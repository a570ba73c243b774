"""The report of a `GradScaler`: found among the callers, shown to members, extended by averages, and written back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from ddp_zero.parallel.grad_scaler import ScalerReport


class Follows(SGD):
    """Takes the report of the scaler that steps it, and writes the outcome that a test says back."""

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


def scaled(gradient: float | None) -> tuple[GradScaler, Follows]:
    param = nn.Parameter(torch.ones(2))
    param.grad = None if gradient is None else torch.full((2,), gradient)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    return scaler, Follows([param], lr=1.0)


def test_averages_that_overflow_after_the_scaler_has_looked_are_found() -> None:
    finite, infinite = torch.ones(3), torch.tensor([1.0, float("nan")])
    for averages, found in (((), 0.0), ((None, finite), 0.0), ((finite, None, infinite), 1.0), ((None,), 0.0)):
        scaler, opt = scaled(1.0)
        opt.averages = averages
        scaler.step(opt)
        assert opt.seen == found


def test_a_report_knows_the_scale_and_needs_a_scaler_among_its_callers() -> None:
    scaler, opt = scaled(1.0)
    seen: list[float] = []
    opt.step = lambda closure=None: seen.append(opt.report.scale)  # type: ignore[method-assign]
    scaler.step(opt)
    assert seen == [64.0]
    with pytest.raises(RuntimeError, match=r"got no scaler among its callers\..*\[ZERO-812\]"):
        ScalerReport(opt, torch.zeros(()))


def test_members_have_the_findings_while_they_step_and_no_longer() -> None:
    scaler, opt = scaled(float("inf"))
    members = [SGD([torch.ones(1)]), SGD([torch.ones(1)])]
    divisor = torch.tensor(64.0)

    def step(closure: Any = None) -> None:
        with opt.report.shown_to(members, divisor):
            assert [(float(one.found_inf), one.grad_scale) for one in members] == [(1.0, divisor)] * 2  # type: ignore[attr-defined]
            raise ArithmeticError("of a member")

    opt.step = step  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="of a member"):
        scaler.step(opt)
    assert not any({"found_inf", "grad_scale"} & vars(one).keys() for one in members)
