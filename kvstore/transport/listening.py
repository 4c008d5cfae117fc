"""Whether anybody listens at an endpoint, without a link to it."""

from __future__ import annotations

import socket

from kvstore.job.address import host_and_port
from kvstore.job.curve_keys import split_key

PROBE_S = 1.0


def listening(endpoint: str) -> bool | None:
    """Return whether anybody listens at an endpoint; None if that cannot be known."""
    bare = split_key(endpoint)[0]
    try:
        if bare.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as made:
                made.settimeout(PROBE_S)
                made.connect(bare.removeprefix("ipc://"))
                return True
        host, port = host_and_port(bare)
        with socket.create_connection((host, int(port)), PROBE_S):
            return True
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return None
