from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import kvstore as kv
from workers.common.row_steps import row_steps


class Pushes:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def paused(self) -> AbstractContextManager[None]:
        self.calls.append("paused")
        return nullcontext()

    def step_over(self) -> None:
        self.calls.append("step over")


def test_trainer_and_tables_of_one_store_find_each_other() -> None:
    store = kv.create("local")
    steps = row_steps(store)
    assert row_steps(store) is steps
    assert row_steps(kv.create("local")) is not steps
    with steps.paused():
        steps.step_over()  # nothing is there yet
    steps.apply_rates()
    pushes = Pushes()
    steps.pushes, steps.rates = pushes, lambda: pushes.calls.append("rates")
    steps.apply_rates()
    with steps.paused():
        steps.step_over()
    assert pushes.calls == ["rates", "paused", "step over"]
