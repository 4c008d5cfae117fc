"""What the tests of tables share: an optimizer on rows, and rows of three elements."""

from typing import Any

import numpy as np

from kvstore.errors import UsageError
from kvstore.optim.row_rules import RowState

WIDTH = 3


class Momentum:
    """``moment = moment / 2 + grad; row -= moment``; moments begin at a half."""

    def __init__(self, rule: str = "momentum", lazy: bool = True) -> None:
        self.rule, self.lazy = rule, lazy
        self.states = {"moment": RowState(None, "float32", 0.5)}

    def step(self, count: int, rows: Any, grads: Any, states: Any, hyper: Any, keep: bool = False) -> None:
        moment = states["moment"]
        moment.mul_(0.5).add_(grads)
        rows.sub_(moment)


def ids_of(ids: Any) -> Any:
    return np.array(ids, np.int64)


def grads_of(ids: Any, number: int) -> Any:
    return np.random.default_rng(number).standard_normal((len(ids), WIDTH)).astype(np.float32)


def pulled(table: Any, ids: Any) -> Any:
    out = np.full((len(ids), WIDTH), 7, np.float32)
    table.pull(ids_of(ids), out)
    return out


def has(part: Any, number: int) -> bool:
    """Whether an id belongs to a stripe of a table."""
    try:
        part.require(ids_of([number]))
    except UsageError:
        return False
    return True
