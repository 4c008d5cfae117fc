"""fit with models that have tables: in a store, or of torch with sparse gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import reducer_of
from recorded import Recorded
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import Checkpoint, callbacks, fit

IDS = torch.randint(0, 50, (24, 3), generator=torch.Generator().manual_seed(0))
BATCHES = [(IDS[start : start + 8], IDS[start : start + 8].sum(1) % 2) for start in range(0, 24, 8)]


class Classifier(nn.Module):
    def __init__(self, store: Any, kind: str, rows: int | None = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag: nn.Module
        if kind == "table":
            self.bag = workers.EmbeddingBag(rows, 4, store=store, key="bag", mode="sum")
        else:
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.bag(ids))
        return scores


def train(kind: str, epochs: int, rows: int | None = 50, lookahead: bool = False, **options: Any) -> Any:
    store = Recorded("adam")
    model = Classifier(store, kind, rows)
    data = workers.lookahead(BATCHES, {model.bag: lambda batch: batch[0]}) if lookahead else BATCHES
    fit(
        *(model, data, BATCHES),
        num_epoch=epochs,
        kvstore=store,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.05},
        update_on_kvstore=True,
        **options,
    )
    return model.state_dict()


@pytest.mark.parametrize(("kind", "rows"), [("table", 50), ("table", None), ("parameter", 50)])
def test_a_run_goes_on_with_the_same_bits(kind: str, rows: int | None, tmp_path: Path) -> None:
    whole = train(kind, 4, rows)
    train(kind, 2, rows, epoch_end_callback=callbacks.do_checkpoint(str(tmp_path / "m")))
    resumed = train(kind, 4, rows, lookahead=kind == "table", resume=Checkpoint(str(tmp_path / "m"), 2))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_other_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path / "m"), 1)
    checkpoint.save_weights(Classifier(Recorded(), "table", 40))
    with pytest.raises(kv.Mismatch, match=r"table 'bag' at bag: its rows have the shape \(40, 4\)"):
        checkpoint.load_weights(Classifier(Recorded(), "table", 50))


def test_several_devices_are_refused() -> None:
    store = Recorded()
    with pytest.raises(kv.UsageError, match="one device per process"):
        fit(Classifier(store, "table"), BATCHES, num_epoch=1, kvstore=store, devices=["cpu", "cpu"])


def test_uneven_workers_with_tables_in_a_store_of_their_own(pair: ThreadedJob) -> None:
    def work(session: Session) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        tables, store = DistStore(session), DistStore(session)
        tables.set_optimizer("adam", learning_rate=0.05)
        model = Classifier(tables, "table")
        data = BATCHES[: 1 + 2 * session.rank]
        history = fit(model, data, BATCHES, num_epoch=2, kvstore=store, reducer=reducer_of(store))
        return model.state_dict(), history

    (one, history), (two, others) = pair.run_sessions(work)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert history == others
