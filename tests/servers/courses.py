"""Courses of a store by seeds: what was saved, loaded, read and taken over is what was there. In one process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from played_shards import PlayedShards

import kvstore as kv
from kvstore.optim.updater import MASTER
from kvstore.rows.halves import array_dtype, widened
from kvstore.rows.stripe import STATE
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.table import TableSpec
from kvstore.values import as_dtype

STEPS = 8
IDS = np.arange(14)
KINDS: dict[str, Rule | None] = {
    "local": None,
    "device": None,
    "dist_sync": Rule(),
    "dist_async": Rule("async"),
    "dist_ssp": Rule("async", staleness=2),
    "quorum": Rule("sync", quorum=1),
}
TABLES = [
    kv.Table(dim=2, init="normal", seed=3),
    kv.Table(shape=(len(IDS), 2), init="uniform"),
    kv.Table(dim=2, evict=kv.Capacity(6)),
    kv.Table(dim=2, evict=kv.Unseen(3)),
    kv.Table(dim=2, evict=kv.Capacity(6, by="count")),
    kv.Table(dim=2, init="uniform", evict=kv.Unseen(3), dtype="bfloat16"),
    kv.Table(shape=(len(IDS), 2), init="normal", seed=3, dtype="float16"),
]
# Several have states of the same names, and some keep other states by the same rule. All states begin with zeros, but
# for the float32 copies of rows of half precision.
OPTIMIZERS: list[tuple[str, dict[str, float]]] = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {}),
    ("nag", {"momentum": 0.9}),
    ("adam", {}),
    ("adamw", {}),
    ("adagrad", {}),
]


class Row(NamedTuple):
    values: bytes
    parts: dict[str, bytes]


class Content(NamedTuple):
    rows: dict[int, Row]
    rule: str | None
    steps: tuple[int, ...]


class Save(NamedTuple):
    folder: Path
    version: int
    content: Content


def content_of(directory: Path) -> Content:
    opened = kv.open_table(directory, verify=True)
    rows = {
        int(number): Row(row.tobytes(), {name: part[place].tobytes() for name, part in page.parts.items()})
        for page in opened.pages()
        for place, (number, row) in enumerate(zip(page.ids, page.rows, strict=True))
    }
    return Content(rows, opened.manifest.rule, opened.manifest.steps)


class Course:
    """One course.

    Args:
        kind: of the store.
        seed: decides all.
        directory: for files.

    Attributes:
        done: what has been done.
    """

    def __init__(self, kind: str, seed: int, directory: Path) -> None:
        self.done: list[str] = []
        self._kind, self._rule = kind, KINDS[kind]
        self._dice = random.Random(f"{kind} {seed}")
        self._numbers = np.random.default_rng(seed)
        self._directory = directory
        self._table = self._dice.choice(TABLES)
        self._optimizer = self._dice.choice(OPTIMIZERS)
        self._saves: list[Save] = []
        self._checkpoint: tuple[Content, tuple[str, dict[str, float]]] | None = None
        self._scratch = 0
        self._job: PlayedShards | None = None
        self._begin(resume=False)

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _begin(self, resume: bool) -> None:
        self.close()
        if self._rule is None:
            self.store: Any = kv.create(self._kind)
        else:
            self._job = PlayedShards(2, self._rule, self._directory / "checkpoints", resume)
            self.store = self._job.store
        self._set(self._optimizer)
        self.store.init("t", self._table)
        self.store.init("w", torch.zeros(3))
        if self._job is not None:
            self._rows = self._job.held("t", TableSpec.of(self._table))
            self._value = self._job.held("w", Spec((3,), "float32"))
        self._seen = [self._pulled()]  # the rows after the last update, and before it, and so on: what readers may get
        self._values = [self._weight()]

    def _set(self, optimizer: tuple[str, dict[str, float]]) -> None:
        self._optimizer = optimizer
        self.store.set_optimizer(optimizer[0], learning_rate=0.1, **optimizer[1])

    # ---- what there is

    def _pulled(self) -> Any:
        return self.store.row_sparse_pull("t", row_ids=IDS).float().numpy().copy()

    def _weight(self) -> Any:
        out = torch.empty(3)
        self.store.pull("w", out)
        return out.numpy().copy()

    def _now(self, state: bool = True) -> Content:
        self._scratch += 1
        path = self._directory / f"scratch-{self._scratch}"
        self.store.save_table("t", path, state=state)
        return content_of(path)

    # ---- what is done

    def run(self) -> None:
        local: dict[Callable[[], None], int] = {
            self._push: 6,
            self._save: 2,
            self._save_changes: 5,
            self._load: 3,
            self._restart: 1,
            self._choose_optimizer: 2,
            self._put: 2,
            self._evict: 2,
        }
        servers: dict[Callable[[], None], int] = {
            self._take_checkpoint: 2,
            self._resume: 1,
            self._take_over: 2,
            self._pair: 1,
        }
        steps = local if self._job is None else local | servers
        self._push()
        for _ in range(STEPS):
            step = self._dice.choices(list(steps), list(steps.values()))[0]
            self.done.append(step.__name__.lstrip("_"))
            step()
            self._look()

    def _push(self) -> None:
        for _ in range(self._dice.randint(1, 3)):
            ids = np.sort(self._numbers.choice(IDS, self._dice.randint(0, 5), replace=False))
            grads = torch.from_numpy(self._numbers.standard_normal((len(ids), 2)))
            self.store.push("t", kv.RowSparse(ids, grads.to(as_dtype(self._table.dtype))), wait=True)
            self._seen.insert(0, self._pulled())
            self.store.push("w", torch.ones(3), wait=True)
            self._values.insert(0, self._weight())

    def _save(self, since: int | None = None) -> None:
        state = self._dice.random() < 0.8
        path = self._directory / "table"
        version = self.store.save_table("t", path, state=state, since=since).wait()
        content, now = content_of(path), self._now(state)
        assert content == now, "what was saved is not what there is"
        assert np.array_equal(kv.open_table(path).lookup(IDS).float().numpy(), self._pulled())
        folder = max(path.iterdir())
        self._saves.append(Save(folder, version, now))

    def _save_changes(self) -> None:
        if not self._saves:
            return self._save()
        save = self._saves[-1] if self._dice.random() < 0.7 else self._dice.choice(self._saves)
        return self._save(save.version)

    def _load(self) -> None:
        if not self._saves:
            return
        save, before = self._dice.choice(self._saves), self._now()
        if self._loads(save.folder):
            self._require_loaded(save.content, before)
        else:
            assert self._now() == before

    def _loads(self, folder: Path) -> bool:
        """Load a save; return whether the optimizer keeps the states that it has."""
        try:
            self.store.load_table("t", folder)
        except kv.UsageError as exc:
            if "there is no place for" in str(exc):
                return False
            raise
        return True

    def _require_loaded(self, saved: Content, before: Content | None) -> None:
        now = self._now()
        same = saved.rule is not None and saved.rule == now.rule
        assert set(now.steps) == {max(saved.steps) if same else 0}
        for number, row in saved.rows.items():
            got = now.rows[number]
            values = widened(np.frombuffer(row.values, array_dtype(self._table.dtype)))
            states = {STATE + MASTER: values.tobytes()} | (row.parts if same else {})
            for name, part in got.parts.items():
                if name.startswith(STATE):
                    assert part == states.get(name, bytes(len(part))), name
            assert got.values == row.values
        if before is not None and not any(isinstance(rule, kv.Unseen) for rule in self._table.evict):
            assert {number: row for number, row in now.rows.items() if number not in saved.rows} == {
                number: row for number, row in before.rows.items() if number not in saved.rows
            }

    def _restart(self) -> None:
        self._begin(resume=False)
        self._checkpoint = None
        if self._saves and self._loads(self._saves[-1].folder):
            self._require_loaded(self._saves[-1].content, None)

    def _choose_optimizer(self) -> None:
        self._set(self._dice.choice(OPTIMIZERS))

    def _put(self) -> None:
        ids = np.sort(self._numbers.choice(IDS, self._dice.randint(1, 6), replace=False))
        rows = torch.full((len(ids), 2), self._dice.random(), dtype=as_dtype(self._table.dtype))
        self.store.put_rows("t", kv.RowSparse(ids, rows))

    def _evict(self) -> None:
        self.store.evict("t")

    def _take_checkpoint(self) -> None:
        assert self.store.save_checkpoint(wait=True)
        self._checkpoint = self._now(), self._optimizer

    def _resume(self) -> None:
        if self._checkpoint is None:
            return
        content, self._optimizer = self._checkpoint
        self._begin(resume=True)
        assert self._now() == content

    def _take_over(self) -> None:
        assert self._job is not None
        before = self._now()
        self._dice.choice(self._job.servers).take_over()
        assert self._now() == before

    def _pair(self) -> None:
        assert self._job is not None
        self._dice.choice(self._job.servers).pair()

    # ---- what readers see

    def _look(self) -> None:
        rows = self._pulled()
        changed = (rows != self._seen[0]).any(axis=1)  # by no update: none that is older may be read
        for seen in self._seen:
            seen[changed] = rows[changed]
        if self._job is None:
            return
        slack = self._dice.choice([0, 1, 3])
        got = self._job.read_rows(self._rows, IDS, slack).float().numpy()
        recent = np.stack(self._seen[: slack + 1])
        assert (got == recent).all(axis=2).any(axis=0).all(), f"rows older than {slack} updates"
        value = self._job.read_value(self._value, slack).numpy()
        assert any(np.array_equal(value, each) for each in self._values[: slack + 1]), f"older than {slack} updates"


@contextmanager
def course(kind: str, seed: int) -> Iterator[Course]:
    """Give a course, and say of an error which one it was."""
    with tempfile.TemporaryDirectory(prefix="courses-") as directory:
        made = Course(kind, seed, Path(directory))
        try:
            yield made
        except BaseException as exc:
            exc.args = (f"{kind}, seed {seed}, after {', '.join(made.done)}: {exc}",)
            raise
        finally:
            made.close()
