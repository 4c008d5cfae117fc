"""Messages about views."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import WireError

PRIMARY = wire.Node("server", 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        wire.View(PRIMARY, 1),
        wire.View(PRIMARY, 2, "k" * 40, ["standby", 2], "ipc://standby", "s" * 40, True),
        wire.Moved(1, 2, "ipc://standby"),
        wire.Standing(PRIMARY, 2, 812, True),
    ],
)
def test_round_trip(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.View(PRIMARY, -1),
        wire.View(PRIMARY, 1, "k" * 41),
        wire.View(PRIMARY, 1, "", ["worker", 1]),
        wire.View(PRIMARY, 1, "", ["standby", 0]),
        wire.View(PRIMARY, 1, "", ["standby"]),
        wire.Moved(4097, 1, ""),
        wire.Moved(1, 1, "x" * 513),
        wire.Standing(PRIMARY, 1, -1, False),
    ],
)
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))
