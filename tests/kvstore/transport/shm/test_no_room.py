"""A transport whose directory of shared memory is full, or not there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shm_ends import BIG, Ends, hello

from kvstore.transport.shm import arena as arenas
from kvstore.transport.shm import presence
from kvstore.transport.shm import shared_memory as shm
from kvstore.transport.shm.shared_memory import LARGE

pytestmark = [
    pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here"),
    pytest.mark.usefixtures("usual_chunks"),
]


def full(fd: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_directory_is_noticed_once_and_frames_go_as_they_are(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    ends.acquaint()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            memory = ends.other.allocate(64 << 20)
            memory[-4:] = b"last"
            assert bytes(ends.send(b"head", memory)[1][-4:]) == b"last"
            assert len(ends.inner.sent[-1]) == 2
            assert ends.other.busy(memory)
    assert caplog.text.count("no shared memory for 67108864 bytes: No space left on device") == 1
    assert "--shm-size" in caplog.text
    ends.send(b"head", ends.other.allocate(64 << 20))
    assert len(ends.inner.sent[-1][0]) == 2 + 24, "there is room again"


def test_where_not_even_the_control_file_fits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(3):
        memory = ends.other.allocate(LARGE)
        memory[:] = BIG
        assert ends.send(b"head", memory) == [b"head", BIG]
    assert len(ends.inner.sent) == 3, "there was nothing to say hello with"
    assert caplog.text.count("no shared memory") == 1
    # A peer that has some is told that we cannot: it could not see us die.
    ends.raw.send(ends.raw_link, [hello("kvstore-0-job-1-0000000000000000", bytes(16))])
    assert ends.listener.recv(0) is None
    assert ends.raw.recv(0)[1] == [b"\xc1\x03"]


def test_no_directory_at_all(ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with monkeypatch.context() as patch:
        patch.setattr(presence, "DIRECTORY", Path("/nowhere"))
        patch.setattr(shm, "DIRECTORY", Path("/nowhere"))
        assert ends.send(b"head", BIG) == [b"head", BIG]
    assert "there is no /nowhere" in caplog.text


def test_references_that_have_run_out(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arenas, "CELLS", 1)  # references that an arena has
    ends.acquaint()
    held = ends.send(b"head", BIG)
    assert ends.send(b"head", BIG) == [b"head", BIG]
    assert ends.inner.sent[1] == [b"head", BIG]
    del held
    assert ends.send(b"head", BIG) == [b"head", BIG]
    assert len(ends.inner.sent[2][0]) == 2 + 24, "one has come back"


SMALL = """
import logging, sys
from kvstore.transport.shm.shared_memory import SharedMemoryTransport
from kvstore.transport.zeromq import ZmqTransport

logging.basicConfig(level=logging.WARNING, format="%(message)s")
listener, other = (SharedMemoryTransport(ZmqTransport(), "small") for _ in range(2))
link = other.connect(listener.bind(sys.argv[1]))
held = []
for size in [1 << 16, 1 << 16, 1 << 22, 1 << 16, 1 << 22, 1 << 17, 1 << 18, 1 << 18]:
    memory = other.allocate(size)
    memory[:] = bytes([len(held)]) * size
    other.send(link, [b"head", memory])
    del memory
    held.append(listener.recv(20)[1][1])
    assert other.recv(0) is None
for number, view in enumerate(held):
    assert set(view) == {number}
print(sum("numpy" in str(type(view.obj)) for view in held))
other.close()
listener.close()
"""


def test_a_small_dev_shm(tmp_path: Path):
    """As a container has it: what fits is shared, the rest goes through the socket, and no SIGBUS."""
    with tempfile.TemporaryDirectory() as private:
        script = Path(private) / "script.py"
        script.write_text(SMALL)
        mounted = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
        argv = ["unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, str(script), f"ipc://{private}/s"]
        if os.getuid() or subprocess.run([*argv[:4], "mount -t tmpfs tmpfs /dev/shm"], check=False).returncode:
            pytest.skip("only root can mount a small /dev/shm")
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert done.stderr.count("no shared memory for 4194304 bytes: No space left on device (/dev/shm has 1 MiB") == 1
    assert len(done.stderr.splitlines()) == 1
