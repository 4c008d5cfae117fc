"""Moves frames between members of a job: one narrow interface, and its implementations."""

from kvstore.transport.transport import Frames, Peer, Transport

__all__ = ["Frames", "Peer", "Transport"]
