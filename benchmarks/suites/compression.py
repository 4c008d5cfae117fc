"""The cost and the gain of compression: codecs alone, and rounds of four hosts with and without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.contenders import Contender, Ours, Work
from benchmarks.dmlc import Layout
from benchmarks.figures import Result, Row
from benchmarks.hosts import hosts, require, sent
from benchmarks.jobs import Place, Unavailable
from benchmarks.session import Case, Session
from benchmarks.suites.network import RATE
from kvstore.codecs import Compressor, parse
from kvstore.codecs.described import codec

ELEMENTS = 10_000_000
TURNS = 7
ROUNDS = 5
FLOOR = "1 GB/s"
# What is measured alone; the four that must be fast have a target.
CODECS: Mapping[str, Mapping[str, object]] = {
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "2bit": {"type": "2bit", "threshold": 1.0},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "int8": {"type": "int8"},
    "topk": {"type": "topk", "ratio": 0.01},
    "threshold": {"type": "threshold", "threshold": 2.5},
    "randomk": {"type": "randomk", "ratio": 0.01},
    "powersgd": {"type": "powersgd", "rank": 2},
}
PLAIN = "kvstore, plain"
# What is measured across hosts.
BOTH_WAYS: Mapping[str, Mapping[str, object]] = {
    "fp16 both ways": {"type": "fp16", "pull": "fp16"},
    "2bit, fp16 back": {"type": "2bit", "threshold": 1.0, "pull": "fp16"},
    "topk 1 %, fp16 back": {"type": "topk", "ratio": 0.01, "pull": "fp16"},
}


def compression(session: Session) -> None:
    """Measure codecs in this process with one thread, then rounds on four hosts."""
    _codecs(session)
    try:
        require()
    except Unavailable as error:
        session.console.print(f"compression: hosts skipped: {error}", style="yellow", markup=False, highlight=False)
        return
    _rounds(session)


def _codecs(session: Session) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with session.console.status("compression: codecs"):
            rows = {"encode": [Row(FLOOR, [4e-6 * ELEMENTS])], "decode": [Row(FLOOR, [4e-6 * ELEMENTS])]}
            for name, options in CODECS.items():
                for way, (samples, share) in _one(options).items():
                    speed = 4e-6 * ELEMENTS / min(samples)
                    rows[way].append(Row(name, samples, f"{speed:.1f} GB/s at best; {1 / share:.0f} times smaller"))
    finally:
        torch.set_num_threads(threads)
    for way, measured in rows.items():
        title = f"Codecs: {way} {ELEMENTS / 1e6:.0f} million floats, one thread"
        session.add(Result(f"codecs-{way}", title, measured, (FLOOR,)))


def _one(options: Mapping[str, object]) -> dict[str, tuple[list[float], float]]:
    """Return for encoding and decoding the time of each turn in ms, and the fraction of bytes that is sent."""
    description = parse(options)
    compressor = Compressor(description)
    values, out = torch.randn(2000, ELEMENTS // 2000), torch.empty(ELEMENTS)
    encoded = compressor.encode("w", values)
    payload = encoded.payload(0, ELEMENTS)
    share = payload.numel() / (4 * ELEMENTS)
    return {
        "encode": (_timed(lambda: compressor.encode("w", values)), share),
        "decode": (_timed(lambda: codec(description).check(payload, out.numel()).write(out, False)), share),
    }


def _timed(action: Callable[[], object]) -> list[float]:
    action()
    samples = []
    for _ in range(TURNS):
        began = time.perf_counter()
        action()
        samples.append(1e3 * (time.perf_counter() - began))
    return samples


def _rounds(session: Session, workers: int = 4) -> None:
    work = Work(workers=workers, servers=workers, rounds=session.options.rounds or ROUNDS)
    with hosts(workers, RATE) as places:
        layout = Layout(places, places)
        contenders: list[Contender] = [Ours(work, layout=layout, name=PLAIN)]
        contenders += [
            Ours(work, layout=layout, name=name, words=("--compression", json.dumps(options)))
            for name, options in BOTH_WAYS.items()
        ]
        before = sent(places[0])
        title = f"ResNet-50's arrays, {workers} hosts, {RATE}, without keys, compressed"
        session.measure(Case("hosts-4-compressed", title, contenders, (PLAIN,), lambda _: _crossed(places, before)))


def _crossed(places: Sequence[Place], before: int) -> None:
    """Raise ``AssertionError`` if hardly anything was sent: then the hosts were not separate."""
    if sent(places[0]) - before < 100e6:
        raise AssertionError("the hosts are not separate, and this is no measurement of the wire")
