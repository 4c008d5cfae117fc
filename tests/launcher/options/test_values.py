from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from launcher.options.values import count, memory, name, number, variable


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        *((number, "0", 0), (number, "0000000008", 8), (count, "4096", 4096)),
        *((memory, "500", "500m"), (memory, "4G", "4g"), (memory, "", "")),
        *((variable, "A:x:y= z", ("A", "x:y= z")), (variable, "A:", ("A", "")), (name, "_a1", "_a1")),
    ],
)
def test_what_is_valid(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (number, "-1", "'-1' is not a number from 0 to 4096"),
        (count, "0", "'0' is not a number from 1 to 4096"),
        (count, "4097", "'4097' is not a number"),
        (number, "²", "is not a number"),
        (number, "9" * 5000, "is not a number"),
        (memory, "4gb", "'4gb' is not a size; valid: a number with m or g"),
        (memory, "0m", "is not a size"),
        (variable, "1A:hunter2", "expected NAME:VALUE"),
        (variable, "hunter2", "expected NAME:VALUE"),
        (name, "A=hunter2", "expected a variable's name alone"),
    ],
)
def test_what_is_not(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message) as caught:
        read(text)
    assert "hunter2" not in str(caught.value), "it may be a secret"
