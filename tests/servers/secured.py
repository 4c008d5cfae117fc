"""A job over TCP whose members, threads of this process, have keys of their own; and training that goes on in it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from jobkeys import variables
from threaded import ThreadedJob
from waiting import LONG

from kvstore.client import DistStore
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, with_key
from kvstore.transport import Transport
from kvstore.transport.shm.shared_memory import sharing
from kvstore.transport.zeromq import ZmqTransport

MEMBERS = ("scheduler", "server 0", "server 1", "worker 0", "worker 1")


class Member(ZmqTransport):
    """An end that listens over TCP wherever it is told to."""

    def __init__(self, job: SecuredJob, name: str) -> None:
        self._job, self._name = job, name
        super().__init__(job.root_fd if name == "scheduler" else -1, job.keys[name])

    def bind(self, endpoint: str) -> str:
        found = super().bind("tcp://127.0.0.1:0" if endpoint.startswith("inproc") else endpoint)
        self._job.places[self._name] = found
        return found


class SecuredJob(ThreadedJob):
    """A job whose members, threads of this process, have keys of their own and meet over TCP.

    Attributes:
        keys: by name of a member.
        places: where those listen who do.
    """

    def __init__(self, *, shm: bool = False) -> None:
        super().__init__(workers=2, servers=2)
        self._keys = variables(len(MEMBERS))
        self.keys = dict(zip(MEMBERS, map(CurveKeys.from_env, self._keys), strict=True))
        self.places: dict[str, str] = {}
        sock = socket.create_server(("127.0.0.1", 0))
        root = "tcp://{}:{}".format(*sock.getsockname())
        self._options["root"] = with_key(root, self.keys["scheduler"].root)
        self.root_fd = sock.detach()
        self._sharing = Config(job="strangers", shm=shm)

    def ends(self, config: Config) -> Callable[[], Transport]:
        name = config.role if config.role == "scheduler" else f"{config.role} {config.rank_hint}"
        return sharing(lambda: Member(self, name), self._sharing)


def train(stop: Callable[[], bool]) -> Callable[[DistStore], tuple[int, list[float]]]:
    """Work for a worker: rounds until ``stop``, each with the result that it must have."""

    def work(store: DistStore) -> tuple[int, list[float]]:
        out = torch.zeros(3000)
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(3000))
        steps = 0
        while True:
            # All workers must do the same number of rounds, so that nobody waits for one that has stopped.
            store.pushpull("w", torch.full((3000,), float(store.rank + 1)), out)
            steps += 1
            assert set(out.tolist()) == {-3.0 * steps}
            ended = torch.zeros(1)
            store.init(f"end {steps}", torch.zeros(1))
            store.pushpull(f"end {steps}", torch.tensor([float(stop())]), ended)
            if ended.item() != 0:
                return steps, out.tolist()

    return work


class Training:
    """Goes on in threads while the block runs, and is right at its end."""

    def __init__(self, job: SecuredJob) -> None:
        self._stop = threading.Event()
        self._results: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(job,))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "it hangs"
        assert not [result for result in self._results if isinstance(result, BaseException)]
        (one, first), (other, second) = self._results
        assert one == other > 0
        assert first == second

    def _run(self, job: SecuredJob) -> None:
        try:
            self._results += job.run(train(self._stop.is_set))
        except BaseException as exc:
            self._results.append(exc)
