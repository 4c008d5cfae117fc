"""train_dlrm.py beside torch_dlrm.py: the same bits in one process, and as a job with any number of servers."""

from __future__ import annotations

import re
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch_dlrm
import train_dlrm
from clicks import options
from clicks.auc import Quality
from clicks.stream import Clicks
from scripts import launch, lines_of

import kvstore as kv
from kvstore.rows.admission import write_beginnings
from workers import Reducer

SMALL = ("--fields", "4", "--largest", "2000", "--dim", "4", "--hidden", "8", "--batch-size", "64", "--disp-steps", "4")


def arguments(*words: str, steps: int = 8) -> Namespace:
    return options.parse([*SMALL, "--steps", str(steps), "--test-steps", "2", "--kv-store", "local", *words])


class Ordered(Clicks):
    """Clicks whose ids are in the order of their rows, since torch sums the gradients of a row in the order of a sort.

    That order depends on the order of the rows of a batch, so with hashed ids the last bits differ.
    """

    def ids(self, rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.uint64)


def trained(args: Namespace, clicks: Clicks) -> Quality:
    """What train_dlrm.py reaches in this process."""
    with kv.create("local") as tables, kv.create("local") as store, Reducer("local") as reducer:
        return train_dlrm.train(args, clicks, tables, store, reducer)


def by_torch(args: Namespace, clicks: Clicks) -> Quality:
    """What torch_dlrm.py reaches with embeddings that begin as the rows of the tables do."""
    counts = clicks.rows(args.steps + args.test_steps)
    bags = torch_dlrm.embeddings(counts, args.dim)
    table = kv.Table(dim=args.dim, init="normal", scale=options.SCALE, seed=args.seed)
    for field, (bag, count) in enumerate(zip(bags, counts, strict=True)):
        rows = np.broadcast_to(np.arange(count)[:, None], (count, args.fields))
        write_beginnings(table, clicks.ids(rows)[:, field].view(np.int64), bag.weight.detach().numpy())
    return torch_dlrm.train(args, clicks, bags)


@pytest.mark.parametrize("words", [(), ("--no-lookahead",)])
def test_one_process_has_torchs_bits(words: tuple[str, ...]) -> None:
    args = arguments(*words)
    clicks = Ordered(args.seed, args.fields, largest=args.largest, period=8)
    assert trained(args, clicks) == by_torch(args, clicks)


def test_with_ids_of_64_bits_it_is_as_good_as_torch() -> None:
    args = arguments("--period", "8")
    clicks = torch_dlrm.stream(args)
    assert trained(args, clicks) == pytest.approx(by_torch(args, clicks), rel=1e-4)


@pytest.mark.release
@pytest.mark.timeout(180)
def test_two_workers_and_two_servers() -> None:
    small = [*SMALL, "--steps", "8", "--test-steps", "2", "--row-optimizer", "rowwiseadagrad", "--codec", "int8"]
    process = launch(f"train_dlrm.py {' '.join(small)}", workers=2, servers=2)
    assert process.returncode == 0, process.stdout
    assert lines_of(process, 1) == []
    assert re.match(r"AUC 0\.\d{4} of 128 samples", lines_of(process, 0)[-1])


def test_alone_it_says_how_good_it_is(monkeypatch, capsys, caplog) -> None:
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", *SMALL, "--steps", "4", "--unseen", "2", "--capacity", "99"])
    with caplog.at_level("INFO"):
        train_dlrm.main()
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"Step\[4\] AUC=0\.\d{4} Samples/s=\d+", lines[0])
    evicted = re.fullmatch(r"4 tables: (\d+) rows in .*B; (\d+) were evicted", lines[-2])
    assert evicted is not None
    assert int(evicted[1]) <= 4 * 99
    assert int(evicted[2]) > 0
    assert re.fullmatch(r"AUC 0\.\d{4} of 1280 samples .*, where 0\.\d{4} is the best possible; .*", lines[-1])


def test_what_the_user_can_mend_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", *SMALL, "--row-optimizer", "lamb"])
    with pytest.raises(SystemExit, match=r"^train_dlrm.py: error: lamb cannot update key 'field0', a table"):
        train_dlrm.main()
