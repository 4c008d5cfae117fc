"""Batches from files: what they have, whose they are, and lines that are none."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore as kv
import workers
from workers import EmbeddingBag


class Half(kv.KVStore):
    """Of worker 1 of 2."""

    num_workers, rank = 2, 1

    def __init__(self) -> None:
        pass


LIBSVM = b"""1 3:0.5 7:2
0 # nothing of this

-1 9:-1e3 123456789012345678:+.25  # the last
+1\t4:1
"""


@pytest.mark.parametrize("packed", [False, True])
def test_lines_of_libsvm(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("data.gz" if packed else "data")
    path.write_bytes(gzip.compress(LIBSVM) if packed else LIBSVM)
    first, second = workers.libsvm_batches(path, 3)
    assert {name: (f"{value.dtype}", value.tolist()) for name, value in first.items()} == {
        "label": ("torch.float32", [1, 0, -1]),
        "ids": ("torch.int64", [3, 7, 9, 123456789012345678]),
        "values": ("torch.float32", [0.5, 2, -1000, 0.25]),
        "offsets": ("torch.int64", [0, 2, 2]),
    }
    bag = EmbeddingBag(None, 1, store=kv.create("local"), key="w", mode="sum", init="constant")
    with torch.no_grad():
        scores = bag(first["ids"], first["offsets"], first["values"])
    assert scores.tolist() == [[2.5], [0], [-999.75]]
    assert [second[name].tolist() for name in ("label", "ids", "offsets")] == [[1], [4], [0]]


@pytest.mark.parametrize(
    "line", [b"1 3", b"1 3:0.5:3 7", b"1 -3:1", b"3:1", b"1 qid:3 4:1", b"1 1234567890123456789:1", b"a 1:1", b"1 1:x"]
)
def test_a_line_that_is_none_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(LIBSVM + line + b"\n")
    with pytest.raises(kv.UsageError, match=f"{path}, line 6: .* is not a label and then number:value"):
        list(workers.libsvm_batches(path, 2))


def click(number: int) -> str:
    numbers = ["" if column == number else str(column - 2) for column in range(13)]
    return "\t".join([str(number % 2), *numbers, *("" if column == 5 else f"{column:08x}" for column in range(26))])


def test_lines_of_criteo(tmp_path: Path) -> None:
    path = tmp_path / "day"
    path.write_text("".join(f"{click(number)}\n" for number in range(5)))
    batches = list(workers.criteo_batches(path, 2))
    assert [len(batch["label"]) for batch in batches] == [2, 2, 1]
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 1, 0, 1, 0]
    assert batches[0]["dense"].isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert batches[2]["dense"][0].nan_to_num(9).tolist() == [-2, -1, 0, 1, 9, 3, 4, 5, 6, 7, 8, 9, 10]
    ids = [kv.hash_ids(["" if column == 5 else f"{column:08x}"], column).item() for column in range(26)]
    assert batches[1]["ids"].tolist() == [ids, ids]
    for wrong in (click(0) + "\t", click(0).replace("\t", " "), "x" + click(0)):
        path.write_text(f"{click(0)}\n{wrong}\n")
        with pytest.raises(kv.UsageError, match=f"{path}, line 2: .* 13 integers and 26 categories"):
            list(workers.criteo_batches(path, 2))


def test_columns_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "clicks.parquet"
    columns: dict[str, Any] = {
        "user": ["ann", "bob", "ann"],
        "history": [["x"], [], ["y", "x"]],
        "scores": pyarrow.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pyarrow.list_(pyarrow.float32(), 2)),
        "count": pyarrow.array([1, 2, 3], "uint8"),
        "label": [True, False, True],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (batch,) = workers.parquet_batches(path, 10)
    assert batch["user"].tolist() == kv.hash_ids(["ann", "bob", "ann"]).tolist()
    assert [part.tolist() for part in batch["history"]] == [kv.hash_ids(["x", "y", "x"]).tolist(), [0, 1, 1]]
    assert [part.tolist() for part in batch["scores"]] == [[1, 2, 3, 4, 5, 6], [0, 2, 4]]
    assert [(batch[name].dtype, batch[name].tolist()) for name in ("count", "label")] == [
        (torch.uint8, [1, 2, 3]),
        (torch.bool, [True, False, True]),
    ]
    assert [batch["count"].tolist() for batch in workers.parquet_batches(path, 1, ["count"], kvstore=Half())] == [[2]]
    with pytest.raises(kv.UsageError, match=r"no column 'item'; choose from \['user', 'history'"):
        next(workers.parquet_batches(path, 10, ["item"]))
    for odd, said in (
        (["a", None], "has nulls"),
        ([[None]], "has nulls"),
        (pyarrow.array([0], "timestamp[s]"), "is of timestamp"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"odd": odd}), path)
        with pytest.raises(kv.UsageError, match=f"column 'odd' {said}"):
            next(workers.parquet_batches(path, 10))


def test_workers_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("".join(f"{number}\n" for number in range(7)))
    labels = [batch["label"].tolist() for batch in workers.libsvm_batches(path, 2, kvstore=Half())]
    assert labels == [[2, 3], [6]]
    assert sum(len(batch["label"]) for batch in workers.libsvm_batches(path, 2, kvstore=kv.create("local"))) == 7
    with pytest.raises(kv.UsageError, match="batch_size=0"):
        next(workers.libsvm_batches(path, 0))
    with pytest.raises(FileNotFoundError):
        next(workers.criteo_batches(tmp_path / "none", 2))
