"""Checks of arguments that several packages have."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import UsageError


def at_least(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``most``.

    Raises:
        UsageError: it is not; the message calls it ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UsageError(f"{name}={value!r} must be an integer, at least {least}")
    if value > most:
        raise UsageError(f"{name}={value!r} must be an integer, at most {most}")
    return int(value)
