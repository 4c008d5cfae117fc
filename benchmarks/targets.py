"""The project's targets: each is a ratio of two rows of one result, so of one run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.figures import Result


@dataclass(frozen=True)
class Target:
    """In ``result``, the median of ``row`` is at most ``factor`` times that of ``peer``."""

    result: str
    row: str
    peer: str
    factor: float

    def __str__(self) -> str:
        return f"{self.result}: {self.row} ≤ {_words(self.factor)}{self.peer}"


@dataclass(frozen=True)
class Verdict:
    """A target and the measured ratio; None if one of the two rows was not measured."""

    target: Target
    ratio: float | None

    @property
    def word(self) -> str:
        """Whether the target is reached, in words."""
        if self.ratio is None:
            return "not measured"
        return "reached" if self.ratio <= self.target.factor else "NOT REACHED"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict."""
        reached = None if self.ratio is None else self.ratio <= self.target.factor
        return {"target": str(self.target), "factor": self.target.factor, "ratio": self.ratio, "reached": reached}


TARGETS: Sequence[Target] = (
    Target("resnet50-none", "kvstore", "mxnet", 1 / 6),
    Target("resnet50-none", "kvstore", "gloo", 1 / 2),
    Target("resnet50-none", "kvstore, arena", "mxnet", 1 / 15),
    Target("resnet50-none", "kvstore, arena", "gloo", 1 / 4),
    Target("resnet50-sgd", "kvstore", "mxnet", 1 / 6),
    Target("vgg16-sgd", "kvstore", "mxnet", 1 / 6),
    Target("resnet50-none-tcp", "kvstore, tcp", "mxnet", 1 / 1.6),
    Target("resnet50-none-tcp", "kvstore, tcp", "sockets", 1.15),
    Target("small-sgd", "kvstore", "mxnet", 1 / 30),
    Target("small-none", "kvstore, numpy", "kvstore", 1.3),
    Target("small-none", "kvstore, dlpack", "kvstore", 1.3),
    Target("small-sgd", "kvstore, numpy", "kvstore", 1.3),
    Target("small-sgd", "kvstore, dlpack", "kvstore", 1.3),
    Target("many-none", "kvstore, numpy", "kvstore", 1.3),
    Target("tiny-none", "kvstore", "mxnet", 1.0),
    Target("resnet50-sgd-async", "kvstore", "mxnet", 1 / 6),
    Target("rows-sgd", "kvstore", "mxnet", 1 / 4),
    Target("rows-sgd-async", "kvstore", "mxnet", 1 / 5),
    Target("rows-adam", "kvstore", "10 ms", 1.0),
    Target("rows-many", "kvstore", "45 ms", 1.0),
    Target("rows-tables", "26 tables", "one table", 1.5),
    Target("rows-array", "an array", "a table", 1.1),
    Target("rows-dlrm", "kvstore", "ddp", 1 / 3),
    *(
        Target(f"rows-fresh{kind}", row, peer, factor)
        for kind in ("", "-async")
        for row in ("kvstore", "growing")
        for peer, factor in (("mxnet", 1 / 4), ("rows that were there", 1.3))
    ),
    # The same step with two processes and alone: the shorter one has the higher efficiency.
    *(
        Target(f"train-{net}", row, "ddp", 1.0)
        for net in ("resnet8", "resnet18")
        for row in ("kvstore", "ddp over kvstore")
    ),
    Target("hosts-4", "kvstore", "wire", 1.07),  # encrypted
    Target("hosts-4", "kvstore, no keys, OMP_NUM_THREADS=1", "wire", 1.05),
    Target("hosts-4", "kvstore", "gloo", 1.0),
    Target("hosts-4+4", "kvstore", "wire", 1.08),
    Target("hosts-4+4", "kvstore", "gloo", 1 / 1.5),
    *(Target(f"hosts-2x{workers}-10MB-200mbit", "kvstore", "wire", 1.08) for workers in (1, 2, 4, 8)),
    Target("hosts-2x4-10MB-200mbit", "kvstore", "gloo", 0.65),
    Target("hosts-4x4-10MB-200mbit", "kvstore", "wire", 1.1),
    Target("hosts-4x4-10MB-200mbit", "kvstore", "gloo", 0.9),
    Target("hosts-4x1-resnet50-1gbit", "kvstore", "wire", 1.07),
    Target("hosts-2x4-resnet50-200mbit", "kvstore, 2bit, fp16 back", "kvstore", 0.33),
    Target("hosts-train", "kvstore", "ddp", 1.0),
    Target("hosts-train", "kvstore", "limit", 1.0),
    *(
        Target(f"codecs-{way}", name, "1 GB/s", 1.0)
        for way in ("encode", "decode")
        for name in ("fp16", "2bit", "1bit", "int8")
    ),
    Target("hosts-4-compressed", "fp16 both ways", "kvstore, plain", 0.55),
    Target("hosts-4-compressed", "2bit, fp16 back", "kvstore, plain", 0.32),
    Target("hosts-4-compressed", "topk 1 %, fp16 back", "kvstore, plain", 0.32),
    Target("memory", "largest server", "allowed", 1.0),
    Target("memory-growth", "largest growth", "allowed", 1.0),
    *(Target("table-lookups", f"{count} ids at a time", "15 M/s", 1.0) for count in ("8,160", "100,000")),
    Target("table-index", "index of 10 million ids", "allowed", 1.0),
    Target("table-served", "8,160 rows at a time", "1 M/s", 1.0),
    Target("table-growth", "second half", "allowed", 1.0),
    Target("publish-bytes-1", "kvstore", "allowed", 1.0),
    Target("publish-bytes-10", "kvstore", "allowed", 1.0),
    Target("publish-bytes-1-behind", "kvstore", "ideal", 1.1),
    *(Target(f"publish-{readers}", "kvstore", "gloo", 1 / 4) for readers in (1, 4)),
    *(Target(f"publish-{readers}", "kvstore", "safetensors", 1 / 2) for readers in (1, 4)),
    Target("publish-1", "kvstore, publish_state", "safetensors", 1.0),
    Target("publish-1-first", "kvstore", "gloo", 1.1),
    Target("publish-line", "kvstore", "gloo", 1 / 25),
    Target("followers-rounds-1", "kvstore", "nothing published", 1.05),
    *(Target(f"followers-actor-{every}", "kvstore", "50 a minute", 1.0) for every in ("round", "second")),
    Target("followers-crowd-memory", "largest growth", "allowed", 1.0),
)


def judge(results: Iterable[Result], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Return a verdict on every target whose result was measured."""
    by_name = {result.name: result for result in results}
    return [
        Verdict(target, by_name[target.result].ratio(target.row, target.peer))
        for target in targets
        if target.result in by_name
    ]


def _words(factor: float) -> str:
    """Format a factor in words: ``1/6 of ``, ``1.05 × `` or ``0.65 × ``."""
    if factor == 1:
        return ""
    inverse = Fraction(1 / factor).limit_denominator(10)
    of = factor < 1 and math.isclose(factor * inverse, 1)
    return f"1/{float(inverse):g} of " if of else f"{factor:g} × "
