"""How long a round of a large job takes, by a model: the busiest of its lines and threads, and what nothing overlaps.

``python -m benchmarks.round_model`` prints the table of ``docs/scaling.md``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEADERS = 1.046  # packets of 1,500 bytes
GIGA = 1e9


@dataclass(frozen=True)
class Constants:
    """What processors do. ``docs/scaling.md`` says how each was measured.

    Attributes:
        message_s: seconds of a server's or an aggregator's thread for one message and its answer, without their bytes.
        worker_message_s: the same of a worker.
        add: bytes of contributions that one thread sums in a second.
        socket: bytes that one thread sends or receives in a second over plain TCP.
        curve: bytes that one transport encrypts or decrypts in a second.
        encode, decode: bytes of plain values that one thread compresses, or sums from compressed ones, in a second.
    """

    message_s: float = 100e-6
    worker_message_s: float = 100e-6
    add: float = 5 * GIGA
    socket: float = 2 * GIGA
    curve: float = 1.2 * GIGA
    encode: float = 4.8 * GIGA
    decode: float = 11 * GIGA


@dataclass(frozen=True)
class Cluster:
    """A job and its lines.

    Attributes:
        hosts, workers_per_host: how many.
        servers: how many; at most one a host if they are beside workers.
        rate: of each host's line, bits a second, each way.
        nbytes: of all gradients of a worker.
        beside: whether servers are on the workers' hosts, or have hosts of their own.
        aggregated: whether one contribution leaves a host.
        encrypted: whether links are.
        up, down: how much smaller gradients and values are, compressed; 1 for plain.
        piece: bytes of a message, about.
        cores: that all hosts share; 0 if each process has one of its own, as on real hosts.
    """

    hosts: int
    workers_per_host: int
    servers: int
    rate: float
    nbytes: float = 102.2e6
    beside: bool = False
    aggregated: bool = True
    encrypted: bool = False
    up: float = 1.0
    down: float = 1.0
    piece: float = 640 * 1024
    cores: int = 0

    @property
    def contributions(self) -> int:
        """To each segment in a round."""
        return self.hosts if self.aggregated else self.hosts * self.workers_per_host

    @property
    def leaving(self) -> int:
        """How many gradients leave a host in a round."""
        return 1 if self.aggregated else self.workers_per_host


@dataclass(frozen=True)
class Prediction:
    """What one round takes each of them, in seconds.

    Attributes:
        parts: lines and threads that work at the same time, by name.
        fill_s: until a server can answer the first piece, which nothing overlaps.
    """

    parts: dict[str, float]
    fill_s: float

    @property
    def bottleneck(self) -> str:
        """The busiest of all."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def round_s(self) -> float:
        """How long the round takes."""
        return self.parts[self.bottleneck] + self.fill_s


def predict(cluster: Cluster, constants: Constants = Constants()) -> Prediction:
    """Return what a round of ``cluster`` takes."""
    line = cluster.rate / 8 / HEADERS
    up, down = cluster.nbytes / cluster.up, cluster.nbytes / cluster.down
    into = cluster.contributions * up / cluster.servers  # a server, in all
    out_of = cluster.contributions * down / cluster.servers
    if cluster.beside:  # a host's own share does not cross its line
        away = 1 - 1 / cluster.hosts
        host_line = cluster.leaving * (up + down) * away * min(1.0, cluster.hosts / cluster.servers)
        busiest = max(cluster.leaving * up + out_of, cluster.leaving * down + into) * away
        lines = {"line of a host with a server": max(host_line, busiest) / line}
        fill_s = 0.0  # lines carry gradients until the end
    else:
        lines = {
            "worker's line": cluster.leaving * max(up, down) / line,
            "server's line": max(into, out_of) / line,
        }
        fill_s = min(cluster.contributions * cluster.piece / cluster.up, into) / line
    return Prediction({**lines, **_threads(cluster, constants, into, out_of, up, down)}, fill_s)


