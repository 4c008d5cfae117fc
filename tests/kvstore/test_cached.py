"""Properties that are computed once, and no lock is left locked whatever interrupts them."""

from __future__ import annotations

import threading

from interrupting import interrupted

from kvstore.cached import cached


class Squared:
    def __init__(self, number: int) -> None:
        self.number = number
        self.times = 0

    @cached
    def square(self) -> int:
        """Its square."""
        self.times += 1
        return self.number**2


def test_it_is_computed_once_for_each_instance() -> None:
    a, b = Squared(3), Squared(4)
    assert [a.square, a.square, b.square] == [9, 9, 16]
    assert (a.times, b.times) == (1, 1)


def test_the_class_has_it_with_its_docstring() -> None:
    assert Squared.square.__doc__ == "Its square."


def elsewhere() -> list[int]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(Squared(5).square), daemon=True)
    thread.start()
    thread.join(10)
    return found


def test_another_thread_computes_it_after_an_exception_at_any_line() -> None:
    line = 0
    while interrupted(lambda: Squared(2).square, line):
        line += 1
        assert elsewhere() == [25]
    assert line > 1
