"""Rounds of push and pull on one machine: ``pushpull``, ``small`` and ``async``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contenders import Contender, Gloo, Mxnet, Ours, Sockets, Work
from benchmarks.options import Options
from benchmarks.peers import Peers
from benchmarks.session import Case, Session

ROUNDS = {"tiny": 500, "vgg16": 6, "many": 5}
TITLES = {
    "resnet50": "ResNet-50, 161 arrays, 102 MB",
    "vgg16": "VGG-16, 32 arrays, 553 MB",
    "small": "2,000 arrays of 128 floats",
    "many": "100,000 arrays of two floats",
    "tiny": "one array of 1 KB",
}


def pushpull(session: Session) -> None:
    """Measure the case of the options; without options, the cases with a target."""
    options = session.options
    if options.one_line:
        transport = options.transport or "auto"
        memories = (options.memory or "ordinary",)
        session.measure(case(_work(options), session.peers, memories, transport))
        return
    session.measure(case(_work(options), session.peers, ("ordinary", "arena")))
    session.measure(with_check(case(_work(options, optimizer="sgd"), session.peers, ("ordinary", "arena"))))
    session.measure(case(_work(options, "vgg16", "sgd"), session.peers))
    session.measure(case(_work(options), session.peers, transport="tcp"))
    session.measure(with_default(case(_work(options), Peers((), session.peers.cache), transport="zeromq")))


def small(session: Session) -> None:
    """Measure many small arrays, of torch and of others, and one: the cost of a message and of a key."""
    session.measure(with_other_arrays(case(_work(session.options, "small"), session.peers)))
    session.measure(with_other_arrays(case(_work(session.options, "small", "sgd"), session.peers)))
    session.measure(case(_work(session.options, "tiny"), session.peers))
    if session.options.net is None:
        alone = Peers((), session.peers.cache)
        session.measure(with_other_arrays(case(_work(session.options, "many"), alone), with_init=True))


def asynchronous(session: Session) -> None:
    """Measure ``dist_async``: an update for every push."""
    session.measure(case(_work(session.options, optimizer="sgd", kind="dist_async"), session.peers))


def case(
    work: Work, peers: Peers, memories: Sequence[str] = ("ordinary",), transport: str = "auto", name: str = ""
) -> Case:
    """Return a case with all contenders that can do the work.

    Args:
        work: what to do.
        peers: with whom to compare.
        memories: where our arrays are: ``ordinary`` memory, an ``arena`` of the store, or one after the other.
        transport: how our payloads travel.
        name: what to call it; made from the work if empty.
    """
    contenders: list[Contender] = [
        Ours(work, memory, transport, name=our_name(memory, transport)) for memory in memories
    ]
    if "mxnet" in peers:
        contenders.append(Mxnet(work, peers))
    # These sum one flat array: it is other work where servers update, or where it is the number of arrays that counts.
    sums = work.optimizer == "none" and work.kind == "dist_sync" and work.net != "small"
    if sums and "gloo" in peers:
        contenders.append(Gloo(work))
    if sums and "sockets" in peers and transport != "auto":
        contenders.append(Sockets(work))
    return Case(name or case_name(work, transport), _title(work, transport), contenders)


def with_check(measured: Case) -> Case:
    """Return the case with a row of ours with ``check_finite``, to compare with ours without."""
    ours = next(one for one in measured.contenders if isinstance(one, Ours))
    checked = replace(ours, name=f"{ours.name}, check_finite", words=(*ours.words, "--check-finite"))
    return replace(measured, contenders=[checked, *measured.contenders], peers=(*measured.peers, ours.name))


def with_default(measured: Case) -> Case:
    """Return the case with a row of ours over the default transport, to compare with."""
    ours = next(one for one in measured.contenders if isinstance(one, Ours))
    default = replace(ours, transport="auto", name=our_name(ours.memory, "auto"))
    return replace(measured, contenders=[*measured.contenders, default], peers=(*measured.peers, default.name))


def with_other_arrays(measured: Case, with_init: bool = False) -> Case:
    """Return the case with rows of ours with numpy arrays and with what has DLPack, to compare with torch tensors."""
    ours = next(one for one in measured.contenders if isinstance(one, Ours))
    torch = replace(ours, with_init=with_init)
    numpy, dlpack = (
        replace(torch, name=f"{ours.name}, {kind}", words=(*ours.words, "--arrays", kind))
        for kind in ("numpy", "dlpack")
    )
    others = [one for one in measured.contenders if one is not ours]
    return replace(measured, contenders=[torch, numpy, dlpack, *others], peers=(*measured.peers, ours.name))


def our_name(memory: str, transport: str) -> str:
    """Return the name of our row."""
    return ", ".join(
        ["kvstore", *(["arena"] if memory == "arena" else []), *([transport] if transport != "auto" else [])]
    )


def case_name(work: Work, transport: str = "auto") -> str:
    """Return a name such as ``resnet50-sgd-async-tcp-4x2``; usual values are left out."""
    words = [work.net, work.optimizer]
    words += ["async"] if work.kind == "dist_async" else []
    words += [transport] if transport != "auto" else []
    words += [f"{work.workers}x{work.servers}"] if (work.workers, work.servers) != (2, 2) else []
    return "-".join(words)


def _title(work: Work, transport: str) -> str:
    updates = {"none": "no optimizer", "sgd": "SGD with momentum"}.get(work.optimizer, work.optimizer)
    words = [TITLES.get(work.net, work.net), updates, work.kind, f"{work.workers} workers, {work.servers} servers"]
    return ", ".join(words + ([transport] if transport != "auto" else []))


def _work(options: Options, net: str = "resnet50", optimizer: str = "none", kind: str = "dist_sync") -> Work:
    chosen = options.net or net
    return Work(
        net=chosen,
        workers=options.workers,
        servers=options.servers,
        optimizer=options.optimizer or optimizer,
        kind=options.kind or kind,
        rounds=options.rounds or ROUNDS.get(chosen, 10),
    )
