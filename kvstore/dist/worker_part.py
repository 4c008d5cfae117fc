"""What one worker adds to the checkpoints: the state of what is attached, and the residuals of its compression."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kvstore.checkpoint.stateful import packed
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.dist.trained import TrainedStore
from kvstore.values import to_buffer

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object with state, as torch's modules, optimizers and schedulers are."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take the state."""
        ...


class WorkerPart:
    """See the module.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._attached: dict[str, tuple[Stateful, bool]] = {}
        self._writer: threading.Thread | None = None

    def attach(self, name: str, thing: Stateful, shared: bool) -> None:
        """Add ``thing`` to later checkpoints; if ``shared``, at worker 0 alone."""
        self._attached[name] = thing, shared

    @property
    def has_shared(self) -> bool:
        """Whether something is attached that all workers share."""
        return any(shared for _, shared in self._attached.values())

    def has_own(self, stores: Sequence[TrainedStore]) -> bool:
        """Return whether there is anything to write."""
        return bool(self._attached_here()) or any(store.compresses for store in stores)

    def write(self, folder: Path, number: int, stores: Sequence[TrainedStore], shared_only: bool = False) -> None:
        """Copy what this worker adds to checkpoint ``number``, and write it in a thread.

        Raises:
            UsageError: a state has something that cannot be saved.
        """
        tensors, text = packed(self._own(stores, shared_only))
        self.join()
        args = folder / f"worker-{self._rank}.safetensors", tensors, text
        self._writer = threading.Thread(target=_write_part, args=args, name=f"kvstore-checkpoint-{number}", daemon=True)
        self._writer.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until what was last begun is written, or has failed."""
        if self._writer is not None:
            self._writer.join(timeout)

    def _attached_here(self) -> Mapping[str, Stateful]:
        """Return what this worker saves: what is shared, worker 0 alone."""
        return {name: thing for name, (thing, shared) in self._attached.items() if self._rank == 0 or not shared}

    def _own(self, stores: Sequence[TrainedStore], shared_only: bool) -> dict[str, Any]:
        """Return what this worker adds, by name."""
        own = {
            name: thing.state_dict()
            for name, thing in self._attached_here().items()
            if not shared_only or self._attached[name][1]
        }
        if not shared_only:
            own |= {store.residuals_name: store.residuals() for store in stores if store.compresses}
        return own


def _write_part(path: Path, tensors: Mapping[str, torch.Tensor], text: str) -> None:
    headers = [TensorHeader.of(name, value) for name, value in tensors.items()]
    try:
        write_tensors(path, headers, (to_buffer(value) for value in tensors.values()), {"state": text})
    except OSError as exc:
        log.error("%s: this worker's part of the checkpoint failed: %s", path, exc.strerror)
