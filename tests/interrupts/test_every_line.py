"""An exception at every line of every call of a store: the call has not been made, or it has been made whole.

One worker and two servers, in threads, over real links. After each exception the store says whether the push was made;
weights are integers, so that they tell exactly what has been applied. ``TimeoutError`` is what handlers of alarms
raise; to whoever is at a socket it looks like an error of the system's.
"""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from every_line import LIMIT_S, MARKS, TABLE_STEP, same, sweep
from interrupting import Interrupt
from threaded import ThreadedJob
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.member.session import Session
from kvstore.rule import Rule

pytestmark = MARKS

SIZES = {"cut": 40_000, "whole": 300}  # elements: over the bound, and so large that memory is shared; and under it
KEYS = list(SIZES)


class Watched:
    """A store of SGD's, and what its weights must be."""

    def __init__(self, session: Session, mode: str) -> None:
        self.store = DistStore(session, f"dist_{mode}", Rule(mode))
        self.store.set_optimizer("sgd", learning_rate=1.0)
        self.store.init(KEYS, [torch.zeros(size) for size in SIZES.values()])
        self.sum = 0
        self.pushes = 0

    def values(self, value: float) -> list[torch.Tensor]:
        return [torch.full((size,), float(value)) for size in SIZES.values()]

    def check(self, value: int) -> bool:
        """After a call that may have pushed ``value``: return whether it did, and hold the weights to it."""
        pushes = self.store.statistics().pushes
        made = pushes - self.pushes
        assert made in (0, len(KEYS))
        self.pushes = pushes
        self.sum -= value if made else 0
        outs = self.values(-1)
        self.store.barrier()
        self.store.pull(KEYS, outs)
        assert all(same(out, self.sum) for out in outs), (self.sum, [out.unique() for out in outs])
        assert gc.isenabled()
        assert torch.is_grad_enabled()
        return bool(made)


@pytest.mark.parametrize(
    ("verb", "mode", "error"),
    [
        ("push", "sync", Interrupt),
        ("push", "async", Interrupt),
        ("pull", "sync", Interrupt),
        ("pushpull", "sync", Interrupt),
        ("push", "async", TimeoutError),
        ("pushpull", "sync", TimeoutError),
    ],
)
def test_pushes_and_pulls(job: ThreadedJob, verb: str, mode: str, error: type[BaseException]) -> None:
    def work(session: Session) -> None:
        watched = Watched(session, mode)
        values, outs = watched.values(0), watched.values(0)
        made = set()

        def call(line: int) -> None:
            for value in values:
                value.fill_(line % 7 + 1)
            if verb == "push":
                watched.store.push(KEYS, values)
            elif verb == "pull":
                watched.store.pull(KEYS, outs)
            else:
                watched.store.pushpull(KEYS, values, outs)

        def after(line: int) -> None:
            for value in values:
                value.fill_(1e9)  # nobody reads them any more
            made.add(watched.check(line % 7 + 1))

        assert sweep(job, call, after, error) > 300
        assert made == ({False} if verb == "pull" else {False, True})
        watched.store.close()

    job.run_sessions(work)


@pytest.mark.parametrize("numpy", [True, False], ids=["numpy", "torch"])
def test_many_small_arrays_at_once(job: ThreadedJob, numpy: bool) -> None:
    def arrays(value: float) -> list[Any]:
        made = [torch.full((3,), float(value)) for _ in range(40)]
        return [tensor.numpy() for tensor in made] if numpy else made

    def work(session: Session) -> None:
        store, keys = DistStore(session, "dist_sync"), list(range(40))
        store.init(keys, arrays(0))
        values, outs, pulled = arrays(0), arrays(0), arrays(0)
        pushes = expected = 0

        def call(line: int) -> None:
            for value in values:
                value[:] = line % 7 + 1
            store.pushpull(keys, values, outs)

        def after(line: int) -> None:
            nonlocal pushes, expected
            for value in values:
                value[:] = 1e9  # nobody reads them any more
            if store.statistics().pushes > pushes:
                pushes, expected = pushes + 40, line % 7 + 1
            assert store.statistics().pushes == pushes
            store.pull(keys, pulled)
            assert all((out == expected).all() for out in pulled)
            for value in outs:
                value[:] = -1
            store.barrier()
            assert all((out == -1).all() for out in outs)

        assert sweep(job, call, after, Interrupt) > 300
        store.close()

    job.run_sessions(work)


