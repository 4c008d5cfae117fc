"""What several command lines have in common."""

from __future__ import annotations

import argparse

import pytest
from arguments import Parser, default_store, natural, positive


def test_the_store_is_dist_sync_in_a_job_only(monkeypatch):
    assert default_store() == "local"
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    assert default_store() == "dist_sync"


def test_whole_numbers():
    assert (natural("0"), natural("17"), positive("1")) == (0, 17, 1)
    for text in ("-1", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            natural(text)
    with pytest.raises(argparse.ArgumentTypeError, match="must be 1 or more"):
        positive("0")


def test_rank_0_alone_says_what_is_wrong_in_one_line(monkeypatch, capsys):
    parser = Parser("Does nothing")
    parser.prog = "nothing.py"
    for rank, said in (("0", "nothing.py: error: unrecognized arguments: --more; -h lists the options\n"), ("1", "")):
        monkeypatch.setenv("DMLC_TASK_ID", rank)
        with pytest.raises(SystemExit) as exit_:
            parser.parse_args(["--more"])
        assert exit_.value.code == 2
        assert capsys.readouterr().err == said


def test_help_shows_defaults_where_there_are_any():
    parser = Parser("Does nothing")
    parser.add_argument("--size", type=int, default=3, help="its size")
    parser.add_argument("--file", help="its file")
    parser.add_argument("--fast", action="store_true", help="its speed")
    text = parser.format_help()
    assert "its size (default: 3)" in text
    assert text.count("default") == 1
