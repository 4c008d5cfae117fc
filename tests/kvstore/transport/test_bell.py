"""A bell wakes whoever waits, however often it is rung."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from kvstore.transport.bell import Bell


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def rings(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_is_readable_from_ring_until_silence(bell: Bell) -> None:
    assert not rings(bell)
    bell.ring()
    assert rings(bell)
    assert rings(bell), "to look does not silence it"
    bell.silence()
    assert not rings(bell)


def test_silence_where_nobody_has_rung_does_not_block(bell: Bell) -> None:
    bell.silence()
    assert not rings(bell)


def test_however_often_it_is_rung_nobody_waits_and_one_silence_is_enough(bell: Bell) -> None:
    for _ in range(4000):  # more than fits: a wake-up is there, so what does not fit need not be
        bell.ring()
    assert rings(bell)
    bell.silence()
    assert not rings(bell)


def test_after_close_ringing_does_nothing(bell: Bell) -> None:
    bell.close()
    bell.ring()