def test_init(job: ThreadedJob) -> None:
    def work(session: Session) -> None:
        watched = Watched(session, "async")
        store = watched.store

        def call(line: int) -> None:
            store.init([f"cut {line}", f"whole {line}"], watched.values(line))

        def after(line: int) -> None:
            with suppress(AlreadyInitialized):
                call(line)
            keys, outs = [f"cut {line}", f"whole {line}"], watched.values(-1)
            store.pull(keys, outs)
            assert all(same(out, line) for out in outs)
            store.pushpull(keys, watched.values(1), outs)
            assert all(same(out, line - 1) for out in outs)
            watched.pushes += 2
            watched.check(0)

        assert sweep(job, call, after, Interrupt) > 300
        store.close()

    job.run_sessions(work)


def test_barrier_and_join(job: ThreadedJob) -> None:
    def work(session: Session) -> None:
        watched = Watched(session, "sync")
        for call in (watched.store.barrier, watched.store.join):

            def after(_: int, call: Callable[[], Any] = call) -> None:
                call()
                watched.store.push(KEYS, watched.values(3))
                assert watched.check(3)

            assert sweep(job, lambda _, call=call: call(), after, Interrupt) > 100
        watched.store.close()

    job.run_sessions(work)


def test_making_and_closing_stores(job: ThreadedJob) -> None:
    """More of them than there may be at once."""

    def work(session: Session) -> None:
        def make(_: int) -> None:
            DistStore(session, "dist_async", Rule("async"))

        def use(_: int) -> None:
            Watched(session, "async").store.close()

        assert sweep(job, make, use, Interrupt) > 100
        watched = [Watched(session, "sync")]

        def close(_: int) -> None:
            watched[0].store.close()

        def again(_: int) -> None:
            watched[0].store.close()
            with pytest.raises(UsageError, match="closed"):
                watched[0].store.pull(KEYS, watched[0].values(0))
            watched[0] = Watched(session, "sync")
            watched[0].store.push(KEYS, watched[0].values(2))
            assert watched[0].check(2)

        assert sweep(job, close, again, Interrupt) > 100
        watched[0].store.close()

    job.run_sessions(work)


@pytest.mark.parametrize(
    "compression",
    [{"type": "2bit", "threshold": 0.5}, {"type": "topk", "ratio": 0.01}, {"type": "powersgd", "rank": 1}],
    ids=lambda compression: compression["type"],
)
def test_residuals_are_as_if_nothing_had_happened(tmp_path: Path, compression: dict[str, Any]) -> None:
    """The pushes that were made, made again in peace, give the same bits."""
    tmp_path.chmod(0o700)
    shape = (60, 50)
    generator = torch.Generator().manual_seed(7)
    gradients = [torch.randn(shape, generator=generator) for _ in range(20)]

    def made_by(session: Session) -> DistStore:
        store = DistStore(session, "dist_sync")
        store.set_gradient_compression(compression)
        store.set_optimizer("sgd", learning_rate=0.25)
        store.init("w", torch.zeros(shape))
        return store

    def value(store: DistStore) -> torch.Tensor:
        out = torch.empty(shape)
        store.barrier()
        store.pull("w", out)
        return out

    def work(session: Session) -> None:
        store, made = made_by(session), []

        def call(line: int) -> None:
            store.push("w", gradients[line % 20])

        def after(line: int) -> None:
            pushes = store.statistics().pushes
            if pushes > len(made):
                made.append(gradients[line % 20])
            assert pushes == len(made)
            if line % 50 == 0:
                value(store)

        assert sweep(job, call, after, Interrupt) > 300
        result = value(store)
        store.close()
        calm = made_by(session)
        for gradient in made:
            calm.push("w", gradient)
        assert torch.equal(value(calm), result)
        calm.close()

    with ThreadedJob(1, 2, directory=tmp_path, kind="unix", bigarray_bound=1000, limit_s=LIMIT_S) as job:
        job.run_sessions(work)


