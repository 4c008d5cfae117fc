"""Who may ask a server, and for whom: a worker for itself, an aggregator for the workers of its host. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.errors import UsageError
from servers.names import workers

CARRIED = (wire.Push, wire.Pull)  # what aggregators send for workers


class Speakers:
    """The members that one server hears.

    Args:
        num_workers: of the job.
        worker_keys: the public keys that the workers have joined with, by rank; empty where links prove no keys.
        aggregated: for each aggregator, the ranks of the workers that it speaks for.
        aggregator_keys: of the aggregators; see ``worker_keys``.
    """

    def __init__(
        self,
        num_workers: int,
        worker_keys: Sequence[str] = (),
        aggregated: Sequence[Sequence[int]] = (),
        aggregator_keys: Sequence[str] = (),
    ) -> None:
        self._aggregated = [sorted(set(ranks)) for ranks in aggregated]
        self._keys = _keyed("worker", num_workers, worker_keys)
        self._keys |= _keyed("aggregator", len(aggregated), aggregator_keys)

    def key(self, node: wire.Node) -> str | None:
        """Return the public key that ``node`` has joined with, empty where links prove none; None for a stranger."""
        return self._keys.get(node)

    def require(self, message: wire.Request) -> None:
        """Raise ``UsageError`` if the sender of ``message``, which is no stranger, may not send it."""
        node = message.sender.node
        if not isinstance(message, CARRIED):
            if node.role == "aggregator":
                raise UsageError(
                    f"{node} sent a {type(message).__name__}; "
                    "servers take Push, Pull and Explain from aggregators, the rest from workers"
                )
            return
        if isinstance(message, wire.Push) and message.encode is not None:
            raise UsageError(
                f"{node} sent a Push with encode, which asks an aggregator to compress; "
                "servers take values that are compressed already, with codec"
            )
        if node.role == "aggregator":
            if not message.ranks or message.ranks != self._aggregated[node.rank]:  # most often a whole host's
                self._require_aggregated(message)
        elif message.ranks:
            raise UsageError(
                f"{node} sent a {type(message).__name__} for {workers(message.ranks)}; "
                "a worker sends without ranks, and only for itself"
            )

    def _require_aggregated(self, message: wire.Push | wire.Pull) -> None:
        what = f"{message.node} sent a {type(message).__name__}"
        mine = self._aggregated[message.node.rank]
        if not message.ranks:
            raise UsageError(f"{what} without ranks, which say for which workers it is")
        if not set(mine).issuperset(message.ranks):
            raise UsageError(f"{what} for {workers(message.ranks)}; it speaks for {workers(mine)} only")


def _keyed(role: str, number: int, keys: Sequence[str]) -> dict[wire.Node, str]:
    """Return the key of each member of ``role``. All are first incarnations: nobody is replaced yet."""
    return {wire.Node(role, rank, 1): keys[rank] if rank < len(keys) else "" for rank in range(number)}
