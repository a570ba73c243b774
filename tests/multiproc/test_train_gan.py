"""The GAN example: two sharded optimizers in one process, equal to plain optimizers."""

from tests.multiproc.example_scripts import run_example


def test_two_sharded_optimizers_equal_plain_ones() -> None:
    text = run_example("train_gan.py", "--steps 60 --compare")
    assert "largest parameter difference to DDP + Adam: 0.0 (parameters moved: True)" in text
    assert "of 8 modes covered" in text
