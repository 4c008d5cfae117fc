"""Text as numbers: what is learned from, and what is held out."""

from __future__ import annotations

import pytest
import torch
from lm import text


def test_the_last_tenth_is_held_out(song):
    corpus = text.load([song], context=16)
    whole = corpus.decode(corpus.training.tolist()) + corpus.decode(corpus.validation.tolist())
    assert len(corpus.validation) == len(song.read_text()) // 10
    assert corpus.characters == text.UNKNOWN + " Xabcdefgh"
    assert whole == song.read_text()


def test_a_character_that_was_not_learned_is_unknown(tmp_path):
    (tmp_path / "x").write_text("ab" * 50 + "Z" * 11)
    corpus = text.load([tmp_path / "x"], context=4)
    assert corpus.characters == text.UNKNOWN + "ab"
    assert set(corpus.validation.tolist()) == {0}


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "short").write_text("abc" * 10)
    with pytest.raises(text.TextError, match="too few for a context of 16"):
        text.load([tmp_path / "short"], context=16)
    with pytest.raises(text.TextError, match="No such file"):
        text.load([tmp_path / "none"], context=16)


def test_our_own_text_is_there():
    corpus = text.load(text.ours(), context=128)
    assert len(corpus.training) > 50_000
    assert len(corpus.validation) > 5_000


def test_a_batch_is_what_seed_step_and_rank_say():
    def batch(**changed):
        where = {"seed": 0, "step": 3, "rank": 1} | changed
        return text.training_batch(torch.arange(100), 4, 8, **where)

    inputs, targets = batch()
    assert inputs.shape == targets.shape == (4, 8)
    assert (inputs + 1).equal(targets)
    assert batch()[0].equal(inputs)
    assert not any(batch(**{name: 7})[0].equal(inputs) for name in ("seed", "step", "rank"))


def test_validation_is_shared_out_and_nothing_is_counted_twice():
    seen = [
        target
        for rank in range(3)
        for _, targets in text.validation_batches(torch.arange(90), 2, 8, rank=rank, workers=3)
        for target in targets.flatten().tolist()
    ]
    assert sorted(seen) == list(range(1, 89))


def test_what_is_printed_controls_no_terminal():
    assert text.printable("a\n\x1b[2Jé") == "a\\n?[2J?"
