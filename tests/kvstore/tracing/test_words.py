"""Numbers for names: one for each value until it is taken, and what they stand for twice."""

from __future__ import annotations

from kvstore.tracing.words import Words


def test_a_value_keeps_its_number_until_words_are_cleared() -> None:
    words = Words()
    numbers = [words["a"], words["b"], words["a"]]
    assert numbers[0] == numbers[2] != numbers[1]
    words.clear()
    assert words["a"] not in numbers


def test_what_numbers_stand_for_is_told_twice() -> None:
    words = Words()
    first = words["a"]
    words.clear()
    assert words.take() == [(first, "a")]
    second = words["a"]
    assert words.take() == [(first, "a"), (second, "a")]
    assert words.take() == [(second, "a")]
    assert words.take() == []
