"""The server as a process: the core and its loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import CheckpointError, KVStoreError
from kvstore.job.config import Config
from kvstore.transport import Transport
from kvstore.wire import Message, Roster
from servers.member import ServingMember
from servers.requests.replies import Outbox

if TYPE_CHECKING:  # these bring torch, which the scheduler does without
    from kvstore.checkpoint.tensors import FileRecord
    from servers.store.capture import StoreCapture


class Server(ServingMember):
    """A member that serves its shard until the workers are done or the job has failed. See ``ServingMember``."""

    def __init__(
        self,
        config: Config,
        make_transport: Callable[[], Transport],
        endpoint: str,
        clock: Callable[[], float],
        thread: Callable[..., threading.Thread],
    ) -> None:
        from servers.saving import Saver  # brings torch, which the scheduler does without
        from servers.shard import Shard

        super().__init__(config, make_transport, endpoint, clock, thread)
        self._shard = Shard(
            self._session.rank,
            self._session.num_workers,
            self._transport,
            self._transport,
            self._session.worker_keys,
            self._session.aggregated,
            self._session.aggregator_keys,
        )
        if config.checkpoint_dir:
            self._saver = Saver(Path(config.checkpoint_dir), self._session.rank, self._saved, thread)
            self._shard.save = self._saver.save

    def _saved(self, capture: StoreCapture, outcome: FileRecord | CheckpointError) -> None:
        with suppress(KVStoreError, OSError):  # the server may have ended meanwhile
            self._service.post(lambda: self._shard.saved(capture, self._saver.path(capture), outcome))

    def _serve(self) -> None:
        self._service.run(self._shard.handle, self._tick)

    def _notice(self, notice: Message) -> Outbox:
        return self._shard.depart(notice.departed) if isinstance(notice, Roster) else []

    def _tick(self) -> Outbox:
        self._failed()
        return []


def run_server(
    config: Config,
    make_transport: Callable[[], Transport],
    endpoint: str,
    clock: Callable[[], float] = time.monotonic,
    thread: Callable[..., threading.Thread] = threading.Thread,
) -> int:
    """Be a server; see ``Server``."""
    return Server(config, make_transport, endpoint, clock, thread).run()
