"""The copy that readers of one host share: who may use it when, and what is left of it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reading_job import job_with_readers
from threaded import ThreadedJob
from waiting import LONG

from kvstore.client import DistStore
from kvstore.codecs.changes import checksum, encode_changes
from kvstore.errors import DeadlineExceeded, UsageError, WireError
from kvstore.reading import follower, shared_copy
from kvstore.reading.held import ReadSegment
from kvstore.reading.published_copy import NUMBER, CopyMemory, Published, PublishedCopy
from kvstore.reading.reader import Reader
from kvstore.reading.shared_copy import SharedCopy, SharingStalled, share
from kvstore.transport.shm import presence
from kvstore.wire.versions import PIECE, VersionRead
from servers.store.publishing import PublishedValues

ARRAYS = {
    "b": Published(3, "float32", [ReadSegment(1, 0, 0, 3)]),
    "w": Published(1 << 20, "bfloat16", [ReadSegment(0, 0, 0, 1 << 19), ReadSegment(2, 1, 1 << 19, 1 << 20)]),
}


def files() -> list[Path]:
    return list(presence.DIRECTORY.glob(f"kvstore-{os.getuid()}-readers-*"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(presence, "DIRECTORY", tmp_path)  # other tests have files in /dev/shm
    yield f"ipc://{os.getpid()}"
    presence.sweep()
    assert not files()


def shared(root: str, arrays: dict[str, Published] = ARRAYS) -> SharedCopy:
    copy = share(root, 1, arrays)
    assert isinstance(copy, SharedCopy)
    return copy


def soon() -> float:
    return time.monotonic() + 30.0


def test_readers_of_the_same_arrays_see_the_same_memory_until_the_last_has_closed(root: str) -> None:
    one, other = shared(root), shared(root, dict(reversed(ARRAYS.items())))
    assert share(f"{root}0", 1, {"b": ARRAYS["b"]}) is None  # too small
    with one.writing(soon()):
        one.flats["w"][5] = one.flats["b"][2] = 7.0
        one.held["w"][1] = 3
        one.note(9, 3, "läuft")
    with other.reading(soon()), one.reading(soon()):
        assert (other.flats["w"][5].item(), other.flats["b"][2].item()) == (7.0, 7.0)
        assert (other.held["w"].tolist(), other.held["b"].tolist()) == ([0, 3], [0])
        assert (other.lineage, other.number, other.label) == (9, 3, "läuft")
    one.close()
    assert shared(root).number == 3  # closed when it is collected
    other.close()
    other.close()
    assert not files()


def test_one_that_does_nothing_is_not_waited_for(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = shared(root), shared(root)
    with one.writing(soon()):
        with pytest.raises(DeadlineExceeded, match=f"pid {os.getpid()}.* still fetches"), other.reading(0.0):
            pass
        monkeypatch.setattr(shared_copy, "STALL_S", 0.05)
        with pytest.raises(SharingStalled), other.reading(soon()):
            pass
    with one.reading(soon()), pytest.raises(SharingStalled), other.writing(soon()):
        pass


def test_calls_with_short_timeouts_wait_together(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "STALL_S", 0.05)
    one, other = shared(root), shared(root)
    with one.writing(soon()):
        for goes_on in (True, True, False):
            with pytest.raises(DeadlineExceeded if goes_on else SharingStalled), other.reading(0.0):
                pass
            time.sleep(0.1)
            if goes_on and other.number == 0:
                one.beat()
                one.note(9, 3, "")


def test_a_child_after_fork_takes_nothing_from_its_parent(root: str) -> None:
    one, other = shared(root), shared(root)
    with one.writing(soon()):
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(UsageError, match="after fork"), one.reading(0.0):
                    pass
                one.close()
                other.close()
            finally:
                os._exit(0 if files() else 1)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(DeadlineExceeded), other.reading(0.0):
            pass
    other.close()
    assert files()
    one.close()
    assert not files()


def test_whoever_removes_the_files_and_is_stopped_holds_nobody_up(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "REMOVING_S", 0.05)
    copy = shared(root)
    control = next(path for path in files() if path.suffix == ".0")
    copy.close()
    locked = presence.own_file(control.name)
    fcntl.flock(locked, fcntl.LOCK_EX)
    assert share(root, 1, ARRAYS) is None
    os.close(locked)


class Interrupted(np.ndarray):  # type: ignore[type-arg]
    def __setitem__(self, at: Any, value: Any) -> None:
        if at == NUMBER and value:
            raise KeyboardInterrupt
        super().__setitem__(at, value)


def test_a_reader_that_ends_while_it_notes_a_version_leaves_none() -> None:
    copy = CopyMemory(ARRAYS)
    copy.note(1, 500, "of another job")
    copy.head = copy.head.view(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy.note(2, 3, "new")
    assert copy.number == 0


def start_holder(root: str) -> int:
    """Return the pid of a process that writes to the copy until it is killed."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            copy = shared(root)
            with copy.writing(soon()):
                copy.flats["b"][0] = 4.0
                os.write(tells, b"holds")
                time.sleep(600)
        finally:
            os._exit(1)
    os.close(tells)
    assert os.read(told, 5) == b"holds"
    os.close(told)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_reader_that_is_killed_holds_nobody_up_and_leaves_nothing(root: str) -> None:
    holder = start_holder(root)
    copy = shared(root)
    kill(holder)
    with copy.writing(soon()):
        assert copy.flats["b"].tolist() == [4.0, 0.0, 0.0]
    copy.close()
    assert not files()
    kill(start_holder(root))
    assert files()
    presence.sweep()  # as each reader does at its start, and each job at its end
    assert not files()


