"""Checks of arguments that several packages take."""

from __future__ import annotations

from typing import Any

import torch

from kvstore import UsageError
from kvstore.plain import scalar


def on_off_auto(name: str, value: object) -> bool | None:
    """Return True or False as given, and None for ``auto`` (or None)."""
    if value is None or isinstance(value, bool):
        return value
    if value == "auto":
        return None
    raise UsageError(f"{name}={value!r} must be True, False or 'auto'")


def require_optimizer(value: object) -> None:
    if not isinstance(value, torch.optim.Optimizer):
        raise UsageError(f"optimizer must be an instance of torch.optim.Optimizer, not {type(value).__name__}")


def at_least(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r} must be an integer, at least {least}")
    if value > most:
        raise UsageError(f"{name}={value!r} must be an integer, at most {most}")
    return value
