"""What every store does, whatever it is made of: one suite for local, device and all dist stores."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import Foreign
from threaded import ThreadedJob

import kvstore as kv
from kvstore.dist import DistStore
from kvstore.optim import states_file
from kvstore.rule import Rule
from kvstore.spec import ITEMSIZE
from kvstore.ticket import claim
from kvstore.values import as_dtype

# What it is about is told in tests/kvstore/dist/test_momentum.py.
pytestmark = pytest.mark.filterwarnings("ignore:.* has momentum .* gradients come late:UserWarning")

BOUND = 60  # elements: arrays of so many are cut over the servers


@dataclass(frozen=True)
class Kind:
    """A type of store, and how many workers and servers use it together; none for a local one.

    Attributes:
        links: what their links are, as ``ThreadedJob`` knows them.
    """

    name: str
    workers: int = 0
    servers: int = 0
    links: str = "inproc"

    @property
    def dist(self) -> bool:
        return self.workers > 0

    def __str__(self) -> str:
        links = "" if self.links == "inproc" else f"-{self.links}"
        return f"{self.name}-{self.workers}x{self.servers}{links}" if self.dist else self.name


ASSIGNING = [
    Kind("local"),
    Kind("device"),
    Kind("dist_sync", 1, 1),
    Kind("dist_sync", 3, 2),
    Kind("dist_device_sync", 2, 3),
    Kind("dist_sync", 2, 2, "zeromq"),
    Kind("dist_sync", 2, 2, "curve"),
]
ALL = [*ASSIGNING, Kind("dist_async", 1, 1), Kind("dist_async", 2, 2), Kind("dist_async", 2, 2, "zeromq")]

Run = Callable[[Callable[[kv.KVStore], Any]], list[Any]]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[Kind], ThreadedJob]]:
    """One running job for each kind of dist store, for all tests of this module."""
    running: dict[Kind, ThreadedJob] = {}
    with contextlib.ExitStack() as stack:

        def cluster_for(kind: Kind) -> ThreadedJob:
            if kind not in running:
                ipc = kind.links.startswith("zeromq")
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) if ipc else None
                cluster = ThreadedJob(
                    kind.workers, kind.servers, bigarray_bound=BOUND, directory=directory, kind=kind.links
                )
                running[kind] = stack.enter_context(cluster)
            return running[kind]

        yield cluster_for


@pytest.fixture
def run(request: pytest.FixtureRequest, clusters: Callable[[Kind], ThreadedJob]) -> Run:
    """Calls a function with a new store on every worker, and returns the results by rank."""
    kind: Kind = request.param

    def run_local(work: Callable[[kv.KVStore], Any]) -> list[Any]:
        with kv.create(kind.name) as store:
            return [work(store)]

    def run_dist(work: Callable[[kv.KVStore], Any]) -> list[Any]:
        def in_session(session: Any) -> Any:
            mode = "async" if "async" in kind.name else "sync"
            with DistStore(session, kind.name, Rule(mode), "device" in kind.name) as store:
                return work(store)

        return clusters(kind).run_sessions(in_session)

    return run_dist if kind.dist else run_local


assigning = pytest.mark.parametrize("run", ASSIGNING, ids=str, indirect=True)
every = pytest.mark.parametrize("run", ALL, ids=str, indirect=True)


def one_to(n: int) -> int:
    return n * (n + 1) // 2


def mine(store: kv.KVStore) -> int:
    """What this worker contributes."""
    return store.rank + 1


def all_of(store: kv.KVStore) -> int:
    """What all contribute."""
    return one_to(store.num_workers)


def pulled(store: kv.KVStore, key: Any, like: Any) -> np.ndarray[Any, Any]:
    out = torch.empty_like(like) if isinstance(like, torch.Tensor) else torch.empty(like)
    store.pull(key, out)
    return out.float().numpy()


def settled(store: kv.KVStore, ticket: kv.Ticket) -> None:
    """Return when the pushes of all workers have taken effect."""
    ticket.wait()
    store.barrier()


# ---- assigning: without an optimizer a push assigns the sum


@assigning
def test_a_push_that_waits_has_taken_effect_when_it_returns(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(100))
        value = torch.full((100,), float(mine(store)))
        ticket = store.push("w", value, wait=True)
        assert claim(ticket).open == set()
        assert store.statistics().outstanding == 0
        assert (pulled(store, "w", value) == all_of(store)).all()

    run(work)


@assigning
def test_a_push_assigns_the_sum(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.full((2, 3), 9.0))
        for factor in (1, 10):
            store.push("w", torch.full((2, 3), float(factor * mine(store))))
            assert (pulled(store, "w", (2, 3)) == factor * all_of(store)).all()

    run(work)


@assigning
def test_the_values_of_several_devices_are_summed(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", [torch.zeros(3), torch.zeros(3)])
        store.push("w", [torch.full((3,), float(device * mine(store))) for device in (1, 2, 3, 4)])
        outs = [torch.empty(3) for _ in range(4)]
        store.pull("w", outs)
        assert all((out == 10 * all_of(store)).all() for out in outs)

    run(work)


@assigning
def test_lists_of_keys_and_lists_of_lists(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        keys = [5, 7, 11]
        store.init(keys, [torch.zeros(2, 2)] * 3)
        store.push(keys, [torch.full((2, 2), float(key * mine(store))) for key in keys])
        outs: list[Any] = [torch.empty(2, 2) for _ in keys]
        store.pull(keys, outs)
        assert [out[0, 0].item() for out in outs] == [key * all_of(store) for key in keys]
        values = [[torch.full((2, 2), float(key)), torch.ones(2, 2)] for key in keys]
        outs = [[torch.empty(2, 2), torch.empty(2, 2)] for _ in keys]
        store.pushpull(keys, values, outs)
        for key, its in zip(keys, outs, strict=True):
            assert all((out == (key + 1) * store.num_workers).all() for out in its)

    run(work)


@assigning
def test_a_key_listed_twice_has_both_values(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
        outs = [torch.empty(2) for _ in range(3)]
        store.pushpull(["a", "b", "a"], [torch.full((2,), float(n)) for n in (1, 2, 4)], outs)
        assert [out[0].item() for out in outs] == [n * store.num_workers for n in (5, 2, 5)]

    run(work)


@pytest.mark.parametrize("key", [3, -(2**63), 2**63, 2**64 - 1, "w", "layer.0/重み"])
@assigning
def test_int_and_str_keys(run: Run, key: Any) -> None:
    def work(store: kv.KVStore) -> None:
        store.init(key, np.zeros(2))
        out = np.empty(2)
        store.pushpull(key, np.full(2, mine(store), float), out)
        assert (out == all_of(store)).all()

    run(work)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6.0).reshape(2, 3),
        lambda: torch.arange(6, dtype=torch.float64).view(2, 3),
        lambda: torch.nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3)),
        lambda: Foreign(torch.arange(6, dtype=torch.float64).view(2, 3)),
        lambda: np.arange(6.0).reshape(3, 2, order="F").reshape(2, 3),
        lambda: np.arange(6.0).reshape(3, 2).T.copy().T.T.reshape(2, 3),
        lambda: np.stack([np.arange(6.0)] * 2, axis=1)[:, 0].reshape(2, 3),
        lambda: torch.arange(6, dtype=torch.float64).view(2, 3).t().contiguous().t(),
    ],
)
@assigning
def test_arrays_of_every_kind(run: Run, make: Callable[[], Any]) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", make())
        out = make()
        store.pushpull("w", make(), out)
        tensor = out.tensor if isinstance(out, Foreign) else torch.as_tensor(out).detach()
        expected = torch.as_tensor(
            np.asarray(make().tensor if isinstance(out, Foreign) else torch.as_tensor(make()).detach())
        )
        assert torch.equal(tensor, expected * store.num_workers)

    run(work)


@assigning
def test_values_that_can_only_be_read(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        value = np.arange(6.0)[::-1]
        fixed = np.broadcast_to(np.float64(2), (6,))
        store.init("w", value)
        assert pulled(store, "w", torch.empty(6, dtype=torch.float64)).tolist() == [5, 4, 3, 2, 1, 0]
        store.push("w", [value, fixed, np.arange(6, dtype=">f8")])
        assert (pulled(store, "w", torch.empty(6, dtype=torch.float64)) == 7 * store.num_workers).all()

    run(work)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4", ">i8"])
@assigning
def test_arrays_of_foreign_byte_order_are_values_but_cannot_be_written_to(run: Run, dtype: str) -> None:
    def work(store: kv.KVStore) -> None:
        value = np.arange(6, dtype=dtype).reshape(2, 3)
        native = value.astype(value.dtype.newbyteorder("="))
        out = np.empty_like(native)
        store.init("w", value)
        store.pull("w", out)
        assert (out == native).all()
        store.push("w", [value, value])
        store.pull("w", out)
        assert (out == 2 * native * store.num_workers).all()
        refused = pytest.raises(
            kv.UsageError, match=rf"foreign byte order \({dtype}\).* out as an array of {native.dtype}"
        )
        with refused:
            store.pull("w", np.empty_like(value))
        with refused:
            store.pushpull("w", value)  # which would write to it
        with refused:
            store.pushpull("w", native, np.empty_like(value))
        store.pull("w", out)
        assert (out == 2 * native * store.num_workers).all()  # what is refused has not been pushed
        store.pushpull("w", value, out)
        assert (out == native * store.num_workers).all()

    run(work)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (BOUND - 1,), (7, 11), (3, BOUND, 2)], ids=str)
@pytest.mark.parametrize("name", sorted(ITEMSIZE))
@assigning
def test_dtypes_and_shapes(run: Run, name: str, shape: tuple[int, ...]) -> None:
    def work(store: kv.KVStore) -> None:
        value = (torch.arange(int(np.prod(shape))) % 7).to(getattr(torch, name)).view(shape)
        store.init("w", value)
        out = torch.zeros_like(value)
        store.pull("w", out)
        assert torch.equal(out, value)
        store.push("w", value * mine(store))
        store.pull("w", out)
        assert torch.equal(out, value * all_of(store))

    run(work)


@assigning
def test_outs_that_are_not_contiguous(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        value = torch.arange(2.0 * BOUND).view(2, BOUND)
        small = torch.arange(6.0).view(2, 3)
        store.init(["big", "small"], [value, small])
        outs = [torch.zeros(BOUND, 2).t(), torch.zeros(2, 6)[:, ::2]]
        plain = torch.zeros(2, BOUND)
        store.pull(["big", "small", "big"], [*outs, plain])
        assert torch.equal(outs[0], value)
        assert torch.equal(outs[1], small)
        assert torch.equal(plain, value)

    run(work)


@assigning
def test_pushpull_in_place(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init(["a", "b"], [torch.zeros(3), np.zeros(BOUND)])
        one, two, three = torch.ones(3), torch.ones(3), np.full(BOUND, float(mine(store)))
        store.pushpull(["a", "b"], [[one, two], three])
        assert one.tolist() == two.tolist() == [2 * store.num_workers] * 3
        assert (three == all_of(store)).all()

    run(work)


@pytest.mark.parametrize("size", [3, BOUND, 50_000])
@assigning
def test_a_pushed_array_is_the_callers_again_at_once(run: Run, size: int) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(size))
        grad = torch.ones(size)
        store.push("w", grad)
        grad.fill_(99)
        assert (pulled(store, "w", (size,)) == store.num_workers).all()

    run(work)


@assigning
def test_stored_values_are_nobodys_memory(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        first, out = torch.ones(3), torch.empty(3)
        store.init("w", first)
        first.fill_(5)
        store.pull("w", out)
        out.fill_(6)
        assert pulled(store, "w", (3,)).tolist() == [1, 1, 1]
        store.pushpull("w", torch.ones(3), out)
        store.barrier()
        out.fill_(7)
        assert pulled(store, "w", (3,)).tolist() == [store.num_workers] * 3

    run(work)


@assigning
def test_tickets(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(3))
        push = store.push("w", torch.ones(3))
        out, both = torch.empty(3), torch.ones(3)
        pull = store.pull("w", out, wait=False)
        pushpull = store.pushpull("w", both, wait=False)
        for ticket in (pushpull, pull, push):
            ticket.wait()
            assert ticket.done()
        assert out.tolist() == both.tolist() == [store.num_workers] * 3
        assert store.statistics().outstanding == 0

    run(work)


@assigning
def test_many_rounds_in_flight(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(2))
        outs = [torch.empty(2) for _ in range(20)]
        tickets = [
            store.pushpull("w", torch.full((2,), float(n * mine(store))), out, wait=False) for n, out in enumerate(outs)
        ]
        for ticket in tickets:
            ticket.wait()
        assert [out[0].item() for out in outs][-1] == 19 * all_of(store)
        assert pulled(store, "w", (2,)).tolist() == [19 * all_of(store)] * 2

    run(work)


@assigning
def test_half_precision_is_summed_in_float32(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(2, dtype=torch.bfloat16))
        values = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, *[0.5] * 8)]
        store.push("w", values)
        expected = 260.0 * store.num_workers
        assert pulled(store, "w", torch.empty(2, dtype=torch.bfloat16)).tolist() == [expected] * 2

    run(work)


# ---- what holds with and without an optimizer


@every
def test_everybody_gets_rank_zeros_values(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        keys = ["a", "b", "c"]
        outs = [torch.empty(3), torch.empty(BOUND), torch.empty(())]
        store.broadcast(keys, [torch.full(out.shape, 5.0 + store.rank) for out in outs], outs)
        assert all((out == 5).all() for out in outs)
        store.broadcast("d", torch.full((2,), float(store.rank)), [both := torch.empty(2), torch.empty(2)])
        assert (both == 0).all()

    run(work)


@every
def test_a_second_init_raises_and_changes_nothing(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("a", torch.ones(2))
        with pytest.raises(kv.AlreadyInitialized, match="'a'"):
            store.init("a", torch.zeros(2))
        with pytest.raises(kv.AlreadyInitialized, match="'a'"):
            store.init(["b", "a"], [torch.zeros(2)] * 2)
        store.init("b", torch.full((2,), 3.0))
        assert pulled(store, "a", (2,)).tolist() == [1, 1]
        assert pulled(store, "b", (2,)).tolist() == [3, 3]

    run(work)


@every
def test_init_of_one_key_twice_in_a_call(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with pytest.raises(kv.UsageError, match="twice"):
            store.init(["a", "a"], [torch.ones(2)] * 2)
        store.init("a", torch.ones(2))

    run(work)


@every
def test_a_key_without_a_value(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("a", torch.ones(2))
        for call in (
            lambda: store.push("b", torch.ones(2)),
            lambda: store.pull("b", torch.ones(2)),
            lambda: store.pushpull("b", torch.ones(2)),
            lambda: store.pull(["a", "b"], [torch.ones(2)] * 2),
        ):
            with pytest.raises(kv.KeyNotInitialized, match=r"'b'.*init"):
                call()

    run(work)


@every
def test_a_key_that_is_misspelled(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init(["weight", "bias"], [torch.ones(2), torch.ones(2)])
        for call in (
            lambda: store.push("wieght", torch.ones(2)),
            lambda: store.pull("wieght", torch.ones(2)),
            lambda: store.pushpull("wieght", torch.ones(2)),
            lambda: store.push(["bias", "wieght"], [torch.ones(2)] * 2),
            lambda: store.pull(["bias", "wieght"], [torch.ones(2)] * 2),
            lambda: store.pushpull(["bias", "wieght"], [torch.ones(2)] * 2),
        ):
            with pytest.raises(kv.KeyNotInitialized, match=r"'wieght' has no value.*; did you mean 'weight'\?"):
                call()

    run(work)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), np.ones(2, "i4")]
)
@every
def test_another_shape_or_dtype_raises_at_the_call(run: Run, wrong: Any) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.ones(2))
        right = torch.ones(2)
        for call in (
            lambda: store.push("w", wrong),
            lambda: store.pull("w", wrong),
            lambda: store.pull("w", [right, wrong]),
            lambda: store.pushpull("w", wrong, right),
            lambda: store.pushpull("w", right, wrong),
        ):
            with pytest.raises(kv.Mismatch, match=r"'w' is float32\[2\]"):
                call()
        with pytest.raises(kv.UsageError, match="differ"):
            store.push("w", [right, wrong])
        settled(store, store.push("w", right))
        assert pulled(store, "w", (2,)).tolist() == [1 - store.num_workers] * 2

    run(work)


@every
def test_keys_of_one_kind(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with pytest.raises(kv.KeyNotInitialized):
            store.pull("w", torch.ones(1))
        store.init(3, torch.ones(1))
        for call in (
            lambda: store.init("w", torch.ones(1)),
            lambda: store.push("3", torch.ones(1)),
            lambda: store.pull([3, "3"], [torch.ones(1)] * 2),
        ):
            with pytest.raises(kv.UsageError, match="keys of one kind"):
                call()
        assert pulled(store, 3, (1,)).tolist() == [1]

    run(work)


@pytest.mark.parametrize(
    "bad", [3.0, "value", object(), np.zeros(2, complex), torch.eye(2).to_sparse(), [torch.ones(2), None]]
)
@every
def test_what_is_no_value(run: Run, bad: Any) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.ones(2))
        for call in (
            lambda: store.init("v", bad),
            lambda: store.push("w", bad),
            lambda: store.pull("w", bad),
            lambda: store.pushpull("w", bad, torch.ones(2)),
            lambda: store.pushpull("w", torch.ones(2), bad),
        ):
            with pytest.raises(kv.UsageError):
                call()
        assert pulled(store, "w", (2,)).tolist() == [1, 1]

    run(work)


@every
def test_outs_that_cannot_be_written(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd")
        store.init("w", np.ones(2))
        fixed = np.ones(2)
        fixed.flags.writeable = False
        for call in (
            lambda: store.pull("w", fixed),
            lambda: store.pull("w", np.ones(2)[::-1]),
            lambda: store.pushpull("w", fixed),
            lambda: store.pull("w", torch.ones(1, dtype=torch.float64).expand(2)),
        ):
            with pytest.raises(kv.UsageError, match=r"out (has|is)"):
                call()

    run(work)


@every
def test_mxnets_calls_for_sparse_values_and_commands(run: Run) -> None:
    def work(store: kv.KVStore) -> list[float]:
        store.init("w", torch.ones(3))
        out = torch.zeros(3)
        store.pull("w", out, 0, ignore_sparse=False)
        with pytest.raises(kv.UsageError):  # it is for tables
            store.row_sparse_pull("w", out=out, row_ids=torch.tensor([0]))
        with pytest.raises(kv.Unsupported, match="no commands; call set_optimizer"):
            store._send_command_to_servers(0, "")
        return out.tolist()

    assert all(result == [1, 1, 1] for result in run(work))


@every
def test_the_job(run: Run) -> None:
    def work(store: kv.KVStore) -> tuple[int, int]:
        assert store.num_dead_nodes() == 0
        assert store.is_capable("optimizer")
        assert store.is_capable("Optimizer")
        with pytest.raises(kv.UnknownName, match="choose from optimizer"):
            store.is_capable("flight")
        store.barrier()
        store._barrier()
        return store.rank, store.num_workers

    results = run(work)
    assert results == [(rank, len(results)) for rank in range(len(results))]


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_the_type_is_the_name_asked_for(kind: Kind, clusters: Callable[[Kind], ThreadedJob]) -> None:
    if kind.dist:
        mode = "async" if "async" in kind.name else "sync"
        types = clusters(kind).run_sessions(lambda session: DistStore(session, kind.name, Rule(mode)).type)
        assert types == [kind.name] * kind.workers
    else:
        assert kv.create(kind.name.upper()).type == kind.name


@every
def test_statistics(run: Run) -> None:
    def work(store: kv.KVStore) -> kv.Statistics:
        store.set_optimizer("sgd")
        assert store.statistics().keys == 0
        store.init(["a", "b"], [torch.zeros(4), torch.zeros(BOUND)])
        for _ in range(3):
            store.push(["a", "b"], [torch.zeros(4), torch.zeros(BOUND)]).wait()
        store.pull("a", torch.zeros(4))
        store.pushpull("a", torch.zeros(4))
        store.push("a", torch.zeros(4)).wait()
        return store.statistics()

    for statistics in run(work):
        assert (statistics.keys, statistics.pushes, statistics.pulls, statistics.outstanding) == (2, 8, 2, 0)
        if statistics.server_bytes:
            assert sum(statistics.server_bytes) == 4 * (4 + BOUND)
            assert statistics.bytes_pushed == 4 * (5 * 4 + 3 * BOUND)
            assert statistics.bytes_pulled == 2 * 4 * 4


@every
def test_a_store_may_be_closed_twice(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with store as same:
            assert same is store
            store.init("a", torch.zeros(1))
        store.close()
        store.close()
        calls: list[Callable[[], Any]] = [
            lambda: store.push("a", torch.zeros(1)),
            lambda: store.pull("a", torch.zeros(1)),
            lambda: store.pushpull("a", torch.zeros(1)),
            lambda: store.init("b", torch.zeros(1)),
            lambda: store.set_optimizer("sgd"),
            lambda: store.set_learning_rate(0.1),
        ]
        for call in calls:
            with pytest.raises(kv.UsageError, match="this store is closed"):
                call()

    run(work)


@every
def test_an_exception_passes_through_the_block(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with pytest.raises(ZeroDivisionError), store:
            _ = 1 / 0

    run(work)


# ---- with an optimizer


@every
def test_an_optimizer_gets_the_sum(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.5)
        store.init(["a", "b"], [torch.zeros(3), torch.zeros(BOUND)])
        for rounds in (1, 2):
            values = [torch.full((3,), float(mine(store))), torch.full((BOUND,), 2.0 * mine(store))]
            settled(store, store.push(["a", "b"], values))
            assert (pulled(store, "a", (3,)) == -0.5 * rounds * all_of(store)).all()
            assert (pulled(store, "b", (BOUND,)) == -1.0 * rounds * all_of(store)).all()
            store.barrier()

    run(work)


@every
def test_an_optimizer_may_come_after_init(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(3))
        store.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.25))
        settled(store, store.push("w", torch.ones(3)))
        assert (pulled(store, "w", (3,)) == -0.25 * store.num_workers).all()

    run(work)


@every
def test_the_callers_gradient_stays_as_it_is(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=0.5, clip_gradient=0.25)
        store.init(["w", "h"], [torch.zeros(3), torch.zeros(3, dtype=torch.float16)])
        grads = torch.ones(3), torch.ones(3, dtype=torch.float16)
        outs = torch.empty(3), torch.empty(3, dtype=torch.float16)
        store.pushpull(["w", "h"], list(grads), list(outs))
        assert all((grad == 1).all() for grad in grads)
        store.barrier()

    run(work)


@every
def test_strides_of_gradients_do_not_matter(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(2, 3))
        settled(store, store.push("w", torch.arange(6.0).view(3, 2).t()))
        assert (pulled(store, "w", (2, 3)) == -store.num_workers * np.arange(6.0).reshape(3, 2).T).all()

    run(work)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
@every
def test_an_optimizer_updates_floats_only(run: Run, name: str) -> None:
    def work(store: kv.KVStore) -> None:
        value = torch.ones(2, dtype=getattr(torch, name))
        store.set_optimizer("sgd")
        store.init("n", value)
        with pytest.raises(kv.Mismatch, match=f"'n' is {name}.*floating point only"):
            store.push("n", value)
        out = torch.zeros_like(value)
        store.pull("n", out)
        assert out.tolist() == [1, 1]

    run(work)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@every
def test_an_optimizer_updates_every_float(run: Run, name: str) -> None:
    def work(store: kv.KVStore) -> None:
        value = torch.zeros(3, dtype=getattr(torch, name))
        store.set_optimizer("sgd", learning_rate=0.5)
        store.init("w", value)
        settled(store, store.push("w", torch.ones_like(value)))
        assert (pulled(store, "w", value) == -0.5 * store.num_workers).all()

    run(work)


@every
def test_half_precision_weights_do_not_lose_small_steps(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=2.0**-10 / store.num_workers)
        store.init("w", torch.ones(2, dtype=torch.bfloat16))
        for _ in range(64):
            ticket = store.push("w", torch.ones(2, dtype=torch.bfloat16))
        settled(store, ticket)
        assert pulled(store, "w", torch.empty(2, dtype=torch.bfloat16)).tolist() == [1 - 64 * 2.0**-10] * 2

    run(work)


@every
def test_an_unknown_optimizer_or_hyper_parameter(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with pytest.raises(kv.UnknownName, match=r"no optimizer 'sdg'; choose from .*sgd"):
            store.set_optimizer("sdg")
        with pytest.raises(kv.UnknownName, match=r"no hyper-parameter 'momentun'; choose from .*momentum"):
            store.set_optimizer("sgd", momentun=0.9)

    run(work)


@every
def test_a_new_learning_rate_keeps_the_momentum(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        share = 1.0 / store.num_workers
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        assert store.learning_rate == 1.0
        store.init("w", torch.zeros(2))
        if store.rank == 0 or "async" not in store.type:
            grad = torch.full((2,), share if "async" not in store.type else 1.0)
            store.push("w", grad).wait()
            store.set_learning_rate(0.25)
            store.push("w", grad).wait()
            assert store.learning_rate == 0.25
        store.barrier()
        np.testing.assert_allclose(pulled(store, "w", (2,)), -1 - 0.25 * 1.5, rtol=1e-6)

    run(work)


@every
def test_gradients_can_be_scaled_anew(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=0.5)
        store.init("w", torch.zeros(2))
        settled(store, store.push("w", torch.ones(2)))
        store.set_hyperparameters(rescale_grad=0.25)
        settled(store, store.push("w", torch.ones(2)))
        assert (pulled(store, "w", (2,)) == -0.75 * store.num_workers).all()

    run(work)


@pytest.mark.parametrize("bad", ["0.1", None, float("nan"), True])
@every
def test_a_learning_rate_is_a_number(run: Run, bad: Any) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.5)
        if bad is not None:
            with pytest.raises(kv.UsageError, match="not a finite number"):
                store.set_learning_rate(bad)
        else:
            store.set_hyperparameters(learning_rate=None, rescale_grad=None)
        assert store.learning_rate == 0.5

    run(work)


@every
def test_other_numbers_keep_the_state(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        alone = store.rank == 0 or "async" not in store.type
        share = torch.full((2,), 1.0 / (store.num_workers if "async" not in store.type else 1))
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        store.init("w", torch.zeros(2))
        for lr in (1.0, 0.25):
            store.set_optimizer("sgd", learning_rate=lr, momentum=0.5)
            assert store.learning_rate == lr
            if alone:
                store.push("w", share).wait()
            store.barrier()
        np.testing.assert_allclose(pulled(store, "w", (2,)), -1 - 0.25 * 1.5, rtol=1e-6)

    run(work)


@every
def test_another_optimizer_drops_the_state_and_says_so(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("nag", learning_rate=1.0)
        store.init("w", torch.zeros(2))
        settled(store, store.push("w", torch.ones(2)))
        before = pulled(store, "w", (2,))
        store.barrier()
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        settled(store, store.push("w", torch.ones(2)))
        if "async" not in store.type:
            assert (pulled(store, "w", (2,)) == before - store.num_workers).all()

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "sgd replaces nag, whose state is dropped" in caplog.text


@every
def test_multipliers_by_key(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        keys = ["plain", "slow", "still", "bare"]
        share = 1.0 / store.num_workers if "async" not in store.type else 1.0
        mults = {"lr_mult": {"slow": 0.5, "still": 0}, "wd_mult": {"bare": 0}}
        store.set_optimizer("sgd", learning_rate=1.0, wd=0.5, **mults)
        store.init(keys, [torch.full((BOUND,), 2.0) for _ in keys])
        if store.rank == 0 or "async" not in store.type:
            store.push(keys, [torch.full((BOUND,), share) for _ in keys]).wait()
        store.barrier()
        np.testing.assert_allclose([pulled(store, key, (BOUND,))[-1] for key in keys], [0, 1, 2, 1], atol=1e-6)

    run(work)


@every
def test_without_an_optimizer_there_is_nothing_to_set_or_save(run: Run, tmp_path: Path) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(2))
        with pytest.raises(kv.UsageError, match="optimizer"):
            _ = store.learning_rate
        with pytest.raises(kv.UsageError, match="set_optimizer"):
            store.save_optimizer_states(tmp_path / "s")

    run(work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("optimizer", "keys"), [("adam", ["a", "b", "n"]), ("adagrad", [2**64 - 1, -(2**63), 7]), ("sgd", ["a", "b", "n"])]
)
@every
def test_a_run_goes_on_from_saved_states_to_the_bit(run: Run, optimizer: str, keys: list[Any], tmp_path: Path) -> None:
    shapes = dict(zip(keys, [(3, 2), (BOUND + 3,), ()], strict=True))
    options = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer == "sgd" else {})}

    def begin(store: kv.KVStore, weights: dict[Any, torch.Tensor]) -> None:
        store.init(list(weights), list(weights.values()))
        store.set_optimizer(optimizer, **options)

    def step(store: kv.KVStore, number: int) -> None:
        if store.rank == 0 or "async" not in store.type:
            generator = torch.Generator().manual_seed(10 * number + store.rank)
            store.push(list(shapes), [torch.randn(shape, generator=generator) for shape in shapes.values()])

    def weights_of(store: kv.KVStore) -> dict[Any, torch.Tensor]:
        return {key: torch.from_numpy(pulled(store, key, shape)) for key, shape in shapes.items()}

    def whole(store: kv.KVStore) -> tuple[Any, Any]:
        begin(store, {key: torch.ones(shape) for key, shape in shapes.items()})
        for number in (0, 1):
            step(store, number)
        middle = weights_of(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "s")
        store.barrier()
        for number in (2, 3):
            step(store, number)
        return middle, weights_of(store)

    middle, end = run(whole)[0]

    def second_half(store: kv.KVStore) -> Any:
        begin(store, middle)
        store.load_optimizer_states(tmp_path / "s")
        for number in (2, 3):
            step(store, number)
        return weights_of(store)

    again = run(second_half)[0]
    assert all(torch.equal(again[key], end[key]) for key in shapes)
    assert not torch.equal(middle[keys[1]], end[keys[1]])


@every
def test_states_that_do_not_belong_here(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"

    def save(store: kv.KVStore) -> None:
        store.set_optimizer("adam")
        store.init("w", torch.zeros(2))
        if store.rank == 0 or "async" not in store.type:
            store.push("w", torch.ones(2)).wait()
        if store.rank == 0:
            store.save_optimizer_states(path)

    def refuse(optimizer: str, key: str, shape: tuple[int, ...], text: str) -> Callable[[kv.KVStore], None]:
        def work(store: kv.KVStore) -> None:
            store.set_optimizer(optimizer)
            store.init(key, torch.zeros(shape))
            if store.rank == 0:
                with pytest.raises(kv.UsageError, match=text):
                    store.load_optimizer_states(path)

        return work

    run(save)
    run(refuse("sgd", "w", (2,), "the states of adam, but the optimizer is sgd"))
    run(refuse("adam", "v", (2,), "key 'w', which has not been initialized"))
    run(refuse("adam", "w", (3,), r"of shape \[2\] for key 'w'"))
    path.write_bytes(b"nonsense")
    run(refuse("adam", "w", (2,), "damaged"))


@pytest.mark.parametrize("shape", [(), (BOUND, 1)])
@every
def test_states_that_torch_would_read_past_are_refused(run: Run, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "s"
    states_file.write(path, "sgd", {("w", "momentum_buffer"): torch.ones(shape)})

    def work(store: kv.KVStore) -> Any:
        store.init("w", torch.zeros(BOUND, 3))
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        if store.rank == 0:
            with pytest.raises(kv.UsageError, match=r"momentum_buffer.* of key 'w'|states of key 'w': momentum_buffer"):
                store.load_optimizer_states(path)
        store.barrier()
        if store.rank == 0 or "async" not in store.type:
            store.push("w", torch.ones(BOUND, 3))
        return pulled(store, "w", (BOUND, 3))

    assert len(np.unique(run(work)[0])) == 1  # the state is none, so all elements were updated alike


@every
def test_of_a_file_of_states_all_are_taken_or_none(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    keys = [f"k{number}" for number in range(6)]  # on several servers
    good = {(key, "momentum_buffer"): torch.ones(4) for key in keys}
    states_file.write(path, "sgd", good | {(keys[-1], "momentum_buffer"): torch.ones(())})

    def work(store: kv.KVStore) -> Any:
        store.init(keys, [torch.zeros(4)] * len(keys))
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        if store.rank == 0:
            with pytest.raises(kv.UsageError, match="states of key 'k5': momentum_buffer"):
                store.load_optimizer_states(path)
        store.barrier()
        if store.rank == 0 or "async" not in store.type:
            store.push(keys, [torch.zeros(4)] * len(keys))  # moves what has a momentum
        store.barrier()
        return [pulled(store, key, (4,)) for key in keys]

    assert not np.any(run(work)[0])


# ---- memory of the store's


@pytest.mark.parametrize("run", ASSIGNING, indirect=True, ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float16, "int32", np.float64])
def test_arrays_from_the_store_are_like_any(run: Run, dtype: Any) -> None:
    def work(store: kv.KVStore) -> None:
        shapes = {"small": (3,), "cut": (7, 11), "number": (), "none": (0, 2)}
        ours = {key: store.empty(shape, dtype) for key, shape in shapes.items()}
        assert {value.dtype for value in ours.values()} == {torch.float32 if dtype is None else as_dtype(dtype)}
        assert {key: tuple(value.shape) for key, value in ours.items()} == shapes
        store.init(list(ours), [torch.zeros_like(value) for value in ours.values()])
        for turn in (1, 2):
            for value in ours.values():
                value.fill_(turn)
            outs = {key: torch.empty_like(value) for key, value in ours.items()}
            store.pushpull(list(ours), list(ours.values()), list(outs.values()))
            assert all((out == turn * store.num_workers).all() for out in outs.values())
        base = store.empty(6, dtype)
        base.copy_(torch.arange(6))
        outs = {key: torch.empty(2, dtype=base.dtype) for key in ("first", "last")}
        store.init(list(outs), [torch.zeros_like(out) for out in outs.values()])
        store.pushpull(list(outs), [base[:2], base[4:]], list(outs.values()))  # what lies between is not sent
        assert outs["first"].tolist() == [0, store.num_workers]
        assert outs["last"].tolist() == [4 * store.num_workers, 5 * store.num_workers]
        one = store.empty(np.int64(5))  # a number is a shape too
        assert tuple(one.shape) == (5,)

    run(work)


@pytest.mark.parametrize("run", ALL, indirect=True, ids=str)
def test_arrays_may_become_the_value(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        if "async" in store.type:
            store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=-1.0)
        keys, shapes = ["small", "cut"], [(2, 3), (9, 9)]
        outs = [torch.empty(shape) for shape in shapes]
        store.init(keys, [torch.zeros(shape) for shape in shapes])
        store.barrier()
        store.push(keys, [torch.ones(shape) for shape in shapes]).wait()
        store.barrier()
        store.pull(keys, outs, copy=False)
        assert all((out == store.num_workers).all() for out in outs)
        assert [tuple(out.shape) for out in outs] == shapes
        kept = [out.detach() for out in outs]  # over the same memory
        store.barrier()
        store.pushpull(keys, [torch.ones(shape) for shape in shapes], [torch.empty(shape) for shape in shapes])
        store.barrier()
        assert all((value == store.num_workers).all() for value in kept), "it stays as it is when the server goes on"
        store.pull(keys, outs, copy=False)
        now = store.num_workers if "async" not in store.type else 2 * store.num_workers
        assert all((out == now).all() for out in outs)

    run(work)


@pytest.mark.parametrize("run", [Kind("local"), Kind("dist_sync", 1, 1)], indirect=True, ids=str)
def test_a_dtype_that_cannot_be_stored_is_no_dtype_of_an_array(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        for wrong in (torch.complex64, "complex64", "nonsense", object()):
            with pytest.raises(kv.UsageError, match="cannot be stored"):
                store.empty((2,), wrong)

    run(work)
