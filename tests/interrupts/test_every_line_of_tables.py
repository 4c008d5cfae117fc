"""An exception at every line of the calls that are about tables; see ``test_every_line.py``."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from every_line import MARKS, TABLE_STEP, same, sweep
from interrupting import Interrupt
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import AlreadyInitialized
from kvstore.member.session import Session
from kvstore.rule import Rule

pytestmark = MARKS

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
