"""Where the page of a job is, and its token."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.job.page_address import TOKEN, lines, listen, prepared, token_of


def test_it_listens_for_this_machine_alone() -> None:
    with listen(0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen(port)


def test_a_file_gets_a_token_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_of(file)
    assert TOKEN.fullmatch(token)
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(file) == token


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token_of(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        token_of(file)


@pytest.mark.parametrize("content", ["", "short", "x" * 31, "with spaces " * 4, "ä" * 40])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="has no token") as caught:
        token_of(file)
    assert not content or content not in str(caught.value)


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none/token"):
        token_of(tmp_path / "none" / "token")


@pytest.mark.parametrize(
    ("env", "count"), [({"DISPLAY": ":0"}, 1), ({"DISPLAY": ":0", "SSH_CONNECTION": "a 1 b 2"}, 2), ({}, 2)]
)
def test_where_no_browser_can_open_it_a_line_says_how_to_reach_it(env: dict[str, str], count: int) -> None:
    first, *others = lines(8080, "t" * 40, env)
    assert first == f"dashboard: http://127.0.0.1:8080/?token={'t' * 40}"
    assert len(others) == count - 1
    assert all(f"ssh -N -L 8080:127.0.0.1:8080 {socket.gethostname()}" in line for line in others)


def test_settings_say_the_port_and_the_token(tmp_path: Path) -> None:
    token = token_of(tmp_path / "token")
    listener, found = prepared({"KVSTORE_DASHBOARD_TOKEN_FILE": str(tmp_path / "token")})
    with listener:
        assert found == token
        with pytest.raises(ConfigError, match="set KVSTORE_DASHBOARD_PORT to one that is free"):
            prepared({"KVSTORE_DASHBOARD_PORT": str(listener.getsockname()[1])})
    listener, found = prepared({})
    with listener:
        assert TOKEN.fullmatch(found)
        assert found != token
