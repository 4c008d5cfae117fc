"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.contenders import TRANSPORTS
from benchmarks.hosts import MTU
from benchmarks.networks import shapes_of
from benchmarks.peers import PEERS
from benchmarks.remote import SETTINGS
from benchmarks.wire import bytes_a_ms

CLUSTER_SERVERS = 64

WHATS = {
    "pushpull": "rounds of push and pull of a network's arrays, or the lines that have a target",
    "small": "2,000 arrays of 128 floats, and one of 1 KB",
    "async": "the arrays of ResNet-50 with dist_async and SGD with momentum",
    "rows": "rows of tables, beside MXNet's row-sparse arrays, and many tables beside one",
    "train": "training steps, alone, with two workers, and with torch's DistributedDataParallel",
    "network": "the same across hosts made of network namespaces, with many workers, too; needs root and iproute2",
    "encryption": "what encrypted links cost, over TCP on this machine",
    "compression": "codecs alone, and rounds of four hosts of 1 Gbit/s with and without compression",
    "scale": "against workers, servers and sizes",
    "memory": "what the servers hold, over many rounds",
    "soak": "what the servers hold in a long job of rounds, keys, stores, checkpoints and saved tables; 12 minutes",
    "tables": "tables of rows in one process: lookups, updates, memory, and saved tables",
    "cluster": "512 hosts of 8 workers without processes: what each message costs, and what a round takes by a model",
    "publish": "versions of a model for readers, here and over 200 Mbit/s; bytes of changes; --net decoder has 1.2 GB",
    "followers": "rounds of a job with two followers, versions that an actor has, 64 followers",
    "straggler": "whether a worker that becomes 50 ms late is named in time; its network needs root and iproute2",
    "deaths": "which part of the samples counts where workers are killed and come back; --rounds are seconds",
    "devices": "what the workers of one host have on GPUs, summed in shared memory and on one GPU; needs a GPU",
    "all": "all of these but the soak, with fewer rounds, in under ten minutes on two cores",
}


@dataclass(frozen=True)
class Options:
    """The options. None: not given; each measurement has its own default.

    Attributes:
        what: one of ``WHATS``.
        net, optimizer, kind, memory, transport: of rounds; any of them asks for one line in the place of several.
        workers, servers: how many, on this machine.
        rounds: how many are counted.
        repeats: how often each contender's processes are started.
        mtu: bytes of a packet between hosts.
        hosts, workers_per_host, rate, also: of rounds across hosts; any of them asks for these rounds alone.
        peers: some of ``PEERS``.
        out: the directory for ``json`` and ``plot``.
    """

    what: str
    net: str | None = None
    workers: int = 2
    servers: int = 2
    rounds: int | None = None
    repeats: int | None = None
    optimizer: str | None = None
    kind: str | None = None
    memory: str | None = None
    transport: str | None = None
    mtu: int = MTU
    hosts: Sequence[int] = ()
    workers_per_host: Sequence[int] = ()
    rate: str | None = None
    also: Sequence[str] = ()
    peers: Sequence[str] = PEERS
    out: Path = Path("bench-results")
    json: Path | None = None
    plot: Path | None = None

    @property
    def one_line(self) -> bool:
        """Whether the options ask for one kind of rounds."""
        return any((self.net, self.optimizer, self.kind, self.memory, self.transport))

    @property
    def asks_for_hosts(self) -> bool:
        """Whether the options say which hosts to make."""
        return any((self.hosts, self.workers_per_host, self.rate, self.also))


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse ``argv``, by default this process's arguments.

    Raises:
        SystemExit: it makes no sense.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure, beside others at the same work in the same run.",
        epilog="\n".join(["WHAT is one of:", *(f"  {what:10} {meaning}" for what, meaning in WHATS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=WHATS, metavar="WHAT", help="see below")
    add(
        "--net",
        type=_net,
        help="resnet50, vgg16, small, many, tiny, decoder, small-decoder, or one array of a size such as 40MB",
    )
    add("-n", "--workers", type=_count, default=2, metavar="N")
    add("-s", "--servers", type=_count, metavar="N", help=f"2; cluster: {CLUSTER_SERVERS}")
    add("--rounds", type=_count, metavar="N", help="rounds or steps that are counted; soak: minutes")
    add("--repeats", type=_count, metavar="N", help="turns of all contenders; 3, and 1 for all")
    add("--optimizer", choices=["none", "sgd", "adam"], help="what servers update with; sgd has momentum")
    add("--type", dest="kind", choices=["dist_sync", "dist_async"])
    add("--memory", choices=["ordinary", "arena"], help="the caller's own arrays, or memory from the store")
    add(
        "--transport",
        choices=list(TRANSPORTS),
        help="sockets: no shared memory; tcp: over the loopback interface; zeromq: all links are ZeroMQ's",
    )
    add(
        "--mtu",
        type=_mtu,
        default=MTU,
        metavar="BYTES",
        help=f"of a packet between hosts; {MTU}, as Ethernet's, by default",
    )
    numbers: dict[str, Any] = {"type": _counts, "default": (), "metavar": "N,..."}
    add("--hosts", **numbers, help="network: numbers of hosts, a server on each; 2,4. cluster: 512")
    add("--workers-per-host", **numbers, help="network: numbers of workers on each of them; 1,2,4. devices: 2,4,8")
    add("--rate", type=_rate, metavar="RATE", help="network: what each of them may send, as tc says it; 200mbit")
    add(
        "--also",
        type=_also,
        default=(),
        metavar="NAMES",
        help=f"network: more rows of ours, with other settings: some of {','.join(SETTINGS)}",
    )
    add("--peers", type=_peers, default=PEERS, metavar="NAMES", help=f"some of {','.join(PEERS)}, or none; default all")
    add("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="for figures and pictures")
    add("--json", type=Path, metavar="FILE", help="by default WHAT.json in DIR")
    add("--plot", type=Path, metavar="FILE", help="by default WHAT.png in DIR")
    given = parser.parse_args(argv)
    given.servers = given.servers or (CLUSTER_SERVERS if given.what == "cluster" else 2)
    return Options(**{one.name: getattr(given, one.name) for one in fields(Options)})


def _net(text: str) -> str:
    try:
        shapes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _rate(text: str) -> str:
    try:
        bytes_a_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _also(text: str) -> tuple[str, ...]:
    return _names(text, "setting", SETTINGS)


def _mtu(text: str) -> int:
    if not text.isdecimal() or not 576 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 576 to 65535")
    return int(text)


def _peers(text: str) -> tuple[str, ...]:
    return _names(text, "peer", PEERS)


def _names(text: str, kind: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {kind} {name!r}; choose from {', '.join(known)}, or none")
    return names
