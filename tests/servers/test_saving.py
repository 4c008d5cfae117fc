from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from asking import Desk, optimized
from safetensors.torch import load_file

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.checkpoint.tensors import record_of
from kvstore.errors import CheckpointError
from kvstore.manifests import FileRecord
from servers.saving import Saver


def saved(directory: Path) -> tuple[Desk, list[Any]]:
    """Let a shard save checkpoint 5 in ``directory``; return it, and what its saver reported."""
    desk = Desk(1, values={3: torch.arange(4.0)})
    optimized(desk, momentum=0.5)
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
