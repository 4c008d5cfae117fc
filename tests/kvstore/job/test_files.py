from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstore.errors import CheckpointError
from kvstore.job.files import read_manifest, replacing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("old")
    return path


def replace(path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text("new")


def require_alone(path: Path, content: str) -> None:
    assert path.read_text() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def failing_sync(number: int, error: BaseException) -> Callable[[int], None]:
    """An ``os.fsync`` whose ``number``-th call raises."""
    calls = iter(range(number))

    def fsync(fd: int) -> None:
        if next(calls) == number - 1:
            raise error

    return fsync


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def fsync(fd: int) -> None:
        about = os.fstat(fd)
        what = path.parent if stat.S_ISDIR(about.st_mode) else path
        steps.append((what.name, about.st_size if what is path else 0, path.read_text()))
        assert what is path or os.path.samestat(about, path.parent.stat())

    monkeypatch.setattr(os, "fsync", fsync)
    replace(path)
    assert steps == [("file", 3, "old"), (path.parent.name, 0, "new")]


def test_what_the_writer_has_put_in_place_of_the_draft_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    with replacing(path) as draft:
        other = draft.with_name("other")
        other.write_text("new")
        other.replace(draft)
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]
    require_alone(path, "new")


def test_a_file_that_was_not_there_is_created(tmp_path: Path) -> None:
    replace(tmp_path / "file")
    require_alone(tmp_path / "file", "new")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path: Path, error: BaseException) -> None:
    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    require_alone(path, "old")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk failed"), KeyboardInterrupt()])
@pytest.mark.parametrize(("step", "content"), [(1, "old"), (2, "new")])
def test_a_sync_that_fails_is_raised_and_leaves_one_file_whole(
    path: Path, step: int, content: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing_sync(step, error))
    with pytest.raises(type(error)):
        replace(path)
    require_alone(path, content)


def test_a_link_in_the_way_is_not_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.job.files.secrets.token_hex", lambda _: "guessed")
    (path.parent / ".file.guessed.part").symlink_to(path)
    with pytest.raises(FileExistsError):
        replace(path)
    assert path.read_text() == "old"


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


CRASH = """
import os, sys
from pathlib import Path
from kvstore.errors import CheckpointError
from kvstore.job.files import read_manifest, replacing

step, path = sys.argv[1], Path(sys.argv[2])
syncs = []

def fsync(fd):
    syncs.append(fd)
    if step == f"sync {len(syncs)}":
        os._exit(9)

os.fsync = fsync
with replacing(path) as draft:
    draft.write_text("new")
    if step == "write":
        os._exit(9)
os._exit(9)
"""


@pytest.mark.parametrize(("step", "content"), [("write", "old"), ("sync 1", "old"), ("sync 2", "new"), ("end", "new")])
def test_a_process_that_dies_at_any_step_leaves_one_file_whole(path: Path, step: str, content: str) -> None:
    assert subprocess.run([sys.executable, "-c", CRASH, step, path], check=False).returncode == 9
    assert path.read_text() == content
    drafts = [entry for entry in path.parent.iterdir() if entry != path]
    assert len(drafts) == (content == "old")  # nobody was left to remove it


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_need_not_sync_directories(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing_sync(2, OSError(number, os.strerror(number))))
    replace(path)
    require_alone(path, "new")


def test_a_directory_that_cannot_be_read_is_enough(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(name: Path, flags: int, *mode: int) -> int:  # root may read all
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", denied)
        replace(path)
    require_alone(path, "new")


@pytest.mark.parametrize(("mode", "expected"), [({}, 0o640), ({"mode": 0o600}, 0o600)])
def test_the_mode_is_the_callers_less_the_umask(path: Path, mode: dict[str, int], expected: int) -> None:
    before = os.umask(0o027)
    try:
        with replacing(path, **mode) as draft:
            assert stat.S_IMODE(draft.stat().st_mode) == expected
            draft.write_text("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_manifest_is_read_if_it_is_there_and_not_too_long(path: Path) -> None:
    assert read_manifest(path, 3, "checkpoint") == b"old"
    with pytest.raises(CheckpointError, match="damaged: a manifest has at most 2 bytes"):
        read_manifest(path, 2, "checkpoint")
    with pytest.raises(CheckpointError, match=r"missing or unreadable .*: .* is no checkpoint"):
        read_manifest(path.parent / "manifest", 3, "checkpoint")


@pytest.mark.parametrize("how", ["a library", "Python"])
def test_what_cannot_be_written_is_named_by_its_own_path_whoever_writes(tmp_path: Path, how: str) -> None:
    path = tmp_path / "weights"
    path.write_text("old")

    def write() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with replacing(path) as draft:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            try:
                if how == "Python":
                    draft.write_bytes(bytes(10_000))
                else:
                    save_file({"w": np.zeros(10_000)}, draft)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(OSError, match="too large") as raised:
        write()
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, f"{path}")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]
