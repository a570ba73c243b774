"""The picture in docs/parallel.md is the one that its command draws."""

from benchmarks.draw_parallel import PANELS, TARGET, draw


def test_the_picture_is_up_to_date() -> None:
    assert TARGET.read_text() == draw(PANELS), "run python -m benchmarks.draw_parallel"


def test_every_rank_is_in_at_most_one_group_of_a_row() -> None:
    for panel in PANELS:
        for row in panel.rows:
            ranks = [rank for group in row.groups for rank in group]
            assert len(ranks) == len(set(ranks))
