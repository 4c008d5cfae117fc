"""Samples from LibSVM files and from clicks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clicks.stream import Clicks
from fm import data

TEXT = "1 0:1 3:0.5\n0 2:2\n1\n-1 1:1 2:1 3:1\n1 4:4\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "samples"
    written.write_text(TEXT)
    return written


def test_a_file_in_batches(file: Path) -> None:
    first, second, third = data.libsvm(file, 2, 5)
    assert first.ids.tolist() == [[0, 3], [2, 0]]
    assert first.values.tolist() == [[1, 0.5], [2, 0]]
    assert second.values.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [batch.labels.tolist() for batch in (first, second, third)] == [[1, 0], [1, 0], [1]]


def test_workers_have_as_many_batches_as_each_other(file: Path) -> None:
    parts = [list(data.libsvm(file, 2, 5, part, 2)) for part in range(2)]
    assert [batch.labels.tolist() for batch in parts[0]] == [[1], [1]]
    assert [batch.labels.tolist() for batch in parts[1]] == [[0], [0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 0:1\nclick 2\n", "line 2: 'click 2' is not a label and number:value for each feature"),
        ("1 5:1\n", "line 1: features are numbered from 0 to 4; see --input-size"),
        ("1 -1:1\n", "features are numbered from 0 to 4"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(data.DataError, match=message):
        list(data.libsvm(tmp_path / "bad", 2, 5))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"cannot read the samples: .*No such file"):
        list(data.libsvm(tmp_path / "none", 2, 5))


def test_clicks_are_hashed_to_numbers() -> None:
    (batch,) = data.clicks(Clicks(fields=3), [5], 20, 50, 0, 1)
    assert batch.ids.shape == (20, 3)
    assert 0 <= batch.ids.min() <= batch.ids.max() < 50
    assert torch.equal(batch.values, torch.ones(20, 3))
    assert len(batch.chances) == 20
