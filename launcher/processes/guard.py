"""launch.py's side of the keeper: starts it, tells it, and sends it away."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from launcher.job.tasks import MARK
from launcher.processes import keeper

MAX_RESTARTS = 3
GOODBYE_S = 1.0


class Guard:
    """Sees to it that a job does not outlive launch.py.

    If the keeper itself dies, another takes its place and is told all; after MAX_RESTARTS somebody means it, and the
    job goes on with the parent-death signal alone.

    Args:
        directory: the job's, to be removed if launch.py cannot.
        mark: what the job's processes carry in their environment.
        variable: as the value of this.
        job: the job's name, by which to find the memory that they have shared; the mark if None.
    """

    def __init__(self, directory: Path, mark: str, *, variable: str = MARK, job: str | None = None) -> None:
        self.mark = f"{variable}={mark}"
        self._variable = variable
        self._job = mark if job is None else job
        self.sessions: set[int] = set()
        self._directory = directory
        self._restarts = 0
        self._pipe = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def fileno(self) -> int:
        """The pipe to the keeper, for a new process, which tells the keeper of itself before it executes its program.

        So there is no moment at which a program runs that the keeper does not know. -1 if there is no keeper any more.
        """
        return self._pipe

    def add(self, pid: int) -> None:
        """A child runs, which has announced itself."""
        self.sessions.add(pid)

    def recheck(self) -> str | None:
        """Replace the keeper if it has died.

        Returns:
            What to tell the user, if it had.
        """
        if self._process is None or self._process.poll() is None:
            return None
        self._close()
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            return "the keeper process died again; if launch.py is killed, processes may stay behind"
        self._start()
        for pid in self.sessions:
            self._tell(b"%d\n" % pid)
        return "the keeper process died; started another"

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the job."""
        keeper.signal_all(self.sessions, self.mark, signum)

    def leftovers(self) -> bool:
        """Whether anything of the job is known to live. Always false where there is no /proc."""
        try:
            return bool(keeper.strays(self.sessions, self.mark))
        except OSError:
            return False  # `kill` tells of it, if that does not pass

    def kill(self) -> None:
        """Leave nothing of the job alive."""
        try:
            keeper.kill_all(self.sessions, self.mark, patience=1.0)
        except OSError as error:  # no reason to lose the job's exit code
            print(f"launch.py: cannot see whether processes of the job are left: {error.strerror}", file=sys.stderr)

    def dismiss(self) -> None:
        """The job is over, its processes are gone, its directory too: send the keeper away."""
        if self._process is None:
            return
        self._tell(b"bye\n")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_S)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                # Isolated: the user's PYTHONPATH and sitecustomize are for the job.
                [sys.executable, "-I", keeper.__file__, str(self._directory), self.mark, self._job],
                stdin=read,
                # It must hold neither the terminal nor the pipe that somebody reads launch.py's output from.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # Inside another job: that one's end must leave this keeper alone to do its work.
                env={name: value for name, value in os.environ.items() if name != self._variable},
                start_new_session=True,
            )
        finally:
            os.close(read)

    def _tell(self, line: bytes) -> None:
        # A dead keeper is noticed by recheck(), which repeats everything.
        with suppress(BrokenPipeError):
            os.write(self._pipe, line)

    def _close(self) -> None:
        os.close(self._pipe)
        self._process, self._pipe = None, -1
