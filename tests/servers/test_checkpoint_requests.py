"""Who may ask a server for a capture, and who is told when it is in a file."""

from __future__ import annotations

from pathlib import Path

import torch
from asking import Desk, Worker, optimized, text_of

from kvstore import wire
from kvstore.errors import CheckpointError
from servers.store.capture import StoreCapture


def asked(worker: Worker, clocks: dict[int, int], number: int = 1) -> wire.Message:
    return wire.Capture(worker.me(), 0, number, list(clocks), list(clocks.values()))


def desk(size: int) -> tuple[Desk, list[StoreCapture]]:
    """Return a shard of one segment, and a list of the captures that it saves."""
    made = Desk(2, values={1: torch.zeros(size)})
    complete: list[StoreCapture] = []
    made.shard.checkpoints.save = complete.append
    return made, complete


def test_who_may_ask_and_for_what() -> None:
    made, complete = desk(1)
    first, second = made.workers
    assert "only worker 0" in text_of(made.reply(second, asked(second, {1: 0})), "UsageError")
    assert "no value" in text_of(made.reply(first, asked(first, {9: 0})), "KeyNotInitialized")
    assert made.reply(first, asked(first, {1: 0}))
    assert "before" in text_of(made.reply(first, asked(first, {1: 0})), "UsageError")
    assert "not known" in text_of(made.reply(first, wire.AwaitCapture(first.me(), 0, 8)), "UsageError")
    made.shard.checkpoints.save = None
    assert "KVSTORE_CHECKPOINT_DIR" in text_of(made.reply(first, asked(first, {1: 0}, 2)), "CheckpointError")
    assert len(complete) == 1


def test_who_awaits_a_file_has_other_answers_forgotten_and_may_ask_again() -> None:
    made, complete = desk(3)
    optimized(made, lr=0.5)
    first, other = made.workers
    made.ask(first, asked(first, {1: 0}))
    waits = wire.AwaitCapture(first.me(), 0, 1)
    made.ask(first, waits)
    known = len(made.shard.ledger)
    for clock in range(1, 9):
        first.done, other.done = first.seq + 1, other.seq + 1  # but for ``waits``
        made.ask(first, first.push({1: torch.ones(3)}, clock, want=True))
        made.ask(other, other.push({1: torch.ones(3)}, clock, want=True))
    assert len(made.shard.ledger) <= known
    assert made.shard.handle(b"new link", waits) == []
    outbox = made.shard.saved(complete[0], Path("file"), CheckpointError("disk full"))
    assert [(peer, text_of(reply, "CheckpointError")) for peer, reply in outbox] == [
        (first.peer, "disk full"),
        (b"new link", "disk full"),
    ]
