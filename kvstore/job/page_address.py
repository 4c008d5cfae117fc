"""The address of a job's page: where it listens, the token that it is opened with, and the lines that say so."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.files import read_secret
from kvstore.job.settings import DASHBOARD_PORT, DASHBOARD_TOKEN_FILE

HOST = "127.0.0.1"
TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")
_MODE = 0o600


def listen(port: int) -> socket.socket:
    return socket.create_server((HOST, port), backlog=64)


def prepared(env: Mapping[str, str]) -> tuple[socket.socket, str]:
    """Return a socket that listens, and a token, by the settings in ``env``."""
    port, file = DASHBOARD_PORT.read(env), DASHBOARD_TOKEN_FILE.read(env)
    token = token_of(Path(file)) if file else secrets.token_urlsafe(32)
    try:
        return listen(port), token
    except OSError as error:
        raise ConfigError(
            f"the page cannot be at port {port} ({os.strerror(error.errno or 0)}): set {DASHBOARD_PORT.name} to one "
            "that is free, or to 0"
        ) from None


def token_of(path: Path) -> str:
    """Return the token in a file; if there is no file, make it, for its owner alone to read."""
    try:
        try:
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            token = read_secret(path, "a token", 256).decode("ascii", "replace").strip()
        else:
            token = secrets.token_urlsafe(32)
            with open(made, "w", encoding="ascii") as file:  # noqa: PTH123 (of a descriptor)
                file.write(f"{token}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read or made: {error.strerror}") from None
    if not TOKEN.fullmatch(token):
        raise ConfigError(f"{path} has no token; valid: 32 to 128 letters, digits, - and _ (its content is not shown)")
    return token


def lines(port: int, token: str, env: Mapping[str, str]) -> list[str]:
    """Return the lines that say where the page is; over ssh, or without a display, how to reach it, too."""
    found = [f"dashboard: http://{HOST}:{port}/?token={token}"]
    if env.get("SSH_CONNECTION") or not (env.get("DISPLAY") or env.get("WAYLAND_DISPLAY")):
        found.append(f"dashboard: from another machine, first: ssh -N -L {port}:{HOST}:{port} {socket.gethostname()}")
    return found
