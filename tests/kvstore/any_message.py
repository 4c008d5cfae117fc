"""What the tests of messages share: any message of any class, as a hypothesis strategy."""

from __future__ import annotations

import functools
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


@functools.cache  # each of so many strategies takes a while to make
def value_of(name: str, hint: Any, size: int) -> st.SearchStrategy[Any]:
    """What field ``name`` may hold; all lists of one message that describe the same things have ``size`` entries."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    special = {
        "sender": st.builds(wire.Sender, nodes, whole, whole),
        "node": nodes,
        "primary": nodes,
        "standby": st.none() | st.tuples(st.sampled_from(["server", "standby"]), st.integers(1, 9)).map(list),
        "primary_key": st.text(max_size=40),
        "standby_key": st.text(max_size=40),
        "start": st.integers(1, 9),
        "sha256": st.text(max_size=40),
        "path": text,
        "number": st.integers(1, 2**62),
        "role": roles,
        "mode": st.sampled_from(["sync", "async"]),
        "staleness": st.none() | st.integers(0, 1 << 30),
        "quorum": st.none() | st.integers(1, 4096),
        "late": st.sampled_from(["drop", "keep"]),
        "compensation": numbers,
        "codec": st.none() | st.sampled_from([["2bit", [["threshold", 0.5]]], ["fp16", []]]),
        "back": st.none() | st.sampled_from([["int8", [["seed", 0], ["stochastic", False]]], ["", []]]),
        "lengths": some(st.integers(0, 1 << 40), size),
        "segment_counts": some(st.integers(1, 1 << 20), size) | st.just([]),
        "rank": ranks,
        "last": st.integers(0, 4096),
        "store": st.integers(0, 255),
        "ordinal": st.integers(1, 2**62),
        "bound": st.integers(1, 2**62),
        "longest": st.integers(1, 2**62),
        "num_workers": st.integers(1, 4096),
        "keys": some(keys, size),
        "shapes": some(shapes, size),
        "dtype": st.sampled_from(sorted(ITEMSIZE)),
        "dtypes": some(st.sampled_from(sorted(ITEMSIZE)), size),
        "ids": some(st.integers(0, 2**32 - 1), size, unique=True),
        "clocks": some(st.integers(0, 2**62 - 1), size),
        "names": some(text, size),
        "servers": some(text if get_args(hint)[:1] == (list[str],) else st.integers(0, 4096), size),
        "worker_keys": some(st.text(max_size=40), size),
        "departed": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "kinds": some(st.integers(0, max(0, size - 1)), size),
        "counts": some(st.just(1), size),
        "starts": some(st.integers(0, 2**48), size),
        "stops": some(st.integers(0, 2**48), size),
        "hyper": some(st.tuples(text, hyper).map(list), size),
        "lr_mult": some(st.tuples(keys, numbers).map(list), size),
        "wd_mult": some(st.tuples(keys, numbers).map(list), size),
        "groups": some(st.tuples(st.lists(keys, max_size=3), st.lists(named, max_size=3)).map(list), size),
        "changes": some(st.tuples(st.integers(0, 4096), text, hyper).map(list), size),
        "ranks": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "rank_clocks": some(st.integers(0, 2**62 - 1), size) | st.just([]),
        "encode": st.none() | st.just(["topk", [["ratio", 0.1]]]),
        "aggregate": st.sampled_from(["rounds", "host"]),
        "aggregator": text if kind is str else ranks,
        "aggregator_keys": some(st.text(max_size=40), size),
        "aggregated": some(st.lists(st.integers(0, 4096), max_size=3, unique=True).map(sorted), size),
        "sizes": some(st.integers(1, 1 << 20), size),
        "records": st.just(0),
        "traced": some(st.integers(0, 2**62 - 1), 2),
        "versions": some(st.integers(0, 2**62 - 1), size),
        "contributors": some(st.lists(st.integers(0, 4096), max_size=3, unique=True).map(sorted), size) | st.just([]),
        "scales": some(numbers, size) | st.just([]),
        "failures": some(st.tuples(whole, text, text).map(list), size),
        "splits": some(whole, size),
        "pushed": some(st.tuples(st.integers(0, 4096), st.integers(0, 2**62 - 1)).map(list), size),
        "opened_by": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "closed_by": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "read_by": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "residuals": some(st.integers(0, 2**32), size),
        "encoded": some(st.integers(0, 2**32), size),
        "steps": some(st.integers(0, 2**62 - 1), size) if get_origin(kind) is list else st.integers(0, 2**61),
        "seqs": some(st.integers(0, 2**62 - 1), size),
        "priority": st.none() | st.integers(-(2**31), 2**31),
        "tables": some(tables, size),
        "table": tables,
        "key": keys,
        "changed": some(st.integers(0, 2**62 - 1), size),
        "wanted": some(st.integers(0, 1 << 32), size),
        "codecs": some(st.sampled_from(CODECS), size),
        "count": st.integers(0, 1 << 32),
        "id": st.integers(0, 2**32 - 1),
        "stripes": st.integers(1, 4096),
        "since": st.none() | states,
        "at": numbers if kind is float else states,
        "lineage": lineages if kind is int else st.none() | lineages,
        "version": st.integers(0, 2**61) | (st.none() if kind is not int else st.nothing()),
        "columns": some(st.integers(0, 1 << 20), size),
        "positions": some(st.integers(0, 1 << 19), size, unique=True).map(sorted),
        "came_last": some(whole, size),
        "alone_us": some(whole, size),
        "sent": some(whole, size) if get_origin(kind) is list else (numbers if kind is float else whole),
        "received": some(whole, size) if get_origin(kind) is list else whole,
        "values": some(st.tuples(text, numbers).map(list), size),
        "waiting": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "waits": some(whole, size) if get_origin(kind) is list else text,
        "missing": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "threads": some(st.tuples(text, st.lists(text, max_size=3)).map(list), size),
        "places": some(text, size),
        "offsets": some(st.tuples(st.integers(1, 9), numbers, numbers).map(list), size),
        "thread_names": some(st.tuples(st.integers(0, 2**64 - 1), text).map(list), size),
        "awaited": some(st.integers(0, 4096), size, unique=True).map(sorted),
        "expected": some(st.integers(0, 4096), size),
        "members": some(
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
        "pid": st.integers(0, 2**31 - 1),
        "events": some(st.tuples(numbers, text).map(list), size),
        "owners": some(st.integers(0, 4096), size),
        "device": st.binary(min_size=16, max_size=16),
        "opaque": st.binary(min_size=64, max_size=64),
        "offset": st.integers(0, 1 << 40),
        "nbytes": st.integers(1, 1 << 40),
        "loan": st.integers(1, 2**62),
        "buffers": st.lists(st.binary(max_size=20), max_size=4),
    }
    if name in special:
        return special[name]
    plain = {
        int: whole,
        str: text,
        bool: st.booleans(),
        float: numbers,
        float | None: st.none() | numbers,
        str | None: st.none() | text,
    }
    return plain[kind]


@st.composite
def any_message(draw: st.DrawFn, cls: type[Any]) -> Any:
    size = draw(st.integers(0, COUNT))
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{name: draw(value_of(name, hint, size)) for name, hint in hints.items()})


def with_shorter(message: Any, field: str) -> list[Any]:
    """The frames of ``message``, of which the list ``field`` has lost its last item."""
    names = field_names(type(message))
    values = [getattr(message, name) for name in names]
    at = names.index(field)
    values[at] = values[at][:-1]
    return [msgpack.packb(header_of(type(message), values)), *getattr(message, "buffers", [])]
