"""What messages have in common. A message is a class, and each of its fields declares the check that it must pass.

A request says who asks, in its ``sender``; a reply carries the sequence number of the request that it answers. The rest
are notices, of which those about one member carry its ``node``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, field, fields
from typing import Annotated, Any, NamedTuple

from kvstore.errors import WireError
from kvstore.job.contract import member_title
from kvstore.wire import fields as f
from kvstore.wire.coding import frozen, message

MAX_REASON = 4000  # characters that an error is cut to, so that no message is refused for its length


class Node(NamedTuple):
    """Who a member is. A process that takes a dead one's rank has a higher incarnation."""

    role: f.Role
    rank: f.Rank
    incarnation: f.Seq

    def __str__(self) -> str:
        return member_title(self.role, self.rank)


NodeField = Annotated[Node, f.Triple(Node)]


class Sender(NamedTuple):
    """Who makes a request, and which of their requests it is."""

    node: NodeField
    seq: f.Seq  # the number of the request among all of the sender's
    done: f.Seq  # all requests of the sender below this number have been answered, so answers kept for repeats may go


@frozen
class Message:
    """The base class of all messages. Two are equal if all their fields are."""

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self))

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __repr__(self) -> str:
        shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"


@frozen
class Request(Message):
    """Is answered by a ``Reply`` of the same number.

    Attributes:
        remembered: whether whoever is asked remembers the answer for as long as the request may be repeated. Where a
            repeat does no harm, it need not, and other answers are not kept because this one is still missing.
    """

    remembered = True
    sender: Annotated[Sender, f.Triple(Sender)]

    @property
    def node(self) -> Node:
        return self.sender.node

    @property
    def seq(self) -> int:
        return self.sender.seq


@frozen
class Reply(Message):
    """Answers the request ``seq``."""

    seq: f.Seq


# ---- of servers and the scheduler alike


@message(1)
class Ack(Reply):
    """It is done. ``missed`` segments of a push came after their round was over."""

    missed: Annotated[int, f.integer()] = 0


@message(2)
class Failure(Reply):
    """It was refused, or failed; ``kind`` names a class of ``kvstore.errors``."""

    kind: Annotated[str, f.text(64)]
    text: f.Text


@message(3)
class Explain(Request):
    """What does my request ``about`` wait for?"""

    about: f.Seq


@message(4)
class Explanation(Reply):
    """It waits for this, in words; empty if it does not wait here. ``missing`` are workers that it waits for."""

    text: f.Text
    missing: f.Ranks = field(default_factory=list)


def require_known(kinds: Sequence[int], known: Sequence[Any]) -> None:
    """Raise ``WireError`` unless each of ``kinds`` is a place in the list ``known``."""
    if kinds and max(kinds) >= len(known):
        raise WireError(f"expected kinds below {len(known)}, got {max(kinds)}")
