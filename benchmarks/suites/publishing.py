"""Versions for readers: the bytes of what has changed, and the time until readers of the same host have it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import ssh
from benchmarks.contenders import Contender, Samples, launched, program
from benchmarks.figures import Result, Row
from benchmarks.hosts import INTERFACE, hosts, line
from benchmarks.jobs import HERE, Member, Unavailable, run, scratch
from benchmarks.networks import elements, shapes_of
from benchmarks.peers import Peers
from benchmarks.session import Case, Session
from kvstore.wire.versions import PIECE
from servers.store.publishing import PublishedValues

SHARES = (0.01, 0.03, 0.1)
ALLOWED = {0.01: 1.7, 0.1: 15.5}  # percent of the model
BEHIND = 8  # versions
COUNTED = 4_000_000  # elements of which bytes are counted
RATE, STEPS = 3e-6, (1, 10, 100)
READERS = (1, 4)
ROUNDS = 8
LINE = "200mbit"


def publish(session: Session) -> None:
    """Measure bytes, and times with each number of readers."""
    for share in SHARES:
        session.add(_bytes(share, 1))
    session.add(_bytes(SHARES[0], BEHIND))
    session.add(_adamw_bytes())
    for readers in READERS:
        _times(session, readers)
    try:
        _line(session)
    except Unavailable as error:
        session.console.print(f"publish-line: skipped: {error}", style="yellow", markup=False, highlight=False)


def _bytes(share: float, behind: int) -> Result:
    """Count the bytes of an answer to a reader that is so many versions ``behind``, in percent of the model's."""
    rng = np.random.default_rng(0)
    pieces = [PublishedValues(PIECE, "float32", "bfloat16") for _ in range(COUNTED // PIECE)]
    values = torch.from_numpy(rng.standard_normal((len(pieces), PIECE)).astype(np.float32))
    versions = [values.clone()]
    for number in range(1, 2 + behind):
        if number > 1:
            values[torch.from_numpy(rng.random(tuple(values.shape)) < share)] *= -1
            versions.append(values.clone())
        for piece, part in zip(pieces, values, strict=True):
            piece.publish(part, number)
    answers = [piece.changes(1, 1 + behind) or [] for piece in pieces]
    nbytes = sum(memoryview(buffer).nbytes for answer in answers for buffer in answer)
    union = torch.stack([version != versions[0] for version in versions]).any(0)
    for version in versions:  # what has changed and changed back is in the union of changes, too
        union |= version != values
    changed = union.float().mean().item()
    entropy = -(changed * math.log2(changed) + (1 - changed) * math.log2(1 - changed)) / 8
    name = f"publish-bytes-{100 * share:g}" + ("-behind" if behind > 1 else "")
    title = f"Bytes for a reader {behind} version{'s' * (behind > 1)} behind, each of {share:.0%} of the bf16 elements"
    ideal = Row("ideal", [100 * (2 * changed + entropy) / 2], "values, and the entropy of the positions")
    allowed = [Row("allowed", [ALLOWED[share]])] if behind == 1 and share in ALLOWED else []
    rows = [Row("kvstore", [100 * nbytes / (2 * values.numel())]), ideal, *allowed]
    return Result(name, title, rows, ("ideal", "allowed"), "% of the model")


def _adamw_bytes() -> Result:
    """Count the bytes of single versions while AdamW trains float32 weights, which are published in bf16."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(0.02 * torch.randn(COUNTED // PIECE, PIECE))
    optimizer = torch.optim.AdamW([weights], lr=RATE, fused=True)
    pieces = [PublishedValues(PIECE, "float32", "bfloat16") for _ in weights]
    rows = []
    for step in range(1 + max(STEPS)):
        if step:
            weights.grad = torch.randn_like(weights)
            optimizer.step()
        values = weights.detach()
        changed = sum(piece.publish(part, 1 + step) for piece, part in zip(pieces, values, strict=True))
        if step in STEPS:
            answers = [piece.changes(step, 1 + step) or [] for piece in pieces]
            nbytes = sum(memoryview(buffer).nbytes for answer in answers for buffer in answer)
            note = f"{changed / values.numel():.1%} of the elements"
            rows.append(Row(f"step {step}", [100 * nbytes / (2 * values.numel())], note))
    title = f"Bytes of a version after a step of AdamW at a rate of {RATE:g} on N(0, 0.02), with random gradients"
    return Result("publish-bytes-adamw", title, rows, unit="% of the model")


def _times(session: Session, readers: int) -> None:
    options = session.options
    net = options.net or "small-decoder"
    who = ["kvstore", *(each for each in ("gloo", "ray") if each in options.peers)]
    who += ["safetensors"] if options.peers else []
    contenders: Sequence[Contender] = [
        Versions(each, net, readers, options.servers, options.rounds or ROUNDS, peers=session.peers) for each in who
    ]
    size = 2e-6 * elements(shapes_of(net))
    title = f"From publish to the last of {readers} readers: {size:,.0f} MB of which 1 % changes"
    result = session.measure(Case(f"publish-{readers}", title, contenders, tuple(who[1:])), show=False)
    first = [row for row in result.rows if row.name.startswith("first: ")]
    result.rows = [row for row in result.rows if row not in first]
    session.add(result)
    for row in first:
        row.name = row.name.removeprefix("first: ")
    session.add(
        Result(f"publish-{readers}-first", f"The same for the first version: all {size:,.0f} MB", first, who[1:])
    )


def _line(session: Session) -> None:
    """Measure the same between two hosts, with encrypted links; gloo sends all of the model each time."""
    options = session.options
    net, who = options.net or "small-decoder", ["kvstore", *(["gloo"] if "gloo" in options.peers else [])]
    with hosts(2, LINE, options.mtu) as places, ssh.logins(places) as logged:
        contenders = [Versions(each, net, 1, options.servers, options.rounds or ROUNDS, hosts=logged) for each in who]
        size = 2e-6 * elements(shapes_of(net))
        title = f"From publish to a reader over {line(LINE, options.mtu)}: {size:,.0f} MB of which 1 % changes"
        session.measure(Case("publish-line", title, contenders, ("gloo",)))


@dataclass(frozen=True)
class Versions:
    """A publisher and readers.

    Attributes:
        name: how: one of ``--who`` of the program.
        rounds: how many versions are counted after the first.
        peers: who has the Python with Ray.
        hosts: the publisher and all servers are on the first, and readers on the others; by default all are here.
    """

    name: str
    net: str
    readers: int
    servers: int
    rounds: int
    peers: Peers | None = None
    hosts: ssh.Ssh | None = None

    def run(self) -> Samples:
        """See ``Contender``. Ours has two rows: from when ``publish_state`` returns, and from its call."""
        with scratch() as folder:
            path = folder / "report"
            words = ["--who", self.name, "--net", self.net, "--readers", str(self.readers), "--folder", str(folder)]
            command = [*program("publish"), *words, "--rounds", str(self.rounds), "--report", str(path)]
            first, *others = [HERE] * 2 if self.hosts is None else self.hosts.places
            env = {"GLOO_SOCKET_IFNAME": INTERFACE} if first.namespace else {}
            if self.name == "ray" and self.peers is not None:
                env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of this run alone
                command = [self.peers.ray(), "-m", "benchmarks.programs.publish_ray", *command[3:]]
            publisher = Member("publisher", command, env, first)
            if self.name == "kvstore":
                job = launched(1, self.servers, command, {})
                more = ["--readers", str(folder / "readers.json"), "--reader-share", "100%"]
                if self.hosts is not None:
                    more += ["--launcher", "ssh", "--ssh-config", str(self.hosts.config)]
                    more += ["-H", str(self.hosts.hostfile([first], 1))]
                publisher = Member(job.name, [*job.argv[:-1], *more, job.argv[-1]], job.env, first)
            members = [
                Member(f"reader {number}", [*command, "--reader", str(number)], env, others[number % len(others)])
                for number in range(self.readers)
            ]
            figures = run([publisher, *members], path)
        if self.name != "kvstore":
            return {self.name: figures["whole"], f"first: {self.name}": [figures["first"]]}
        return {
            "kvstore": figures["after"],
            "kvstore, publish_state": figures["whole"],
            "first: kvstore": [figures["first_after"]],
            "first: kvstore, publish_state": [figures["first"]],
        }
