"""The example over data, pipeline and tensor parallel ranks runs, at fewer ranks, and learns as one device does."""

import re

from tests.multiproc.example_scripts import ROOT, run_example, run_script


def test_stages_train_to_the_losses_of_one_device() -> None:
    text = run_example("train_3d.py", "--steps 12 --batch-size 8 --context 16 --layers 2 --tensor-ranks 1")
    found = [tuple(map(float, one)) for one in re.findall(r"loss (\d\.\d+), on one device (\d\.\d+)", text)]
    assert len(found) == 6, text
    assert found[-1][0] < found[0][0] - 0.5, "both began at ln(256) = 5.5"
    assert all(abs(mine - other) < 1e-4 for mine, other in found), found


def test_a_number_of_ranks_that_does_not_fit_is_an_error_of_one_line() -> None:
    ended = run_script(ROOT / "examples" / "train_3d.py", ["--tensor-ranks", "2"])
    assert ended.code != 0
    assert "Expected a multiple of 4 ranks for 2 stages of 2 tensor parallel ranks, got 2." in ended.errors
    assert "AssertionError" not in ended.errors
