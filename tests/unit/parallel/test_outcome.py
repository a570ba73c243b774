"""What ranks say of errors that they share."""

import pytest

from ddp_zero.core.comm.agreement import StepFailedElsewhereError
from ddp_zero.parallel.errors import HeldErrors, shown


def test_an_error_that_several_ranks_have_is_shown_once() -> None:
    assert shown({3: "ValueError: a", 1: "KeyError: b", 0: "ValueError: a"}) == (
        "ValueError: a (global ranks 0, 3); KeyError: b (global rank 1)"
    )


def test_of_several_errors_the_own_one_is_kept() -> None:
    held = HeldErrors()
    for error in (StepFailedElsewhereError("of a peer"), ValueError("own"), StepFailedElsewhereError("later")):
        with held.catching():
            raise error
    with pytest.raises(ValueError, match="own"):
        held.raise_now()
    held.raise_now()  # once
    assert held.take() is None
