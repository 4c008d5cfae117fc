"""What several command lines have in common, and the last lines of an example."""

from __future__ import annotations

import argparse
import shlex
import sys

import closing
import pytest
from arguments import Parser, default_store, natural, positive

from kvstore import Statistics

# ---- what several command lines have in common


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


# ---- the last lines of an example


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A program in a folder of its own, with an interpreter that launch.py lies beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["a program.py", "--lr", "1"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return tmp_path


def test_what_a_training_has_cost():
    assert closing.cost(2.0, 5, Statistics()) == "2.0 s for 5 rounds, 2.5 a second"
    assert closing.cost(2.0, 5, Statistics(bytes_pushed=999, bytes_pulled=13_800_000)) == (
        "2.0 s for 5 rounds, 2.5 a second; each worker sent 999 bytes and received 13.8 MB"
    )
    assert closing.cost(2.0, 5, Statistics(), "steps") == "2.0 s for 5 steps, 2.5 a second"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_bytes_in_a_unit_that_suits(nbytes, text):
    assert closing.size(nbytes) == text


def test_a_command_that_runs_the_program_again(here, monkeypatch):
    tail = "-n 2 -s 2 python 'a program.py' --lr 1 --mom 0"
    assert closing.command("--mom", "0") == f"{shlex.quote(sys.executable)} -m launcher {tail}"
    beside = here / "bin" / "launch.py"
    beside.parent.mkdir()
    beside.touch(0o755)
    assert closing.command("--mom", "0") == f"bin/launch.py {tail}"
    monkeypatch.chdir(here.parent)
    assert closing.command("--mom", "0") == f"{here.name}/bin/launch.py {tail}"
    monkeypatch.chdir(beside.parent.parent / "..")
    monkeypatch.setenv("PATH", str(beside.parent))
    assert closing.command("--mom", "0") == f"launch.py {tail}"


def test_a_command_for_the_job_it_runs_in(here, monkeypatch):
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("DMLC_NUM_SERVER", "1")
    assert " -n 3 -s 1 python " in closing.command()
    assert " -n 4 -s 1 python " in closing.command(num_workers=4)


def test_suggestions_below_a_title():
    assert closing.try_next([("more", "x -n 4"), ("less", "x")]) == (
        "To try next:\n  more:\n    x -n 4\n  less:\n    x"
    )


def test_a_number_of_things():
    assert [closing.counted(number, "epoch") for number in (1, 2)] == ["1 epoch", "2 epochs"]
    assert closing.counted(2, "batch", "batches") == "2 batches"
