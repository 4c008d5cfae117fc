from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import ROOT
from programs_of_ours import run

from kvstore.job import our_module
from launcher.agents.links.link import ENLIST
from launcher.errors import LaunchError
from launcher.job.command import (
    PROGRAM,
    agent_argv,
    argv_of,
    module_directories,
    program_argv,
    require_program,
    shadows,
    shim,
)

PYTHON = "/a b/bin/python"
HOSTILE = ["a b", "it's", '"', "$(echo gone)", "`id`", "x;y", "new\nline", "", "*", "ünï", "--", "\\"]
WORDS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


def test_separate_words_stay_as_they_are() -> None:
    assert argv_of(["python", "train.py", *HOSTILE], PYTHON) == (PYTHON, "train.py", *HOSTILE)


@given(st.lists(WORDS, min_size=1))
def test_separate_words_are_never_interpreted(words: list[str]) -> None:
    assert argv_of(["train", *words], PYTHON) == ("train", *words)


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("python train.py --lr 0.1", (PYTHON, "train.py", "--lr", "0.1")),
        ("python3 -m train", (PYTHON, "-m", "train")),
        ("./train 'a b' \"c d\" e\\ f --x=y", ("./train", "a b", "c d", "e f", "--x=y")),
        ("pythonic x", ("pythonic", "x")),
        ("train", ("train",)),
    ],
)
def test_a_plain_string_is_split_and_needs_no_shell(text: str, argv: tuple[str, ...]) -> None:
    assert argv_of([text], PYTHON) == argv


@pytest.mark.parametrize(
    "text",
    [
        "cd x && python train.py",
        "LR=0.1 python train.py",
        "python train.py > log",
        "python train.py $HOME",
        "python train.py '$(id)'",
        "exit 7",
        "python a.py\npython b.py",
        "python *.py",
    ],
)
def test_a_string_that_needs_the_shell_gets_it_unchanged(text: str) -> None:
    assert argv_of([text], PYTHON) == ("/bin/sh", "-c", text)


@given(st.lists(WORDS.filter(bool), min_size=1))
def test_a_quoted_string_means_what_it_says(words: list[str]) -> None:
    argv = argv_of([shlex.join(["train", *words])], PYTHON)
    assert argv == ("train", *words) or argv == ("/bin/sh", "-c", shlex.join(["train", *words]))


@pytest.mark.parametrize("command", [[""], ["  "], ["''"], ["", "x"], []])
def test_an_empty_command_is_an_error(command: list[str]) -> None:
    with pytest.raises(LaunchError, match="empty"):
        argv_of(command, PYTHON)


def test_an_open_quote_is_an_error_that_shows_it() -> None:
    with pytest.raises(LaunchError, match=r"no closing quotation.*python 'train\.py"):
        argv_of(["python 'train.py"], PYTHON)


def test_the_shim_is_that_interpreter(tmp_path) -> None:
    file = tmp_path / "python"
    file.write_text(shim(sys.executable))
    file.chmod(0o700)
    script = "import sys; print(sys.executable, sys.prefix, sys.argv[1:])"
    ours = subprocess.run([sys.executable, "-c", script, *HOSTILE], capture_output=True, check=True)
    shimmed = subprocess.run([file, "-c", script, *HOSTILE], capture_output=True, check=True)
    assert shimmed.stdout == ours.stdout


def test_the_shim_quotes_the_path() -> None:
    assert shim("/a'b $x/python").splitlines()[1] == "exec '/a'\"'\"'b $x/python' \"$@\""


@pytest.mark.parametrize(
    ("command", "directories"),
    [
        (["python", "train.py", "other/x.py"], ["."]),
        (["python jobs/train.py --lr 0.1"], ["jobs"]),
        (["nice -n 5 /opt/python '/a b/train.py'"], ["/a b"]),
        (["python -m train"], ["."]),
        (["python", "-c", "import train.py"], ["."]),
        (["./train"], []),
        (["no 'end"], []),
    ],
)
def test_where_a_program_looks_for_modules(command: list[str], directories: list[str]) -> None:
    assert module_directories(command, {}) == directories
    assert module_directories(command, {"PYTHONPATH": "/a::b"}) == [*directories, "/a", "b"]


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-"],
        ["python -"],
        ["python3.12 -u - --epochs 2"],
        ["python", "-W", "ignore", "-Xdev", "-"],
        ["/opt/venv/bin/python -"],
        ["env", "A=1", "python", "-"],
        ["timeout 60 python -u -"],
        ["python"],
        ["python -u"],
    ],
)
def test_a_python_that_would_read_its_program_from_nowhere_is_refused(command: list[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"python\S*.* reads its program from the standard input, .* python train\.py"
    ):
        require_program(command)


@pytest.mark.parametrize(
    "command",
    [
        ["python train.py -"],
        ["python", "-u", "train.py"],
        ["python -m train -"],
        ["python -c 'print(1)' -"],
        ["python", "-uc", "print(1)"],
        ["python -W ignore train.py"],
        ["python --version"],
        ["python -V"],
        ["python - < train.py"],
        ["env A=1 ./train.py python -"],
        ["cat -"],
        [""],
    ],
)
def test_other_commands_have_a_program(command: list[str]) -> None:
    require_program(command)


@pytest.mark.parametrize(
    ("path", "root"),
    [("", ROOT), ("{}", ROOT), ("./:{}/none", ROOT), (f"{{}}:{ROOT}", ROOT), ("{}", None)],
)
def test_an_agent_is_ours_whatever_the_working_directory_and_the_path_hold(
    shadowed: Path, path: str, root: Path | None
) -> None:
    environ = {ENLIST: "hunter2"} | ({"PYTHONPATH": path.format(shadowed)} if path else {})
    code, out, err = run(agent_argv(sys.executable, root and str(root)), shadowed, **environ)
    assert (code, out) == (1, b"")
    assert err.startswith(f"the agent cannot start: {ENLIST} is not a ticket")
    assert "hunter2" not in err


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    clone = tmp_path / 'a clone\'s "place" {x}'
    (clone / "ours").mkdir(parents=True)
    (clone / "ours" / "__init__.py").write_text("def main():\n    print('here')\n    return 3\n")
    assert run(program_argv(sys.executable, "ours", str(clone)), tmp_path) == (3, b"here\n", "")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "wanted.py").write_text("def main():\n    print('there')\n")
    theirs = {"PYTHONPATH": str(tmp_path / "theirs")}
    assert run(program_argv(sys.executable, "wanted", str(clone)), tmp_path, **theirs) == (0, b"there\n", "")
    assert program_argv("py", "ours") == ["py", "-c", PROGRAM.format(first="", module="ours")]


def test_a_file_and_a_package_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "workers.py").touch()
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").touch()
    assert [str(shadow) for shadow in shadows([str(tmp_path)])] == [
        f"`import kvstore` takes {tmp_path}/kvstore/__init__.py, which hides the package {our_module.ROOT}/kvstore; "
        "rename the file, unless that is meant",
        f"`import workers` takes {tmp_path}/workers.py, which hides the package {our_module.ROOT}/workers; "
        "rename the file, unless that is meant",
    ]


def test_what_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()  # without __init__.py: an installed package goes first
    assert shadows([str(tmp_path), "/nowhere", our_module.ROOT]) == []
    (tmp_path / "kvstore.py").touch()
    assert shadows([our_module.ROOT, str(tmp_path)]) == []


def test_a_link_to_ours_is_ours(tmp_path: Path) -> None:
    (tmp_path / "workers").symlink_to(Path(our_module.ROOT, "workers"))
    assert shadows([str(tmp_path)]) == []
