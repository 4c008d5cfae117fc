"""Where a unix socket may be: in a directory that nobody else can enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.errors import ConfigError

MAX_PATH = 107  # bytes of a unix socket's path


def require_private(path: Path) -> None:
    """Raise ``ConfigError`` unless ``path`` is one that a unix socket can have, in a directory of this user alone."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(f"{path} is longer than the {MAX_PATH} bytes that a unix socket's path may have")
    try:
        info = path.parent.stat()
    except OSError as exc:
        raise ConfigError(f"cannot listen at {path}: {exc.strerror}") from None
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"{path.parent} must belong to this user alone (mode 0700) to hold the job's sockets")
