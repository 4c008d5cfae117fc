"""Tables of rows in one process: lookups, memory while ids come and go, bytes of a row, and reading a saved table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Curve, Result, Row
from benchmarks.session import Session
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowUpdater
from kvstore.rows.index import SlotIndex
from kvstore.rows.open_table import OpenTable, open_table
from kvstore.rows.row_table import RowTable
from kvstore.rows.saving import FrozenReading, OpenSaves, save_table
from kvstore.rows.table_files import FrozenState
from kvstore.table import Capacity, Table

KNOWN = 10_000_000  # ids of the index that is looked up in
BATCHES = (8_160, 100_000)
TURNS = 7
LOOKUPS, SERVED, INDEX_BYTES = "15 M/s", "1 M/s", 50.0

PUSHES = 1_000
PUSHED = 100_000  # ids of a push; nearly all are new
CAPACITY = 1_000_000
DIM = 8
SAMPLES = 20
MAY_GROW = 1.05  # what lies between two pushes varies by a few buffers

SAVED, WIDTH = 1_000_000, 64


def tables(session: Session) -> None:
    """Measure with one thread, which is a server's share of a small machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _lookups(session)
        _saved(session)
        _flat(session)
    finally:
        torch.set_num_threads(threads)


def _lookups(session: Session) -> None:
    rng = np.random.default_rng(0)
    index = SlotIndex()
    ids = rng.permutation(KNOWN).astype(np.int64) * 0x9E3779B97F4A7C1  # any int64
    with session.console.status("tables: an index of 10 million ids"):
        for start in range(0, KNOWN, BATCHES[1]):
            index.insert(ids[start : start + BATCHES[1]])
        measured = [Row(LOOKUPS, [1e3 / 15])]
        for count in BATCHES:
            wanted = [rng.choice(ids, count) for _ in range(max(1, 500_000 // count))]
            samples = _timed(lambda wanted=wanted: [index.find(each) for each in wanted])
            measured.append(_rated(f"{count:,} ids at a time", samples, count * len(wanted)))
    session.add(Result("table-lookups", "Lookups of ids among 10 million", measured, (LOOKUPS,), "ns an id"))
    row = Row("index of 10 million ids", [index.nbytes / KNOWN])
    session.add(Result("table-index", "Memory for an id", [row, Row("allowed", [INDEX_BYTES])], ("allowed",), "bytes"))


def _saved(session: Session) -> None:
    """Measure updates of a table, its memory, its save, and reading that."""
    rng = np.random.default_rng(0)
    table = RowTable(Table(dim=WIDTH, init="uniform", scale=0.1))
    updater = RowUpdater(describe("adam", {"learning_rate": 0.001}), "t", "float32", WIDTH, grows=True)
    table.use(updater)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, SAVED))
    with session.console.status("tables: a million rows"), tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(ids), BATCHES[1]):
            part = ids[start : start + BATCHES[1]]
            table.update(part, np.ones((len(part), WIDTH), np.float32), updater)
        known = np.sort(rng.permutation(ids)[: BATCHES[0]])
        out, grads = np.empty((len(known), WIDTH), np.float32), np.ones((len(known), WIDTH), np.float32)
        work = {
            "pull": _timed(lambda: table.pull(known, out)),
            "update, adam": _timed(lambda: table.update(known, grads, updater)),
        }
        title = f"{BATCHES[0]:,} of a million rows of {WIDTH} floats in a table that grows"
        session.add(Result("table-rows", title, [Row(name, samples) for name, samples in work.items()]))
        path = Path(folder)
        began = time.perf_counter()
        save_table(path, "t", table.table, 1, None, True, lambda _: _frozen(table), True, OpenSaves())
        took = time.perf_counter() - began
        served = _served(open_table(path), ids, rng)
        nbytes = sum(file.stat().st_size for file in path.glob("*/*"))
    session.add(Result("table-served", "open_table(...).lookup of random rows", served, (SERVED,), "ns a row"))
    held = table.statistics()["bytes"] / len(table)
    sizes = [
        Row("in memory", [held], f"weights {4 * WIDTH}, two states {8 * WIDTH}"),
        Row("in files", [nbytes / len(table)], f"saved at {1e-6 * nbytes / took:,.0f} MB/s"),
    ]
    session.add(Result("table-bytes", f"Bytes of a row of {WIDTH} floats with adam's states", sizes, unit="bytes"))


def _frozen(table: RowTable) -> tuple[FrozenReading, FrozenState]:
    frozen = table.freeze()
    return FrozenReading([frozen]), FrozenState([frozen.at], [frozen.steps], table.parts, "adam")


def _served(opened: OpenTable, ids: np.ndarray, rng: np.random.Generator) -> list[Row]:  # type: ignore[type-arg]
    measured = [Row(SERVED, [1e3])]
    for count in BATCHES:
        wanted = rng.choice(ids, count)
        measured.append(_rated(f"{count:,} rows at a time", _timed(lambda wanted=wanted: opened.lookup(wanted)), count))
    return measured


def _flat(session: Session) -> None:
    """Push ids that are nearly all new through a table of limited capacity, and watch this process's memory."""
    pushes = session.options.rounds or PUSHES
    table = RowTable(Table(dim=DIM, init="normal", scale=0.01, evict=Capacity(CAPACITY)))
    updater = RowUpdater(describe("adagrad", {"learning_rate": 0.05}), "t", "float32", DIM, grows=True)
    table.use(updater)
    rng, held, took = np.random.default_rng(0), [], 0.0
    with session.console.status(f"tables: {pushes * PUSHED / 1e6:.0f} million ids through a table of a million rows"):
        for number in range(pushes):
            ids = np.unique(rng.integers(-(2**63), 2**63 - 1, PUSHED))
            grads = np.ones((len(ids), DIM), np.float32)
            began = time.perf_counter()
            table.update(ids, grads, updater)
            took += time.perf_counter() - began
            if not number % max(1, pushes // SAMPLES) or number == pushes - 1:
                held.append((1e-6 * (number + 1) * PUSHED, resident_mb()))
    title = "This process's memory while ids pass through a table of at most a million rows"
    session.add_curve(Curve("table-flat", title, "million ids", "MB", {"resident": held}, logarithmic=False))
    half = len(held) // 2
    early, late = (max(megabytes for _, megabytes in part) for part in (held[:half], held[half:]))
    note = f"{1e-6 * pushes * PUSHED / took:.2f} million ids/s"
    peaks = [Row("second half", [late], note), Row("allowed", [MAY_GROW * early])]
    session.add(Result("table-growth", "The most memory in the second half of the pushes", peaks, ("allowed",), "MB"))


def resident_mb() -> float:
    """Return this process's memory in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024e-6


def _rated(name: str, samples: list[float], count: int) -> Row:
    each = [1e6 * sample / count for sample in samples]
    return Row(name, each, f"{1e3 / min(each):.1f} M/s at best")


def _timed(action: Callable[[], object]) -> list[float]:
    """Return the time of each turn in ms, after one that is not counted."""
    action()
    samples = []
    for _ in range(TURNS):
        began = time.perf_counter()
        action()
        samples.append(1e3 * (time.perf_counter() - began))
    return samples