def test_a_barrier_with_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    comes: queue.Queue[bool] = queue.Queue()  # for each barrier of worker 0's: whether worker 1 comes, or goes

    def one(store: DistStore) -> None:
        while comes.get(timeout=LONG):
            store.barrier()

    def zero(store: DistStore) -> None:
        passed = 0

        def after(_: int) -> None:
            nonlocal passed
            if store.barriers > passed:
                comes.put(True)
            store.barrier()  # the same, or the next
            passed = store.barriers
            comes.put(True)

        comes.put(True)
        assert sweep(job, lambda _: store.barrier(), after, Interrupt) > 100
        store.barrier()
        comes.put(False)

    with ThreadedJob(2, 1, directory=tmp_path, kind="unix", limit_s=LIMIT_S) as job:
        job.run(lambda store: (one if store.rank else zero)(store))


# ---- tables


TABLES = ["fixed", "grown"]
IDS = [torch.arange(0, 6000, 7), torch.arange(6000).mul(2**40 + 1)]  # so many rows that memory is shared
WIDTH = 8


@pytest.mark.parametrize(("mode", "error"), [("sync", Interrupt), ("async", TimeoutError)])
def test_rows_of_tables(job: ThreadedJob, mode: str, error: type[BaseException]) -> None:
    """An array and two tables in one call, whose rows come back in the same messages."""

    def work(session: Session) -> None:
        store = DistStore(session, f"dist_{mode}", Rule(mode))
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["a", *TABLES], [torch.zeros(3), kv.Table(shape=(6000, WIDTH)), kv.Table(dim=WIDTH)])
        rows = [torch.zeros(len(ids), WIDTH) for ids in IDS]
        outs = [torch.zeros(3), *map(torch.zeros_like, rows)]
        pushes = total = 0

        def call(line: int) -> None:
            for each in rows:
                each.fill_(line % 7 + 1)
            grads = [torch.full((3,), line % 7 + 1.0), *map(kv.RowSparse, IDS, rows)]
            store.pushpull(["a", *TABLES], grads, outs, row_ids=[None, *IDS])

        def after(line: int) -> None:
            nonlocal pushes, total
            for each in rows:
                each.fill_(1e9)  # nobody reads them any more
            if store.statistics().pushes > pushes:
                pushes, total = pushes + 3, total - line % 7 - 1
            assert store.statistics().pushes == pushes
            store.barrier()
            for out in outs:
                out.fill_(-1)
            assert all(same(found, total) for found in store.row_sparse_pull(TABLES, row_ids=IDS))
            assert all(same(out, -1) for out in outs), "an answer has been taken for a call that was given up"
            assert gc.isenabled()

        assert sweep(job, call, after, error, TABLE_STEP) > 300
        store.close()

    job.run_sessions(work)


def test_init_of_tables(job: ThreadedJob) -> None:
    def work(session: Session) -> None:
        store = DistStore(session, "dist_sync")

        def call(line: int) -> None:
            first = kv.RowSparse([1, 8], torch.full((2, 3), line + 1.0), (9, 3))
            store.init(
                [f"rows {line}", f"constant {line}"], [first, kv.Table(dim=3, init="constant", scale=line + 1.0)]
            )

        def after(line: int) -> None:
            with suppress(AlreadyInitialized):
                call(line)
            found = store.row_sparse_pull([f"rows {line}", f"constant {line}"], row_ids=[[1, 8], [2**50]])
            assert all(same(rows, line + 1) for rows in found)

        assert sweep(job, call, after, Interrupt, TABLE_STEP) > 300
        store.close()

    job.run_sessions(work)
