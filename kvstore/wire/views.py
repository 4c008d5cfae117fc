"""The messages about views: which process serves a server's rank, and which would take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from kvstore.job.curve_keys import LENGTH
from kvstore.wire import fields as f
from kvstore.wire.frames import message
from kvstore.wire.messages import Message, NodeField, Rank, Seq
from kvstore.wire.rendezvous import MemberNotice

Address = Annotated[str, f.text(512)]
Key = Annotated[str, f.text(LENGTH)]  # public
Seat = Annotated["list[Any] | None", f.optional(f.tuple_of(f.choice("server", "standby"), f.integer(1)))]


@message(35)
@dataclass(frozen=True)
class View(Message):
    """To the members that hold a server's rank, ``primary.rank``: who serves it from now on.

    Attributes:
        primary: the member that serves workers.
        epoch: grows with every change of the view.
        primary_key: the public key that the primary has joined with; empty where links prove none.
        standby: the role and start of the member that takes over when the primary is lost; None if there is none.
        standby_address, standby_key: of the standby; empty if there is none.
        synced: whether the standby has the primary's state, so that it can take over.
    """

    primary: NodeField
    epoch: Seq
    primary_key: Key = ""
    standby: Seat = None
    standby_address: Address = ""
    standby_key: Key = ""
    synced: Annotated[bool, f.flag] = False


@message(36)
@dataclass(frozen=True)
class Moved(Message):
    """To workers and aggregators: server ``rank`` is at ``address`` from now on."""

    rank: Rank
    epoch: Seq
    address: Address


@message(37)
@dataclass(frozen=True)
class Standing(MemberNotice):
    """From a primary to the scheduler, regularly: it serves its rank.

    Attributes:
        epoch: of the view that it serves in.
        rounds: the highest number of rounds that are over of any segment.
        synced: whether its standby has all that it has, so that it answers nobody before the standby has it.
        nbytes: how much has been sent to the standby to bring it into step; 0 if that is not known.
    """

    epoch: Seq
    rounds: Seq
    synced: Annotated[bool, f.flag]
    nbytes: Seq = 0
