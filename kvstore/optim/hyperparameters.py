"""The values of hyper-parameters, as users give them and as the wire can carry them. Pure."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from kvstore.errors import UsageError
from kvstore.plain import scalar
from kvstore.wire.fields import MAX_HYPER_LIST, MAX_HYPER_TEXT

# Among the hyper-parameters of a push: a text of a worker's own, on which the workers of a round must agree, and which
# no update reads. Saying nothing differs from any text.
ALIKE = "alike"


def finite(name: str, value: Any) -> float | int:
    """Return ``value`` as a finite Python number."""
    value = scalar(value)
    if isinstance(value, int) and abs(value) >= 2**63:  # more than the wire has for one
        value = float(value) if abs(value) < 2**1000 else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name}={value!r} is not a finite number")
    return value


def positive(name: str, value: Any) -> float | int:
    """Return ``value`` as a finite number above 0; raise ``UsageError`` otherwise."""
    number = finite(name, value)
    if number <= 0:
        raise UsageError(f"{name}={number!r} must be positive; None does without")
    return number


def require_weight(value: Any) -> float:
    """Return ``value`` as the weight of a push; raise ``UsageError`` otherwise."""
    weight = float(finite("weight", value))
    if weight < 0:
        raise UsageError(f"weight={value!r} must be at least 0")
    return weight


def carried(text: str) -> str:
    """Return ``text`` as the wire can carry it: what is too long ends in a digest, so that others differ."""
    if len(text) <= MAX_HYPER_TEXT:
        return text
    end = f"... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text[: MAX_HYPER_TEXT - len(end)] + end


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(name: str, value: Any) -> Any:
    """Return ``value`` as the wire can carry it: a number, bool, text, None, or a list of numbers."""
    value = scalar(value)
    if isinstance(value, str | list | tuple) and len(value) > (
        MAX_HYPER_TEXT if isinstance(value, str) else MAX_HYPER_LIST
    ):
        raise UsageError(f"{name} is too long: at most {MAX_HYPER_TEXT} characters, or {MAX_HYPER_LIST} numbers")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return [None if item is None else finite(name, item) for item in value]
    return finite(name, value)
