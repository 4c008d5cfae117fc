"""Messages about memory of devices, between the workers of a host and its aggregator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kvstore.wire import fields as f
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import Clocks, Ids, Number, Reply, Request, Store, Text, same_length
from kvstore.wire.parameters import Changes, Priority, Push

Loan = Annotated[int, f.integer(1)]
MAX_LENT = 1 << 40  # bytes
# Fields of either push.
_OF_VALUES = ("store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority", "in_float32")


@message(170)
@dataclass(frozen=True)
class Lend(Request):
    """Read this memory of my device where a ``PushLent`` names the loan.

    Attributes:
        loan: its number among those of this worker and store.
        device, opaque, offset, nbytes: see ``kvstore.devices.Handle``.
    """

    store: Store
    loan: Loan
    device: Annotated[bytes, f.raw(16)]
    opaque: Annotated[bytes, f.raw(64)]
    offset: Annotated[int, f.integer(0, MAX_LENT)]
    nbytes: Annotated[int, f.integer(1, MAX_LENT)]


@message(171)
@dataclass(frozen=True)
class Borrowed(Reply):
    """The memory can be read here; or it cannot, for the reason that ``refusal`` has."""

    refusal: Text = ""


@message(172)
@dataclass(frozen=True)
class PushLent(Request):
    """A ``Push`` to an aggregator, of plain values that are in the memory of ``loan``, from its beginning.

    What it asks for comes back plain.
    """

    store: Store
    loan: Loan
    ids: Ids
    clocks: Clocks
    want: Annotated[bool, f.flag]
    lr: Number
    rescale: Number
    changes: Changes = field(default_factory=list)
    priority: Priority = None
    in_float32: Annotated[bool, f.flag] = False

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)

    @classmethod
    def of(cls, push: Push, loan: int) -> PushLent:
        """Return ``push`` of plain values, which are in the memory of ``loan``."""
        return cls(push.sender, loan=loan, **_described(push))

    def plain(self, buffers: Sequence[Buffer] = ()) -> Push:
        """Return the push of the same values in ``buffers``."""
        return Push(self.sender, buffers=buffers, **_described(self))


def _described(push: Push | PushLent) -> dict[str, Any]:
    """Return what a push says of its values, wherever they are."""
    return {name: getattr(push, name) for name in _OF_VALUES}
