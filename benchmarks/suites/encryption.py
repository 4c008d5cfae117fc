"""The cost of keys: the same rounds over TCP, plain and encrypted."""

from __future__ import annotations

from benchmarks.contenders import Contender, Ours, Work
from benchmarks.dmlc import Layout
from benchmarks.figures import Result
from benchmarks.jobs import HERE
from benchmarks.networks import elements, shapes_of
from benchmarks.session import Case, Session

ROUNDS = 10
PLAIN = "kvstore, plain"


def encryption(session: Session) -> None:
    """Measure rounds over the loopback interface, where only the processors are the limit."""
    options = session.options
    net = options.net or "resnet50"
    work = Work(net, options.workers, options.servers, rounds=options.rounds or ROUNDS)
    layout = Layout([HERE] * work.workers, [HERE] * work.servers)
    sockets = {"KVSTORE_SHM": "0"}
    contenders: list[Contender] = [
        Ours(work, layout=layout, env=sockets, name=PLAIN),
        Ours(work, layout=layout, env=sockets, keys=True, name="kvstore, encrypted"),
    ]
    nbytes = 2 * 4 * elements(shapes_of(net)) * work.workers

    def note(result: Result) -> None:
        for row in result.rows:
            if row.samples:
                row.note = f"{nbytes / row.median / 1e6:.2f} GB/s"

    members = f"{work.workers} workers, {work.servers} servers"
    title = f"The arrays of {net} over TCP, {members}; GB/s of all workers, both ways"
    session.measure(Case(f"{net}-encryption", title, contenders, (PLAIN,), note))
