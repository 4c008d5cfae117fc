"""Checkpoints of whole jobs with tables: one that goes on has the rows of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from threaded import ThreadedJob

import kvstore as kv
from kvstore.checkpoint.export import export
from kvstore.checkpoint.folders import listed
from kvstore.checkpoint.reader import CheckpointReader
from kvstore.checkpoint.verify import verify
from kvstore.client import DistStore
from kvstore.errors import Mismatch
from kvstore.job.valid_values import Interval

KEYS = ["w", "fixed", "grows"]
IDS = {"fixed": np.arange(20), "grows": np.arange(-6, 30) * 2**40}
WIDTHS = {"fixed": 3, "grows": 2}
GROWS = kv.Table(dim=2, init="normal", admit=kv.MinCount(2), evict=kv.Unseen(rounds=2))
FIXED = kv.Table(shape=(20, 3), dtype="float64", init="uniform")


def pushed(key: str, rank: int, step: int) -> kv.RowSparse:
    noise = np.random.default_rng([rank, step, len(key)])
    ids = IDS[key][noise.random(len(IDS[key])) < 0.4]
    return kv.RowSparse(
        ids, noise.standard_normal((len(ids), WIDTHS[key])).astype(FIXED.dtype if key == "fixed" else "float32")
    )


class Steps:
    """How many have been made."""

    def __init__(self) -> None:
        self.made = 0

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


def training(steps: int, optimizer: str, late: bool = False, grows: kv.Table = GROWS, **hyper: Any) -> Any:
    """A program of ``steps`` steps in all; it sets the optimizer after ``init`` if that is to be ``late``."""

    def train(store: DistStore) -> Any:
        counter, weight = Steps(), torch.zeros(3000)
        if not late:
            store.set_optimizer(optimizer, **hyper)
        store.init(KEYS, [weight, FIXED, grows])
        if late:
            store.set_optimizer(optimizer, **hyper)
        store.attach("steps", counter)
        while counter.made < steps:
            gradients = [torch.ones(3000), *(pushed(key, store.rank, counter.made) for key in KEYS[1:])]
            store.push(KEYS, gradients)
            counter.made += 1
            store.save_checkpoint(if_due=True)
        store.barrier()
        rows = [store.row_sparse_pull(key, row_ids=IDS[key]) for key in KEYS[1:]]
        counts = store.table_statistics("grows")
        return rows, [counts[name] for name in ("rows", "made", "evicted", "refused", "version")]

    return train


def run(directory: Path, program: Any, servers: int = 2, every: int = 0, **settings: Any) -> list[Any]:
    settings |= {"checkpoint_dir": str(directory), "checkpoint_every": Interval(every)}
    with ThreadedJob(2, servers, **settings) as job:
        results: list[Any] = job.run(program)
    return results


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("optimizer", "hyper"), [("sgd", {"momentum": 0.9, "learning_rate": 0.1}), ("adam", {})])
def test_tables_go_on_with_the_same_bits_on_other_servers(
    tmp_path: Path, optimizer: str, hyper: dict[str, Any], late: bool
) -> None:
    undisturbed = run(tmp_path / "none", training(9, optimizer, late, **hyper))
    run(tmp_path, training(6, optimizer, late, **hyper), every=5)
    (folder,) = listed(tmp_path)
    assert verify(folder.path).rounds == 5
    resumed = run(tmp_path, training(9, optimizer, late, **hyper), 3, checkpoint_resume=str(tmp_path))
    for (rows, counts), (wanted, wanted_counts) in zip(resumed, undisturbed, strict=True):
        assert all(map(torch.equal, rows, wanted))
        assert counts == wanted_counts


def test_a_checkpoint_has_the_rows_of_its_round_though_later_ones_follow(tmp_path: Path) -> None:
    run(tmp_path, training(4, "sgd", learning_rate=1.0), every=3)
    undisturbed = run(tmp_path / "none", training(3, "sgd", learning_rate=1.0))[0][0]
    with CheckpointReader(listed(tmp_path)[-1].path) as reader:
        pages = list(reader.pages(0, "fixed"))
    ids = np.concatenate([page.ids for page in pages])
    assert torch.equal(undisturbed[0][ids], torch.from_numpy(np.concatenate([page.rows for page in pages])))


def test_an_export_has_whole_tables_and_the_rows_of_those_that_grow(tmp_path: Path) -> None:
    (rows, _), _ = run(tmp_path, training(3, "adam"), every=3)
    path = tmp_path / "model.safetensors"
    export(listed(tmp_path)[-1].path, path, states=True)
    tensors = load_file(path)
    assert torch.equal(tensors["fixed"], rows[0])
    assert tensors["fixed.exp_avg"].shape == (len(tensors["fixed.ids"]), 3)
    wanted = dict(zip(IDS["grows"].tolist(), rows[1].tolist(), strict=True))
    assert tensors["grows.ids"].tolist() == sorted(tensors["grows.ids"].tolist())
    assert tensors["grows"].tolist() == [wanted[number] for number in tensors["grows.ids"].tolist()]
    assert len(tensors["grows"]) > 0


def test_another_table_is_refused(tmp_path: Path) -> None:
    run(tmp_path, training(2, "sgd"), every=1)
    other = kv.Table(dim=2, init="normal", admit=kv.MinCount(3), evict=kv.Unseen(rounds=2))
    with pytest.raises(Mismatch, match=r"with admit=MinCount\(count=2\) there and MinCount\(count=3\) here"):
        run(tmp_path, training(3, "sgd", grows=other), checkpoint_resume=str(tmp_path))


def test_a_table_that_is_new_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, training(2, "sgd"), every=1)

    def more(store: DistStore) -> None:
        store.set_optimizer("sgd")
        store.init(
            [*KEYS, "more", "rows of w"], [torch.zeros(3000), FIXED, GROWS, FIXED, kv.Table(dim=1, parameter="w")]
        )

    run(tmp_path / "more", more, checkpoint_resume=str(tmp_path))
    assert "has no rows of 'more', 'w': what init was given is used" in caplog.text


def test_in_an_async_store_each_server_saves_the_rows_of_now(tmp_path: Path) -> None:
    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("grows", kv.Table(dim=2))
        for step in range(5 - 2 * store.rank):  # a capture does not wait for those who are slower
            store.push("grows", pushed("grows", store.rank, step), wait=True)
        store.barrier()
        assert store.save_checkpoint(wait=True)
        if store.rank == 0:
            wanted.append(store.row_sparse_pull("grows", row_ids=IDS["grows"]))

    wanted: list[torch.Tensor] = []
    with ThreadedJob(2, 2, checkpoint_dir=str(tmp_path)) as job:
        job.run(train, "async")
    verify(listed(tmp_path)[-1].path)
    with CheckpointReader(listed(tmp_path)[-1].path) as reader:
        rows = {
            number: row for page in reader.pages(0, "grows") for number, row in zip(page.ids, page.rows, strict=True)
        }
    assert np.array_equal(np.stack([rows.get(number, np.zeros(2)) for number in IDS["grows"]]), wanted[0].numpy())
