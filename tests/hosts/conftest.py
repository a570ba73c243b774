"""These tests make network interfaces and start daemons, so they run only when their folder is named."""

import pytest


@pytest.fixture(autouse=True)
def _only_when_named(request: pytest.FixtureRequest) -> None:
    if not any("hosts" in str(argument) for argument in request.config.invocation_params.args):
        pytest.skip("makes network interfaces and starts daemons: run `python -m pytest tests/hosts` as root")
