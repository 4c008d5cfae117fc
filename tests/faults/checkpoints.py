"""``python -m faults.checkpoints 200``: a process that only checkpoints is killed so many times, at random moments.

It has the shards of two servers, and does what servers and worker 0 do for a checkpoint. After each kill the newest
checkpoint must be the last one that was complete, or a later one, and all that have a manifest must be whole: every
element of every value and state is the number of rounds that the manifest says. ``--full`` gives the directory so few
bytes that it fills up, again and again; it needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvstore import wire
from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.folders import begin, listed
from kvstore.client.checkpoint_in_progress import CheckpointInProgress, SavedStore
from kvstore.client.entries import Entries, SegmentColumns
from kvstore.errors import CheckpointError, ServerError
from kvstore.sealed_folders import FileRecord
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec
from kvstore.values import to_buffer
from servers.saving import Saver
from servers.shard import Shard
from servers.store.capture import StoreCapture

SIZE = 400_000  # elements of each server's segment
SERVERS = 2
TABLE = Table(shape=(20_000, 16))
STRIPE = 10  # the number of server 0's segment of the table; the next server has the next
LONGEST_S = 0.06  # until a kill, at first; then about half of all kills are to leave a new checkpoint


class CheckpointingJob:
    """Two shards and what worker 0 knows of them, from the newest checkpoint on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seq = 0
        self._shards = [Shard(rank, 1) for rank in range(SERVERS)]
        self._replies: dict[int, object] = {}
        self._posted = threading.Condition()
        whole = [folder for folder in listed(directory) if folder.whole]
        self.number = max((folder.number for folder in listed(directory)), default=0)
        value = torch.zeros(SIZE * SERVERS)
        self.base = 0
        if whole:
            with CheckpointReader(whole[-1].path) as reader:
                self.base, value = reader.manifest.rounds, reader.value(0, "w").clone()
        for rank, shard in enumerate(self._shards):
            saver = Saver(shard.checkpoints.memory, directory, rank, partial(self._saved, rank))
            shard.checkpoints.save = saver.save
            part = to_buffer(value[rank * SIZE : (rank + 1) * SIZE])
            self._ask(rank, wire.Open(self._me(), 0, "sync"))
            self._ask(rank, wire.Init(self._me(), 0, [rank], ["w"], [0], [[SIZE]], "float32", [part]))
            self._ask(rank, wire.InitTables(self._me(), 0, [STRIPE + rank], ["t"], [TABLE.described], rank, SERVERS))
            assert isinstance(
                self._ask(
                    rank, wire.SetOptimizer(self._me(), 0, 1, "sgd", [["momentum", 0.5]], None, [], [], 1.0, 1.0)
                ),
                wire.Ack,
            )
            ids = np.arange(rank, 20_000, SERVERS)
            rows = np.full((len(ids), TABLE.width), self.base, np.float32)
            buffers = [to_buffer(torch.from_numpy(ids)), to_buffer(torch.from_numpy(rows))]
            put = wire.PutRows(self._me(), 0, STRIPE + rank, len(ids), None, None, [], [], [], buffers)
            assert isinstance(self._ask(rank, put), wire.Ack)
        self.clock = 0

    def round(self) -> None:
        """Make every value ``base + clock``, and every momentum -1."""
        gradient = torch.full((SIZE,), -0.5 if self.clock else -1.0)
        self.clock += 1
        for rank in range(SERVERS):
            push = wire.Push(self._me(), 0, [rank], [self.clock], False, None, None, buffers=[to_buffer(gradient)])
            assert isinstance(self._ask(rank, push), wire.Ack)
            ids = torch.arange(rank, 20_000, SERVERS)
            rows = torch.full((len(ids), TABLE.width), float(gradient[0]))
            buffers: list[wire.Buffer] = [to_buffer(ids), to_buffer(rows), b""]
            own = [STRIPE + rank], [self.clock], [len(ids)], [0]
            of_rows = wire.PushRows(
                self._me(), 0, *own, True, False, False, None, None, [], codecs=["none"], buffers=buffers
            )
            assert isinstance(self._ask(rank, of_rows), wire.Ack)

    def checkpoint(self) -> bool:
        """Make a checkpoint, while another round is made; return whether there is one."""
        self.number += 1
        try:
            folder = begin(self._directory, self.number)
        except OSError:
            return False
        half = 10_000 * TABLE.width
        given = [SERVERS, SERVERS], [0, 1, 10, 11], [0, 1, 0, 1], [0, SIZE, 0, half], [SIZE, 2 * SIZE, half, 2 * half]
        columns = SegmentColumns(*(np.array(column, np.int64) for column in given))
        specs = [Spec((SIZE * SERVERS,), "float32"), TableSpec.of(TABLE)]
        entries = Entries.of(["w", "t"], [0, 1], specs, columns)
        outcome: list[bool] = []
        store = SavedStore(0, 1, "sync", entries, [self.clock, self.clock])
        rounds = self.base + self.clock
        progress = CheckpointInProgress(folder, self.number, rounds, 1, SERVERS, [store], [], 2, 5.0, outcome.append)
        waits = {}
        for rank in range(SERVERS):
            assert isinstance(
                self._ask(rank, wire.Capture(self._me(), 0, self.number, [rank, STRIPE + rank], [self.clock] * 2)),
                wire.Ack,
            )
            wait = wire.AwaitCapture(self._me(), 0, self.number)
            self._ask(rank, wait)
            waits[wait.seq] = rank
        self.round()
        for seq, rank in waits.items():
            with self._posted:
                self._posted.wait_for(lambda seq=seq: seq in self._replies)
                reply = self._replies.pop(seq)
            if isinstance(reply, wire.Captured):
                progress.take((0, rank), reply)
            else:
                progress.fail(ServerError(str(reply)))
        assert progress.join(30)
        return outcome == [True]

    def _me(self) -> wire.Sender:
        self._seq += 1
        return wire.Sender(wire.Node("worker", 0, 1), self._seq, self._seq)

    def _ask(self, rank: int, message: wire.Request) -> object:
        with self._posted:
            for _, reply in self._shards[rank].handle(b"worker", message):
                self._replies[reply.seq] = reply  # type: ignore[attr-defined]
            return self._replies.get(message.seq)

    def _saved(self, rank: int, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> None:
        with self._posted:
            for _, reply in self._shards[rank].saved(capture, path, outcome):
                self._replies[reply.seq] = reply  # type: ignore[attr-defined]
            self._posted.notify_all()


def require_whole(directory: Path, least: int) -> int:
    """Raise unless every checkpoint is whole, and there is one from number ``least`` on; return the newest number."""
    newest = 0
    for folder in listed(directory):
        if not folder.whole:
            continue
        manifest = verify(folder.path)
        with CheckpointReader(folder.path) as reader:
            value, states = reader.value(0, "w"), reader.states(0, ["w"])
            rows = np.concatenate([page.rows for page in reader.pages(0, "t")])
        assert torch.equal(value, torch.full_like(value, float(manifest.rounds))), folder
        assert len(rows) == TABLE.rows, folder
        assert (rows == manifest.rounds).all(), folder
        assert torch.equal(states["w", "momentum_buffer"], -torch.ones_like(value)), folder
        newest = manifest.number
    assert newest >= least, f"checkpoint {least} was complete, and the newest is {newest}"
    return newest


def child(directory: Path, told: int) -> None:
    """Checkpoint for ever, and write each number to the pipe ``told`` once the checkpoint is complete."""
    job = CheckpointingJob(directory)
    job.round()
    os.write(told, b"ready\n")
    while True:
        if job.checkpoint():
            os.write(told, f"{job.number}\n".encode())


def kill(directory: Path, count: int, seed: int) -> list[int]:
    """Kill so many processes at random moments; return the newest number after each."""
    chance = random.Random(seed)
    torch.set_num_threads(1)
    newest, numbers, longest = 0, [], LONGEST_S
    for _ in range(count):
        reading, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                child(directory, told)
            finally:
                os._exit(9)
        os.close(told)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.readline() == b"ready\n"
            time.sleep(chance.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "it ended by itself"
            complete = [int(line) for line in pipe.read().split(b"\n") if line]
        before, newest = newest, require_whole(directory, max([newest, *complete]))
        longest *= 0.9 if newest > before else 1.1
        numbers.append(newest)
    return numbers


def fill(directory: Path, count: int) -> tuple[int, int]:
    """Checkpoint on a disk that is full at every other one; return how many were made, and how many failed."""
    job, ballast, made = CheckpointingJob(directory), directory / "ballast", 0
    job.round()
    for number in range(count):
        if number % 2:
            left = os.statvfs(directory)
            ballast.write_bytes(bytes(max(0, left.f_bavail * left.f_frsize - number % 7 * SIZE)))
        whole = [folder.number for folder in listed(directory) if folder.whole]
        made += job.checkpoint()
        ballast.unlink(missing_ok=True)
        require_whole(directory, max(whole, default=0))
    return made, count - made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.checkpoints", description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="fill a small disk instead of killing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        began = time.monotonic()
        if options.full:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", name], check=True)
            try:
                made, failed = fill(directory, options.kills)
            finally:
                subprocess.run(["umount", name], check=True)
            print(f"{made} checkpoints made, {failed} failed on a full disk; all that were there stayed whole")
            return 0 if made and failed else 1
        numbers = kill(directory, options.kills, options.seed)
        fresh = sum(after > before for before, after in zip([0, *numbers], numbers, strict=False))
        print(
            f"{len(numbers)} kills in {time.monotonic() - began:.0f} s: {fresh} left a new checkpoint, "
            f"{len(numbers) - fresh} the old one; none was torn"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
