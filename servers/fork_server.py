"""A process that imports what servers, standbys and aggregators need, once for those of a host, and forks each of them.

Launchers start it (``kvstore.job.forking``): ``python our_module.py servers.fork_server CHANNEL``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from kvstore.job.forking import serve
from kvstore.job.settings import OMP_NUM_THREADS
from servers import __main__ as server_process
from servers.processes import end_with, importing


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends this
    with importing():
        import torch

        import kvstore.transport.shm.shared_memory
        import kvstore.transport.sockets.socket_transport  # noqa: F401
        import servers.aggregator.aggregator_process
        import servers.replication.pair_process  # noqa: F401 (for the children)
    loaded_with = os.environ.get(OMP_NUM_THREADS.name)
    if not serve(socket.socket(fileno=int(sys.argv[1]))):
        os._exit(0)  # at once: a thread that keeps it from forking could keep it from ending, too
    # Of the variables that torch reads when it is loaded, this one may differ between the children.
    threads = os.environ.get(OMP_NUM_THREADS.name, "")
    if threads != loaded_with and threads.isdigit():
        torch.set_num_threads(int(threads))
    if "numpy.random" in sys.modules:  # which numpy 1 imports; all children would draw the same numbers
        sys.modules["numpy.random"].seed()
    return server_process.main()


if __name__ == "__main__":
    end_with(main)
