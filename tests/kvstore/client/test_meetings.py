"""Meetings of workers: all hear what worker 0 has decided, and who would add something."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from waiting import LONG

from kvstore.client.checkpointing import Meetings, told


class Sums:
    """Sums of worker 0 and 1, as a store makes them."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.both = Barrier(2, timeout=LONG)

    def end(self, rank: int) -> End:
        return End(self, rank)


class End:
    """One worker's end of ``Sums``."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self.sums, self.rank = sums, rank
        self.calls: list[str] = []

    def init(self, key: str | list[str], value: torch.Tensor | list[torch.Tensor]) -> None:
        if self.rank == 0 and isinstance(key, list):
            self.sums.values |= {name: each.clone() for name, each in zip(key, value, strict=True)}
        elif self.rank == 0:
            self.sums.values[key] = value.clone()
        self.sums.both.wait()

    def pull(self, key: str, out: torch.Tensor) -> None:
        out.copy_(self.sums.values[key])

    def pushpull(self, key: str, value: torch.Tensor) -> None:
        if self.rank == 0:
            self.sums.values[key] = torch.zeros_like(value)
        for rank in range(2):
            self.sums.both.wait()
            if self.rank == rank:
                self.sums.values[key] += value
        self.sums.both.wait()
        value.copy_(self.sums.values[key])
        self.sums.both.wait()

    def join(self, timeout: float | None = None) -> int:
        self.calls.append("join")
        return 0

    def begin_join(self) -> None:
        self.calls.append("begin_join")

    def close(self) -> None:
        self.calls.append("close")


def together(work: Any) -> list[Any]:
    """Return what ``work`` returns for the end of each of two workers."""
    sums = Sums()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, [sums.end(rank) for rank in range(2)]))


def test_all_hear_what_worker_0_has_found_in_the_directory() -> None:
    assert together(lambda end: told(end, *((7, 5) if end.rank == 0 else (0, 0)))) == [(7, 5)] * 2


def test_each_meeting_has_the_decisions_of_that_meeting() -> None:
    def work(end: End) -> list[Any]:
        meetings = Meetings(end, end.rank, 2)
        first = meetings.meet(end.rank == 1, *((4, 20) if end.rank == 0 else (0, 0)))
        return [first, meetings.meet(True, *((0, 30) if end.rank == 0 else (0, 0)))]

    assert together(work) == [[(4, 20, [1]), (0, 30, [0, 1])]] * 2


def test_all_hear_which_worker_fails_first_and_why() -> None:
    def work(end: End) -> list[str]:
        meetings = Meetings(end, end.rank, 2)
        said = ["", "", ""], ["", "what is attached as 'möbius'", "x" * 1000]
        return [meetings.failure(why) for why in said[end.rank]] + [meetings.failure("both")]

    told = ["", "worker 1: what is attached as 'möbius'", f"worker 1: {'x' * 600}", "worker 0: both"]
    assert together(work) == [told] * 2


def test_a_join_is_the_stores() -> None:
    def work(end: End) -> list[str]:
        meetings = Meetings(end, end.rank, 2)
        meetings.begin_join()
        meetings.join()
        return end.calls

    assert together(work) == [["begin_join", "join"]] * 2
