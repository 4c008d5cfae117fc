"""What the tests of tables share: an optimizer on rows."""

from typing import Any

from kvstore.optim.row_rules import RowState


class Momentum:
    """``moment = moment / 2 + grad; row -= moment``; moments begin at a half."""

    def __init__(self, rule: str = "momentum", lazy: bool = True) -> None:
        self.rule, self.lazy = rule, lazy
        self.states = {"moment": RowState(None, "float32", 0.5)}

    def step(self, count: int, rows: Any, grads: Any, states: Any, hyper: Any, keep: bool = False) -> None:
        moment = states["moment"]
        moment.mul_(0.5).add_(grads)
        rows.sub_(moment)
