"""The scheduler's log as a file: whole, private, short, and given up loudly."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rendezvous import Member

from kvstore import wire
from kvstore.errors import KVStoreError
from servers import input_log
from servers.input_log import InputLog
from servers.scheduler.logged import Came, Record, Succession, Ticked

W0 = Member("worker", 1, 0)


def barrier(number: int) -> Came:
    return Came(1.0, b"link", "", replace(W0.barrier(number), sender=wire.Sender(W0.node, number, number)))


def test_a_log_has_what_was_written_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written: list[Record] = [barrier(1), Succession(), Came(2.0, b"x", "key", W0.declare("a")), Ticked(3.0, [])]
    first = InputLog(path, 2, 1)
    assert first.earlier == []
    for record in written[:3]:
        first.write(record)
    first.close()
    second = InputLog(path, 2, 1)
    second.write(written[3])
    assert [*second.earlier, written[3]] == InputLog(path, 2, 1).earlier == written


def test_it_is_this_users_alone(tmp_path: Path) -> None:
    InputLog(tmp_path / "log", 1).close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_last_record_that_was_cut_short_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = InputLog(path, 2)
    log.write(barrier(1))
    log.write(barrier(2))
    log.close()
    os.truncate(path, path.stat().st_size - 1)
    again = InputLog(path, 2)
    assert again.earlier == [barrier(1)]
    again.write(barrier(3))
    assert InputLog(path, 2).earlier == [barrier(1), barrier(3)]


def test_what_is_not_a_log_of_this_job_is_an_error(tmp_path: Path) -> None:
    InputLog(tmp_path / "log", 2, 1).close()
    with pytest.raises(KVStoreError, match="of another job"):
        InputLog(tmp_path / "log", 2, 2)
    with pytest.raises(KVStoreError, match=r"missing/log: No such file"):
        InputLog(tmp_path / "missing" / "log", 2, 1)


def test_barriers_that_are_over_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_log, "TRIM_BYTES", 1000)
    path = tmp_path / "log"
    log = InputLog(path, 1)
    longest = 0
    for number in range(1, 200):
        log.write(barrier(number))
        longest = max(longest, path.stat().st_size)
    log.write(Came(1.0, b"link", "", W0.declare("a")))
    assert longest < 1200
    *barriers, declared = InputLog(path, 1).earlier
    assert isinstance(declared, Came)
    assert barriers[-1] == barrier(199)


def test_a_log_that_cannot_be_written_is_given_up_and_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log = InputLog(path, 2)
    log.write(barrier(1))

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write(barrier(2))
    log.write(barrier(3))
    (message,) = caplog.messages
    assert "cannot be written: No space left on device. The job goes on, but will end if the scheduler dies" in message
    with pytest.raises(KVStoreError, match="could not write its log to the end"):
        InputLog(path, 2)
