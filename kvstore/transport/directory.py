"""Checks where a unix socket may be: in a directory that no other user can enter."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.directory import require_private

MAX_PATH = 107  # bytes of a unix socket's path


def require_socket_path(path: Path) -> None:
    """Raise ``ConfigError`` unless a unix socket can have ``path``, and its directory is private to this user."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(
            f"{path} is longer than the {MAX_PATH} bytes that a unix socket's path may have: set a shorter TMPDIR"
        )
    try:
        require_private(path.parent)
    except ConfigError as exc:
        raise ConfigError(f"cannot listen at {path}: {exc}") from None
