"""The links of readers at one process, and what may come over them: reads, whatever they say who they are. Pure."""

from __future__ import annotations

from kvstore.transport.base import Admission
from kvstore.wire.guests import READS
from servers.requests.guest_links import GuestLinks

READER = "reader"  # the role of those who take no part in training


class ReaderLinks(GuestLinks):
    """The links of readers.

    Args:
        most: how many there may be at once. If there are more, the one that has been silent for longest is dropped.
        key: the public key that all readers have proved; empty where links prove no keys.
        admission: admits and refuses links; by default all are admitted.
    """

    def __init__(self, most: int, key: str = "", admission: Admission | None = None) -> None:
        super().__init__(READER, READS, "reading", most, key, admission)
