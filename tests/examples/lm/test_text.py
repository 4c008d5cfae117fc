"""Text as numbers: what is learned from, and what is held out."""

from __future__ import annotations

import math

import pytest
import torch
from lm import options, text
from lm.transformer import Transformer
from lm.updates import learning_rate, updates

import kvstore as kv


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


# ---- The command line of train_lm.py


def test_wrong_options_end_the_program(capsys):
    for words in (["--width", "10", "--heads", "3"], ["--temperature", "0"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            options.parse(words)
    assert "--width 10 cannot be divided among 3 heads" in capsys.readouterr().err


# ---- The learning rate over a run


def test_the_schedule():
    rates = [learning_rate(step, 100, 10, 1.0, 0.1) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 <= rates[-1] < 0.101


# ---- The network


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(characters=5, context=8, layers=2, heads=2, width=16)


def test_no_position_sees_what_follows(model):
    numbers = torch.randint(5, (1, 8))
    changed = numbers.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 5
    before, after = model(numbers), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_it_begins_by_knowing_nothing(model):
    loss = model.loss(torch.randint(5, (4, 8)), torch.randint(5, (4, 8)))
    assert loss.item() == pytest.approx(math.log(5), abs=0.1)


def test_a_sample_is_as_long_as_asked_and_repeatable(model):
    start = torch.tensor([1, 2])
    first = model.sample(start, 20, 1.0, seed=3)
    assert len(first) == 20
    assert first == model.sample(start, 20, 1.0, seed=3)
    assert first != model.sample(start, 20, 1.0, seed=4)


# ---- Two ways to update, which are the same for one worker that exchanges at each step with plain outer SGD

DILOCO = "--inner-steps 1 --outer-lr 1 --outer-momentum 0"


def trained(words: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The model's parameters after a few steps, before and after the end."""
    torch.manual_seed(0)
    model = Transformer(5, 8, 1, 2, 8)
    update = updates(model, options.parse(words.split()), kv.create("local"))
    for step in range(5):
        numbers = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model.loss(numbers[:, :-1], numbers[:, 1:]).backward()
        update.step(0.01)
    with update.common_weights():
        common = [parameter.detach().clone() for parameter in model.parameters()]
    update.finish()
    return common, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("words", ["", DILOCO])
def test_in_the_end_all_have_the_common_weights(words: str) -> None:
    for common, own in zip(*trained(words), strict=True):
        assert torch.equal(common, own)


def test_both_have_the_same_adamw() -> None:
    for one, other in zip(trained("")[1], trained(DILOCO)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_between_exchanges_the_common_weights_stay() -> None:
    common, own = trained("--inner-steps 4 --outer-lr 1 --outer-momentum 0")
    assert any(not torch.equal(one, other) for one, other in zip(common, own, strict=True))
