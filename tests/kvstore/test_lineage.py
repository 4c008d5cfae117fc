from __future__ import annotations

from kvstore.lineage import NOWHERE, UNKNOWN, Version, new_lineage, next_lineage


def test_numbers_are_compared_within_a_lineage_only() -> None:
    assert Version(7, 5).since(Version(7, 3)) == 2
    assert Version(7, 5).since(Version(7, 5)) == 0
    assert Version(7, 5).since(Version(7, 6)) is None
    assert Version(7, 5).since(Version(8, 3)) is None
    assert Version(UNKNOWN, 5).since(Version(UNKNOWN, 3)) is None
    assert Version(7, 5).since(NOWHERE) is None


def test_each_lineage_is_another_and_what_follows_is_known_from_it() -> None:
    drawn = {new_lineage() for _ in range(100)}
    assert len(drawn) == 100
    assert UNKNOWN not in drawn
    first = drawn.pop()
    assert next_lineage(first) == next_lineage(first) not in drawn | {first}
    assert next_lineage(UNKNOWN) == UNKNOWN
