"""The pictures of docs/design.md are the ones that their command draws."""

from collections import Counter

from benchmarks.draw_design import DOCS, floors, pictures, way


def test_the_pictures_are_up_to_date() -> None:
    for target, picture in pictures().items():
        assert target.read_text() == picture, "run python -m benchmarks.draw_design"


def test_every_package_of_the_page_is_in_the_picture() -> None:
    by_floor = floors((DOCS / "design.md").read_text())
    assert len(by_floor) == 15
    assert {"core.plan", "ground"} <= set(by_floor[0])


def test_three_buckets_are_in_use_at_any_moment_at_most() -> None:
    using = Counter(move.start for move in way(8) if move.label != "parameters new")
    assert max(using.values()) == 3
