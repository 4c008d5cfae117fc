"""Processes at the other end that are killed, over every transport that there is between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from every_transport import MEMBERS, Ends, pattern, receive

CHILD = """
import os, sys
from kvstore.job.curve_keys import CurveKeys
from kvstore.transport.memory import ScatteredFrame
from kvstore.transport.shm.shared_memory import SharedMemoryTransport
from kvstore.transport.sockets.socket_transport import TcpTransport
from kvstore.transport.sockets.socket_transport import UnixTransport
from kvstore.transport.zeromq import ZmqTransport

kind, endpoint = sys.argv[1:]
keys = CurveKeys.from_env(os.environ) if "key=" in endpoint else None
sockets = {"unix": UnixTransport, "tcp": TcpTransport}
inner = sockets.get(kind.removeprefix("shm-"), lambda: ZmqTransport(keys=keys))()
transport = SharedMemoryTransport(inner, "conformance") if kind.startswith("shm-") else inner
link = transport.connect(endpoint)
transport.send(link, [b"hello", bytes(1 << 13)])
held = []
number = 0
while True:
    received = transport.recv(30)
    if received is None:
        sys.exit("nobody there")
    held.append(received)
    if received[1][0] == b"write":
        for _ in range(20):
            memory = transport.allocate(1 << 20)
            memory[:] = bytes([number % 256]) * (1 << 20)
            transport.send(link, [b"%d" % number, memory])
            number += 1
    else:
        transport.send(link, [b"got"])
"""


@pytest.fixture
def child(ends: Ends) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that connects to the endpoint, and does what messages say."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        env = os.environ | MEMBERS[0]
        made.append(subprocess.Popen([sys.executable, "-c", CHILD, ends.kind, ends.endpoint], env=env))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        for path in Path("/dev/shm").glob(f"kvstore-{os.getuid()}-conformance-{process.pid}-*"):
            path.unlink()


# Each carrier, alone and with shared memory; what is between processes. A test of each starts several.
between_processes = pytest.mark.parametrize(
    "ends", ["unix", "tcp", "zmq-ipc", "curve", "shm-unix", "shm-tcp", "shm-curve"], indirect=True
)


@between_processes
def test_a_writer_that_is_killed_leaves_its_readers_what_they_have(ends: Ends, child: Callable[..., object]):
    listener = ends.new()
    ends.endpoint = listener.bind(ends.endpoint)
    writer = child()
    peer, _ = receive(listener)
    held = []
    for _ in range(4):
        listener.send(peer, [b"write"])
        held += [receive(listener)[1] for _ in range(10)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    while (received := listener.recv(0.2)) is not None:  # what was on its way is whole, or does not come
        held.append(received[1])
    for number, (head, frame) in enumerate(held):
        assert int(bytes(head)) == number
        assert bytes(frame) == bytes([number % 256]) * (1 << 20)
    child()
    assert receive(listener)[1][0] == b"hello"


@between_processes
def test_a_reader_that_is_killed_costs_nobody_anything(ends: Ends, child: Callable[..., object]):
    listener = ends.new()
    ends.endpoint = listener.bind(ends.endpoint)
    readers = [child(), child()]
    peers = [receive(listener)[0], receive(listener)[0]]
    for _ in range(3):
        for peer in peers:
            listener.send(peer, [b"keep", pattern(1 << 16)])
        for _ in peers:
            assert receive(listener)[1] == [b"got"]
    os.kill(readers[0].pid, signal.SIGKILL)
    readers[0].wait()
    answers = 0
    for _ in range(30):
        for peer in peers:
            memory = listener.allocate(1 << 20)
            listener.send(peer, [b"keep", memory])
        answers += receive(listener)[1] == [b"got"]
    assert answers == 30
