"""The operating system: which ones the project runs on."""

from __future__ import annotations

import sys


def unsupported(what: str) -> str:
    """Why something that takes several processes does not run on this system; empty if it does.

    Args:
        what: what the user has called: ``launch.py``, ``kv.create('dist_sync')``.
    """
    if sys.platform == "win32":
        return (
            f"{what} runs on Linux and macOS, but not on Windows, which lacks the processes, sockets and locks that it "
            "uses; run it in WSL 2 (wsl --install), where it is Linux. Stores in one process ('local', 'device') do "
            "not need it"
        )
    return ""
