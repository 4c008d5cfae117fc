"""How many bytes a message should have, which is the largest piece that an array goes in. Pure.

A server answers when it has a piece from each worker. Until then its line is idle, and the round ends later by as much.
A worker's line carries one piece for each server first, so that delay is the time of servers × piece bytes. In small
stores pieces are therefore small. In large ones they are as large as is good for the processors.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = 16  # pieces of a store on each server


@dataclass(frozen=True)
class Pieces:
    """What all workers of a job know of it.

    Attributes:
        most: bytes of a piece.
        least: bytes of a piece, however small the store; 0 if all pieces are to be of ``most``.
        servers: how many there are.
    """

    most: int
    least: int = 0
    servers: int = 1

    def of(self, nbytes: int) -> int:
        """Return the bytes of a piece in a store whose arrays have ``nbytes``."""
        if not self.least:
            return self.most
        return max(min(self.least, self.most), min(self.most, nbytes // (PARTS * self.servers)))
