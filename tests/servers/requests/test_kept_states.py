"""What a shard keeps for workers that come back, and for how long."""

from __future__ import annotations

from typing import Any

from asking import Desk, Worker, text_of

from kvstore import wire


def keep(desk: Desk, sponsor: Worker, incarnation: int, content: bytes, number: int = 7, part: int = 0) -> None:
    message = wire.KeepState(sponsor.me(), 1, incarnation, number, part, [content])
    assert desk.reply(sponsor, message) == wire.Ack(message.seq)


def take(desk: Desk, newcomer: Worker, number: int = 7, part: int = 0) -> Any:
    return desk.reply(newcomer, wire.TakeState(newcomer.me(), number, part))


def come_back(desk: Desk, incarnation: int) -> Worker:
    desk.shard.depart([], {1: incarnation - 1}, {1: incarnation})
    newcomer = Worker(1, incarnation=incarnation)
    desk.names[newcomer.peer] = newcomer.name
    return newcomer


def test_it_is_kept_until_the_worker_has_it() -> None:
    desk = Desk(2, min_workers=1)
    sponsor, newcomer = desk.workers[0], come_back(desk, 2)
    keep(desk, sponsor, 2, b"old", number=6)  # of a sponsor that was lost meanwhile
    for part, content in enumerate((b"one", b"two")):
        keep(desk, sponsor, 2, content, part=part)
    for _ in range(2):  # a repeat
        assert [bytes(take(desk, newcomer, part=part).buffers[0]) for part in range(2)] == [b"one", b"two"]
    assert "not on this server any more" in text_of(take(desk, sponsor), "NodeLost"), "it is another worker's"
    message = wire.DropState(newcomer.me())
    assert desk.reply(newcomer, message) == wire.Ack(message.seq)
    assert "not on this server any more" in text_of(take(desk, newcomer), "NodeLost")


def test_it_is_kept_no_longer_than_the_worker_lives() -> None:
    desk = Desk(2, min_workers=1)
    come_back(desk, 2)
    keep(desk, desk.workers[0], 2, b"one")
    assert desk.shard.kept.nbytes == 3
    newcomer = come_back(desk, 3)
    assert desk.shard.kept.nbytes == 0
    keep(desk, desk.workers[0], 2, b"late")
    keep(desk, desk.workers[0], 3, b"new")
    assert desk.shard.kept.nbytes == 3
    assert bytes(take(desk, newcomer).buffers[0]) == b"new"
