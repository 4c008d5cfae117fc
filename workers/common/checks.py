"""Checks of arguments that several packages take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore import UsageError
from kvstore.plain import scalar
from kvstore.spec import shorten


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


def thawed(keys: Sequence[Any]) -> str:
    """Say that these parameters are trained from now on: a worker that does so alone leaves the others waiting."""
    verb = "requires" if len(keys) == 1 else "require"
    return f"{shorten(keys)} {verb} a gradient there since the last step, which must begin on all workers at one step"


def at_least(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r} must be an integer, at least {least}")
    if value > most:
        raise UsageError(f"{name}={value!r} must be an integer, at most {most}")
    return value
