"""The messages between the primary of a server's rank and its standby."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from kvstore.wire import fields as f
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import Message, Seq


@message(60)
@dataclass(frozen=True)
class Record(Message):
    """From a primary: the ``number``-th change of its state. The buffers are the frames of a message that says which.

    Attributes:
        epoch: of the view that the primary serves in.
        number: 1 for the first record to this standby; no number is left out.
    """

    epoch: Seq
    number: Annotated[int, f.integer(1)]
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(61)
@dataclass(frozen=True)
class Stored(Message):
    """From a standby: I have every record up to ``number``, and shall apply them even if you are lost."""

    epoch: Seq
    number: Seq
