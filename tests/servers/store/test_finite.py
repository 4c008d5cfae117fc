"""``check_finite``: who has pushed values that are not finite, and that nothing is updated with them."""

from __future__ import annotations

import pytest
import torch
from asking import Desk, floats, optimized, text_of


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_fail_their_round_and_name_who_pushed_them(optimizer: str, bad: float):
    desk = Desk(2, values={1: floats(5), 2: floats(5, 5)}, finite=True)
    if optimizer == "sgd":
        optimized(desk, lr=1.0)
    start, sign = (5, -1) if optimizer == "sgd" else (0, 1)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}, 1))
    replies = desk.ask(b, b.push({1: floats(1), 2: floats(1, bad)}, 1))
    assert len(replies) == 2
    for reply in replies.values():
        assert text_of(reply, "NotFinite") == (
            "push 1 of 'k2' by worker 1 has NaN or infinite elements; its segment has not been updated"
        )
    assert desk.value(1, clock=1).tolist() == [5]
    assert desk.value(2, clock=1).tolist() == [5, 5]
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1), 2: floats(1, 2)}, 2))
    assert (desk.value(1, clock=2) - start).tolist() == [2 * sign], "and the next round goes on"
    assert (desk.value(2, clock=2) - start).tolist() == [2 * sign, 4 * sign]


def test_a_sum_that_is_not_finite_although_all_its_parts_are():
    desk = Desk(2, values={1: torch.zeros(2, dtype=torch.float16)}, finite=True)
    a, b = desk.workers
    desk.ask(a, a.push({1: torch.full((2,), 60000.0, dtype=torch.float16)}))
    push = b.push({1: torch.full((2,), 60000.0, dtype=torch.float16)})
    text = text_of(desk.ask(b, push)[1, push.seq], "NotFinite")
    assert text.startswith("push 1 of 'k1': each worker's values are finite, their sum is not in float16")


def test_async_pushes_that_are_not_finite_are_refused_alone():
    desk = Desk(2, "async", values={1: floats(0)}, finite=True)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    push = a.push({1: floats(float("nan"))}, 1)
    assert "by worker 0" in text_of(desk.ask(a, push)[0, push.seq], "NotFinite")
    desk.ask(b, b.push({1: floats(3)}, 1))
    desk.ask(a, a.push({1: floats(4)}, 2))
    assert desk.value(1).tolist() == [-7]
