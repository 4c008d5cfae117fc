"""What one worker adds to the checkpoints: the state of what is attached, and the residuals of its compression."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from kvstore.checkpoint.folders import part_of, promise_of
from kvstore.checkpoint.stateful import joined, packed
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.client.trained import TrainedStore
from kvstore.errors import CheckpointError, NodeLost, UsageError
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
        self._failed = False  # what the last writer had to write
        self._copied: tuple[dict[str, torch.Tensor], str] | None = None

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

    def copy(self, folder: Path, stores: Sequence[TrainedStore], shared_only: bool = False) -> None:
        """Copy what this worker adds to a checkpoint; ``write`` follows.

        Raises:
            CheckpointError: something cannot be saved; the message names it.
        """
        self._copied = None
        copied = self._own(stores, shared_only)
        try:
            promise_of(folder, self._rank).touch()
        except OSError as exc:
            raise CheckpointError(f"{part_of(folder, self._rank)}: {exc.strerror}") from None
        self._copied = copied

    def write(self, folder: Path, number: int) -> None:
        """Write what was copied, in a thread."""
        if self._copied is None:
            return
        self.join()
        args = folder, *self._copied
        self._copied, self._failed = None, False
        self._writer = threading.Thread(target=self._write, args=args, name=f"kvstore-checkpoint-{number}", daemon=True)
        self._writer.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until what was last begun is written, or has failed; return whether it has not failed."""
        if self._writer is not None:
            self._writer.join(timeout)
        return not self._failed

    def _attached_here(self) -> Mapping[str, Stateful]:
        """Return what this worker saves: what is shared, worker 0 alone."""
        return {name: thing for name, (thing, shared) in self._attached.items() if self._rank == 0 or not shared}

    def _own(self, stores: Sequence[TrainedStore], shared_only: bool) -> tuple[dict[str, torch.Tensor], str]:
        """Return what this worker adds, as tensors and JSON."""
        states = {
            name: (thing.state_dict, f"what is attached as {name!r} cannot be saved")
            for name, thing in self._attached_here().items()
            if not shared_only or self._attached[name][1]
        }
        if not shared_only:
            residuals = "the residuals of the compression cannot be saved"
            states |= {store.residuals_name: (store.residuals, residuals) for store in stores if store.compresses}
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, str] = {}
        for name, (state_dict, failed) in states.items():
            try:
                more, texts[name] = packed(state_dict(), f"{len(texts)}.")
            except NodeLost:
                raise
            except Exception as exc:  # of the program's own classes: whatever it is, training goes on
                why = str(exc) if isinstance(exc, UsageError) else f"{type(exc).__name__}: {exc}"
                log.debug("%s", failed, exc_info=True)
                raise CheckpointError(f"{failed}: {why}") from exc
            tensors |= more
        return tensors, joined(texts)

    def _write(self, folder: Path, tensors: Mapping[str, torch.Tensor], text: str) -> None:
        path = part_of(folder, self._rank)
        try:
            headers = [TensorHeader.of(name, value) for name, value in tensors.items()]
            write_tensors(path, headers, (to_buffer(value) for value in tensors.values()), {"state": text})
        except Exception as exc:
            self._failed = True
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else f"{type(exc).__name__}: {exc}"
            log.error("%s: this worker's part of the checkpoint failed: %s", path, why)
            with suppress(OSError):
                promise_of(folder, self._rank).unlink(missing_ok=True)
