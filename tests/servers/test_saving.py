from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from asking import Desk, Worker, optimized, text_of
from safetensors.torch import load_file

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.errors import CheckpointError
from kvstore.sealed_folders import FileRecord, record_of
from servers.saving import MOST, Saver
from servers.store.capture import StoreCapture


def saved(directory: Path) -> tuple[Desk, list[Any]]:
    """Let a shard save checkpoint 5 in ``directory``; return it, and what its saver reported."""
    desk = optimized(Desk(1, values={3: torch.arange(4.0)}), momentum=0.5)
    outcomes: list[Any] = []
    ended = threading.Event()

    def done(*outcome: Any) -> None:
        outcomes.extend(outcome)
        ended.set()

    saver = Saver(desk.shard.checkpoints.memory, directory, 1, done)
    desk.shard.checkpoints.save = saver.save
    worker = desk.workers[0]
    desk.ask(worker, worker.push({3: torch.ones(4)}, 1))
    desk.ask(worker, wire.Capture(worker.me(), 0, 5, [3], [1]))
    request = wire.AwaitCapture(worker.me(), 0, 5)
    assert desk.reply(worker, request) is None
    assert ended.wait(20)
    outcomes.extend(desk.named(desk.shard.saved(outcomes[0], *outcomes[1:])).values())
    return desk, outcomes


def test_a_file_is_written_and_reported(tmp_path: Path) -> None:
    folder = begin(tmp_path, 5)
    _, (_, _, outcome, reply) = saved(tmp_path)
    path = folder / "store-0.server-1.safetensors"
    assert isinstance(outcome, FileRecord)
    assert outcome == record_of(path)
    assert reply == wire.Captured(reply.seq, outcome.nbytes, outcome.sha256, [1], "sgd", str(path))
    tensors = load_file(path)
    assert tensors["3/value"].tolist() == [-0.5, 0.5, 1.5, 2.5]
    assert tensors["3/state/momentum_buffer"].tolist() == [1, 1, 1, 1]


def test_a_directory_that_is_not_shared_is_an_error_and_training_goes_on(tmp_path: Path) -> None:
    desk, (_, _, outcome, reply) = saved(tmp_path)
    assert isinstance(outcome, CheckpointError)
    assert "must be on a file system that all hosts share" in reply.text
    worker = desk.workers[0]
    assert desk.reply(worker, worker.push({3: torch.ones(4)}, 2)) is not None


def test_without_threads_the_error_is_reported(tmp_path: Path) -> None:
    class NoThreads:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    outcomes: list[Any] = []
    desk = Desk(1, values={3: torch.arange(4.0)})
    threads: Any = NoThreads
    memory = desk.shard.checkpoints.memory
    desk.shard.checkpoints.save = Saver(memory, tmp_path, 1, lambda *given: outcomes.extend(given), threads).save
    worker = desk.workers[0]
    assert desk.reply(worker, wire.Capture(worker.me(), 0, 5, [3], [0])) is not None
    assert "can't start new thread" in str(outcomes[2])


def asked(worker: Worker, clocks: dict[int, int], number: int = 1) -> wire.Message:
    return wire.Capture(worker.me(), 0, number, list(clocks), list(clocks.values()))


def desk(size: int) -> tuple[Desk, list[StoreCapture]]:
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


def test_who_waits_is_answered_when_the_file_is_there_and_each_of_its_links_once(tmp_path: Path) -> None:
    made, complete = desk(1)
    first = made.workers[0]
    made.ask(first, asked(first, {1: 0}, 7))
    request = wire.AwaitCapture(first.me(), 0, 7)
    for peer in (first.peer, b"new", b"new"):
        assert made.shard.handle(peer, request) == []
    assert made.shard.checkpoints.explain(request.node, request.seq) == "is writing checkpoint 7"
    assert made.shard.checkpoints.explain(request.node, request.seq + 1) == ""
    (tmp_path / "there").write_bytes(b"file")
    record = record_of(tmp_path / "there")
    answers = made.shard.saved(complete[0], Path("/there"), record)
    captured = wire.Captured(request.seq, 4, record.sha256, [0], complete[0].optimizer, "/there")
    assert answers == [(first.peer, captured), (b"new", captured)]
    again = wire.AwaitCapture(first.me(), 0, 7)
    assert made.reply(first, again) == replace(captured, seq=again.seq)


def test_few_outcomes_are_remembered() -> None:
    made, complete = desk(1)
    first = made.workers[0]
    for number in range(1, MOST + 2):
        made.ask(first, asked(first, {1: 0}, number))
        made.shard.saved(complete[-1], Path("file"), CheckpointError("disk full"))
    texts = [
        text_of(made.reply(first, wire.AwaitCapture(first.me(), 0, number)), kind)
        for number, kind in ((1, "UsageError"), (2, "CheckpointError"))
    ]
    assert "not known" in texts[0]
    assert texts[1] == "disk full"
    assert "before" in text_of(made.reply(first, asked(first, {1: 0}, 2)), "UsageError")
