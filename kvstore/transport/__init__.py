"""Moves frames between members of a job: one narrow interface, and its implementations.

base           the interface
choose         which transport a job's links go over
inproc         inside one process, for tests
shm            shared memory, around one of the others
sockets        our own: unix sockets, and TCP without encryption
zeromq         ZeroMQ: ipc, TCP, and TCP with CURVE
memory         memory that messages are built in
directory      checks that a directory is private
bell           wakes a thread that waits for sockets
tcp_sockets    TCP sockets of the system: listening, congestion control
system_errors  tells errors of the system from those that signal handlers raise
"""

from kvstore.transport.base import Frames, Peer, Transport
from kvstore.transport.inproc import InprocNetwork, InprocTransport

__all__ = ["Frames", "InprocNetwork", "InprocTransport", "Peer", "Transport"]
