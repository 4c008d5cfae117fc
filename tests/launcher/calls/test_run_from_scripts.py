"""Jobs of a script that is a process of its own: what it defines, how it is interrupted, and that nothing stays."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import called
import pytest
from launched import ROOT, Launched, launch
from waiting import until

Script = Callable[..., Launched]


@pytest.fixture
def script(tmp_path: Path, short: Path) -> Iterator[Script]:
    """Run a script that can import `called`, with `short` as TMPDIR."""
    started: list[Launched] = []

    def start(text: str, *, way: str = "file", stdout: int | None = None) -> Launched:
        path, token = tmp_path / "script.py", uuid.uuid4().hex
        path.write_text(textwrap.dedent(text))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_NUM")}
        environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(called.__file__).parent)]), "TMPDIR": str(short)}
        with path.open("rb") as source:
            command = [sys.executable, *([str(path)] if way == "file" else [])]
            process = launch(command, environ, token, tmp_path, tmp_path, stdin=source, stdout=stdout)
        started.append(Launched(process, tmp_path, token))
        return started[-1]

    yield start
    for launched in started:
        launched.end()


SCRIPT = """
import signal, sys
import called, launcher

class Point:
    def __init__(self, x):
        self.x = x

def move(point, by):
    return Point(point.x + by)

if __name__ == "__main__":
    called.in_haste()
"""


def test_from_a_script_with_what_it_defines(script: Script) -> None:
    launched = script(
        SCRIPT
        + """
    print("before")
    print([point.x for point in launcher.run(move, (Point(3),), {"by": 4}, num_workers=2)], flush=True)
    launcher.run(called.speak)
"""
    )
    assert launched.wait() == 0
    assert launched.out.splitlines() == ["before", "[7, 7]", "[worker 0] one", "[worker 0] two"]
    assert launched.err == "[worker 0] three\n"
    assert launched.family() == {}


def test_a_function_that_only_the_script_itself_defines(script: Script) -> None:
    launched = script(
        """
        import called, launcher
        if __name__ == "__main__":
            called.in_haste()
            def late(): pass
            launcher.run(late)
        """
    )
    assert launched.wait() == 1
    assert launched.err.splitlines()[-1].startswith("AttributeError: Can't get attribute 'late'")
    assert "worker 0 could not load late or its arguments; define it at the top of a module, or of" in launched.err


def test_a_script_without_its_guard(script: Script, tmp_path: Path) -> None:
    launched = script(
        """
        import called, launcher
        open("imported", "a").write("x")
        called.in_haste()
        launcher.run(called.echo, num_workers=2)
        """
    )
    assert launched.wait() == 1
    assert launched.err.splitlines()[-1].startswith(
        "launcher.errors.LaunchError: launcher.run was called while a worker"
    )
    assert 'under `if __name__ == "__main__":`' in launched.err.splitlines()[-1]
    assert len((tmp_path / "imported").read_text()) <= 3
    assert launched.family() == {}


def test_a_script_that_fails_when_workers_import_it(script: Script) -> None:
    launched = script(
        """
        import called, launcher
        if __name__ != "__main__":
            raise OSError("not twice")
        called.in_haste()
        launcher.run(called.echo)
        """
    )
    assert launched.wait() == 1
    assert "[worker 0] OSError: not twice" in launched.err
    assert "worker 0 exited with code 1 before it could call echo; its output may say why" in launched.err


def test_functions_of_an_interactive_session_and_of_a_module(script: Script) -> None:
    text = SCRIPT + "    (moved,) = launcher.run(move, (Point(1), 2))\n    print(moved.x, type(moved) is Point)\n"
    launched = script(text + "    print(launcher.run(called.echo))\n", way="stdin")
    assert launched.wait() == 0, launched.err
    assert launched.out == "3 True\n[(0, (), {})]\n"


SLEEPS = SCRIPT + "    launcher.run(called.sleep, ('.',), num_workers=2)\n"


def ready(tmp_path: Path) -> Callable[[], bool]:
    return lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1))


def test_ctrl_c(script: Script, tmp_path: Path, short: Path) -> None:
    # A shell lets what it runs in the background ignore SIGINT, and with it all that the tests start.
    listens = "    signal.signal(signal.SIGINT, signal.default_int_handler)\n    try: launcher.run(called.sleep"
    text = SLEEPS.replace("    launcher.run(called.sleep", listens)
    launched = script(text + "    except KeyboardInterrupt: print('interrupted'); sys.exit(5)\n")
    until(ready(tmp_path))
    launched.kill(signal.SIGINT)
    assert launched.wait() == 5
    assert launched.out == "interrupted\n"
    assert launched.family() == {}
    assert not list(short.iterdir())


def test_sigterm_ends_the_job_and_then_the_script(script: Script, tmp_path: Path, short: Path) -> None:
    launched = script(SLEEPS)
    until(ready(tmp_path))
    launched.kill(signal.SIGTERM)
    assert launched.wait() == -signal.SIGTERM
    assert launched.family() == {}
    assert not list(short.iterdir())


def test_a_signal_that_the_script_survives(script: Script, tmp_path: Path) -> None:
    launched = script(SLEEPS.replace("    called", "    signal.signal(signal.SIGTERM, print)\n    called"))
    until(ready(tmp_path))
    launched.kill(signal.SIGTERM)
    assert launched.wait() == 1
    assert launched.err.splitlines()[-1] == "launcher.errors.WorkerFailed: the job was ended by SIGTERM"


def test_nothing_outlives_a_script_that_is_killed(script: Script, tmp_path: Path, short: Path) -> None:
    launched = script(SLEEPS)
    until(ready(tmp_path))
    launched.kill(signal.SIGKILL)
    until(lambda: not launched.family())
    until(lambda: not list(short.iterdir()))


def test_nobody_reads_the_output(script: Script) -> None:
    read, write = os.pipe()
    launched = script(SCRIPT + "    launcher.run(called.shout, num_workers=1)\n", stdout=write)
    os.close(write)
    os.read(read, 100)
    os.close(read)
    assert launched.wait() == 1
    assert "BrokenPipeError: [Errno 32] standard output has no reader any more" in launched.err
    assert launched.family() == {}
