"""The data of the examples with tables: clicks, LibSVM files, and words."""

from __future__ import annotations

import math
import sysconfig
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from clicks.auc import auc, quality
from clicks.stream import DENSE, Clicks
from fm import data
from fm.machine import logits
from words.corpus import NEGATIVES, Corpus, CorpusError, standard_library
from words.skipgram import loss, ranking

import kvstore as kv

# ---- the clicks: the same from the same seed, whoever asks, with ids that drift


def test_workers_have_parts_of_one_batch() -> None:
    clicks = Clicks(seed=3, fields=5)
    whole = clicks.batch(7, 10)
    for part in range(3):
        mine = Clicks(seed=3, fields=5).batch(7, 10, part, 3)
        for values, all_of_them in zip(mine, whole, strict=True):
            assert np.array_equal(values, all_of_them[part::3])
    assert whole.ids.shape == whole.rows.shape == (10, 5)
    assert whole.dense.shape == (10, DENSE)
    assert [batch.ids.tolist() for batch in clicks.batches(range(7, 8), 10)] == [whole.ids.tolist()]


def test_rows_and_ids_stand_for_one_another() -> None:
    clicks = Clicks(fields=4, largest=5000, period=5)
    batches = [clicks.batch(number, 500) for number in range(12)]
    counts = clicks.rows(12)
    for field in range(4):
        rows = torch.cat([batch.rows[:, field] for batch in batches])
        ids = torch.cat([batch.ids[:, field] for batch in batches])
        assert rows.max() < counts[field]
        assert len({*zip(rows.tolist(), ids.tolist(), strict=True)}) == len(rows.unique()) == len(ids.unique())


# ---- The area under the ROC curve, and the logarithmic loss


def test_it_is_the_share_of_pairs_in_the_right_order() -> None:
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 5, 60).astype(float), random.integers(0, 2, 60)
    pairs = [(a, b) for a in scores[labels == 1] for b in scores[labels == 0]]
    assert auc(scores, labels) == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]))


def test_the_best_is_said_where_it_is_known() -> None:
    labels = np.array([1, 0, 1, 0])
    predicted, true = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.9, 0.1, 0.9, 0.1])
    assert str(quality(predicted, true, labels)).startswith(
        "AUC 0.7500 of 4 samples not trained on, where 1.0000 is the best possible; log loss 0."
    )
    assert str(quality(predicted, np.empty(0), labels)).startswith("AUC 0.7500 of 4 samples not trained on; log loss")


# ---- samples from LibSVM files and from clicks


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


# ---- The formula of the factorization machine, beside all pairs


def test_it_is_the_sum_over_all_pairs() -> None:
    torch.manual_seed(0)
    values, linear, factors = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4, 2)
    expected = 0.5 + (linear * values).sum(dim=1)
    for first, second in combinations(range(4), 2):
        products = (factors[:, first] * factors[:, second]).sum(dim=1)
        expected = expected + products * values[:, first] * values[:, second]
    torch.testing.assert_close(logits(values, linear, factors, torch.tensor([0.5])), expected)


# ---- identifiers of source files, and pairs of them


TEXTS = [f"def function{number % 3}(self, value):\n    return self.total + value * x\n" * 100 for number in range(20)]


def test_the_frequent_ones_come_first_and_have_hashes() -> None:
    corpus = Corpus(TEXTS)
    assert set(corpus.names[:2]) == {"self", "value"}
    assert corpus.ids.tolist() == kv.hash_ids(corpus.names).tolist()
    assert len(set(corpus.ids.tolist())) == len(corpus.names)


def test_workers_have_parts_of_one_batch_of_words() -> None:
    corpus = Corpus(TEXTS)
    (whole,) = corpus.learned(range(4, 5), 10, seed=1)
    assert whole.centers.shape == (10,)
    assert whole.targets.shape == (10, 1 + NEGATIVES)
    for part in range(3):
        (mine,) = corpus.learned(range(4, 5), 10, 1, part, 3)
        assert torch.equal(mine.centers, whole.centers[part::3])
        assert torch.equal(mine.targets, whole.targets[part::3])


def test_too_little_source_is_an_error() -> None:
    with pytest.raises(CorpusError, match=r"identifiers to learn from and .* too few"):
        Corpus(["some words"] * 20)


def test_the_standard_library_without_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json/decoder.py", "abc.py", "test/test_abc.py", "site-packages/other.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert standard_library() == ["abc.py", "json/decoder.py"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "zipped")})
    with pytest.raises(CorpusError, match="there is no source in"):
        standard_library()


# ---- Scores of pairs, and how well they tell a true neighbour from others


def test_the_loss_is_that_of_the_papers_sum() -> None:
    scored = torch.tensor([[2.0, -1.0, 0.5]])
    expected = -sum(math.log(1 / (1 + math.exp(-x))) for x in (2.0, 1.0, -0.5))
    assert math.isclose(loss(scored).item(), expected, rel_tol=1e-5)


def test_a_true_neighbour_that_comes_first_and_one_that_comes_last() -> None:
    assert ranking(torch.tensor([[1.0, *[0.0] * 99]]))[:2] == (1.0, 1.0)
    mrr, hits, pairs = ranking(torch.tensor([[-1.0, *[0.0] * 99]]))
    assert (round(mrr, 6), hits, pairs) == (0.01, 0.0, 1)
    assert ranking(torch.zeros(2, 100)).hits == 0.0  # equal scores say nothing
    assert "hits@10 1.0000 of 1 pairs" in str(ranking(torch.tensor([[1.0, 0.0]])))
