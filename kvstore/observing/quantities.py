"""How numbers are written for people: durations, bytes, shares, and the ranks of many members. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "-"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``12 s``, ``3 min 12 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def nbytes(count: float) -> str:
    """Write so many bytes, in powers of 1,000: ``999 B``, ``1.2 MB``."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 99.95 else f"{count:.1f} {_UNITS[unit]}"


def share(part: float) -> str:
    """Write a part of one: ``98 %``."""
    return f"{100 * part:.0f} %"


def rate(number: float) -> str:
    """Write how often something is done in a second, with three digits at most."""
    if not math.isfinite(number):
        return UNKNOWN
    return f"{number:.0f}" if number >= 99.5 else f"{number:.1f}" if number >= 9.95 else f"{number:.2f}"


def count(number: float) -> str:
    """Write a whole number."""
    return f"{number:.0f}"


def ranks(numbers: Iterable[int]) -> str:
    """Write ranks, with ranges of three or more in short: ``0, 2, 4-63``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def members(role: str, numbers: Iterable[int]) -> str:
    """Name members of one role: ``worker 3``, ``workers 0, 2, 4-63``."""
    numbers = sorted(set(numbers))
    return f"{role}{'' if len(numbers) == 1 else 's'} {ranks(numbers)}"
