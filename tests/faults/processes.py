"""The processes of a run. They are forks of one that has torch already, which takes seconds to start."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jobkeys
import torch
from cutting import cut

import kvstore.client  # noqa: F401 - so that forks have them
import servers.server  # noqa: F401
from faults.plan import Plan
from faults.training import Training, Wrong
from kvstore.bootstrap.report import tell
from servers.__main__ import main as serve

WRONG_EXIT = 77
RESTARTED = ("server", "standby", "scheduler")
HEARTBEAT = {"KVSTORE_HEARTBEAT_S": "0.2", "KVSTORE_HEARTBEAT_TIMEOUT_S": "10", "KVSTORE_TIMEOUT_S": "20"}


class Processes:
    """The scheduler, servers and workers of one run.

    Args:
        plan: of the run.
        directory: a private one, of this run alone.
        work: what each worker does; what the plan says by default.
        replicas: 1 to give each server a standby, and to start dead servers, standbys and schedulers again.
        least: the job goes on without workers that die as long as so many are left; 0 if it does not.
        returning: whether workers that die are started again, unless something was wrong.
    """

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        work: Callable[[], object] | None = None,
        replicas: int = 0,
        least: int = 0,
        returning: bool = False,
    ) -> None:
        self.codes: dict[str, int] = {}
        self.starts: Counter[str] = Counter()
        self.directory = directory
        self._plan = plan
        self._work_of = work
        self._replicas = replicas
        self._least = least
        self._returning = returning
        self._running: dict[str, int] = {}
        self._untold: list[tuple[dict[str, str], str, int, str, int, bool]] = []
        names = ["scheduler 0"]
        names += [f"server {rank}" for rank in range(plan.servers)]
        names += [f"standby {rank}" for rank in range(plan.servers * replicas)]
        names += [f"worker {rank}" for rank in range(plan.workers)]
        listener = None if plan.kind in ("unix", "shm") else socket.create_server(("127.0.0.1", 0))
        keys = jobkeys.variables(len(names)) if plan.kind == "curve" else [{}] * len(names)
        self._env = {}
        for name, own in zip(names, keys, strict=True):
            self._env[name] = self._environment(name, listener) | own
            self._fork(name, listener)
        self._listener = listener if replicas or returning else None
        if listener is not None and self._listener is None:
            listener.close()

    @property
    def alive(self) -> list[str]:
        self.reap()
        return list(self._running)

    @property
    def output(self) -> str:
        return "".join(
            f"[{path.stem}] {line}\n"
            for path in sorted(self.directory.glob("*.log"))
            for line in path.read_text().splitlines()
        )

    def reap(self) -> None:
        """Note who has ended, and tell the others, as launch.py does."""
        for name, pid in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[name]
                self.codes[name] = os.waitstatus_to_exitcode(status)
                if self.codes[name] and self._running:
                    self._lost(name, f"ended with {self.codes[name]}")
        self._tell_again()

    def pid(self, name: str) -> int | None:
        return self._running.get(name)

    def _lost(self, name: str, how: str) -> None:
        """Tell the others, and start it again if it is one of those."""
        role, _, rank = name.partition(" ")
        may = role in RESTARTED if self._replicas else False
        # Not only who was killed: a newcomer ends itself, too, if its sponsor is killed before it has let it in.
        may = may or (self._returning and role == "worker" and self.codes[name] != WRONG_EXIT)
        again = may and any(other.startswith("worker") for other in self._running)
        report = self._env[name], role, int(rank), how, self.starts[name], not again
        if role != "scheduler" and not tell(*report):
            self._untold.append(report)
        if again:
            self.codes.pop(name)
            self._env[name] |= {"KVSTORE_LOST": f"{how.replace(' ', '-')} {time.monotonic()}"}
            self._fork(name, self._listener)

    def _tell_again(self) -> None:
        """Tell what has not been heard: the scheduler may have been dead then."""
        if self._untold and any(other.startswith("worker") for other in self._running):
            self._untold = [report for report in self._untold if not tell(*report)]

    def wait(self, seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.alive

    def send(self, name: str, number: int) -> None:
        if name in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running[name], number)

    def move(self, name: str) -> None:
        raise NotImplementedError("launch.py moves servers: --launch")

    def cut(self, name: str, which: int) -> None:
        if name in self._running:
            cut(self._running[name], which, unix=self._plan.kind in ("unix", "shm"))

    def end(self) -> None:
        for name in self.alive:
            self.send(name, signal.SIGKILL)
        self.wait(10.0)

    def _environment(self, name: str, listener: socket.socket | None) -> dict[str, str]:
        role, _, rank = name.partition(" ")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        env |= HEARTBEAT | {"DMLC_ROLE": role, "DMLC_TASK_ID": rank, "KVSTORE_JOB": f"faults-{os.getpid()}"}
        env |= {"DMLC_NUM_WORKER": f"{self._plan.workers}", "DMLC_NUM_SERVER": f"{self._plan.servers}"}
        env["KVSTORE_SHM"] = "1" if self._plan.kind == "shm" else "0"
        env["KVSTORE_REPLICAS"], env["KVSTORE_MIN_WORKERS"] = f"{self._replicas}", f"{self._least}"
        if self._replicas and role == "scheduler":
            env["KVSTORE_SCHEDULER_LOG"] = f"{self.directory}/scheduler.journal"
        if listener is None:
            return env | {"DMLC_PS_ROOT_URI": f"ipc://{self.directory}/scheduler"}
        host, port = listener.getsockname()
        env |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": f"{port}", "KVSTORE_TRANSPORT": "tcp"}
        return env | ({"KVSTORE_ROOT_FD": f"{listener.fileno()}"} if role == "scheduler" else {})

    def _fork(self, name: str, listener: socket.socket | None) -> None:
        self.starts[name] += 1
        pid = os.fork()
        if pid:
            self._running[name] = pid
            return
        code = 1
        try:
            log = os.open(self.directory / f"{name.replace(' ', '-')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.clear()
            os.environ.update(self._env[name] | {"KVSTORE_START": f"{self.starts[name]}"})
            if listener is not None and name != "scheduler 0":
                listener.close()
            code = _exit_code(self._work if name.startswith("worker") else serve)
        finally:
            os._exit(code)

    def _work(self) -> int:
        if self._work_of is not None:
            self._work_of()
        else:
            Training(self._plan, lambda text: print(text, flush=True)).run()
        return 0


def _exit_code(main: Callable[[], int]) -> int:
    """What a fork ends with: it must not go back to where it was made."""
    try:
        code = main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException as exc:
        traceback.print_exc()
        sys.last_value = exc
        code = WRONG_EXIT if isinstance(exc, Wrong) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@contextlib.contextmanager
def running(
    plan: Plan,
    work: Callable[[Path], object] | None = None,
    replicas: int = 0,
    least: int = 0,
    returning: bool = False,
) -> Iterator[Processes]:
    """The processes of a plan, see ``Processes``; none of them is left afterwards."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first one imports much more of torch, so that forks have that, too
    directory = Path(tempfile.mkdtemp(prefix="faults-"))  # not a TemporaryDirectory: forks would remove it at their end
    try:
        made = Processes(
            plan, directory, None if work is None else partial(work, directory), replicas, least, returning
        )
        try:
            yield made
        finally:
            made.end()
    finally:
        shutil.rmtree(directory)
