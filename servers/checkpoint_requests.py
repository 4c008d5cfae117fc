"""What worker 0 asks a server for a checkpoint: to capture its segments, and to say when they are in a file. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore import wire
from kvstore.errors import CheckpointError, UsageError
from kvstore.manifests import FileRecord
from servers.requests.captured import CaptureDesk
from servers.requests.replies import Answer
from servers.store.capture import CaptureMemory, StoreCapture
from servers.store.served_stores import ServedStores


class CheckpointRequests:
    """The captures of one server.

    Args:
        rank: of the server, for messages.
        stores: of the server.

    Attributes:
        save: writes a capture to its file, then has ``saved`` called; None if this server has no place for checkpoints.
        memory: what captures are copied to.
    """

    def __init__(self, rank: int, stores: ServedStores) -> None:
        self.save: Callable[[StoreCapture], None] | None = None
        self.memory = CaptureMemory()
        self._rank = rank
        self._stores = stores
        self._captures = CaptureDesk[StoreCapture]()

    @property
    def nbytes(self) -> int:
        """How many bytes a checkpoint of all stores copies."""
        return sum(served.captures.nbytes for served in self._stores.open.values())

    def serve(self, peer: bytes, message: wire.Capture | wire.AwaitCapture) -> list[Answer]:
        """Begin a capture, or let worker 0 wait for its file; return the answers that need not wait.

        Raises:
            UsageError: it comes from another worker, or names what cannot be captured.
            CheckpointError: this server has no directory for checkpoints.
        """
        if message.node.rank != 0 or message.node.role != "worker":
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        if isinstance(message, wire.AwaitCapture):
            return self._captures.wait(peer, message)
        served = self._stores.require(message.store)
        if self.save is None:
            raise CheckpointError(
                f"server {self._rank} has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all processes "
                "of the job (launch.py --checkpoint-dir)"
            )
        self._captures.begin(message.store, message.number)
        try:
            clocks = dict(zip(message.ids, message.clocks, strict=True))
            served.captures.begin(message.store, message.number, clocks, self.save, self.memory)
        except BaseException:
            self._captures.forget(message.store, message.number)
            raise
        return [Answer(peer, message, wire.Ack(message.seq))]

    def saved(self, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> list[Answer]:
        """Note that ``capture`` has been written to ``path``, or why not; return the answers to who waits for that."""
        if capture.store in self._stores.open:
            self._stores.open[capture.store].captures.end(capture)
        if isinstance(outcome, CheckpointError):
            return self._captures.ended(capture.store, capture.number, outcome)
        clocks = [capture.clocks[number] for number in capture.ids]
        captured = wire.Captured(0, outcome.nbytes, outcome.sha256, clocks, capture.optimizer, str(path))
        return self._captures.ended(capture.store, capture.number, captured)

    def explain(self, node: wire.Node, about: int) -> str:
        """Say what request ``about`` of ``node`` waits for; empty if it waits for no file."""
        return self._captures.explain(node, about)
