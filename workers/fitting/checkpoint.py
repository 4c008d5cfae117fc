"""Checkpoints: all that a training needs to go on as if it had not stopped, in files that need no pickle.

Of ``Checkpoint("model", 3)``, after three epochs, or ``Checkpoint("model", 3, 100)``, after 100 batches more:

    model-0003.safetensors     weights and buffers, by rank 0        model-0003-000100.safetensors
    model-0003.states          the optimizer's states, by rank 0     model-0003-000100.states
    model-0003.states.1        what worker 1's compression lacks, where there is any
    model-0003.worker.1        worker 1's random numbers, position in the data, own buffers, and callbacks

Every file is written beside its place and then put there, the weights or a worker's own file last: who finds these
finds its rank's part whole, and of one run even where there were files of another. To go on, every worker needs rank
0's two files and its own: on several hosts, a folder that they share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvstore import KVStoreError, Mismatch, UsageError
from kvstore.job.files import replacing
from kvstore.optim.states_file import read_residuals

WEIGHTS, WORKER = "workers weights 1", "workers position 1"


class CheckpointError(UsageError):
    """A file of a checkpoint is missing or damaged."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` for what goes wrong in the block with what ``path`` says; the package's errors stay."""
    try:
        yield
    except KVStoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{path}: damaged, or made for something else: {type(exc).__name__}: {exc}") from exc


def require_fields(path: Path, about: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise ``CheckpointError`` unless ``about``, read from ``path``, has fields of these kinds, and counts from 0."""
    for name, kind in kinds.items():
        value = about.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise CheckpointError(f"{path}: damaged: its {name} is no {kind.__name__} that was written there")


class States(Protocol):
    """What is needed of ``Trainer``: its optimizer's states, to a file and back."""

    def save_states(self, path: Path) -> None:
        """Write them."""

    def load_states(self, path: Path) -> None:
        """Read them."""


@dataclass(frozen=True)
class Checkpoint:
    """The files of one moment of a training.

    Attributes:
        prefix: what their names begin with; folders in it are made when they are needed.
        epoch: how many epochs are done, so that the first checkpoint has number 1, as in MXNet.
        batch: how many batches of the next epoch are done.
    """

    prefix: str
    epoch: int
    batch: int = 0

    @property
    def weights(self) -> Path:
        """The file of the weights and the buffers, in safetensors' format."""
        return self._path("safetensors")

    def states(self, rank: int = 0) -> Path:
        """The file of the optimizer's states, and of what worker ``rank``'s compression lacks."""
        return self._path("states" if rank == 0 else f"states.{rank}")

    def worker(self, rank: int) -> Path:
        """The file of what worker ``rank`` alone knows."""
        return self._path(f"worker.{rank}")

    def begin(self, rank: int) -> None:
        """Take away a part that was saved before, its last file first: it is saved anew, maybe without states."""
        for path in (self.weights if rank == 0 else self.worker(rank), self.states(rank)):
            path.unlink(missing_ok=True)

    def save_weights(self, model: nn.Module, about: Mapping[str, Any] | None = None) -> None:
        """Write the model's state, and ``about``, which is fit for JSON, as metadata.

        Raises:
            UsageError: the model's state is not tensors only.
        """
        tensors = model.state_dict()
        if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise UsageError(f"a checkpoint holds tensors, but this state of the model is none: {', '.join(odd)}")
        _write(self.weights, tensors, {"format": WEIGHTS, **(about or {})})

    def load_weights(self, model: nn.Module) -> dict[str, Any]:
        """Make the model what it was, before a ``Trainer`` is made of it; returns what was said ``about`` it.

        Raises:
            CheckpointError: there is no whole checkpoint.
            Mismatch: it is another model's.
        """
        tensors, about = _read(self.weights, WEIGHTS)
        there = {name: list(tensor.shape) for name, tensor in tensors.items()}
        here = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in {**here, **there}:
            if there.get(name) != here.get(name):
                said = [f"{shapes[name]}" if name in shapes else "nothing" for shapes in (there, here)]
                raise Mismatch(
                    f"{self.weights}: this is another network's checkpoint: of {name!r} it has {said[0]}, and the "
                    f"model {said[1]}; the model must be made as for the run that saved it"
                )
        model.load_state_dict(tensors)
        return about

    def read_about(self) -> dict[str, Any]:
        """Return what was said ``about`` the weights.

        Raises:
            CheckpointError: there is no whole checkpoint.
        """
        return _read(self.weights, WEIGHTS, names=())[1]

    def save_states(self, trainer: States, rank: int = 0) -> bool:
        """Write the optimizer's states; returns whether there was anything of this worker to keep.

        Rank 0's states are everybody's. Another worker's file only matters for what its compression lacks.
        """
        path = self.states(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_states(path)
        if rank == 0 or read_residuals(path) is not None:
            return True
        path.unlink()
        return False

    def load_states(self, trainer: States, rank: int = 0) -> None:
        """Make the trainer's optimizer remember what it did; every worker calls it.

        Raises:
            CheckpointError: the file is missing.
            UsageError: it is damaged, or another optimizer's.
        """
        path = self.states(rank) if self.states(rank).exists() else self.states()
        if not path.exists():
            raise CheckpointError(f"{path}: missing; the optimizer cannot go on where it was")
        trainer.load_states(path)

    def save_worker(self, rank: int, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Write what worker ``rank`` alone knows: tensors, and what is fit for JSON.

        Raises:
            UsageError: something is not.
        """
        _write(self.worker(rank), tensors, {"format": WORKER, **about})

    def load_worker(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what ``save_worker`` wrote.

        Raises:
            CheckpointError: there is no whole file.
        """
        return _read(self.worker(rank), WORKER)

    def _path(self, suffix: str) -> Path:
        batch = f"-{self.batch:06d}" if self.batch else ""
        return Path(f"{self.prefix}-{self.epoch:04d}{batch}.{suffix}")


def _write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(about)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{path}: what a checkpoint says must be fit for JSON: {exc}") from exc
    # Clones, because tied weights share memory, which safetensors refuses.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        save_file(copies, part, {"about": text})


def _read(
    path: Path, wanted: str, names: Iterable[str] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with reading(path), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
            about = json.loads((file.metadata() or {}).get("about", "{}"))
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: there is no whole checkpoint: {exc}") from exc
    if not isinstance(about, dict) or about.pop("format", None) != wanted:
        raise CheckpointError(f"{path}: this is not a file that Checkpoint wrote")
    return tensors, about
