"""A member with a shard: what its thread has written is reported in the loop, as an answer."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from threaded import ThreadedJob

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.job.config import Config
from kvstore.member.session import Session
from kvstore.transport import Transport
from kvstore.values import to_buffer
from servers.member import Surroundings
from servers.requests.replies import Outbox
from servers.server import Server


class Noting(Server):
    """Notes the answers that no message has asked for at that moment."""

    noted: list[Outbox]

    def _answer(self, outbox: Outbox) -> Outbox:
        self.noted.append(outbox)
        return super()._answer(outbox)


def test_a_file_is_written_beside_the_loop_and_reported_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Noting.noted = []

    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        config = dataclasses.replace(config, checkpoint_dir=str(tmp_path))
        return Noting(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()

    def save(session: Session) -> wire.Captured:
        (server,) = session.servers
        value = to_buffer(torch.arange(4.0))
        session.client.call(server, "opening", wire.Open, store=0, mode="sync", staleness=None)
        first = {"ids": [3], "keys": ["w"], "kinds": [0], "shapes": [[4]], "dtype": "float32"}
        session.client.call(server, "init", wire.Init, store=0, buffers=wire.pack_arrays([value]), **first)
        session.client.call(server, "capture", wire.Capture, store=0, number=5, ids=[3], clocks=[0])
        reply = session.client.call(server, "waiting", wire.AwaitCapture, store=0, number=5)
        assert isinstance(reply, wire.Captured)
        return reply

    monkeypatch.setattr("threaded.run_server", run)
    folder = begin(tmp_path, 5)
    with ThreadedJob(1, 1) as job:
        (reply,) = job.run_sessions(save)
    assert Path(reply.path) == folder / "store-0.server-0.safetensors"
    assert Path(reply.path).stat().st_size == reply.nbytes
    assert len(Noting.noted) == 1
