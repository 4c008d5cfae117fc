"""A fork server: its children are its starter's, each with its own environment, and its death costs none of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from proc import state
from waiting import until

from kvstore.job import processes
from kvstore.job.forking import Forked, ForkServer, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="only Linux, on x86-64 and ARM, has fork servers")

# What a child runs is the text in its argument.
PROGRAM = """
import os, socket, sys
{before}
from kvstore.job.forking import serve
if not serve(socket.socket(fileno=int(sys.argv[1]))):
    os._exit(3)
exec(sys.argv[1])
"""
ENV = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}


class Forks:
    """A fork server and what its children write."""

    def __init__(self, folder: Path, before: str = "") -> None:
        self._folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM.format(before=before))
        self.server = ForkServer((sys.executable, str(program)), ENV, -1, stderr=2)
        self.server.execute()
        self.children: list[Forked] = []

    def ask(self, text: str, env: Mapping[str, str] = ENV, keeper_fd: int = -1, name: str = "child") -> Path:
        """Ask for a child that executes `text`. Returns the file with its output."""
        output = self._folder / f"output-{len(self.children)}"
        with output.open("wb") as out:
            argv = (sys.executable, "program.py", "-", text, name)
            self.children.append(self.server.fork(argv, env, out.fileno(), out.fileno(), keeper_fd))
        return output

    def begin(self) -> None:
        until(lambda: self.server.collect() is not None and (self.server.ended or not self.server.asked))

    def run(self, text: str, env: Mapping[str, str] = ENV) -> bytes:
        output = self.ask(text, env)
        self.begin()
        assert self.end() == 0, output.read_text()
        return output.read_bytes()

    def end(self) -> int | None:
        until(lambda: self.children[-1].poll() is not None)
        return self.children[-1].returncode


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    forks = Forks(tmp_path)
    yield forks
    forks.server.close()
    for child in forks.children:
        if child.pid and child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            until(lambda child=child: child.poll() is not None)


SHOW = "import json, os; print(json.dumps([sys.argv[1:], dict(os.environ)], sort_keys=True))"


def test_a_child_has_its_words_and_environment_and_none_of_anothers(forks: Forks) -> None:
    odd = {"A": "1=2", "B": "", "C": os.fsdecode(b"\xff"), "LC_ALL": "C"}
    words, env = json.loads(forks.run(SHOW, odd))
    assert (words, env) == ([SHOW, "child"], odd)
    assert json.loads(forks.run(SHOW, {"D": "4"}))[1] == {"D": "4"}


def test_a_child_is_the_starters_and_leads_a_session_of_its_own(forks: Forks) -> None:
    printed = forks.run("import os; print(os.getppid(), os.getpid(), os.getpgrp(), os.getsid(0))")
    pid = str(forks.children[-1].pid)
    assert printed.split() == [str(os.getpid()).encode(), *3 * [pid.encode()]]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sys.exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise ValueError", 1),
    ],
)
def test_its_exit_code_is_that_of_a_program(forks: Forks, text: str, code: int) -> None:
    forks.ask(text)
    forks.begin()
    assert forks.end() == code


def test_threads_signals_and_processes_work_in_a_child(forks: Forks) -> None:
    # Each asks the C library for the number of the main thread, which only the kernel could set.
    text = (
        "import os, signal, subprocess, threading\n"
        "heard = []; signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
        "main = threading.main_thread().ident\n"
        "thread = threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGUSR1)); thread.start()\n"
        "thread.join(); subprocess.run(['true'], check=True); pid = os.fork()\n"
        "if not pid: os._exit(5)\n"
        "print(heard, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert forks.run(text) == b"[1] 5\n"


def test_ps_shows_a_child_by_its_own_words_and_environment(tmp_path: Path) -> None:
    words = [b"python", b"our_module.py", b"servers", b"aggregator-4095"]
    text = (
        "import os; from kvstore.job.processes import show; os.environ.clear()\n"
        f"show({words}, [b'A=1', b'B=2 3'])\n"
        "print(*(open(f'/proc/self/{name}').read().rstrip(chr(0)) for name in ('cmdline', 'environ')), sep='|', end='')"
    )
    printed = subprocess.run([sys.executable, "-c", text], env=ENV, check=True, capture_output=True).stdout
    assert [part.split(b"\0") for part in printed.split(b"|")] == [words, [b"A=1", b"B=2 3"]]


def test_the_keeper_learns_its_number_before_anybody_else(forks: Forks) -> None:
    read, write = os.pipe()
    forks.ask("pass", keeper_fd=write)
    os.close(write)
    forks.begin()
    with os.fdopen(read) as lines:
        assert lines.read() == f"{forks.children[-1].pid}\n"  # read to the end: nobody holds the other end


def test_a_child_gets_the_limit_of_files_that_was_given(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "given_files", 123)
    assert forks.run("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])") == b"123\n"


SEARCH = """
sought = os.environ["HALF"] * 2
found = 0
for line in open("/proc/self/maps"):
    start, stop = (int(end, 16) for end in line.split()[0].split("-"))
    if " rw-p " in line:
        memory = open("/proc/self/mem", "rb", 0)
        memory.seek(start)
        found += memory.read(stop - start).count(bytes.fromhex(sought))
print(found)
"""


def test_a_child_finds_no_environment_of_another_in_its_memory(forks: Forks) -> None:
    half = os.urandom(16)
    secret = os.fsdecode(half.hex().encode() * 2)
    env = ENV | {"HALF": half.hex().encode().hex()}  # the secret is in no environment that is searched
    assert int(forks.run(SEARCH, env | {"SECRET": secret})) > 1  # the text that it makes of the halves is one
    assert int(forks.run(SEARCH, env)) <= 1


def test_what_it_has_forked_lives_on_without_it(forks: Forks) -> None:
    output = forks.ask("import time; print('begun', flush=True); time.sleep(0.3); sys.exit(9)")
    forks.begin()
    os.kill(forks.server.pid, signal.SIGKILL)
    until(lambda: forks.server.collect() == [] and forks.server.ended)
    with pytest.raises(OSError, match="Broken pipe"):
        forks.ask("pass")
    assert forks.end() == 9
    assert output.read_text() == "begun\n"


def test_with_threads_it_makes_none(tmp_path: Path) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    forks = Forks(tmp_path, thread)
    forks.ask("pass")
    forks.begin()
    assert forks.server.ended
    assert len(forks.server.asked) == 1
    forks.server.close()


def test_all_end_with_the_starter(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(before=""))
    text = (
        "import os, sys, time; from kvstore.job.forking import ForkServer\n"
        f"server = ForkServer((sys.executable, {str(tmp_path / 'program.py')!r}), dict(os.environ), -1, 2)\n"
        "server.execute()\n"
        "argv = (sys.executable, 'x', '-', 'import time; time.sleep(60)')\n"
        "child = server.fork(argv, dict(os.environ), 1, 2, -1)\n"
        "while not server.collect(): time.sleep(0.01)\n"
        "print(server.pid, child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", text], env=ENV, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = list(map(int, starter.stdout.readline().split()))
        starter.kill()
    until(lambda: not any(map(runs, pids)))


def runs(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except OSError:
        return False
