"""train_word2vec.py beside torch_word2vec.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch_word2vec
import train_word2vec
from torch import nn
from words import options
from words.corpus import Corpus

import kvstore as kv
from kvstore.rows.admission import write_beginnings

SMALL = (
    "--dim",
    "8",
    "--steps",
    "40",
    "--batch-size",
    "512",
    "--lr",
    "0.05",
    "--disp-steps",
    "10",
    "--test-pairs",
    "200",
)


@pytest.fixture
def corpus() -> Corpus:
    """Three kinds of files, each with identifiers of its own."""
    texts = [
        " ".join(f"kind{number % 3}_word{(number * 7 + place) % 20}" for place in range(400)) for number in range(30)
    ]
    return Corpus(texts)


def test_one_process_is_as_good_as_torch(corpus: Corpus) -> None:
    args = options.parse([*SMALL, "--min-count", "0", "--kv-store", "local"])
    inner, outer = (nn.Embedding(len(corpus.names), args.dim, sparse=True) for _ in range(2))
    table = kv.Table(dim=args.dim, init="uniform", scale=0.5 / args.dim, seed=args.seed)
    write_beginnings(table, corpus.ids.numpy(), inner.weight.detach().numpy())
    nn.init.zeros_(outer.weight)
    with kv.create("local") as store:
        ours = train_word2vec.train(args, corpus, store)
    theirs = torch_word2vec.train(args, corpus, inner, outer)
    assert ours == pytest.approx(theirs, abs=0.02)
    assert ours.hits > 0.15  # by chance 0.1


def test_identifiers_of_one_step_get_no_row(corpus: Corpus) -> None:
    args = options.parse([*SMALL, "--steps", "1", "--min-count", "2", "--kv-store", "local"])
    with kv.create("local") as store:
        train_word2vec.train(args, corpus, store)
        assert store.table_statistics("inner")["rows"] == 0
        assert store.table_statistics("inner")["refused"] > 0


def test_what_the_user_can_mend_is_one_line(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "short.py").write_text("import this")
    monkeypatch.setattr(sys, "argv", ["train_word2vec.py", "--source", str(tmp_path / "short.py")])
    with pytest.raises(SystemExit, match=r"^train_word2vec.py: error: 0 identifiers to learn from"):
        train_word2vec.main()
    monkeypatch.setattr(sys, "argv", ["torch_word2vec.py", "--source", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit, match=r"^torch_word2vec.py: error: .*No such file"):
        torch_word2vec.main()


def test_torch_alone_says_how_good_it_is(monkeypatch, capsys, tmp_path: Path) -> None:
    files = []
    for number in range(10):
        files += ["--source", str(tmp_path / f"{number}.py")]
        (tmp_path / f"{number}.py").write_text("left right " * 400)
    torch.manual_seed(0)
    monkeypatch.setattr(sys, "argv", ["torch_word2vec.py", *SMALL, *files])
    torch_word2vec.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7200 identifiers to learn from, 800 held out, 2 different ones"
    assert "hits@10" in lines[-1]
