"""The language model: its text, its schedule, its network, and one run of the script as a job."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_lm
from lm import options, text
from lm.schedule import learning_rate
from lm.transformer import Transformer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 8 --steps 12 --eval-every 6 --lr 0.01 --sample 8"


@pytest.fixture
def song(tmp_path):
    path = tmp_path / "song.txt"
    path.write_text("abcdefgh " * 100 + "abcdefgX " * 12)
    return path


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(characters=5, context=8, layers=2, heads=2, width=16)


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


def test_the_schedule():
    rates = [learning_rate(step, 100, 10, 1.0, 0.1) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 <= rates[-1] < 0.101


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


def test_what_is_printed_controls_no_terminal():
    assert text.printable("a\n\x1b[2Jé") == "a\\n?[2J?"


def test_wrong_options_end_the_program(capsys):
    for words in (["--width", "10", "--heads", "3"], ["--temperature", "0"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            options.parse(words)
    assert "--width 10 cannot be divided among 3 heads" in capsys.readouterr().err


def test_what_the_user_can_mend_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--text", f"{tmp_path / 'none'}", "--kv-store", "local"])
    with pytest.raises(SystemExit, match=r"^train_lm\.py: error: cannot read the text: "):
        train_lm.main()


def test_two_workers_learn(song):
    command = f"python {SCRIPT} {TINY} --text {song} --batch-size 8"
    words = [sys.executable, ROOT / "launcher" / "launch.py", "-n", "2", "-s", "2", "--launcher", "local", command]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bits = [float(found) for found in re.findall(r"^\[worker 0\] Step.* Validation-bits=(\S+) ", done.stderr, re.M)]
    assert len(bits) == 2
    assert bits[1] < bits[0] < math.log2(11)
    assert re.search(r"^\[worker 0\] Sample: .{8,}$", done.stderr, re.M)
    assert "[worker 1]" not in done.stderr
