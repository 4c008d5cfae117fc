"""Whole jobs on 1, 2, 3 and 5 servers: one sha256 for each optimizer, of arrays and of tables, however they travel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.optim.optimizer import find, names, names_for_rows

ROUNDS = 2
SHAPES = {"vector": (1003,), "cube": (3, 5, 67), "even": (512,), "small": (7,)}
MATRICES = {"tall": (211, 7), "wide": (5, 333)}
TABLES = {
    "fixed": kv.Table(shape=(101, 3), init="normal"),
    "grows": kv.Table(dim=17, init="normal", admit=kv.MinCount(2), evict=kv.Unseen(2)),
}
IDS = {"fixed": np.arange(101), "grows": np.arange(60) * 7919 - 1000}
MOMENTUM = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "centered": True}}
FEW = ("sgd", "adamw", "adagrad", "lamb")
ALL = [name for name in names() if not getattr(find(name).cls, "random", False)]

# What each end encodes: a worker all of them; a server of its segments those whose elements, or blocks of them, are
# encoded by themselves; an aggregator likewise.
WORKERS = (
    {"type": "fp16", "pull": "fp16"},
    {"type": "bf16", "pull": "bf16"},
    {"type": "int8", "pull": "int8"},
    {"type": "int8", "stochastic": True},
    {"type": "1bit", "threshold": 0.0},
    {"type": "2bit", "threshold": 0.3},
    {"type": "topk", "ratio": 0.05, "momentum": 0.9},
    {"type": "threshold", "threshold": 0.4},
    {"type": "randomk", "ratio": 0.1, "seed": 3},
    {"type": "powersgd", "rank": 1},
)
SUMS = [
    {"type": "fp16", "pull": pull}
    for pull in ("int8", "1bit", {"type": "2bit", "threshold": 0.3}, {"type": "threshold", "threshold": 0.4})
]
AGGREGATORS = [each for each in WORKERS if each["type"] not in ("topk", "randomk") and "stochastic" not in each]


def program(
    optimizer: str | None, compression: dict[str, Any] | None = None, tables: Mapping[str, kv.Table] | None = None
) -> Callable[[DistStore], str]:
    """Return what a worker does: it trains for some rounds, and returns a hash of all that it has got."""

    def work(store: DistStore) -> str:
        shapes: dict[str, Sequence[int]] = SHAPES | MATRICES
        if optimizer is not None:
            store.set_optimizer(optimizer, learning_rate=0.05, rescale_grad=1 / 3, **MOMENTUM.get(optimizer, {}))
            shapes = MATRICES if find(optimizer).dims == 2 else shapes
        if compression is not None:
            store.set_gradient_compression(compression)
        drawn = torch.Generator().manual_seed(0)
        store.init(list(shapes), [torch.randn(*shape, generator=drawn) for shape in shapes.values()])
        if tables:
            store.init(list(tables), list(tables.values()))
        found = hashlib.sha256()
        for step in range(ROUNDS):
            drawn = torch.Generator().manual_seed(100 * store.rank + step)
            grads = [torch.randn(*shape, generator=drawn) for shape in shapes.values()]
            outs = [torch.empty(*shape) for shape in shapes.values()]
            store.pushpull(list(shapes), grads, out=outs)
            for out in outs:
                found.update(out.numpy().tobytes())
            for key, table in (tables or {}).items():
                ids = IDS[key][torch.rand(len(IDS[key]), generator=drawn).numpy() < 0.6]
                rows = torch.randn(len(ids), table.width, generator=drawn)
                store.push(key, kv.RowSparse(torch.from_numpy(ids), rows))
                found.update(store.row_sparse_pull(key, row_ids=IDS[key]).numpy().tobytes())
        return found.hexdigest()

    return work


def hashes(servers: int, aggregators: int, optimizers: Collection[str]) -> dict[str, set[str]]:
    """Train in one job with each optimizer, and with each compression; return what the workers have got, by name."""
    piece_bytes = 1 << 20 if servers < 3 else 1024  # in one message, or in several
    found: dict[str, set[str]] = {}
    with ThreadedJob(
        2 + aggregators, servers, aggregators=aggregators, bigarray_bound=300, piece_bytes=piece_bytes
    ) as job:
        for name in optimizers:
            found[name] = set(job.run(program(name, tables=TABLES if name in names_for_rows() else None)))
        for compression in AGGREGATORS if aggregators else WORKERS:
            found[f"adam, {compression}"] = set(job.run(program("adam", compression)))
        for compression in SUMS:
            found[f"sums, {compression}"] = set(job.run(program(None, compression)))
    return found


@pytest.mark.parametrize(
    ("aggregators", "numbers", "optimizers"),
    [
        pytest.param(2, (5,), FEW, id="aggregators", marks=pytest.mark.long),
        pytest.param(0, (2, 3, 5), ALL, id="workers alone", marks=pytest.mark.faults),  # test_cuts.py: without a job
    ],
)
def test_the_number_of_servers_changes_no_bit(
    aggregators: int, numbers: Collection[int], optimizers: Collection[str]
) -> None:
    one = hashes(1, aggregators, optimizers)
    assert {name for name, found in one.items() if len(found) != 1} == set(), "all workers get the same"
    for servers in numbers:
        several = hashes(servers, aggregators, optimizers)
        assert {name for name in one if one[name] != several[name]} == set(), f"differ on {servers} servers"


@pytest.mark.parametrize("servers", [2, 3])
def test_a_table_never_has_more_rows_than_its_capacity_on_any_number_of_servers(servers: int) -> None:
    def work(store: DistStore) -> list[int]:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("t", kv.Table(dim=1, evict=kv.Capacity(7)))
        counts = []
        for step in range(6):
            ids = torch.arange(12) + 12 * step
            store.push("t", kv.RowSparse(ids, torch.ones(12, 1))).wait()
            counts.append(int(store.table_statistics("t")["rows"]))
        return counts

    with ThreadedJob(1, servers) as job:
        (counts,) = job.run(work)
    assert max(counts) <= 7
    assert counts[-1] == 7, "and it has as many, once each server has had more ids than rows"


def test_a_capacity_of_less_than_a_row_for_each_server_is_refused() -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match=r"Capacity\(2\) is less than one row for each of 3 servers.* least 3"):
            store.init("t", kv.Table(dim=1, evict=[kv.Unseen(9), kv.Capacity(2)]))
        store.init("t", kv.Table(dim=1, evict=kv.Capacity(3)))

    with ThreadedJob(1, 3) as job:
        job.run(work)
