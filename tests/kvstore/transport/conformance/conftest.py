"""Ends of each transport."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_transport import Ends, both, far, near, secured, shared
from inproc import InprocNetwork

from kvstore.transport.shm.presence import available
from kvstore.transport.sockets.socket_transport import TcpTransport, UnixTransport
from kvstore.transport.zeromq import ZmqTransport


@pytest.fixture(
    params=[
        "inproc",
        "unix",
        "tcp",
        "zmq-ipc",
        "curve",
        "shm-unix",
        "shm-tcp",
        "shm-zmq",
        "shm-curve",
        # Each of their carriers has both kinds of places above, and memory that is shared.
        *(pytest.param(kind, marks=pytest.mark.release) for kind in ("zmq-tcp", "curve-ipc", "shm-ipc")),
    ]
)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param.startswith("shm") and not available():
        pytest.skip("memory cannot be shared here")
    with tempfile.TemporaryDirectory() as directory:  # which is 0700, and short enough for a socket
        made = {
            "inproc": lambda: Ends(InprocNetwork().transport, "inproc://here"),
            "unix": lambda: Ends(UnixTransport, f"ipc://{directory}/here"),
            "tcp": lambda: Ends(TcpTransport, "tcp://127.0.0.1:0"),
            "zmq-ipc": lambda: Ends(ZmqTransport, f"ipc://{directory}/here"),
            "zmq-tcp": lambda: Ends(ZmqTransport, "tcp://127.0.0.1:0"),
            "curve": lambda: Ends(secured(), "tcp://127.0.0.1:0"),
            "curve-ipc": lambda: Ends(secured(), f"ipc://{directory}/here"),
            "shm-unix": lambda: Ends(near, f"ipc://{directory}/here"),
            "shm-ipc": lambda: Ends(shared, f"ipc://{directory}/here"),
            "shm-tcp": lambda: Ends(far, "tcp://127.0.0.1:0"),
            "shm-zmq": lambda: Ends(shared, "tcp://127.0.0.1:0"),
            "shm-curve": lambda: Ends(both(), "tcp://127.0.0.1:0"),
        }[request.param]()
        made.kind = request.param
        yield made
        made.close()
        assert not list(Path("/dev/shm").glob(f"kvstore-{os.getuid()}-conformance-{os.getpid()}-*"))
