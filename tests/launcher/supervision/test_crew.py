from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest

from launcher.supervision.crew import turn


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe() for _ in range(3)]
    yield made
    for read, write in made:
        os.close(read)
        os.close(write)


def test_what_is_ready_is_called_and_nothing_else(pipes: list[tuple[int, int]]) -> None:
    called: list[int] = []
    with selectors.DefaultSelector() as selector:
        for number, (read, _) in enumerate(pipes):
            selector.register(read, selectors.EVENT_READ, lambda number=number: called.append(number))
        assert not turn(selector, 0)
        for number in (0, 2):
            os.write(pipes[number][1], b"x")
        assert turn(selector, 60)
        assert sorted(called) == [0, 2]


def test_what_has_no_callable_is_only_waited_for(pipes: list[tuple[int, int]]) -> None:
    read, write = pipes[0]
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        os.write(write, b"x")
        assert turn(selector, 60)
    assert os.read(read, 9) == b"x"
