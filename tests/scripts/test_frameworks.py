"""The scripts of transformers and accelerate, as `test_scripts.py` checks the others."""

from functools import partial

import pytest

from tests.frameworks.job import as_a_job
from tests.multiproc.harness import Cases
from tests.scripts.checks import check
from tests.scripts.variants import IN_FRAMEWORKS

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")


@pytest.mark.parametrize("title", IN_FRAMEWORKS)
def test_scripts_of_frameworks(title: str) -> None:
    Cases.pool_of(2).run(as_a_job, partial(check, title=title), timeout=300.0, group_timeout=60.0)
