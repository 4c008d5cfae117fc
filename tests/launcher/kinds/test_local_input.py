"""Workers that ask on launch.py's terminal or read its input: ``breakpoint()``, and commands from a file."""

from __future__ import annotations

import os
import select
import termios
import time
from collections.abc import Callable
from pathlib import Path

import screen
from launched import Launched
from waiting import LONG

Start = Callable[..., Launched]

# As a shell starts it: the terminal is its session's, and Ctrl-C a signal.
CONTROLLED = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
PROGRAM = """
import os, sys
rank = int(os.environ["DMLC_TASK_ID"])
if rank:
    known = rank + 40, all(map(os.isatty, (0, 1, 2))), os.environ["KVSTORE_PATIENCE_S"]
    breakpoint()
    print("went on")
sys.stdin.read()
"""
ASKS = "import os; print([input('? '), input('? ')], os.environ.get('KVSTORE_PATIENCE_S'))"


class Typist:
    """Somebody at a terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""

    def types(self, text: str, after: str) -> None:
        """Wait until the program has said ``after``, beyond what was seen before, and type."""
        self.waits(after)
        os.write(self._fd, text.encode())

    def waits(self, wanted: str) -> None:
        """Wait until the program has said something."""
        begin, deadline = len(self.seen), time.monotonic() + LONG
        while wanted not in self.seen[begin:]:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 1 << 16).decode()


def test_breakpoint_in_the_worker_that_has_the_terminal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with screen.terminal() as (ours, theirs):
        mode = termios.tcgetattr(theirs)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        launched = start("-n", "2", "--attach", "1", "python", "train.py", prelude=CONTROLLED, **streams)
        user = Typist(ours)
        user.types("known\n", after="(Pdb) ")
        user.types("no such\x03", after="(41, True, '0')")
        user.types("n\n", after="KeyboardInterrupt--")
        user.types("\x03\x03", after="went on")
        assert launched.wait() == 130, user.seen
        assert termios.tcgetattr(theirs) == mode, "a prompt that was killed has left it otherwise"
        user.waits("no process of the job is left")
    assert "[worker 1]" not in user.seen, "between it and the terminal is nobody"
    assert not launched.family()


def test_input_from_a_file_is_for_the_only_worker_and_for_the_one_that_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "answers").write_text("one\ntwo\n")
    said = []
    for words, env in (
        (("-n", "1"), {}),
        (("-n", "1", "--attach", "0"), {"KVSTORE_PATIENCE_S": "7"}),
    ):
        with (tmp_path / "answers").open() as answers:
            launched = start(*words, "python", "-S", "asks.py", stdin=answers.fileno(), env=env)
            launched.wait()
            said.append(launched.out)
    assert said[0] == "[worker 0] ? ? ['one', 'two'] None\n"
    assert said[1] == "? ? ['one', 'two'] 7\n"
