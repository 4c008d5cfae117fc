"""A server and a scheduler as real processes, trained through real sockets, while strangers throw nonsense at them."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from malformed import flood
from waiting import LONG

from kvstore.client import DistStore
from kvstore.job.config import Config
from kvstore.member.session import Session
from kvstore.transport.sockets.socket_transport import UnixTransport
from kvstore.transport.sockets.stream import GREETING, packed

FRAMES = 300  # more would take long: strangers get little of the time
GROWTH = 4 << 20  # bytes
ENV = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_TASK_ID": "0", "OMP_NUM_THREADS": "1"}


class Process:
    """``python -m servers`` in some role."""

    def __init__(self, role: str, directory: Path) -> None:
        self.log = directory / f"{role}.log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "servers"],
                env=os.environ | ENV | {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": f"ipc://{directory}/scheduler"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def rss(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def wait(self) -> int:
        return self._process.wait(LONG)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Stranger:
    """Someone who can reach the sockets and is no member: each thing that they say costs them the connection."""

    def __init__(self, directory: Path) -> None:
        self._paths = [directory / "scheduler", directory / "server-0"]

    def throw(self, count: int, seed: int) -> None:
        for frames in flood(count, seed):
            self._say(GREETING + b"".join(map(bytes, packed(frames))))

    def throw_bytes(self, count: int) -> None:
        """Streams of something else, or that announce what never comes."""
        dice = random.Random(1)
        announced = [struct.pack("<IQ", 1, size) + b"x" * 100 for size in (1 << 20, 1 << 35, 1 << 40, (1 << 63) + 1)]
        announced += [struct.pack("<I", count) + b"x" * 100 for count in (0, 1 << 16, 1 << 18, (1 << 32) - 1)]
        for number in range(count):
            self._say(GREETING + announced[number // 2 % len(announced)] if number % 2 else dice.randbytes(200))

    def _say(self, said: bytes) -> None:
        for path in self._paths:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(LONG)
                sock.connect(str(path))
                try:
                    sock.sendall(said)
                    while sock.recv(4096):
                        pass
                except (BrokenPipeError, ConnectionResetError):
                    pass


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.release
def test_hundreds_of_malformed_frames_cost_nobody_anything(directory: Path):
    processes = [Process(role, directory) for role in ("scheduler", "server")]
    stranger = Stranger(directory)
    stop = threading.Event()
    steps: list[Any] = [0]

    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(1000))
        out = torch.zeros(1000)
        while not stop.is_set():
            steps[0] += 1
            store.pushpull("w", torch.ones(1000), out)
            assert set(out.tolist()) == {-float(steps[0])}

    def run() -> None:
        try:
            train(DistStore(session))
        except BaseException as exc:
            steps.append(exc)

    try:
        session = Session(Config("worker", f"ipc://{directory}/scheduler", 1, 1, timeout_s=LONG), UnixTransport).join()
        thread = threading.Thread(target=run)
        thread.start()
        stranger.throw(300, seed=1)  # whatever is allocated once is there after this
        stranger.throw_bytes(20)
        before, steps_before = [process.rss() for process in processes], steps[0]
        stranger.throw(FRAMES, seed=2)
        stranger.throw_bytes(100)
        grown = [process.rss() - rss for process, rss in zip(processes, before, strict=True)]
        steps_after = steps[0]
        stop.set()
        thread.join(LONG)
        assert len(steps) == 1, steps[1]
        assert steps_after > steps_before + 10, "training went on"
        session.leave()
        assert [process.wait() for process in processes] == [0, 0]
        assert max(grown) < GROWTH, grown
        assert all(process.log.stat().st_size < 4000 for process in processes), "a flood does not fill the log"
    finally:
        stop.set()
        for process in processes:
            process.end()


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_process_outside_a_job_says_so_and_exits(role: str, directory: Path):
    process = subprocess.run(
        [sys.executable, "-m", "servers"],
        env=os.environ | {"DMLC_ROLE": role},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("ConfigError: this process is not part of a distributed job")