def _threads(
    cluster: Cluster, constants: Constants, into: float, out_of: float, up: float, down: float
) -> dict[str, float]:
    """Return how long the busiest process of each kind works."""
    share = cluster.nbytes / cluster.servers
    messages = max(1.0, share / cluster.piece)  # of one contributor to one server
    plain_in = cluster.contributions * share
    summing = plain_in / (constants.add if cluster.up == 1 else constants.decode)
    encoding = 0.0 if cluster.down == 1 else share / constants.encode
    server = cluster.contributions * messages * constants.message_s + summing + encoding
    sender = cluster.servers * messages * constants.worker_message_s
    if cluster.up > 1:
        sender += cluster.nbytes / constants.encode
    if cluster.down > 1:
        sender += cluster.nbytes / constants.decode
    away = 1 - 1 / cluster.hosts if cluster.beside else 1.0
    server += (into + out_of) * away / constants.socket
    sender += (up + down) * away / constants.socket
    parts = {"server's thread": server}
    senders = cluster.contributions
    if cluster.aggregated and cluster.workers_per_host > 1:
        sums = cluster.workers_per_host * cluster.nbytes / constants.add
        own = cluster.workers_per_host * cluster.servers * messages * constants.message_s
        parts["aggregator's thread"] = sender + sums + own
    else:
        parts["worker's thread"] = sender
    if cluster.encrypted:
        parts["server's encryption"] = (into + out_of) * away / constants.curve
        parts["sender's encryption"] = (up + down) * away / constants.curve
    if cluster.cores:
        busy = sum(each * (cluster.servers if "server" in who else senders) for who, each in parts.items())
        return {"shared cores": busy / cluster.cores}
    return parts


# ---- what was measured, and the table of the page

# What, and the median that was measured, ms: tests hold the model against it. All hosts are namespaces that share two
# cores.
MEASURED = (
    ("2 hosts of 200 Mbit/s, 10 MB, 1 worker each", Cluster(2, 1, 2, 0.2e9, 10e6, True, cores=2), 418),
    ("the same, 2 workers each, flat", Cluster(2, 2, 2, 0.2e9, 10e6, True, False, cores=2), 836),
    ("the same, 4 workers each, flat", Cluster(2, 4, 2, 0.2e9, 10e6, True, False, cores=2), 1669),
    ("2 hosts of 1 Gbit/s, ResNet-50", Cluster(2, 1, 2, 1e9, beside=True, piece=2 << 20, cores=2), 866),
    ("the same, encrypted", Cluster(2, 1, 2, 1e9, beside=True, encrypted=True, piece=2 << 20, cores=2), 874),
    ("4 hosts of 1 Gbit/s, ResNet-50", Cluster(4, 1, 4, 1e9, beside=True, cores=2), 1287),
    ("the same, encrypted", Cluster(4, 1, 4, 1e9, beside=True, encrypted=True, cores=2), 1339),
    ("4 worker hosts and 4 server hosts", Cluster(4, 1, 4, 1e9, cores=2), 879),
    ("4 hosts, fp16 both ways", Cluster(4, 1, 4, 1e9, beside=True, up=2, down=2, cores=2), 671),
    ("4 hosts, 2bit and fp16 back", Cluster(4, 1, 4, 1e9, beside=True, up=16, down=2, cores=2), 402),
    ("4 hosts of 10 Gbit/s", Cluster(4, 1, 4, 10e9, beside=True, cores=2), 433),
)

LARGE = (  # what, and the job without its rate
    ("64 server hosts, no aggregation", Cluster(512, 8, 64, 0, aggregated=False)),
    ("64 server hosts", Cluster(512, 8, 64, 0)),
    ("64 server hosts, encrypted", Cluster(512, 8, 64, 0, encrypted=True)),
    ("64 server hosts, fp16 both ways", Cluster(512, 8, 64, 0, up=2, down=2)),
    ("64 servers beside workers", Cluster(512, 8, 64, 0, beside=True)),
    ("128 servers beside workers", Cluster(512, 8, 128, 0, beside=True)),
    ("256 servers beside workers", Cluster(512, 8, 256, 0, beside=True)),
    ("512 servers beside workers", Cluster(512, 8, 512, 0, beside=True)),
)
RATES = (10, 100)  # Gbit/s


def table() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| 512 hosts of 8 workers | " + " | ".join(f"{rate} Gbit/s, ms | bottleneck" for rate in RATES) + " |"
    yield "|---|" + "---|---|" * len(RATES)
    for name, cluster in LARGE:
        cells = []
        for rate in RATES:
            chosen = predict(Cluster(**{**vars(cluster), "rate": rate * GIGA}))
            cells.append(f"{1e3 * chosen.round_s:,.0f} | {chosen.bottleneck}")
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
