"""The pulse: a small process that sends heartbeats for a worker, ``python -m kvstore.member.pulse``.

A call into C that keeps the interpreter's lock stops all threads of a worker, the heartbeat's too. This process sends
heartbeats for the worker as long as the worker's process exists and is not stopped, since slow is not dead. It reads
all that it needs from its standard input, and ends when that ends.

It is no child of the worker's process: a program may wait for all of its children, or end them. It is also a witness:
asked where the worker is, it tells where that was at its last heartbeat, and whether it is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys
from kvstore.job.processes import complete, orphaned, source_root, words
from kvstore.transport.choose import links
from kvstore.wire.guests import UNASKED

_ENDED = "has ended"
_STOPPED = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": _ENDED,
    "X": _ENDED,
}  # states of processes that do nothing
_LONGEST = 1 << 20  # bytes of the input; the keys of 4,096 members are 164 KiB
END_S = 1.0


_HEADER = struct.Struct("<IH")  # of the text: a checksum, for a text may be read while it is written; its length
_LONGEST_TEXT = 512  # bytes of the text


class LastPlace:
    """Where a process was at its last heartbeat, in memory that the process beside it reads.

    A call that keeps the interpreter's lock, and a stop, end all answers of the process. What it has written stays.
    Nobody waits for the reader, and the reader is not woken. ``fd`` is inherited from the writer; None makes new
    memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvstore-place") if fd is None else fd
        self._written = ""

    def write(self, text: str) -> None:
        if text != self._written:
            data = text.encode()[:_LONGEST_TEXT]
            os.pwrite(self.fd, _HEADER.pack(zlib.crc32(data), len(data)) + data, 0)
            self._written = text

    def read(self) -> str:
        data = os.pread(self.fd, _HEADER.size + _LONGEST_TEXT, 0)
        if len(data) < _HEADER.size:
            return ""
        checksum, length = _HEADER.unpack_from(data)
        text = data[_HEADER.size : _HEADER.size + length]
        return text.decode(errors="replace") if zlib.crc32(text) == checksum else ""

    def close(self) -> None:
        os.close(self.fd)


class PulseProcess:
    """The process that sends heartbeats for this one; ``OSError`` says that the system allows no more processes."""

    def __init__(self, config: Config, node: wire.Node) -> None:
        self._place: LastPlace | None = None
        with contextlib.suppress(OSError):  # without it the process beside knows less
            self._place = LastPlace()
        told = {
            "place": None if self._place is None else self._place.fd,
            "pid": os.getpid(),
            "node": [*node],
            "interval_s": config.heartbeat_s,
            "root": config.root,
            "keys": config.keys and [config.keys.secret, config.keys.root, sorted(config.keys.members)],
            "transport": config.transport,
            "congestion": config.congestion,
        }
        ended, its_end = os.pipe()  # it never writes to this pipe, but the shell between says its number
        try:
            between = subprocess.Popen(
                # The first heartbeat is the worker's own, so a job that is over sooner pays for no imports here.
                orphaned(words(sys.executable, "kvstore.member.pulse", idle_s=config.heartbeat_s / 2)),
                stdin=subprocess.PIPE,
                stdout=its_end,
                env=complete(_nobodys(os.environ), source_root()),
                start_new_session=True,  # Ctrl-C, and a stop of the whole group, are for the worker
                pass_fds=() if self._place is None else (self._place.fd,),
            )
        except BaseException:
            self._forget_place()
            os.close(ended)
            raise
        finally:
            os.close(its_end)
        self._pipe = cast("IO[bytes]", between.stdin)
        between.wait()
        self._alive = os.fdopen(ended, "rb", buffering=0)
        self.pid = int(self._alive.readline().strip() or 0)  # 0: the shell could not start it
        with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
            self._pipe.write(json.dumps(told).encode() + b"\n")
            self._pipe.flush()

    @property
    def ended(self) -> bool:
        return self._look(0.0)

    def _look(self, timeout: float) -> bool:
        """Return whether it has ended, when nobody can write to its pipe any more."""
        return self._alive.closed or bool(select.select([self._alive], [], [], timeout)[0])

    def note_place(self, place: str) -> None:
        if self._place is not None:
            self._place.write(place)

    def end(self) -> None:
        self._forget_place()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        # Killed: it has nothing to finish, and where it still imports, on a busy machine, asking it took a second. The
        # end of its input would not do, because a fork of this process may keep the pipe open.
        if self.pid and not self._look(0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._look(END_S)
        self._alive.close()

    def _forget_place(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None


def _nobodys(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables that make a process a member of a job, some of which are secrets."""
    return {name: value for name, value in env.items() if not name.startswith(("DMLC_", "KVSTORE_"))}


def available() -> bool:
    """Whether this system tells if a process is stopped."""
    return Path("/proc/self/stat").exists()


def stopped(stat: str) -> str:
    """Return why a process does nothing, in words that follow its name; empty if it may do something."""
    return _STOPPED.get(stat.rpartition(")")[2].split()[0], "")


def _start(stat: str) -> str:
    """Return when a process began; ``stat`` is its line in /proc."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


class _Pulse:
    """Sends heartbeats for a process, and answers for it, until that has ended or has closed the pipe."""

    def __init__(self, told: dict[str, Any]) -> None:
        keys = None
        if told["keys"]:
            secret, root, members = told["keys"]
            keys = CurveKeys(secret, root, frozenset(members))
        config = Config(root=told["root"], keys=keys, transport=told["transport"], congestion=told["congestion"])
        self._pid = told["pid"]
        self._interval_s = told["interval_s"]
        self._node = wire.Node(*told["node"])
        self._place = None if told["place"] is None else LastPlace(told["place"])
        self._began = _start(self._stat())
        self._ended = False
        self._transport = links(config)()
        self._scheduler = self._transport.connect(told["root"])

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        pulse, due, said = wire.encode(wire.ProcessAlive(self._node)), time.monotonic(), ""
        try:
            while not self._ended:
                now = time.monotonic()
                if now >= due:
                    due = now + self._interval_s
                    stat = self._stat()
                    why = stopped(stat)
                    if why == _ENDED or _start(stat) != self._began:  # another process may have its number by now
                        return
                    if not why:
                        self._transport.send(self._scheduler, pulse)
                    elif why != said:  # nobody has asked yet, but the silence that begins will need a reason
                        self._tell(UNASKED)
                    said = why
                received = self._transport.recv(max(0.0, due - now))
                if received is not None and received[1]:  # else at most the news that the link has been reconnected
                    self._answer(received[1])
        finally:
            self._transport.close()

    def _watch(self) -> None:
        os.read(sys.stdin.fileno(), 1)
        self._ended = True
        with contextlib.suppress(OSError):  # it is closed already
            self._transport.interrupt()

    def _stat(self) -> str:
        """Return the parent's line in /proc; the line of one that has ended if there is none."""
        try:
            return Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return ") X"

    def _answer(self, frames: list[Any]) -> None:
        with contextlib.suppress(WireError):
            message = wire.decode(frames)
            if isinstance(message, wire.Where):
                self._tell(message.number)

    def _tell(self, number: int) -> None:
        place = "" if self._place is None else self._place.read()
        self._transport.send(
            self._scheduler, wire.encode(wire.Stacks(self._node, number, place, stopped(self._stat()), []))
        )


def main() -> None:
    told = sys.stdin.buffer.readline(_LONGEST)
    if told:
        _Pulse(json.loads(told)).run()


if __name__ == "__main__":
    main()
