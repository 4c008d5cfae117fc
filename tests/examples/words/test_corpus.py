"""Identifiers of source files, and pairs of them."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from words.corpus import CANDIDATES, NEGATIVES, Corpus, CorpusError, hashed, standard_library
from words.skipgram import loss, nearest, ranking, scores

TEXTS = [f"def function{number % 3}(self, value):\n    return self.total + value * x\n" * 100 for number in range(20)]


def test_keywords_and_single_letters_are_left_out() -> None:
    assert set(Corpus(TEXTS).names) == {"function0", "function1", "function2", "self", "value", "total"}


def test_the_frequent_ones_come_first_and_have_hashes() -> None:
    corpus = Corpus(TEXTS)
    assert set(corpus.names[:2]) == {"self", "value"}
    assert corpus.ids.tolist() == [hashed(name) for name in corpus.names]
    assert len(set(corpus.ids.tolist())) == len(corpus.names)


def test_workers_have_parts_of_one_batch() -> None:
    corpus = Corpus(TEXTS)
    (whole,) = corpus.learned(range(4, 5), 10, seed=1)
    assert whole.centers.shape == (10,)
    assert whole.targets.shape == (10, 1 + NEGATIVES)
    for part in range(3):
        (mine,) = corpus.learned(range(4, 5), 10, 1, part, 3)
        assert torch.equal(mine.centers, whole.centers[part::3])
        assert torch.equal(mine.targets, whole.targets[part::3])


def test_neighbours_are_neighbours() -> None:
    corpus = Corpus([f"alone{number} " * 600 for number in range(20)])
    (pairs,) = corpus.learned(range(1), 200, seed=0)
    same = (pairs.targets[:, 0] == pairs.centers).float().mean()
    assert same > 0.9  # but for those at the end of a file
    assert corpus.held_out(50, seed=0).targets.shape == (50, 1 + CANDIDATES)


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


def test_scores_are_products() -> None:
    centers, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])
    assert scores(centers, targets).tolist() == [[1.0, 6.0]]


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


def test_the_nearest_vectors_have_the_smallest_angle() -> None:
    vectors = torch.tensor([[1.0, 0.0], [9.0, 1.0], [-1.0, 0.0], [1.0, 1.0]])
    assert nearest(vectors, 0, 2) == [1, 3]
