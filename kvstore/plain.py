"""Numbers and options as users give them, as Python's own values. Needs neither numpy nor torch.

A rate may be a tensor that one of torch's schedulers fills in place, a scalar of numpy, or a Fraction. A snapshot that
kept the object would be compared with itself, and JSON and msgpack do not take it. So each value is converted where it
is taken.
"""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any

from kvstore.errors import UsageError


def scalar(value: Any) -> Any:
    """Return a number, or a bool, of any library as Python's own; anything else as it is.

    A tensor or an array counts as a number if it has one element.
    """
    if type(value) in (float, int, bool, str) or value is None:
        return value
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # a tensor without memory (device="meta"), a sparse one
            return value
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    # numpy's longdouble stays what it is in ``item()``; it is a Real, too.
    if isinstance(value, numbers.Real | Decimal):
        try:
            return float(value)
        except (ArithmeticError, ValueError):
            return value
    return value


def integer(name: str, value: Any, least: int, most: int) -> int:
    """Return ``value`` as an int from ``least`` to ``most``.

    Raises:
        UsageError: it is not an integer, or out of range; the message calls it ``name``.
    """
    number = scalar(value)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise UsageError(f"{name}={number!r} must be an integer from {least} to {most}")
    return number
