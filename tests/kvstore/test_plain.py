"""Numbers of any library as Python's own."""

from __future__ import annotations

import enum
import json
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted

from kvstore.cached import cached
from kvstore.errors import UsageError
from kvstore.plain import integer, scalar


class Level(enum.IntEnum):
    TWO = 2


TWOS = [
    *(2, 2.0, Level.TWO, Fraction(4, 2), Decimal("2.0")),
    *(np.float16(2), np.float32(2), np.longdouble(2), np.int8(2), np.uint64(2), np.array(2.0), np.array([[2]])),
    *(torch.tensor(2), torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(2.0, requires_grad=True)),
]


@pytest.mark.parametrize("value", TWOS, ids=repr)
def test_a_number_of_any_library_is_a_python_number(value: Any) -> None:
    assert scalar(value) == 2
    assert type(scalar(value)) in (int, float)
    assert float(json.dumps(scalar(value))) == 2


def test_what_is_taken_does_not_change_with_the_tensor() -> None:
    rate = torch.tensor(0.5)
    taken = scalar(rate)
    rate.fill_(0.25)
    assert taken == 0.5


@pytest.mark.parametrize("value", [np.True_, torch.tensor(True), True])
def test_a_bool_stays_one(value: Any) -> None:
    assert scalar(value) is True


@pytest.mark.parametrize(
    "value", [None, "x", [1.0], (2,), np.ones(2), torch.ones(2, 1), torch.ones(0), torch.ones((), device="meta"), 1j]
)
def test_what_is_no_number_stays_what_it_is(value: Any) -> None:
    assert scalar(value) is value


def test_what_has_no_value_as_a_float_is_left_to_the_callers_check() -> None:
    assert scalar(Decimal("Infinity")) == math.inf
    assert scalar(Fraction(10**400)) == Fraction(10**400)


@pytest.mark.parametrize("value", [0, 4, 1.0, "2", None, True, np.ones(2), torch.tensor(2.0)])
def test_an_integer_is_one_and_in_range(value: Any) -> None:
    assert integer("rounds", torch.tensor(3), 1, 3) == 3
    with pytest.raises(UsageError, match=r"rounds=.* must be an integer from 1 to 3"):
        integer("rounds", value, 1, 3)


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
