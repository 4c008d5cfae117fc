"""Checks of arguments: integers of a range, and switches that may be left to decide themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as kv
from workers.common.checks import at_least, on_off_auto


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_kind_become_plain_ones(value: Any) -> None:
    assert type(at_least("n", value, 3)) is int
    assert at_least("n", value, 3) == 3


@pytest.mark.parametrize("value", [2, -1, 3.0, True, "3", None, np.float32(3)])
def test_what_is_no_integer_or_too_small(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"n=.* must be an integer, at least 3"):
        at_least("n", value, 3)


def test_the_largest_is_64_bits_unless_it_is_said() -> None:
    assert at_least("n", 2**63 - 1, 0) == 2**63 - 1
    with pytest.raises(kv.UsageError, match=f"at most {2**63 - 1}"):
        at_least("n", 2**63, 0)
    with pytest.raises(kv.UsageError, match="n=6 must be an integer, at most 5"):
        at_least("n", 6, 0, 5)


@pytest.mark.parametrize(("value", "meaning"), [(True, True), (False, False), ("auto", None), (None, None)])
def test_a_switch(value: Any, meaning: bool | None) -> None:
    assert on_off_auto("overlap", value) is meaning


@pytest.mark.parametrize("value", ["on", 1, 0, "Auto"])
def test_what_is_no_switch(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"overlap=.* must be True, False or 'auto'"):
        on_off_auto("overlap", value)
