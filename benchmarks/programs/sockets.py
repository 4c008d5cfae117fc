"""The limit of TCP: plain sockets with preallocated buffers, a thread for each direction, and no framing."""

from __future__ import annotations

import multiprocessing as mp
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.networks import elements, shapes_of
from benchmarks.programs.stopwatch import parser, report, timed

PIECE = 262_144  # elements that a server sums, and sends back, at a time


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``; raise ``EOFError`` if the other end closes."""
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count


def pieces(share: int) -> list[slice]:
    """Return a server's ``share`` of the elements in pieces."""
    return [slice(start, min(share, start + PIECE)) for start in range(0, share, PIECE)]


def raw(array: np.ndarray) -> memoryview:
    """Return the bytes of ``array``."""
    return memoryview(array).cast("B")


def server(workers: int, share: int, ready: Any) -> None:
    """Sum what ``workers`` send, piece by piece, until they close."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.put(listener.getsockname()[1])
    socks = [listener.accept()[0] for _ in range(workers)]
    gradients = [np.zeros(share, np.float32) for _ in socks]
    weight = np.zeros(share, np.float32)
    barrier = threading.Barrier(workers)

    def add(piece: slice) -> None:
        first, *others = gradients
        second = others[0] if others else np.float32(0)
        np.add(first[piece], second[piece] if others else second, out=weight[piece])
        for gradient in others[1:]:
            np.add(weight[piece], gradient[piece], out=weight[piece])

    def serve(rank: int) -> None:
        try:
            while True:
                for piece in pieces(share):
                    receive(socks[rank], raw(gradients[rank][piece]))
                    if barrier.wait() == 0:
                        add(piece)
                    barrier.wait()
                    socks[rank].sendall(raw(weight[piece]))
        except (EOFError, OSError, threading.BrokenBarrierError):
            barrier.abort()  # the rounds are over

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def worker(rank: int, ports: list[int], share: int, rounds: int, path: Path) -> None:
    """Send and receive at once, to and from all servers; rank 0 reports."""
    socks = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    gradient = np.random.default_rng(rank).random(share * len(ports), np.float32)
    weight = np.zeros(share * len(ports), np.float32)

    def send(i: int) -> None:
        for piece in pieces(share):
            socks[i].sendall(raw(gradient[i * share : (i + 1) * share][piece]))

    def one_round() -> None:
        mine = [memoryview(raw(weight[i * share : (i + 1) * share])) for i in range(len(ports))]
        threads = [threading.Thread(target=send, args=(i,)) for i in range(len(ports))]
        threads += [threading.Thread(target=receive, args=pair) for pair in zip(socks, mine, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    times = timed(one_round, rounds)
    if rank == 0:
        report(path, times=times)


def main() -> None:
    """Start servers and workers, and wait for them."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("-n", "--workers", type=int, default=2)
    options.add_argument("-s", "--servers", type=int, default=2)
    args = options.parse_args()

    share = elements(shapes_of(args.net)) // args.servers
    ready: Any = mp.Queue()
    started = [mp.Process(target=server, args=(args.workers, share, ready)) for _ in range(args.servers)]
    for process in started:
        process.start()
    ports = [ready.get(timeout=60) for _ in range(args.servers)]
    for rank in range(args.workers):
        started.append(mp.Process(target=worker, args=(rank, ports, share, args.rounds, args.report)))
        started[-1].start()
    for process in started:
        process.join()


if __name__ == "__main__":
    main()
