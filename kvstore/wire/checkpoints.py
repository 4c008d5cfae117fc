"""The messages by which a checkpoint of a running job is taken: rank 0 asks servers to save what they hold."""

from __future__ import annotations

from typing import Annotated

from kvstore.wire import fields as f
from kvstore.wire.coding import message
from kvstore.wire.message import (
    Reply,
    Request,
)


@message(52, parallel=("ids", "clocks"))
class Capture(Request):
    """From rank 0: save segments ``ids`` for checkpoint ``number``, each when ``clocks[i]`` of its rounds are over.

    The answer comes at once. Where rounds go on without rank 0, a segment may be later already: then it is saved as it
    is.
    """

    store: f.Store
    number: Annotated[int, f.integer(1)]
    ids: f.Ids
    clocks: f.Clocks


@message(53)
class AwaitCapture(Request):
    """From rank 0: tell me when your file of this store and checkpoint is on the disk.

    It waits for many rounds, in which nothing else must be kept.
    """

    remembered = False
    store: f.Store
    number: Annotated[int, f.integer(1)]


@message(54)
class Captured(Reply):
    """The file is on the disk."""

    nbytes: Annotated[int, f.integer()]  # nbytes, sha256: of the file
    sha256: Annotated[str, f.text(64)]
    clocks: f.Clocks  # how many rounds of each segment were over, in the order of the ``Capture``
    # the name of the rule that updates this store; None if there is none
    optimizer: Annotated[str | None, f.optional(f.text(64))]
    path: Annotated[str, f.text(8192)]  # of the file, for messages
