"""Signs of life from beside a process: real ones, and what /proc says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jobkeys
import pytest
from proc import state
from waiting import LONG, until

from kvstore import wire
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, with_key
from kvstore.member.pulse import LastPlace, PulseProcess, stopped
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.wire.guests import UNASKED

NODE = wire.Node("worker", 3, 1)


@pytest.fixture(params=["unix", "tcp", "curve", "zeromq", "zeromq-tcp"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    setting = "zeromq" if "zeromq" in request.param else "sockets"
    if request.param in ("unix", "zeromq"):
        return Config(root=f"ipc://{tmp_path}/scheduler", heartbeat_s=0.05, transport=setting)
    keys = CurveKeys.from_env(jobkeys.variables(1)[0]) if request.param == "curve" else None
    return Config(root="tcp://127.0.0.1:0", heartbeat_s=0.05, keys=keys, transport=setting)


@pytest.fixture
def heard(config: Config) -> Iterator[tuple[Transport, Config]]:
    """What listens where the scheduler would, and how it is reached."""
    transport = links(config)()
    try:
        root = transport.bind(config.root)
        if config.keys is not None and "?" not in root:
            root = with_key(root, config.keys.public)
        yield transport, replace(config, root=root)
    finally:
        transport.close()


def hears(transport: Transport, timeout: float = LONG) -> bool:
    received = transport.recv(timeout)
    return received is not None and wire.decode(received[1]) == wire.ProcessAlive(NODE)


def answer_of(transport: Transport, number: int) -> wire.Stacks:
    """What the process says to the question where the other is: after beats that were on their way."""
    received = transport.recv(LONG)
    assert received is not None
    transport.send(received[0], wire.encode(wire.Where(number)))
    while True:
        received = transport.recv(LONG)
        assert received is not None
        message = wire.decode(received[1])
        if isinstance(message, wire.Stacks):
            return message


def test_it_beats_until_it_is_ended_and_tells_where_the_process_was(heard: tuple[Transport, Config]) -> None:
    transport, config = heard
    process = PulseProcess(config, NODE)
    try:
        assert hears(transport)
        assert hears(transport)
        assert not process.ended
        assert answer_of(transport, 1) == wire.Stacks(NODE, 1, "", "", [])
        process.note_place("train.py:41 in load_batch")
        assert answer_of(transport, 2) == wire.Stacks(NODE, 2, "train.py:41 in load_batch", "", [])
        assert hears(transport)
    finally:
        process.end()
    assert process.ended


@pytest.mark.parametrize("config", ["unix"], indirect=True)
def test_it_is_no_child_of_the_process_which_may_wait_for_all_of_its_children(heard: tuple[Transport, Config]) -> None:
    transport, config = heard
    process = PulseProcess(config, NODE)
    try:
        assert hears(transport)
        assert f" {os.getpid()} " not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2][:20]
    finally:
        process.end()


BESIDE = """
import sys, time
from kvstore.job.config import Config
from kvstore.member.pulse import PulseProcess
from kvstore.wire import Node

interval_s = float(sys.argv[2])
config = Config(root=sys.argv[1], heartbeat_s=interval_s, heartbeat_timeout_s=9 * interval_s)
process = PulseProcess(config, Node("worker", 3, 1))
print(process.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def beside(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Transport, subprocess.Popen[str], int]]:
    """A process beside which another beats, what listens, and the number of that other."""
    tmp_path.chmod(0o700)
    config = Config(root=f"ipc://{tmp_path}/scheduler")
    transport = links(config)()
    try:
        transport.bind(config.root)
        words = [sys.executable, "-c", BESIDE, config.root, str(getattr(request, "param", 0.05))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield transport, process, int(process.stdout.readline())
            finally:
                process.kill()
    finally:
        transport.close()


def test_a_process_that_is_stopped_has_no_pulse(beside: tuple[Transport, subprocess.Popen[str], int]) -> None:
    transport, process, _ = beside
    first = transport.recv(LONG)
    assert first is not None
    pulse = first[0]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state(process.pid) == "T", "the process to stop")
    while wire.decode((received := transport.recv(LONG) or first)[1]) == wire.ProcessAlive(NODE):
        pass  # they were on their way
    assert wire.decode(received[1]) == wire.Stacks(NODE, UNASKED, "", "is stopped by a signal", [])
    assert transport.recv(0.5) is None
    transport.send(pulse, wire.encode(wire.Where(5)))
    received = transport.recv(LONG)
    assert received is not None
    assert wire.decode(received[1]) == wire.Stacks(NODE, 5, "", "is stopped by a signal", [])
    os.kill(process.pid, signal.SIGCONT)
    assert hears(transport)


def test_it_ends_with_whom_it_beats_for_however_that_ends(
    beside: tuple[Transport, subprocess.Popen[str], int],
) -> None:
    transport, process, pid = beside
    assert hears(transport)
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "the other to end")


@pytest.mark.parametrize("beside", [2 * LONG], indirect=True)
def test_before_the_first_heartbeat_is_due_it_imports_nothing_and_ends_with_whom_it_beats_for(
    beside: tuple[Transport, subprocess.Popen[str], int],
) -> None:
    transport, process, pid = beside
    until(lambda: "--idle" in Path(f"/proc/{pid}/cmdline").read_text(), "the shell to become the other")
    assert transport.recv(0.0) is None
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "the other to end")


def test_it_is_ended_at_once_even_where_it_has_hardly_begun(tmp_path: Path) -> None:
    config = Config(root=f"ipc://{tmp_path}/scheduler", heartbeat_s=LONG, heartbeat_timeout_s=9 * LONG)
    process = PulseProcess(config, NODE)
    process.end()
    assert process.ended
    until(lambda: not Path(f"/proc/{process.pid}").exists(), "the other to be gone")


@pytest.mark.parametrize(
    ("letter", "alive"), [("R", True), ("S", True), ("D", True), ("T", False), ("t", False), ("Z", False)]
)
def test_what_the_system_says_of_a_process(letter: str, alive: bool) -> None:
    assert (stopped(f"17 (a name (with) brackets) {letter} 1 17 17 0 -1") == "") is alive


@pytest.fixture
def ends() -> Iterator[tuple[LastPlace, LastPlace]]:
    """Who writes, and who reads."""
    writer = LastPlace()
    reader = LastPlace(os.dup(writer.fd))
    yield writer, reader
    writer.close()
    reader.close()


def test_the_latest_text_is_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    assert reader.read() == ""
    for text in ("train.py:41 in load_batch", "a.py:1 in f", "a.py:1 in f", "", "\u00e9" * 2):
        writer.write(text)
        assert reader.read() == text


def test_a_long_text_is_cut(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("x" * 10_000)
    assert reader.read() == "x" * 512


def test_a_text_that_is_half_written_is_not_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("train.py:41 in load_batch")
    os.pwrite(writer.fd, b"other", 10)
    assert reader.read() == ""
