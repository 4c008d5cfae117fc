"""What the workers of calls/test_run.py call. It imports little: every worker imports it."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

WAITS = "import signal; signal.pause()"


def in_haste(setattr: Any = setattr, server: str = WAITS) -> None:
    """Let `launcher.run` start a stand-in for the servers, and end jobs sooner."""
    import launcher.calls.run as calls
    from launcher.job.description import Job
    from launcher.kinds import local
    from launcher.supervision.ending import EndingLimits

    limits = EndingLimits(window=0.3, linger=0.1, patience=0.3, blame=0.3)
    setattr(calls, "Job", functools.partial(Job, server_argv=(sys.executable, "-S", "-c", server)))
    setattr(local, "run", functools.partial(local.run, limits=limits))


class Odd(Exception):
    """It cannot be unpickled: it wants two arguments, and keeps one."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Heard(Exception):
    """It makes a file when somebody asks what it is about."""

    def __str__(self) -> str:
        Path(self.args[0]).touch()
        return "first"


class Shy:
    """It cannot be unpickled where it was made."""

    def __reduce__(self) -> Any:
        return _only_in_a_worker, ()


def _only_in_a_worker() -> Shy:
    if "DMLC_ROLE" not in os.environ:
        raise ImportError("no such module here")
    return Shy()


def rank() -> int:
    return int(os.environ["DMLC_TASK_ID"])


def echo(*args: Any, **kwargs: Any) -> Any:
    return rank(), args, kwargs


def surroundings(*names: str) -> Any:
    parent = multiprocessing.parent_process()
    return {
        "env": {name: os.environ.get(name) for name in names},
        "name": multiprocessing.current_process().name,
        "parent": parent is not None and parent.is_alive(),
        "method": multiprocessing.get_start_method(),
    }


def speak() -> None:
    print("one\ntwo")
    print("three", end="", file=sys.stderr)


def shout() -> None:
    while True:
        print("x" * 1000)


def fail(who: int, what: str) -> None:
    if rank() == who:
        raise ValueError("no data", what)
    time.sleep(60)


def fail_in_turn(heard: str) -> None:
    """Worker 1 raises first, but then does not exit; worker 0 raises when that has been noticed, and exits."""
    if rank() == 1:
        threading.Thread(target=_wait_for, args=("/never",)).start()
        raise Heard(heard)
    _wait_for(heard)
    raise RuntimeError("second")


def _wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def leave(code: Any) -> None:
    sys.exit(code)


def fail_at_exit(code: int) -> Any:
    import numpy as np

    atexit.register(os._exit, code)
    return np.zeros(3)


def vanish(code: int) -> None:
    os._exit(code)


def die(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(60)


def kill_server(pid_file: str) -> None:
    _wait_for(pid_file)
    os.kill(int(Path(pid_file).read_text()), signal.SIGKILL)
    time.sleep(60)


def lock() -> Any:
    return {"fine": 1, "threads": [threading.Lock()]}


def sleep(ready: str = "", seconds: float = 600) -> None:
    if ready:
        Path(ready, f"ready-{rank()}").touch()
    time.sleep(seconds)


def put(queue: Any) -> int:
    queue.put(rank())
    return sum(map(len, sys.argv))


def double(array: Any) -> Any:
    array *= 2
    return array


def nest(workers: int) -> Any:
    import launcher

    in_haste()
    return rank(), launcher.run(echo, (rank(),), num_workers=workers, num_servers=1)


def one_by_one() -> Any:
    yield 1


async def later() -> None:
    """Nobody awaits it."""


def train(steps: int) -> Any:
    """Descend along two parameters; with one worker the same as with a local store."""
    import numpy as np

    import kvstore

    name = "dist_sync" if "DMLC_ROLE" in os.environ else "local"
    store = kvstore.create(name)
    store.set_optimizer("sgd", learning_rate=0.125, momentum=0.5)
    weights = [np.arange(4, dtype="f4"), np.ones((2, 3), dtype="f4")]
    store.init(["a", "b"], weights)
    for step in range(steps):
        share = 1.0 / store.num_workers
        store.pushpull(["a", "b"], [(weight - step) * np.float32(share) for weight in weights], out=weights)
    store.barrier()
    return store.num_workers, weights
