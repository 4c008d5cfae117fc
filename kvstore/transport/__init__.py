"""Moves frames between members of a job: one narrow interface, and its implementations."""

from kvstore.transport.base import Frames, Peer, Transport
from kvstore.transport.inproc import InprocNetwork, InprocTransport

__all__ = ["Frames", "InprocNetwork", "InprocTransport", "Peer", "Transport"]
