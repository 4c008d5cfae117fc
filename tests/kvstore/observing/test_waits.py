from __future__ import annotations

from viewed_job import server, view_of, worker

from kvstore.observing.figures import awaited, waits


def waiting(rank: int, seconds: float, missing: list[int], why: str = "") -> dict[str, object]:
    return {"waiting": [0, 2], "missing": missing, "oldest_us": int(seconds * 1e6), "why": why}


def test_servers_with_the_same_wait_are_told_once_by_the_longest() -> None:
    view = view_of(
        [
            server(0, **waiting(0, 3.0, [1], "waits for worker 1, whose push 7 is missing")),
            server(1, **waiting(1, 5.6, [1], "waits for worker 1, whose push 8 is missing")),
        ]
    )
    [wait] = waits(view)
    assert wait.text == "servers 0, 1: workers 0, 2 have waited 6.0 s for worker 1, whose push 8 is missing"


def test_the_longest_wait_is_first_and_short_ones_are_left_out() -> None:
    view = view_of(
        [server(0, **waiting(0, 3.0, [1])), server(1, **waiting(1, 5.0, [3])), server(2, **waiting(2, 0.1, [4]))]
    )
    assert [wait.missing for wait in waits(view)] == [(3,), (1,)]
    assert len(waits(view, 0.0)) == 3
    assert awaited(view) == [3, 1]


def test_who_is_awaited_at_the_scheduler_comes_last() -> None:
    view = view_of([server(0, **waiting(0, 3.0, [1]))], awaited=[0, 1])
    assert awaited(view) == [1, 0]


def test_a_wait_for_nobody_in_particular_is_told_by_its_reason() -> None:
    view = view_of([worker(0), server(0, waiting=[0], missing=[], oldest_us=2_000_000, why="a checkpoint is taken")])
    assert [wait.text for wait in waits(view)] == ["server 0: worker 0 has waited 2.4 s: a checkpoint is taken"]


def test_nobody_waits() -> None:
    assert waits(view_of([worker(0), server(0)]), 0.0) == []
