"""What only dist stores do: workers that call in any order, disagree, come late, or use several stores at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_worker import every_worker_of
from small_jobs import BOUND, SOON, value_of
from threaded import ThreadedJob, set_limits
from waiting import LONG, until

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.store.local import LocalStore
from kvstore.table import Table


def by_rank(*works: Callable[[DistStore], Any]) -> Callable[[DistStore], Any]:
    """Each worker does its own."""
    return lambda store: works[store.rank](store)


def refused(call: Callable[[], Any]) -> str:
    """The message with which ``call`` is refused, as a mismatch, now or (since the answer is on its way) soon."""
    while True:
        try:
            call()
        except kv.Mismatch as exc:
            return str(exc)


# ---- init


def test_init_waits_for_rank_zero_and_says_so(cluster: ThreadedJob) -> None:
    rank_one_waits = threading.Event()

    def zero(store: DistStore) -> None:
        assert rank_one_waits.wait(LONG)
        store.init(["b", "w"], [torch.zeros(2), torch.full((3,), 4.0)])

    def one(store: DistStore) -> None:
        set_limits(store, SOON)
        with pytest.raises(
            kv.DeadlineExceeded,
            match=r"init of 'w' is not done after 0\.05 s: the scheduler waits for worker 0 to init 'w'",
        ):
            store.init("w", torch.zeros(3))
        rank_one_waits.set()
        set_limits(store, LONG)
        store.init("w", torch.zeros(3))
        assert value_of(store, "w", 3).tolist() == [4, 4, 4]

    cluster.run(by_rank(zero, one))


def test_the_order_and_the_grouping_of_init_do_not_matter(three: ThreadedJob) -> None:
    shapes = {"a": (3,), "b": (4, 5), "c": (), "d": (30,)}

    def values(store: DistStore) -> dict[str, torch.Tensor]:
        return {key: torch.full(shape, ord(key) + 0.25 * store.rank) for key, shape in shapes.items()}

    def together(store: DistStore) -> None:
        store.init(list(shapes), list(values(store).values()))

    def backwards(store: DistStore) -> None:
        store.init(list(shapes)[::-1], list(values(store).values())[::-1])

    def one_by_one(store: DistStore) -> None:
        for key in ("c", "a", "d", "b"):
            store.init(key, values(store)[key])

    def work(store: DistStore) -> None:
        (together, backwards, one_by_one)[store.rank](store)
        keys = sorted(shapes, reverse=store.rank == 1)
        outs = [torch.empty(shapes[key]) for key in keys]
        store.pull(keys, outs)
        assert all((out == ord(key)).all() for key, out in zip(keys, outs, strict=True))
        store.pushpull(keys, [torch.full_like(out, float(ord(key))) for key, out in zip(keys, outs, strict=True)], outs)
        assert all((out == 3 * ord(key)).all() for key, out in zip(keys, outs, strict=True))

    three.run(work)


OTHERS = [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1), torch.zeros(20)]


@pytest.mark.parametrize("other", OTHERS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_different_shapes_or_dtypes_raise_on_both(cluster: ThreadedJob, other: torch.Tensor) -> None:
    def zero(store: DistStore) -> str:
        def go_on() -> None:
            if not store.statistics().keys:
                store.init("w", torch.zeros(3))
            value_of(store, "w", 3)

        return refused(go_on)

    def one(store: DistStore) -> str:
        return refused(lambda: store.init("w", other))

    for text in cluster.run(by_rank(zero, one)):
        assert "key 'w' is" in text
        assert "float32[3] on worker 0" in text
        assert "on worker 1" in text


def test_a_worker_that_waits_learns_that_another_contradicts(three: ThreadedJob) -> None:
    """Both of the others call first: rank 0 never does, and need not for them to learn of it."""

    def work(store: DistStore) -> str | None:
        return refused(lambda: store.init("w", torch.zeros(2 + store.rank))) if store.rank else None

    texts = three.run(work)[1:]
    assert all("'w'" in text and "worker 1" in text and "worker 2" in text for text in texts)


@every_worker_of("cluster")
def test_a_second_init_raises_on_every_worker(store: DistStore) -> None:
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(20)])
    for keys in ("a", ["b"], ["c", "b"]):
        with pytest.raises(kv.AlreadyInitialized):
            store.init(keys, [torch.zeros(20)] * len(keys))
    store.init("c", torch.zeros(1))


# ---- rounds and deadlines


def test_a_late_worker_is_named_with_the_keys_that_wait(three: ThreadedJob) -> None:
    rank_zero_has_seen = threading.Event()

    def zero(store: DistStore) -> None:
        push = store.push(["w", "v"], [torch.ones(3), torch.ones(20)])
        with pytest.raises(kv.DeadlineExceeded) as caught:
            push.wait(SOON)
        text = str(caught.value)
        assert text.startswith("push of 'w', 'v' is not done after 0.05 s: ")
        for word in ("server 0 waits for", "worker 1, whose push 1 of", "worker 2, whose push 1 of", "'w'", "'v'"):
            assert word in text
        assert "; workers 1-2 are at " in text, "they are threads of one process"
        assert "worker 0" not in text
        assert caught.value.silent == ()
        out = torch.empty(3)
        pull = store.pull("w", out, wait=False)
        with pytest.raises(TimeoutError, match="pull of 'w' is not done"):
            pull.wait(SOON)
        rank_zero_has_seen.set()
        pull.wait()
        push.wait()
        assert out.tolist() == [3, 3, 3]

    def others(store: DistStore) -> None:
        assert rank_zero_has_seen.wait(LONG)
        store.push(["w", "v"], [torch.ones(3), torch.ones(20)]).wait()

    def work(store: DistStore) -> None:
        store.init(["w", "v"], [torch.zeros(3), torch.zeros(20)])
        (others if store.rank else zero)(store)

    three.run(work)


def test_the_deadline_of_a_store_is_its_option(cluster: ThreadedJob) -> None:
    seen = threading.Event()

    def zero(store: DistStore) -> None:
        store.push("w", torch.ones(1))
        with pytest.raises(kv.DeadlineExceeded, match=r"after 0\.05 s.*worker 1, whose push 1 of 'w' is missing"):
            value_of(store, "w", 1)
        seen.set()

    def one(store: DistStore) -> None:
        assert seen.wait(LONG)
        store.push("w", torch.ones(1))

    def work(store: DistStore) -> None:
        store.init("w", torch.zeros(1))
        store.barrier()
        set_limits(store, SOON if store.rank == 0 else LONG)
        (one if store.rank else zero)(store)
        set_limits(store, LONG)

    cluster.run(work)


def test_a_worker_may_be_rounds_ahead(cluster: ThreadedJob) -> None:
    ahead = threading.Event()

    def work(store: DistStore) -> list[float]:
        store.init("w", torch.zeros(1))
        outs = [torch.empty(1) for _ in range(5)]
        if store.rank == 1:
            assert ahead.wait(LONG)
        tickets = [store.pushpull("w", torch.full((1,), float(n)), out, wait=False) for n, out in enumerate(outs)]
        ahead.set()
        for ticket in tickets:
            ticket.wait()
        assert outs[-1].item() == 8
        return value_of(store, "w", 1).tolist()

    assert cluster.run(work) == [[8], [8]]


# ---- errors of pushes


@every_worker_of("cluster")
def test_an_error_nobody_waited_for_is_raised_by_the_next_call(store: DistStore) -> None:
    store.set_optimizer("sgd")
    store.init("w", torch.zeros(1))
    store.set_learning_rate(1.0 + store.rank)
    ticket = store.push("w", torch.ones(1))
    while not ticket.done():
        pass
    with pytest.raises(kv.Mismatch, match="disagree"):
        store.pull("w", torch.zeros(1))
    assert value_of(store, "w", 1).item() == 0  # and once only


def test_what_a_thread_pushes_while_another_waits_for_all_pushes(cluster: ThreadedJob) -> None:
    counted = threading.Event()

    def zero(store: DistStore) -> None:
        store.init(["a", "b"], [torch.zeros(3)] * 2)
        session = cluster.sessions[store.rank]
        client = session.client
        wait_all = client.wait_all

        def meanwhile(*waits: Any) -> None:
            wait_all(*waits)
            client.wait_all = wait_all  # type: ignore[method-assign]
            store.push("b", torch.ones(3))

        store.push("a", torch.ones(3))
        client.wait_all = meanwhile  # type: ignore[method-assign]
        for flush in session.flushes:  # as at exit
            flush(LONG)
        assert store.statistics().outstanding == 1  # b, which waits for the other worker
        counted.set()
        assert value_of(store, "b", 3).tolist() == [2, 2, 2]  # comes after the answer to the push
        assert store.statistics().outstanding == 0

    def one(store: DistStore) -> None:
        store.init(["a", "b"], [torch.zeros(3)] * 2)
        store.push("a", torch.ones(3))
        assert counted.wait(LONG)
        store.push("b", torch.ones(3))
        store.pull("b", torch.zeros(3))

    cluster.run(by_rank(zero, one))


def test_close_raises_what_nobody_waited_for(cluster: ThreadedJob) -> None:
    def work(session: Session) -> None:
        store = DistStore(session)
        store.set_optimizer("sgd")
        store.init("w", torch.zeros(1))
        store.set_learning_rate(1.0 + store.rank)
        store.push("w", torch.ones(1))
        with pytest.raises(kv.Mismatch, match="disagree"):
            store.close()
        store.close()
        for call in (lambda: store.push("w", torch.ones(1)), store.barrier, lambda: store.init("v", torch.ones(1))):
            with pytest.raises(kv.UsageError, match="closed"):
                call()

    cluster.run_sessions(work)


# ---- several stores, big arrays


def test_two_stores_in_one_process(cluster: ThreadedJob) -> None:
    def work(session: Session) -> None:
        with DistStore(session, "dist_sync") as one, DistStore(session, "dist_async", Rule("async")) as two:
            one.init("w", torch.zeros(2))
            two.set_optimizer("sgd", learning_rate=1.0)
            two.init("w", torch.zeros(30))
            one.push("w", torch.ones(2))
            two.push("w", torch.ones(30)).wait()
            one.barrier()
            assert value_of(one, "w", 2).tolist() == [2, 2]
            assert value_of(two, "w", 30).tolist() == [-2] * 30
            assert (one.rank, two.rank) == (session.rank, session.rank)
            with pytest.raises(kv.UsageError, match="has set no optimizer"):
                _ = one.learning_rate

    cluster.run_sessions(work)


def test_stores_that_differ_between_workers_are_refused(cluster: ThreadedJob) -> None:
    first = threading.Event()

    def work(session: Session) -> None:
        if session.rank == 0:
            store = DistStore(session, "dist_sync", Rule("sync"))
            first.set()
        else:
            assert first.wait(LONG)
            with pytest.raises(
                kv.Mismatch, match=r"of worker 1 is a 'dist_async' store of .* of worker 0 is a 'dist_sync'"
            ):
                DistStore(session, "dist_async", Rule("async"))
            store = DistStore(session, "dist_sync", Rule("sync"))  # what was refused was not made
        store.init("w", torch.zeros(2))
        store.pushpull("w", out := torch.ones(2))
        assert out.tolist() == [2, 2]
        store.close()

    cluster.run_sessions(work)


def test_big_arrays_are_cut_over_all_servers(three: ThreadedJob) -> None:
    def work(store: DistStore) -> kv.Statistics:
        value = torch.arange(900.0).view(30, 30)
        store.init(["big", "small"], [value, torch.zeros(BOUND - 1)])
        outs = [torch.zeros(30, 30).t(), torch.zeros(30, 60)[:, ::2], torch.zeros(30, 30)]
        store.pull("big", outs)
        assert all(torch.equal(out, value) for out in outs)
        store.pushpull("big", value.t(), outs[0])
        assert torch.equal(outs[0], 3 * value.t())
        return store.statistics()

    for statistics in three.run(work):
        held = sorted(statistics.server_bytes)
        assert held == [4 * 256, 4 * (900 - 3 * 256 + BOUND - 1), 4 * 512]


@every_worker_of("cluster")
def test_what_is_outside_a_strided_out_stays(store: DistStore) -> None:
    store.init("w", torch.ones(4, 5))
    frame = torch.zeros(6, 10)
    store.pull("w", frame[1:5, ::2])
    assert frame.sum() == 20
    assert frame[1:5, ::2].sum() == 20


def test_a_barrier_that_was_late_is_the_same_barrier_when_called_again(cluster: ThreadedJob) -> None:
    late = threading.Event()

    def zero(store: DistStore) -> None:
        set_limits(store, SOON)
        with pytest.raises(kv.DeadlineExceeded, match="waits at the barrier for worker 1"):
            store.barrier()
        late.set()

        def passed() -> bool:
            with contextlib.suppress(kv.DeadlineExceeded):  # the barrier keeps the limits that it began with
                store.barrier()
                return True
            return False

        until(passed, "the other worker")

    def one(store: DistStore) -> None:
        assert late.wait(LONG)
        store.barrier()

    def work(store: DistStore) -> None:
        (one if store.rank else zero)(store)
        store.barrier()

    cluster.run(work)


@every_worker_of("cluster")
def test_the_worker_that_has_pushed_most_joins_last_and_rounds_go_on_without_the_other(store: DistStore) -> None:
    store.init("w", torch.zeros(1))
    out = torch.zeros(1)
    for _ in range(1 + store.rank):
        store.pushpull("w", torch.ones(1), out)
    store.begin_join()
    assert store.join() == 1
    store.pull("w", out)
    assert out.item() == 1, "the second round is worker 1's alone"
    assert store.num_dead_nodes() == 0


def test_what_is_reported_goes_with_the_next_beat_and_nothing_is_traced_without_a_trace(cluster: ThreadedJob) -> None:
    def work(session: Session) -> None:
        store = DistStore(session)
        store.report({"loss": 0.5}, input_s=0.25)
        report = session.activity.report()
        assert (report.values, report.input_us) == ([["loss", 0.5]], 250_000)
        with store.traced("forward"):
            store.barrier()
        assert store.barriers == 1
        store.close()

    cluster.run_sessions(work)


ROWS, WIDTH = 60, 5
FIXED = Table(shape=(ROWS, WIDTH), init="uniform", scale=0.5, seed=3)
GROWING = Table(dim=WIDTH, init="normal", scale=0.1, seed=4)
FAR = torch.tensor([2**61, -7, 12, 2**40, 99, -(2**62)])


def gradient(table: str, step: int, rank: int) -> RowSparse:
    """Rows with duplicates, in no order; what each worker pushes in a step."""
    draws = np.random.default_rng([step, rank, table == "grown"])
    ids = draws.integers(0, ROWS if table == "fixed" else len(FAR), 11)
    rows = torch.from_numpy(draws.normal(size=(11, WIDTH)).astype(np.float32))
    return RowSparse(ids if table == "fixed" else FAR[ids], rows)


def trained(store: Any, steps: int = 5) -> list[torch.Tensor]:
    """Train two tables and an array together; return them."""
    store.set_optimizer("adam", learning_rate=0.1)
    store.init(["fixed", "a", "grown"], [FIXED, torch.ones(3), GROWING])
    outs = [torch.zeros(ROWS, WIDTH), torch.zeros(3), torch.zeros(len(FAR), WIDTH)]
    for step in range(steps):
        grads = [
            gradient("fixed", step, store.rank),
            torch.full((3,), 1.0 + store.rank),
            gradient("grown", step, store.rank),
        ]
        if step == 2:
            grads[0] = RowSparse.zeros((ROWS, WIDTH))
        store.pushpull(["fixed", "a", "grown"], grads, outs, row_ids=[range(ROWS), None, FAR])
    return outs


def test_one_worker_makes_the_bits_of_a_store_in_one_process() -> None:
    with ThreadedJob(1, 2) as job:
        (found,) = job.run(trained)
    for one, other in zip(found, trained(LocalStore()), strict=True):
        assert torch.equal(one, other)
