"""Samples from LibSVM files and from clicks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from clicks.stream import Clicks
from fm import data
from fm.machine import logits

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


# ---- The formula of the factorization machine, beside all pairs


def test_it_is_the_sum_over_all_pairs() -> None:
    torch.manual_seed(0)
    values, linear, factors = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4, 2)
    expected = 0.5 + (linear * values).sum(dim=1)
    for first, second in combinations(range(4), 2):
        products = (factors[:, first] * factors[:, second]).sum(dim=1)
        expected = expected + products * values[:, first] * values[:, second]
    torch.testing.assert_close(logits(values, linear, factors, torch.tensor([0.5])), expected)


def test_features_with_a_value_of_zero_change_nothing() -> None:
    values, linear, factors = torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2, 3)
    padded = torch.tensor([[1.0, 1.0, 0.0]])
    more = (torch.full((1, 3), 1.0), torch.full((1, 3, 3), 1.0))
    assert torch.equal(logits(padded, *more, torch.zeros(1)), logits(values, linear, factors, torch.zeros(1)))
