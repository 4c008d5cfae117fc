from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import until

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.processes.child import Child, cannot_start, suggestion


@dataclass
class Shell:
    """A program that the shell runs."""

    text: str
    name: str = "worker 0"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": os.defpath})

    @property
    def argv(self) -> tuple[str, ...]:
        return ("sh", "-c", self.text)


@dataclass
class Program:
    argv: tuple[str, ...]
    name: str = "worker 0"
    env: dict[str, str] = field(default_factory=dict)


def run(text: str, **env: str) -> tuple[Child, Exit]:
    child = Child(Shell(text, env={"PATH": os.defpath, **env}))
    child.execute()
    return child, until(child.poll, "its end")


def close(child: Child) -> None:
    child.reap()
    os.close(child.stdout)
    os.close(child.stderr)


def test_it_has_its_own_environment_session_and_pipes() -> None:
    child, how = run("echo $W; ps -o sid= -p $$ >&2; cat", W="mine")
    assert how == Exit(code=0)
    assert os.read(child.stdout, 99) == b"mine\n"  # and nothing to read on its standard input
    assert int(os.read(child.stderr, 99)) == child.pid
    close(child)


@pytest.mark.parametrize(("text", "how"), [("exit 7", Exit(code=7)), ("kill -9 $$", Exit(signum=9))])
def test_how_it_ended(text: str, how: Exit) -> None:
    child, ended = run(text)
    assert ended == child.poll() == how
    close(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it is reaped at once")
def test_its_number_is_nobody_elses_until_it_is_reaped() -> None:
    child, _ = run("exit 0")
    os.kill(child.pid, 0)  # a zombie still
    close(child)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_it_runs_nothing_before_it_is_told_to() -> None:
    child = Child(Shell("exit 0"))
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.execute()  # which is too late, and no error
    assert until(child.poll) == Exit(signum=9)
    close(child)


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    child = Child(Program((str(tmp_path / "none"),)))
    with pytest.raises(LaunchError, match=r"cannot start worker 0: there is no command .*/none") as caught:
        child.execute()
    assert caught.value.exit_code == 127
    until(child.poll)
    close(child)


def test_what_to_tell_the_user(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.touch()
    missing = FileNotFoundError()
    for argv, error, text, code in (
        (("train.py",), missing, "there is no command train.py", 127),
        (
            ("python train.py",),
            missing,
            "there is no command python train.py; quote the whole command, or none of it",
            127,
        ),
        ((str(script),), missing, f"the interpreter that {script} names does not exist", 127),
        ((str(script),), PermissionError(13, "Permission denied"), f"{script}: Permission denied", 126),
        (("pyhton", "x.py"), missing, "there is no command pyhton; did you mean: python x.py?", 127),
    ):
        told = cannot_start(Program(argv), error)
        assert (str(told), told.exit_code) == (f"cannot start worker 0: {text}", code)


def test_it_may_say_why_it_ends_before_it_does(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom kvstore.job.exit_report import ExitReport, hand_over\n"
        "assert hand_over(ExitReport('ValueError: no'), os.environ)\ntime.sleep(600)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    program = Program((sys.executable, "-S", "-c", code), env={"PYTHONPATH": root})
    child = Child(program, report=tmp_path / "report-1")
    assert child.report() is None
    child.execute()
    assert until(child.report, "its report") == ExitReport("ValueError: no")
    assert (child.report(), child.poll()) == (None, None)
    os.kill(child.pid, signal.SIGKILL)
    until(child.poll, "its end")
    close(child)


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with a few programs, and a file that cannot be executed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, mode in (("python3.11", 0o755), ("torchrun", 0o755), ("pyhtom", 0o644)):
        (folder / name).touch(mode)
    return f"/no/such/folder:{folder}"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("pyhton", "train.py"), "python train.py"),
        (("pyton3", "train.py"), "python3 train.py"),
        (("torchrnu", "a b.py", "--lr"), "torchrun 'a b.py' --lr"),
        (("no-such-command",), ""),
        (("/usr/bin/pyhton", "train.py"), ""),  # a path says where to look
        (("pyhton train.py", "--lr"), ""),
        (("missing.py",), ""),
    ],
)
def test_misspelt_programs(programs: str, argv: tuple[str, ...], meant: str) -> None:
    assert suggestion(argv, programs) == meant


def test_a_script_needs_python(programs: str, tmp_path: Path) -> None:
    (tmp_path / "ok.py").touch()
    assert suggestion(("ok.py", "--lr", "0.1"), programs, str(tmp_path)) == "python ok.py --lr 0.1"
    assert suggestion(("./ok.py",), programs, str(tmp_path)) == "python ./ok.py"
    assert suggestion((str(tmp_path / "ok.py"),), programs) == f"python {tmp_path}/ok.py"


def test_a_long_command_is_cut_between_words(programs: str) -> None:
    assert suggestion(("pyhton", "train.py", *["--word"] * 99), programs).endswith(" --word ...")
