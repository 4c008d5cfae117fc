"""Frames that are no messages, or messages that nobody would send: for shards, schedulers and running servers."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import torch
from asking import Worker, floats
from asking_rows import evict, freeze, init_tables, pull_rows, push_rows, put_rows, read_frozen
from hypothesis import strategies as st
from junk import JUNK, mutated

from kvstore import wire
from kvstore.table import Capacity, MinCount, Table
from kvstore.wire.coding import MESSAGES, field_names, header_of
from kvstore.wire.message import Message

CODES = sorted(code for code, cls in MESSAGES.items() if cls.__module__.startswith("kvstore."))
BIG = 2**61

_NUMBER = st.none() | st.sampled_from([0, -1, 1.5, 1e308, 5e-324, 0.1])
_CODEC = st.tuples(
    st.sampled_from(["fp16", "2bit", "1bit", "topk", "randomk", "int8", "powersgd", "threshold", "nothing"]),
    st.lists(
        st.tuples(st.sampled_from(["threshold", "ratio", "k", "rank", "seed", "momentum"]), _NUMBER).map(list),
        max_size=2,
    ),
).map(list)
_KEY = st.sampled_from(["k1", "k2", "new", 1, -7, ""])
_ROLE = st.sampled_from(["worker", "worker", "worker", "aggregator", "server", "scheduler", "launcher"])
_RANK = st.integers(-1, 4)
_NODE = st.tuples(_ROLE, _RANK, st.sampled_from([0, 1, 1, 1, 2, BIG])).map(list)
_SEQ = st.integers(0, 40) | st.just(BIG)
_SPECS = {
    "role": _ROLE,
    "rank": _RANK,
    "node": _NODE,
    "sender": st.tuples(_NODE, _SEQ, st.sampled_from([0, 0, 0, 5, BIG])).map(list),
    "seq": _SEQ,
    "about": st.integers(0, 40),
    "store": st.integers(0, 4),
    "ids": st.lists(st.integers(0, 5) | st.just(2**32 - 1), max_size=3, unique=True),
    "clocks": st.lists(st.sampled_from([0, 1, 2, 3, BIG]), max_size=3),
    "keys": st.lists(_KEY, max_size=3),
    "shapes": st.lists(st.lists(st.sampled_from([0, 1, 2, 2**40]), max_size=3), max_size=3),
    "dtypes": st.lists(st.sampled_from(["float32", "int64", "bfloat16", "uint8"]), max_size=3),
    "names": st.lists(st.sampled_from(["momentum_buffer", "step", "exp_avg", "master", ""]), max_size=3),
    "mode": st.sampled_from(["sync", "async"]),
    "staleness": st.none() | st.integers(0, 3),
    "quorum": st.none() | st.integers(1, 3),
    "late": st.sampled_from(["drop", "keep"]),
    "codec": st.none() | _CODEC,
    "back": st.none() | _CODEC,
    "lengths": st.lists(st.sampled_from([0, 1, 8, 20, 1 << 40]), max_size=3),
    "ranks": st.lists(_RANK, max_size=3),
    "rank_clocks": st.lists(st.sampled_from([0, 1, 2, BIG]), max_size=3),
    "encode": st.none() | _CODEC,
    "aggregate": st.sampled_from(["rounds", "host"]),
    "aggregator": st.integers(-1, 2),
    "compensation": st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    "want": st.booleans(),
    "lr": _NUMBER,
    "rescale": _NUMBER,
    "clip_gradient": _NUMBER,
    "version": st.integers(0, 3),
    "number": st.integers(0, 3),
    "pushes": st.integers(0, 9),
    "bound": st.sampled_from([1, 2, 1000]),
    "name": st.sampled_from(["sgd", "adam", "adagrad", "lbfgs", "rprop", "nothing"]),
    "hyper": st.lists(
        st.tuples(
            st.sampled_from(["momentum", "betas", "nesterov", "weight_decay", "lr", "fused", "eps"]),
            _NUMBER | st.booleans() | st.text(max_size=3) | st.lists(_NUMBER, max_size=3),
        ).map(list),
        max_size=3,
    ),
    "lr_mult": st.lists(st.tuples(_KEY, _NUMBER).map(list), max_size=2),
    "wd_mult": st.lists(st.tuples(_KEY, _NUMBER).map(list), max_size=2),
    "address": st.text(max_size=10),
    "error": st.none() | st.text(max_size=10),
    "how": st.text(max_size=10),
    "counts": st.lists(st.sampled_from([0, 1, 2, 4, BIG]), max_size=3),
    "wanted": st.lists(st.sampled_from([0, 1, 2, 4, BIG]), max_size=3),
    "wide": st.booleans(),
    "union": st.booleans(),
    "codecs": st.lists(st.sampled_from(["none", "fp16", "bf16", "int8"]), max_size=3),
    "tables": st.lists(st.deferred(lambda: _TABLE).map(lambda table: table.described), max_size=3),
    "stripe": st.integers(0, 3),
    "stripes": st.integers(1, 3),
    "id": st.integers(0, 5),
    "clock": st.sampled_from([0, 0, 1, BIG]),
    "count": st.sampled_from([0, 1, 2, 1 << 32]),
    "since": st.none() | st.integers(0, 3),
    "steps": st.none() | st.integers(0, 3),
    "columns": st.lists(st.integers(0, 3), max_size=3),
    "start": st.integers(0, 3),
}
_TABLE = st.builds(
    Table, dim=st.just(2), admit=st.none() | st.just(MinCount(2)), evict=st.just(()) | st.just(Capacity(1))
)
_TABLE |= st.just(Table(shape=(3, 2))) | st.just(Table(shape=(3, 2), dtype="float64", codec="fp16"))
_BUFFERS = st.lists(st.sampled_from([0, 4, 8, 16, 32, 48, 65536]).map(bytes), max_size=3)


@st.composite
def _odd_fields(draw: st.DrawFn) -> list[Any]:
    """A message of some class whose fields have values that may, or may not, make sense."""
    code = draw(st.sampled_from(CODES))
    cls = MESSAGES[code]
    junk = draw(st.integers(0, 40))
    values = [
        draw(JUNK if position == junk else _SPECS.get(name, JUNK)) for position, name in enumerate(field_names(cls))
    ]
    buffers = draw(_BUFFERS) if "buffers" in cls.__dataclass_fields__ else []
    return [msgpack.packb(header_of(cls, values)), *buffers]


def good(worker: Worker) -> list[Message]:
    return [
        worker.open(),
        worker.init({3: floats(1, 2)}),
        worker.push({1: floats(1, 2)}, want=True, lr=0.1),
        worker.pull([1], 1),
        worker.set_optimizer("adam", betas=[0.9, 0.99]),
        worker.get_states([1]),
        worker.put_states({(1, "momentum_buffer"): floats(1, 2)}),
        init_tables(worker, {5: Table(dim=2)}),
        push_rows(worker, {4: {0: (1, 2), 2: (1, 2)}}, wanted={4: [1]}),
        pull_rows(worker, {4: [0, 1]}),
        worker.explain(3),
    ]


def _tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from([[2], [2], [2], [1], [], [0], [3], [1, 2]]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float32, torch.float16, torch.int64]))
    return torch.ones(shape, dtype=dtype)


def _some_ranks(draw: st.DrawFn, member: Worker) -> list[int]:
    """Workers that ``member`` may or may not speak for; nobody, mostly, if it is a worker."""
    usual = [[0, 1], [0], [1]] if member.role == "aggregator" else [[], [], []]
    return list(draw(st.sampled_from([*usual, [], [0], [1, 3]])))


def _about_rows(draw: st.DrawFn, member: Worker, what: str, clock: int) -> Message:
    """A message about tables, of which a shard has that of segment 4."""
    segments = draw(st.lists(st.sampled_from([4, 4, 4, 5, 1, 9]), min_size=1, max_size=2, unique=True))
    ids = st.lists(st.sampled_from([0, 1, 2, 2, 3, -1, 2**31 - 1]), max_size=3)
    if what == "tables":
        return init_tables(member, {number: draw(_TABLE) for number in segments}, draw(st.integers(0, 1)), 1)
    if what == "push rows":
        width = draw(st.sampled_from([2, 2, 2, 1]))
        gradients = {number: {each: [1.0] * width for each in draw(ids)} for number in segments}
        options = {name: draw(st.booleans()) for name in ("wide", "union")}
        codec = draw(st.sampled_from(["none", "none", "fp16", "int8"]))
        wanted = {number: draw(ids) for number in segments}
        return push_rows(member, gradients, clock, wanted, lr=draw(_NUMBER), codec=codec, **options)
    if what == "pull rows":
        return pull_rows(member, {number: draw(ids) for number in segments}, clock, wide=draw(st.booleans()))
    if what == "put rows":
        rows = {each: [1.0] * draw(st.sampled_from([2, 2, 1])) for each in draw(ids)[:1]}
        return put_rows(member, segments[0], rows, version=draw(st.none() | st.just(3)))
    if what == "evict":
        return evict(member, segments[0], clock)
    if what == "freeze":
        return freeze(member, segments[0], clock, draw(st.none() | st.integers(0, 2)))
    flags = {name: draw(st.booleans()) for name in ("gone", "state")}
    return read_frozen(member, draw(st.integers(0, 40)), draw(st.integers(0, 3)), **flags)


ROWS = ["tables", "push rows", "push rows", "pull rows", "put rows", "evict", "freeze", "read"]


@st.composite
def _well_formed(draw: st.DrawFn) -> list[Any]:
    """What a member could send, but would not: a message whose parts fit together, with strange contents."""
    member = Worker(draw(st.integers(0, 1)), role=draw(st.sampled_from(["worker", "worker", "aggregator"])))
    member.seq, member.done = draw(st.integers(0, 60)), draw(st.sampled_from([0, 0, 0, 0, 5, BIG]))
    ids = draw(st.lists(st.sampled_from([1, 1, 2, 3, 9]), min_size=1, max_size=3, unique=True))
    clocks = draw(st.lists(st.sampled_from([0, 1, 1, 2, BIG]), min_size=len(ids), max_size=len(ids)))
    store = draw(st.integers(0, 2))
    what = draw(
        st.sampled_from(["push", "push", "pull", "init", "set", "get", "put", "explain", "open", *KEYED, *ROWS])
    )
    if what in ROWS:
        return wire.encode(_about_rows(draw, member, what, clocks[0]))
    if what == "push":
        values = {number: _tensor(draw) for number in ids}
        numbers = {"lr": draw(_NUMBER), "rescale": draw(_NUMBER), "ranks": _some_ranks(draw, member)}
        if numbers["ranks"] and draw(st.booleans()):
            numbers["rank_clocks"] = draw(st.lists(st.sampled_from([0, 1, 2, BIG]), min_size=1, max_size=2))
            numbers["ranks"] = numbers["ranks"][: len(numbers["rank_clocks"])]
            numbers["rank_clocks"] = numbers["rank_clocks"][: len(numbers["ranks"])]
        return wire.encode(member.push(values, clocks, want=draw(st.booleans()), store=store, **numbers))
    if what == "pull":
        return wire.encode(member.pull(ids, clocks, store, ranks=_some_ranks(draw, member)))
    if what == "init":
        return wire.encode(member.init({number: _tensor(draw) for number in ids}, store))
    if what == "set":
        hyper = dict(draw(_SPECS["hyper"]))
        hyper.pop("lr", None)
        name, lr, version = draw(_SPECS["name"]), draw(_NUMBER), draw(st.integers(0, 2))
        return wire.encode(member.set_optimizer(name, lr, version, store, **hyper))
    if what == "get":
        return wire.encode(member.get_states(ids, store))
    if what == "put":
        names = draw(st.lists(_SPECS["names"].filter(bool), min_size=1, max_size=2))
        return wire.encode(
            member.put_states({(number, name): _tensor(draw) for number in ids for name in names[0]}, store)
        )
    if what == "explain":
        return wire.encode(member.explain(draw(st.integers(0, 60))))
    if what == "open":
        return wire.encode(member.open(draw(_SPECS["mode"]), store))
    if what == "barrier":
        return wire.encode(wire.Barrier(member.me(), store=store, number=draw(st.integers(0, 2))))
    if what == "beat":
        return wire.encode(wire.Beat(wire.Node(draw(_ROLE), member.rank, 1)))
    keys = draw(st.lists(_KEY.filter(bool), min_size=1, max_size=3))
    if what == "ready":
        return wire.encode(wire.Ready(member.me(), store=store, keys=keys))
    shapes = [draw(st.sampled_from([[2], [2], [], [3, 3], [2**40]])) for _ in keys]
    dtypes = [draw(st.sampled_from(["float32", "float32", "int8"])) for _ in keys]
    bound = draw(st.sampled_from([1, 1000]))
    kinds = list(range(len(keys)))
    return wire.encode(wire.Declare(member.me(), store, keys, kinds, shapes, dtypes, bound, longest=2**40))


KEYED = ["barrier", "beat", "ready", "declare", "declare"]  # what a scheduler is asked

_broken = mutated(st.integers(0, 1).flatmap(lambda rank: st.sampled_from(good(Worker(rank)))).map(wire.encode))
anything = st.lists(st.binary(max_size=40), max_size=4) | _odd_fields() | _broken | _well_formed() | _well_formed()


def flood(count: int, seed: int = 0) -> Any:
    """Frames of which none is a message that a server or scheduler obeys; ``seed`` decides."""
    dice = random.Random(seed)
    parts = [[bytes(frame) for frame in wire.encode(message)] for message in good(Worker(0))]
    fixed = [
        [b""],
        [b"\xc1"],
        [b"\x91" * 2000 + b"\xc0"],  # deep nesting
        [b"\xdd\xff\xff\xff\xff"],  # a list of four thousand million
        [b"\xc6\xff\xff\xff\xff"],  # bytes of 4 GiB
        [b"\x81" * 500 + b"\x01"],
        [msgpack.packb([wire.VERSION + 1, 18, [["worker", 0, 1], 1, 0], 0, 0])],
        [msgpack.packb([wire.VERSION, 99])],
        [msgpack.packb([wire.VERSION, 18])],
        [
            msgpack.packb(
                [wire.VERSION, 42, [["worker", 0, 1], 1, 0], [1], [], [], msgpack.packb([0, [1] * 5000, True])]
            )
        ],
        [msgpack.packb([wire.VERSION, 41, [["worker", 0, 1], 1, 0], 0, [1], ["k"], [0], [[2**40, 2**40]], "float32"])],
        [b"x"] * 100,
        [bytes(1 << 16)],
    ]
    for _ in range(count):
        kind = dice.randrange(4)
        if kind == 0:
            yield [dice.randbytes(dice.randrange(64)) for _ in range(dice.randrange(1, 4))]
        elif kind == 1:
            yield dice.choice(fixed)
        elif kind == 2:
            head, *rest = dice.choice(parts)
            yield [head[: dice.randrange(len(head))], *rest]
        else:
            head, *rest = dice.choice(parts)
            yield [b"\x00" + head[1:], *rest]
