"""A warning about high momentum in an asynchronous store, where late gradients act as additional momentum."""

from __future__ import annotations

import sys
import warnings

from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule

MUCH = 0.5
_AVERAGED = frozenset({"signum"})  # (1 - momentum) of each gradient goes in: more momentum makes no longer steps
_OURS = ("kvstore", "workers")


def advice(optimizer: Optimizer, rule: Rule, store: str, workers: int) -> str:
    """Return what to tell who updates with ``optimizer`` in a store of several workers; empty if there is nothing.

    Args:
        optimizer: what is set.
        rule: the store's.
        store: the name of its type.
        workers: how many there are.
    """
    momentum = 0.0 if optimizer.name in _AVERAGED else _largest_momentum(optimizer)
    if rule.mode != "async" or workers < 2 or momentum < MUCH:
        return ""
    return (
        f"{optimizer.name} has momentum {momentum:g} in a {store!r} store of {workers} workers: gradients come late "
        "there, which acts as more momentum, so training may become unstable or stop learning. Set momentum=0 and a "
        "higher learning rate, or use a 'dist_sync' store; docs/training.md has figures"
    )


def warn(message: str) -> None:
    """Warn with ``message``, at the line outside of this package and of ``workers`` that has called them."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, stacklevel=level)


def _largest_momentum(optimizer: Optimizer) -> float:
    return max(float(optimizer.defaults(number).get("momentum", 0.0)) for number in range(len(optimizer.groups) + 1))