def test_without_room_or_where_the_file_is_somebody_elses_each_has_its_own(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shared_copy, "room", lambda: (2e6, 2e6))
        assert share(root, 1, ARRAYS) is None
    copy = shared(root)
    for path in files():
        path.chmod(0o660)
    assert share(root, 1, ARRAYS) is None
    for path in files():
        path.chmod(presence.MODE)
    copy.close()


ONE_PIECE = {"w": Published(PIECE, "bfloat16", [ReadSegment(0, 0, 0, PIECE)])}


def test_who_has_not_fetched_a_version_reads_the_changes_alone(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, *others = (PublishedCopy(ONE_PIECE, shared(root, ONE_PIECE)) for _ in range(3))
    arrays = [copy.arrays["w"] for copy in others]
    outs = [torch.zeros(PIECE, dtype=torch.bfloat16), torch.zeros(PIECE)]  # one is converted
    values = np.random.default_rng(0).integers(0x3C00, 0x3F80, PIECE).astype(np.uint16)

    def fetch(number: int, positions: Any, error: int = 0) -> None:
        if positions is not None:
            values[positions] ^= 1
        fetching.note(1 << 60, number, "")
        (ask,) = fetching.asks()
        parts = [bytes(part) for part in encode_changes(positions, values)]
        lengths = [len(part) for part in parts]
        sums = [checksum(values) + error]
        fetching.take(ask, VersionRead(1, 1 << 60, number, "", ["bfloat16"], sums, [len(parts)], lengths, parts))

    def written(whole: bool = False) -> list[bool]:
        for array, out in zip(arrays, outs, strict=True):
            assert array.write(out, whole)
            array.written()
        return [out.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).tobytes() == want for out in outs]

    where = np.arange(7, PIECE, 100)
    want = values.tobytes()
    fetch(1, None)
    assert written(whole=True) == [True, True]
    fetch(2, where)
    want = values.tobytes()
    assert written() == [True, True]  # nobody had read changes before
    fetch(3, where[::2])
    want = values.tobytes()
    fetching.memory.flats["w"][0] *= 2.0
    assert written() == [True, True]  # it was not read: nothing has changed there
    fetching.memory.flats["w"][0] /= 2.0
    for last, positions in enumerate((where, where + 1), 4):  # two versions for one
        fetch(last, positions)
    want = values.tobytes()
    assert written() == [True, True]
    fetch(6, np.arange(0, PIECE, 10))  # too many for the log
    want = values.tobytes()
    assert written() == [True, True]
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda *_: os.close(-1))  # any OSError
        fetch(7, where)
    want = values.tobytes()
    assert written() == [True, True]
    with pytest.raises(WireError, match="not those of version 8"):
        fetch(8, where, error=1)
    fetch(8, None)
    want = values.tobytes()
    assert written() == [True, True]
    for copy in (fetching, *others):
        copy.memory.close()


def sharing_reader(job: ThreadedJob) -> Reader:
    config = dataclasses.replace(job.config("reader"), shm=True)
    return Reader.of(config, "1", 0, LONG, job.ends(config))


@pytest.mark.usefixtures("root")
def test_of_several_followers_one_fetches_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "LEAST_BYTES", 1)
    fetched: list[int] = []
    fetch = follower.PublishedCopy.take

    def noted(*args: object) -> bool:
        fetched.append(1)
        return fetch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(follower.PublishedCopy, "take", noted)
    kept: list[int | None] = []
    publish = PublishedValues.publish

    def publish_noted(self: PublishedValues, values: torch.Tensor, version: int, keep: int | None = None) -> int:
        kept.append(keep)
        return publish(self, values, version, keep)

    monkeypatch.setattr(PublishedValues, "publish", publish_noted)

    def free(_names: object) -> None:
        (path,) = (path for path in files() if path.suffix == ".1")
        with path.open("rb") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def work(store: DistStore) -> None:
        values = torch.randn(3000)
        outs = [torch.zeros(3000, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
        with sharing_reader(job) as first, sharing_reader(job) as second:
            models = [
                reader.follow({"w": out}, on_update=free)
                for reader, out in zip((first, second, second), outs, strict=True)
            ]
            for number in range(1, 7):
                values[number::90] += 1.0
                store.publish_state({"w": values})
                chosen = [models[number % 3], models[(number + 1) % 3]]  # each leaves versions out
                for model in chosen:
                    assert model.update()
                    assert not model.update()
                for model, out in zip(models, outs, strict=True):
                    if model.version == number:
                        assert out.float().equal(values)
                for reader in (first, second):
                    reader.pull("w")  # each server has now heard what it said before
            assert len(fetched) == 6 * 2  # of each server once
            assert set(kept) == {None}  # who has all of a version needs it no more, on any server
            # One that another holds up goes on alone.
            monkeypatch.setattr(shared_copy, "STALL_S", 0.05)
            values[0] += 1.0
            store.publish_state({"w": values})
            (path,) = (path for path in files() if path.suffix == ".1")
            with path.open("rb") as locked:
                fcntl.flock(locked, fcntl.LOCK_EX)
                with pytest.raises(BlockingIOError):  # of on_update
                    models[1].update()
            assert outs[1].float().equal(values)
            child = os.fork()
            if child == 0:  # the links are its parent's, too
                try:
                    with first, pytest.raises(UsageError, match="connect in the child"):
                        models[0].update()
                except BaseException:
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            values[0] += 1.0
            store.publish_state({"w": values})
            assert models[2].update()
        assert not files()

    with job_with_readers(workers=1) as job:
        job.run(work)


def test_a_private_copy_needs_no_locks() -> None:
    copy = CopyMemory(ARRAYS)
    with copy.writing(0.0), copy.reading(0.0):
        copy.note(1, 2, "x" * 300)
    copy.close()
    assert (copy.number, len(copy.label)) == (2, 300)
