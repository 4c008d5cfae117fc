"""Where rank 0 tells the others the job's address: in torchrun's store, or in a file if all are on one host.

In a store, the others first introduce themselves to rank 0, which needs their hosts for the aggregators. Rank 0 tells
the address, and forgets it when all have joined, so that the next program under the same torchrun or mpirun cannot read
it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from kvstore.errors import ConfigError, DeadlineExceeded
from kvstore.job.address import is_loopback
from kvstore.job.files import replacing
from kvstore.job.ranks import Ranks

log = logging.getLogger(__name__)

POLL_S = 0.02
REMIND_S = 60.0  # between two log lines that name the ranks that have not come yet
MOST_NAMED = 8
_PROC = Path("/proc")


@contextlib.contextmanager
def meeting(ranks: Ranks, timeout_s: float) -> Iterator[StoreMeeting | FileMeeting]:
    """The meeting of these ranks, as a context.

    Raises:
        ConfigError: they have no place to meet; the message says what to set.
    """
    if ranks.master:
        yield StoreMeeting(ranks, timeout_s)
    elif ranks.one_host:
        yield FileMeeting(meeting_file(ranks), timeout_s)
    else:
        raise ConfigError(
            f"{ranks.family.starter} has started this process as rank {ranks.rank} of {ranks.size}, on several hosts, "
            "but no address says where they meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port "
            "there, for all (mpirun -x MASTER_ADDR=... with Open MPI, -genv MASTER_ADDR ... with MPICH), or start the "
            'script with launch.py -n 2 -s 2 -H hosts "python script.py"'
        )


def on_one_host(ranks: Ranks) -> bool:
    """Whether all ranks are on this host: their starter says so, or they meet on loopback."""
    return ranks.one_host or is_loopback(ranks.master)


class StoreMeeting:
    """In torch's ``TCPStore`` at ``MASTER_ADDR``: torchrun's own, or one that rank 0 opens there.

    It opens it as ``torch.distributed.init_process_group`` does, so that both can use it in one process.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        from torch import distributed

        self._where = f"{ranks.master}:{ranks.port}"
        self._key = f"kvstore/{ranks.attempt}/address"  # by attempt: what a killed attempt told is still there
        self._rank = ranks.rank
        self._host_keys = [f"kvstore/{ranks.attempt}/host/{rank}" for rank in range(ranks.size)]
        self._timeout_s = timeout_s
        if not distributed.is_available():
            raise ConfigError("this torch has no torch.distributed, through which ranks meet at MASTER_ADDR")
        self._error = distributed.DistError
        serves = ranks.rank == 0 and not ranks.hosted
        try:
            self._store = distributed.TCPStore(  # type: ignore[attr-defined]
                ranks.master,
                ranks.port,
                is_master=serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,  # torch's own init_process_group may listen at the same port
            )
        except self._error as exc:
            doing = "listen" if serves else "reach rank 0"
            raise ConfigError(
                f"cannot {doing} at MASTER_ADDR and MASTER_PORT, {self._where}, where the ranks of "
                f"{ranks.family.starter} meet: {str(exc).splitlines()[0]}"
            ) from None

    def introduce(self, host: str) -> None:
        self._store.set(self._host_keys[self._rank], host)

    def hosts(self) -> list[str]:
        """Wait for the hosts of all other ranks, and return them in the order of ranks."""
        others = self._host_keys[1:]
        deadline = time.monotonic() + self._timeout_s
        while others:
            limit_s = min(REMIND_S, deadline - time.monotonic())
            try:
                self._store.wait(others, timedelta(seconds=max(0.001, limit_s)))
            except self._error:
                missing = [rank for rank, key in enumerate(others, 1) if not self._store.check([key])]
                names = _few(missing)
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"{names} did not come within {self._timeout_s:g} s to where the ranks meet (at "
                        f"{self._where}): all ranks must call kv.create('dist_...')",
                        tuple(f"rank {rank}" for rank in missing),
                    ) from None
                if missing:
                    log.warning("rank 0 waits for %s to create a distributed store", names)
            else:
                break
        return [self._store.get(key).decode(errors="replace") for key in others]

    def tell(self, text: str) -> None:
        self._store.set(self._key, text)

    def hear(self) -> str:
        try:
            text: bytes = self._store.get(self._key)
        except self._error:
            raise _silence(self._where, self._timeout_s) from None
        return text.decode(errors="replace")

    def forget(self) -> None:
        # torchrun's store outlives the program: a second one under it would go to the servers of the first.
        with contextlib.suppress(self._error):  # torchrun has gone, and its store with it
            for key in (self._key, *self._host_keys[1:]):
                self._store.delete_key(key)


class FileMeeting:
    """In a file of this host that only this user can read."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._timeout_s = timeout_s

    def introduce(self, host: str) -> None:
        """Nothing: all ranks are on this host."""

    def hosts(self) -> list[str]:
        return []

    def tell(self, text: str) -> None:
        try:
            with replacing(self.path, mode=0o600) as draft:
                draft.write_text(text)
        except OSError as exc:
            raise ConfigError(f"cannot write {self.path}, where the ranks meet: {exc.strerror}") from None

    def hear(self) -> str:
        deadline = time.monotonic() + self._timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._read()
            if time.monotonic() > deadline:
                raise _silence(str(self.path), self._timeout_s)
            time.sleep(POLL_S)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            # Anyone may have put anything there: opening a pipe would wait for a writer.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, errors="replace") as file:
                status = os.fstat(fd)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    return file.read()
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise ConfigError(f"cannot read {self.path}, where the ranks meet: {exc.strerror}") from None
        raise ConfigError(f"{self.path}, where the ranks meet, must be a regular file of this user: remove it")


def meeting_file(ranks: Ranks) -> Path:
    """The file of these ranks. It is named by the process that has started them all, and by when that one started."""
    pid = _starter(ranks.family.rank)
    return Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}-{pid}-{_started(pid)}.meeting"


def _starter(variable: str) -> int:
    """The nearest ancestor without this rank: mpirun or its agent, whatever scripts are in between."""
    own_rank, pid = _value(os.getpid(), variable), os.getppid()
    while pid > 1 and own_rank is not None and _value(pid, variable) == own_rank:
        pid = int(_stat(pid)[1])
    return pid


def _value(pid: int, variable: str) -> bytes | None:
    try:
        pairs = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None  # another user's, or there is no /proc
    name = variable.encode() + b"="
    return next((pair for pair in pairs if pair.startswith(name)), None)


def _started(pid: int) -> str:
    return _stat(pid)[19].decode() if sys.platform.startswith("linux") else "0"


def _stat(pid: int) -> list[bytes]:
    """``pid (name) state ppid ...`` from the state on: the name may hold anything."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _few(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(f"rank {rank}" for rank in ranks[:MOST_NAMED]) + more


def _silence(where: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"rank 0 has not said within {timeout_s:g} s where the job is (at {where}): it does so at its first "
        "kv.create('dist_...'), which all ranks must come to",
        ("rank 0",),
    )
