"""The server as a process: the core, its loop, and a thread that writes what the core captures. It brings torch."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore import wire
from kvstore.errors import CheckpointError, KVStoreError
from kvstore.sealed_folders import FileRecord
from servers.activity import ServedActivity
from servers.member import ServingMember, Surroundings
from servers.reading.pace import IdleCores, ReaderPace
from servers.requests.replies import Outbox
from servers.saving import Saver
from servers.service import Handle
from servers.shard import Shard
from servers.store.capture import StoreCapture
from servers.store.recording import Recorder

log = logging.getLogger(__name__)

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def injecting(
    handle: Handle,
    faults: list[tuple[str, int]],
    rounds: Callable[[], int],
    send: Callable[[int], None] = lambda signum: os.kill(os.getpid(), signum),
) -> Handle:
    """Return ``handle`` with faults for drills (`launch.py --inject`); itself if there are none.

    Only the server knows its rounds, so only it can do this at the worst moment: the round is over, and nobody knows
    yet. ``faults`` are actions of ``SIGNALS``, each with its round, by rounds. Those that have come are removed.
    """
    if not faults:
        return handle

    def handle_and_fail(peer: bytes, message: wire.Message) -> Outbox:
        outbox = handle(peer, message)
        while faults and rounds() >= faults[0][1]:
            send(SIGNALS[faults.pop(0)[0]])
        return outbox

    return handle_and_fail


class ShardMember(ServingMember):
    """A member that has a shard: a server, or a server or standby with a partner."""

    def __init__(
        self,
        around: Surroundings,
        recorder: Recorder | None = None,
        on_line_back: Callable[[], Outbox] | None = None,
    ) -> None:
        super().__init__(around, on_line_back)
        config, clock = around.config, around.clock
        self._faults = list(config.inject) if config.start == 1 else []
        self._shard = Shard(
            self._session.rank,
            self._session.num_workers,
            self._transport,
            self._transport,
            self._session.worker_keys,
            self._session.aggregated,
            self._session.aggregator_keys,
            recorder=recorder,
            readers=config.readers,
            reader_key="" if config.keys is None else config.keys.reader,
            min_workers=config.min_workers,
            max_workers=config.max_workers,
        )
        self._session.when_traced(self._shard.trace)
        self._pace = (
            None
            if self._shard.reading is None
            else ReaderPace(self._shard.reading, config.reader_share, clock, time.thread_time, IdleCores(clock))
        )
        self._saver: Saver | None = None
        self._prepared = False
        if config.checkpoint_dir:
            memory, directory = self._shard.checkpoints.memory, Path(config.checkpoint_dir)
            self._saver = Saver(memory, directory, self._session.rank, self._saved, around.thread)
            self._shard.checkpoints.save = self._saver.save

    def _handling(self, handle: Handle) -> Handle:
        self._service.timed = self._shard.times
        self._service.grown = self._shard.grown
        return injecting(handle, self._faults, lambda: self._shard.rounds)

    def _leave(self, error: str | None) -> None:
        if error is None and self._session.client.failure is None:
            for (
                action,
                number,
            ) in self._faults:  # a drill that has tested nothing must not look like one that was passed
                log.warning(
                    "--inject: no %s at round %d: there were %d rounds in this job, without those before --resume",
                    *(action, number, self._shard.rounds),
                )
        super()._leave(error)

    def _answer(self, outbox: Outbox) -> Outbox:
        """Return what may be sent now of answers that no message has asked for at this moment."""
        return outbox

    def _activity(self) -> ServedActivity:
        return self._shard.activity(self._clock())

    def _prepare(self) -> None:
        """Once there are values and states, have memory for a checkpoint. Call it now and then."""
        if self._saver is not None and not self._prepared and self._shard.rounds:
            self._prepared = True
            self._saver.prepare(self._shard.checkpoints.nbytes)

    def _saved(self, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> None:
        with suppress(KVStoreError, OSError):  # the server may have ended meanwhile
            self._service.post(lambda: self._answer(self._shard.saved(capture, path, outcome)))


class Server(ShardMember):
    """A server without a standby: it serves its shard until the workers are done or the job has failed."""

    def _serve(self) -> None:
        self._service.run(self._handling(self._shard.handle), self._tick, self._shard.due, between=self._pace)

    def _notice(self, notice: wire.Message) -> Outbox:
        return self._shard.depart(*notice.told) if isinstance(notice, wire.Roster) else []

    def _tick(self) -> Outbox:
        self._failed()
        self._report()
        self._prepare()
        return self._shard.tick(self._clock())
