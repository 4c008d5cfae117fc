"""What tests of standbys have in common that are handed what updates have made."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from servers.store import recording


def soon() -> Any:
    """Have standbys handed a few numbers, too, and after every second round, in a ``with`` block."""
    return patch.multiple(recording, LEAST_BYTES=1, ROUNDS=2)
