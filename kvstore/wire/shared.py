"""Fields that many messages have alike: for the same bytes they are unpacked and checked once.

All contributors push the same segments, round after round, and say the same of them, to the byte. So a class may have
such fields travel packed, as one field of bytes. Who receives bytes that have come before takes what has
been made of them then. These fields are shared by all messages that have brought them: nobody may change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kvstore.errors import WireError
from kvstore.wire.fields import Check, shown
from kvstore.wire.packing import unpacked

ATTRIBUTE = "_shared"  # of a message that has come: its ``SharedFields``
MOST = 4096  # so many are remembered
MOST_BYTES = 1 << 20  # of all that are; as objects they take some ten times as much


class SharedFields:
    """What some bytes say. Messages that have the same object have the same fields.

    Args:
        packed: the bytes.
        values: of the fields, by name.
    """

    __slots__ = ("packed", "values")

    def __init__(self, packed: bytes, values: dict[str, Any]) -> None:
        self.packed = packed
        self.values = values


class SharedGroup:
    """The fields of a message class that travel together.

    Args:
        names: of the fields, in order.
        checks: of the fields.
        values: returns these fields of a message.

    Attributes:
        names: see above.
    """

    def __init__(self, names: Sequence[str], checks: Sequence[Check], values: Callable[[Any], Sequence[Any]]) -> None:
        self.names = names
        self._checks = checks
        self._values = values
        self._known: dict[bytes, SharedFields] = {}
        self._nbytes = 0

    def pack(self, message: Any) -> bytes:
        """Return the fields of ``message`` as they travel; of one that has come, as it has brought them."""
        brought: SharedFields | None = message.__dict__.get(ATTRIBUTE)
        packed: bytes = msgpack.packb(self._values(message)) if brought is None else brought.packed
        return packed

    def read(self, packed: Any) -> SharedFields:
        """Return what ``packed`` says; for the same bytes the same object, as long as it is remembered.

        Raises:
            WireError: these are not the fields, or a field does not pass its check.
        """
        if type(packed) is bytes and (known := self._known.get(packed)) is not None:
            return known
        if type(packed) is not bytes:
            raise WireError(f"expected packed fields, got {shown(packed)}")
        values = unpacked(packed)
        if type(values) is not list or len(values) != len(self.names):
            raise WireError(f"expected a list of {len(self.names)} packed fields, got {shown(values)}")
        for name, check, value in zip(self.names, self._checks, values, strict=True):
            try:
                check(value)
            except WireError as exc:
                raise WireError(f"{name}: {exc}") from None
        made = SharedFields(packed, dict(zip(self.names, values, strict=True)))
        self._remember(made)
        return made

    def _remember(self, made: SharedFields) -> None:
        """Remember ``made``. What is remembered is bounded: a peer may send other bytes each time."""
        nbytes = len(made.packed)
        if len(self._known) >= MOST or self._nbytes + nbytes > MOST_BYTES:
            self._known = {}  # what is in use comes again at once
            self._nbytes = 0
        if nbytes <= MOST_BYTES:
            self._known[made.packed] = made
            self._nbytes += nbytes
