"""What the tests of messages share: any message of any class, as a hypothesis strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
from hypothesis import strategies as st

from kvstore import wire
from kvstore.spec import ITEMSIZE
from kvstore.table import CODECS, DTYPES, INITS, Capacity, MinCount, Probability, Table, Unseen
from kvstore.wire.coding import field_names, header_of

COUNT = 6

ME = wire.Sender(wire.Node("worker", 0, 1), 1, 1)

CONCRETE = [thing for thing in vars(wire).values() if isinstance(thing, type)]

CLASSES = [cls for cls in CONCRETE if cls not in (wire.Message, wire.Request, wire.Reply, wire.Node, wire.Sender)]

roles = st.sampled_from(["worker", "server", "standby", "aggregator", "scheduler", "launcher", "reader", "observer"])

ranks = st.integers(-1, 4096)

text = st.text(max_size=40)

whole = st.integers(0, 2**62)

lineages = st.just(0) | st.integers(2**60, 2**61)

states = st.tuples(lineages, st.integers(0, 2**62 - 1)).map(list)

nodes = st.builds(wire.Node, roles, ranks, whole)

keys = st.integers(-(2**63), 2**64 - 1) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63 - 1)

shapes = st.lists(st.integers(0, 20), max_size=4)

hyper = st.none() | st.booleans() | numbers | text | st.lists(st.none() | numbers, max_size=8)

named = st.tuples(text, hyper).map(list)

tables = st.builds(
    Table,
    dim=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    init=st.sampled_from(INITS),
    scale=st.floats(0, 1),
    admit=st.none() | st.builds(MinCount, st.integers(1, 9)) | st.builds(Probability, st.floats(0.1, 1)),
    evict=st.lists(st.builds(Unseen, st.integers(1, 9)) | st.builds(Capacity, st.integers(1, 9)), max_size=2),
    codec=st.sampled_from(CODECS),
    parameter=st.none() | st.integers(0, 9) | st.just("w"),
).map(lambda table: table.described)


def sender(role: Any = "worker", rank: Any = 0) -> wire.Sender:
    return ME._replace(node=wire.Node(role, rank, 1))


def some(strategy: st.SearchStrategy[Any], size: int, **unique: Any) -> st.SearchStrategy[Any]:
    return st.lists(strategy, min_size=size, max_size=size, **unique)


@functools.cache
def value_of(name: str, hint: Any, size: int) -> st.SearchStrategy[Any]:
    """What field ``name`` may hold; all lists of one message that describe the same things have ``size`` entries."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    special: dict[str, Callable[[], st.SearchStrategy[Any]]] = {  # functions: so many strategies take a while to make
        "sender": lambda: st.builds(wire.Sender, nodes, whole, whole),
        "node": lambda: nodes,
        "primary": lambda: nodes,
        "standby": lambda: st.none() | st.tuples(st.sampled_from(["server", "standby"]), st.integers(1, 9)).map(list),
        "primary_key": lambda: st.text(max_size=40),
        "standby_key": lambda: st.text(max_size=40),
        "start": lambda: st.integers(1, 9),
        "sha256": lambda: st.text(max_size=40),
        "path": lambda: text,
        "number": lambda: st.integers(1, 2**62),
        "role": lambda: roles,
        "mode": lambda: st.sampled_from(["sync", "async"]),
        "staleness": lambda: st.none() | st.integers(0, 1 << 30),
        "quorum": lambda: st.none() | st.integers(1, 4096),
        "weight": lambda: st.none() | st.floats(0, 1e6),
        "late": lambda: st.sampled_from(["drop", "keep"]),
        "compensation": lambda: numbers,
        "codec": lambda: st.none() | st.sampled_from([["2bit", [["threshold", 0.5]]], ["fp16", []]]),
        "back": lambda: st.none() | st.sampled_from([["int8", [["seed", 0], ["stochastic", False]]], ["", []]]),
        "lengths": lambda: some(st.integers(0, 1 << 40), size),
        "segment_counts": lambda: some(st.integers(1, 1 << 20), size) | st.just([]),
        "runs": lambda: (
            some(st.tuples(st.just(1), st.integers(0, 2**48), st.integers(1, 2**48)).map(list), size) | st.just([])
        ),
        "rank": lambda: ranks,
        "last": lambda: st.integers(0, 4096),
        "store": lambda: st.integers(0, 255),
        "ordinal": lambda: st.integers(1, 2**62),
        "bound": lambda: st.integers(1, 2**62),
        "longest": lambda: st.integers(1, 2**62),
        "num_workers": lambda: st.integers(1, 4096),
        "keys": lambda: some(keys, size),
        "shapes": lambda: some(shapes, size),
        "dtype": lambda: st.sampled_from(sorted(ITEMSIZE)),
        "dtypes": lambda: some(st.sampled_from(sorted(ITEMSIZE)), size),
        "ids": lambda: some(st.integers(0, 2**32 - 1), size, unique=True),
        "clocks": lambda: some(st.integers(0, 2**62 - 1), size),
        "names": lambda: some(text, size),
        "servers": lambda: some(text if get_args(hint)[:1] == (list[str],) else st.integers(0, 4096), size),
        "worker_keys": lambda: some(st.text(max_size=40), size),
        "departed": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        **dict.fromkeys(("lost", "came"), lambda: some(st.integers(0, 4096), size, unique=True).map(sorted)),
        **dict.fromkeys(("deaths", "stores", "barriers", "joins"), lambda: some(st.integers(0, 1 << 40), size)),
        "state": lambda: text if kind is str else st.booleans(),
        "kinds": lambda: some(st.integers(0, max(0, size - 1)), size),
        "counts": lambda: some(st.just(1), size),
        "starts": lambda: some(st.integers(0, 2**48), size),
        "stops": lambda: some(st.integers(0, 2**48), size),
        "hyper": lambda: some(st.tuples(text, hyper).map(list), size),
        "lr_mult": lambda: some(st.tuples(keys, numbers).map(list), size),
        "wd_mult": lambda: some(st.tuples(keys, numbers).map(list), size),
        "groups": lambda: some(st.tuples(st.lists(keys, max_size=3), st.lists(named, max_size=3)).map(list), size),
        "changes": lambda: some(st.tuples(st.integers(0, 4096), text, hyper).map(list), size),
        "ranks": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "rank_clocks": lambda: some(st.integers(0, 2**62 - 1), size) | st.just([]),
        "encode": lambda: st.none() | st.just(["topk", [["ratio", 0.1]]]),
        "aggregate": lambda: st.sampled_from(["rounds", "host"]),
        "aggregator": lambda: text if kind is str else ranks,
        "bypassed": lambda: ranks,
        "aggregators": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "aggregator_keys": lambda: some(st.text(max_size=40), size),
        "aggregated": lambda: some(st.lists(st.integers(0, 4096), max_size=3, unique=True).map(sorted), size),
        "sizes": lambda: some(st.integers(1, 1 << 20), size),
        "records": lambda: st.just(0),
        "traced": lambda: some(st.integers(0, 2**62 - 1), 2),
        "versions": lambda: some(st.integers(0, 2**62 - 1), size),
        "contributors": lambda: (
            some(st.lists(st.integers(0, 4096), max_size=3, unique=True).map(sorted), size) | st.just([])
        ),
        "scales": lambda: some(numbers, size) | st.just([]),
        "failures": lambda: some(st.tuples(whole, text, text).map(list), size),
        "splits": lambda: some(whole, size),
        "pushed": lambda: some(st.tuples(st.integers(0, 4096), st.integers(0, 2**62 - 1)).map(list), size),
        "opened_by": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "closed_by": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "read_by": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "residuals": lambda: some(st.integers(0, 2**32), size),
        "encoded": lambda: some(st.integers(0, 2**32), size),
        "steps": lambda: some(st.integers(0, 2**62 - 1), size) if get_origin(kind) is list else st.integers(0, 2**61),
        "seqs": lambda: some(st.integers(0, 2**62 - 1), size),
        "priority": lambda: st.none() | st.integers(-(2**31), 2**31),
        "tables": lambda: some(tables, size),
        "table": lambda: tables,
        "key": lambda: keys,
        "changed": lambda: some(st.integers(0, 2**62 - 1), size),
        "wanted": lambda: some(st.integers(0, 1 << 32), size),
        "codecs": lambda: some(st.sampled_from(CODECS), size),
        "count": lambda: st.integers(0, 1 << 32),
        **dict.fromkeys(("skip", "parts", "done", "evicted"), lambda: st.integers(0, 1 << 20)),
        "id": lambda: st.integers(0, 2**32 - 1),
        "stripes": lambda: st.integers(1, 4096),
        "since": lambda: st.none() | states,
        "at": lambda: numbers if kind is float else states,
        "lineage": lambda: lineages if kind is int else st.none() | lineages,
        "version": lambda: st.integers(0, 2**61) | (st.none() if kind is not int else st.nothing()),
        "columns": lambda: some(st.integers(0, 1 << 20), size),
        "positions": lambda: some(st.integers(0, 1 << 19), size, unique=True).map(sorted),
        "came_last": lambda: some(whole, size),
        "alone_us": lambda: some(whole, size),
        "sent": lambda: some(whole, size) if get_origin(kind) is list else (numbers if kind is float else whole),
        "received": lambda: some(whole, size) if get_origin(kind) is list else whole,
        "values": lambda: some(st.tuples(text, numbers).map(list), size),
        "waiting": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "waits": lambda: some(whole, size) if get_origin(kind) is list else text,
        "missing": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "threads": lambda: some(st.tuples(text, st.lists(text, max_size=3)).map(list), size),
        "places": lambda: some(text, size),
        "offsets": lambda: some(st.tuples(st.integers(1, 9), numbers, numbers).map(list), size),
        "thread_names": lambda: some(st.tuples(st.integers(0, 2**64 - 1), text).map(list), size),
        "awaited": lambda: some(st.integers(0, 4096), size, unique=True).map(sorted),
        "expected": lambda: some(st.integers(0, 4096), size),
        "members": lambda: some(
            st.tuples(
                st.sampled_from(["worker", "server", "standby", "aggregator"]),
                ranks,
                whole,
                st.sampled_from(["joined", "ready", "left", "lost"]),
                numbers,
                text,
                text,
                st.integers(0, 2**31 - 1),
            ).map(list),
            size,
        ),
        "pid": lambda: st.integers(0, 2**31 - 1),
        "events": lambda: some(st.tuples(numbers, text).map(list), size),
        "owners": lambda: some(st.integers(0, 4096), size),
        "device": lambda: st.binary(min_size=16, max_size=16),
        "opaque": lambda: st.binary(min_size=64, max_size=64),
        "offset": lambda: st.integers(0, 1 << 40),
        "nbytes": lambda: st.integers(1, 1 << 40),
        "loan": lambda: st.integers(1, 2**62),
        "rounded": lambda: st.none() | st.sampled_from(["float16", "bfloat16"]),
        "held": lambda: some(whole, size) if get_origin(kind) is list else whole,
        "sums": lambda: some(st.integers(0, 2**64 - 1), size),
        "buffers": lambda: st.lists(st.binary(max_size=20), max_size=4),
    }
    if name in special:
        return special[name]()
    plain = {
        int: whole,
        str: text,
        bool: st.booleans(),
        float: numbers,
        float | None: st.none() | numbers,
        str | None: st.none() | text,
    }
    return plain[kind]


@functools.cache
def hints_of(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@st.composite
def any_message(draw: st.DrawFn, cls: type[Any]) -> Any:
    size = draw(st.integers(0, COUNT))
    return cls(**{name: draw(value_of(name, hint, size)) for name, hint in hints_of(cls).items()})


def with_shorter(message: Any, field: str) -> list[Any]:
    """The frames of ``message``, of which the list ``field`` has lost its last item."""
    names = field_names(type(message))
    values = [getattr(message, name) for name in names]
    at = names.index(field)
    values[at] = values[at][:-1]
    return [msgpack.packb(header_of(type(message), values)), *getattr(message, "buffers", [])]
