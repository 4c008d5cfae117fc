"""What members are told of each other: addresses, public keys, and who speaks for whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kvstore import wire
from servers.scheduler.member import JobMember
from servers.scheduler.members import Members

T = TypeVar("T")


class Welcomes:
    """What welcomes say, once all have joined.

    Args:
        members: of the job.

    Attributes:
        servers: the address of who serves each server's rank; it may change.
    """

    def __init__(self, members: Members) -> None:
        self._num_workers = members.wanted["worker"]
        self.servers = [member.address for member in members.of("server")]
        self._aggregators = [member.address for member in members.of("aggregator")]
        self._keys: dict[str, list[str]] = {}  # by role and rank; empty where links prove none
        for role in ("worker", "aggregator"):
            keys = [member.key for member in members.of(role)]
            self._keys[role] = keys if any(keys) else []
        self._aggregated: list[list[int]] = [[] for _ in self._aggregators]
        for worker in members.of("worker"):
            if worker.aggregator >= 0:
                self._aggregated[worker.aggregator].append(worker.rank)

    def of(self, member: JobMember) -> wire.Welcome:
        """Return the answer to a member's request to join."""
        welcome = wire.Welcome(
            member.join_seq,
            rank=member.rank,
            incarnation=member.incarnation,
            num_workers=self._num_workers,
            servers=list(self.servers),
        )
        if member.role == "worker":
            own = member.aggregator
            return replace(welcome, aggregator=self._aggregators[own]) if own >= 0 else welcome
        if member.role == "aggregator":  # hundreds of them need not hear of thousands of workers
            own_workers = self._aggregated[member.rank]
            return replace(
                welcome,
                worker_keys=_only(own_workers, self._keys["worker"], ""),
                aggregated=_only([member.rank], self._aggregated, []),
            )
        return replace(
            welcome,
            worker_keys=self._keys["worker"],
            aggregated=self._aggregated,
            aggregator_keys=self._keys["aggregator"],
        )


def _only(places: Sequence[int], items: Sequence[T], other: T) -> list[T]:
    """Return ``items`` with ``other`` in all but ``places``; nothing if there are none."""
    shown = [other] * len(items)
    for place in places if items else ():
        shown[place] = items[place]
    return shown
