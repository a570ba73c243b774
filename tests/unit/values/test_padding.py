"""When segments are padded to equal sizes."""

import pytest

from ddp_zero.values.shapes import padded_size


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([8, 8], 8), ([0, 0], 0), ([9, 7], 9), ([10, 7], None), ([9, 0], None), ([64, 64, 63], 64), ([1], 1)],
)
def test_padding_adds_at_most_an_eighth(sizes: list[int], expected: int | None) -> None:
    assert padded_size(sizes) == expected
