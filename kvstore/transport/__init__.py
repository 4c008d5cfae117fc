"""Moving frames between members of a job: one narrow interface, and the ways to do it.

base       the interface
choose     which transport a job's links go over
inproc     inside one process, for tests
shm        shared memory, around one of the others
sockets    unix sockets and plain TCP
zeromq     ZeroMQ: TCP with keys
memory     memory that can be sent
directory  a directory that nobody else can enter
bell       wakes whoever waits for links
"""

from kvstore.transport.base import Frames, Peer, Transport
from kvstore.transport.inproc import InprocNetwork, InprocTransport

__all__ = ["Frames", "InprocNetwork", "InprocTransport", "Peer", "Transport"]
