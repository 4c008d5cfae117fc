from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.job.directory import make_private, require_private, temporary_root

LONG = "x" * 100


def test_a_directory_is_private_and_named_by_user_and_process(tmp_path: Path) -> None:
    directory = make_private(tmp_path)
    assert directory.parent == tmp_path
    assert directory.name.startswith(f"kvstore-{os.getuid()}-{os.getpid()}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert make_private(tmp_path) != directory
    require_private(directory)


def test_a_root_that_is_not_there_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make .*/none: No such file.*set TMPDIR to a writable directory"):
        make_private(tmp_path / "none")


def test_sockets_fit_where_directories_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert temporary_root(Path("/short")) == Path("/short")
    assert temporary_root(Path("/") / LONG) == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    assert temporary_root() == Path("/short")
    monkeypatch.setattr(tempfile, "tempdir", f"/{LONG}")
    assert temporary_root() == Path("/tmp")


def test_the_longest_root_leaves_room_for_a_socket() -> None:
    fits = [n for n in range(1, 100) if temporary_root(Path("/" + "r" * n)) != Path("/tmp")]
    # A directory there, and 36 characters for the socket, must fit the 103 bytes that macOS allows.
    assert len(f"/{'r' * fits[-1]}/kvstore-{os.getuid()}-{os.getpid()}-12345678") + 36 == 103


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o720])
def test_a_directory_that_others_can_enter_is_not_trusted(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(directory)


def test_what_is_no_directory_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not on this host: No such file"):
        require_private(tmp_path / "none")
    file = tmp_path / "file"
    file.touch(mode=0o600)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(file)


def test_another_users_directory_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_private(tmp_path)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(directory)


def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(make_private(tmp_path))
    require_private(link)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(link, follow_symlinks=False)
