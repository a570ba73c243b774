"""The example with a mixture of experts runs, and both models learn."""

import re

from tests.multiproc.example_scripts import run_example


def test_a_mixture_and_a_dense_model_both_learn() -> None:
    text = run_example("train_moe.py", "--steps 30 --batch-size 8 --context 32 --width 32 --layers 1")
    assert "shared by global ranks 0 | 1; this rank's are 0; averaged in opt.step()" in text
    found = re.search(r"dense (\d\.\d+), mixture (\d\.\d+)", text)
    assert found is not None, text
    assert all(float(loss) < 5.0 for loss in found.groups()), "both began at ln(256) = 5.5"
