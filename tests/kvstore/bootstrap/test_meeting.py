"""Where rank 0 tells the others of the job: a file of one host, and torch's store."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from kvstore.bootstrap import meeting as meetings
from kvstore.bootstrap.meeting import FileMeeting, StoreMeeting, meeting, meeting_file, on_one_host
from kvstore.errors import ConfigError, DeadlineExceeded
from kvstore.job.ranks import FAMILIES, Ranks

TORCH, OPENMPI, *_ = FAMILIES


def test_a_file_tells_the_others_until_it_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    rank0, other = FileMeeting(path, 50.0), FileMeeting(path, 50.0)
    heard: list[str] = []
    listener = threading.Thread(target=lambda: heard.append(other.hear()))
    listener.start()
    rank0.tell("here")
    listener.join(50.0)
    assert heard == ["here"]
    assert path.stat().st_mode & 0o077 == 0
    rank0.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere/meeting, where the ranks meet: No such file"):
        FileMeeting(tmp_path / "nowhere" / "meeting", 50.0).tell("here")


def test_silence_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 0 has not said within 0\.05 s") as caught:
        FileMeeting(tmp_path / "meeting", 0.05).hear()
    assert caught.value.silent == ("rank 0",)


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("trap")
    (tmp_path / "meeting").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic links"):
        FileMeeting(tmp_path / "meeting", 0.05).hear()


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "another user's"])
def test_what_another_has_put_where_the_ranks_meet_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "meeting"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.write_text("trap")
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused: list[str] = []

    def hear() -> None:
        try:
            FileMeeting(path, 50.0).hear()
        except ConfigError as exc:
            refused.append(str(exc))

    # To open a pipe may wait for ever, whatever the deadline is.
    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    listener.join(20.0)
    assert [str(path) in text for text in refused] == [True]


def test_siblings_share_the_name_of_the_file() -> None:
    ranks = Ranks(OPENMPI, 0, 2, 0, 2)
    assert meeting_file(ranks) == meeting_file(replace(ranks, rank=1))
    assert f"kvstore-{os.getuid()}-{os.getppid()}-" in meeting_file(ranks).name


def test_torchs_store_tells_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = Ranks(TORCH, 0, 2, master="127.0.0.1", port=port)
    assert on_one_host(ranks)
    rank0, other = StoreMeeting(ranks, 50.0), StoreMeeting(replace(ranks, rank=1), 50.0)
    rank0.tell("here")
    assert other.hear() == "here"
    rank0.forget()
    with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port}"):
        StoreMeeting(replace(ranks, rank=1), 0.2).hear()


def test_torchs_store_tells_rank_0_where_the_others_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = Ranks(TORCH, 0, 4, master="127.0.0.1", port=port)
    rank0 = StoreMeeting(ranks, 50.0)
    StoreMeeting(replace(ranks, rank=1), 50.0).introduce("one")
    with pytest.raises(DeadlineExceeded, match=r"rank 2, rank 3 did not come within 0\.05 s") as caught:
        StoreMeeting(replace(ranks, rank=0, hosted=True), 0.05).hosts()
    assert caught.value.silent == ("rank 2", "rank 3")
    monkeypatch.setattr(meetings, "REMIND_S", 0.01)
    late = [StoreMeeting(replace(ranks, rank=rank), 50.0) for rank in (2, 3)]

    def come_when_missed() -> None:
        until(lambda: bool(caplog.messages), "a reminder")
        for rank, one in enumerate(late, 2):
            one.introduce(f"host {rank}")

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come_when_missed)
        assert rank0.hosts() == ["one", "host 2", "host 3"]
        coming.result()
    assert caplog.messages[0] == "rank 0 waits for rank 2, rank 3 to create a distributed store"
    rank0.forget()
    with pytest.raises(DeadlineExceeded, match="rank 1, rank 2, rank 3 did not come"):
        StoreMeeting(replace(ranks, rank=0, hosted=True), 0.05).hosts()


def test_where_all_are_on_one_host_nobody_asks_which(tmp_path: Path) -> None:
    meeting = FileMeeting(tmp_path / "meeting", 0.0)
    meeting.introduce("here")
    assert meeting.hosts() == []
    assert list(tmp_path.iterdir()) == []


def test_nobody_at_the_master_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot reach rank 0 at MASTER_ADDR and MASTER_PORT, 127.0.0.1:{port}"):
        StoreMeeting(Ranks(TORCH, 1, 2, master="127.0.0.1", port=port), 0.2)


def test_several_hosts_without_an_address() -> None:
    with (
        pytest.raises(ConfigError, match=r"rank 1 of 4, on several hosts.*MASTER_ADDR.*mpirun -x.*launch\.py"),
        meeting(Ranks(OPENMPI, 1, 4, 1, 2), 1.0),
    ):
        pass
