"""Numbers for names: one for each value until it is taken."""

from __future__ import annotations

from kvstore.tracing.tracer import Words


def test_a_value_keeps_its_number_until_it_is_taken() -> None:
    words = Words()
    numbers = [words["a"], words["b"], words["a"]]
    assert numbers[0] == numbers[2] != numbers[1]
    assert words.take() == [(numbers[0], "a"), (numbers[1], "b")]
    assert words.take() == []
    assert words["a"] not in numbers
