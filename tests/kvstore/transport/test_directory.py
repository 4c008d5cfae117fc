"""Where a unix socket may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transport.directory import MAX_PATH, require_socket_path


def test_a_directory_of_this_user_alone_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    require_socket_path(tmp_path / "here")


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o750, 0o755, 0o777])
def test_one_that_others_can_enter_or_read_will_not(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_socket_path(tmp_path / "here")


def test_another_users_will_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_socket_path(tmp_path / "here")


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/here: .*No such file"):
        require_socket_path(tmp_path / "nowhere" / "here")


def test_the_path_has_the_length_that_the_system_allows(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    room = MAX_PATH - len(os.fsencode(tmp_path)) - 1
    require_socket_path(tmp_path / ("x" * room))
    with pytest.raises(ConfigError, match=f"longer than the {MAX_PATH} bytes"):
        require_socket_path(tmp_path / ("x" * (room + 1)))
