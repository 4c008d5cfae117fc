"""``TensorBoard``: a tracker that writes TensorBoard's event files. Needs tensorboardX, the extra ``tensorboard``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore import UsageError

_FLUSH_S = 2
_numbers = itertools.count()
_written: set[Path] = set()  # folders that this process has written to


class TensorBoard:
    """A tracker that writes scalars for TensorBoard (``tensorboard --logdir FOLDER``). It needs tensorboardX.

    Every run of a program adds a file to the folder. If there are some, TensorBoard hides what they have of the first
    step of this run and later ones: a run resumed from a checkpoint makes these steps again. Values are written every
    two seconds, so a kill loses no more.

    Args:
        folder: the folder of a run's files. It is made when needed.

    Raises:
        UsageError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import tensorboardX  # noqa: F401
        except ImportError as exc:
            raise UsageError(
                f"TensorBoard needs tensorboardX: pip install 'torch-kvstore[tensorboard]' ({exc})"
            ) from None
        self._folder = Path(folder).resolve()
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a scalar for each of the ``values`` of ``step``."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write everything, and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        from tensorboardX import SummaryWriter

        resumed = self._folder not in _written and any(self._folder.glob("events.out.tfevents.*"))
        _written.add(self._folder)
        # tensorboardX names a file by the second, and would replace another of the same second.
        suffix = f".{os.getpid()}.{next(_numbers)}"
        return SummaryWriter(
            str(self._folder), purge_step=step if resumed else None, flush_secs=_FLUSH_S, filename_suffix=suffix
        )
