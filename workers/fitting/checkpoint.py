"""Checkpoints: everything that a training needs to continue as if it had not stopped, in files without pickle.

The files of ``Checkpoint("model", 3)``, after three epochs, and of ``Checkpoint("model", 3, 100)``, 100 batches later:

    model-0003.safetensors     weights and buffers, by rank 0        model-0003-000100.safetensors
    model-0003.states          the optimizer's states, by rank 0     model-0003-000100.states
    model-0003.states.1        the residuals of worker 1's compression, if there is any
    model-0003.worker.1        worker 1's random numbers, position in the data, own buffers, and callbacks
    model-0003.inner.1         with DiLoCo, worker 1's own optimizer's states

Every file is written to a temporary file and then renamed. A rank's last file is the weights or its worker file: if
that exists, the rank's part is whole, and from one run even if files of another run were there. To continue, every
worker needs rank 0's two files and its own. On several hosts that takes a shared folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvstore import CheckpointError, KVStoreError, Mismatch, UsageError
from kvstore.checkpoint.tensors import require_names
from kvstore.job.files import foreign_format, replacing, require_plain
from kvstore.optim.states_file import read_residuals
from workers.common.tensors import PLAIN, is_dense, is_expanded, overwrite, pack, unpack
from workers.embedding.modules import TableModule, tables_left_out

WEIGHTS, WORKER = "workers weights 1", "workers position 1"
HELD = PLAIN | {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}  # by safetensors


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the block into a ``CheckpointError`` that names ``path``; errors of this package pass through."""
    try:
        yield
    except KVStoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{path}: damaged, or made for another run: {type(exc).__name__}: {exc}") from exc


def require_fields(path: Path, about: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise ``CheckpointError`` unless ``about``, from ``path``, has fields of these types; integers at least 0."""
    for name, kind in kinds.items():
        value = about.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise CheckpointError(f"{path}: damaged: its {name} is {value!r:.40}, not a valid {kind.__name__}")


class HasStates(Protocol):
    """What a checkpoint needs of a ``Trainer``: its optimizer's states, to a file and back."""

    def save_states(self, path: Path) -> None: ...

    def load_states(self, path: Path) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """The files of one moment of a training.

    Attributes:
        prefix: the beginning of the files' names. Folders in it are made when needed.
        epoch: the number of finished epochs. So the first checkpoint has number 1, as in MXNet.
        batch: the number of finished batches of the next epoch.
    """

    prefix: str
    epoch: int
    batch: int = 0

    @property
    def weights(self) -> Path:
        """The file of the weights and buffers, in the safetensors format."""
        return self._path("safetensors")

    def states(self, rank: int = 0) -> Path:
        """The file of the optimizer's states, and of the residuals of worker ``rank``'s compression."""
        return self._path("states" if rank == 0 else f"states.{rank}")

    def worker(self, rank: int) -> Path:
        """The file of worker ``rank``'s own state."""
        return self._path(f"worker.{rank}")

    def inner(self, rank: int) -> Path:
        """The file of the states of worker ``rank``'s own optimizer, which there is with DiLoCo."""
        return self._path(f"inner.{rank}")

    def begin(self, rank: int) -> None:
        """Remove ``rank``'s part of an earlier save, its last file first, before saving again."""
        for path in (self.weights if rank == 0 else self.worker(rank), self.states(rank), self.inner(rank)):
            path.unlink(missing_ok=True)

    def remove(self, rank: int) -> None:
        """Remove ``rank``'s part, as far as that is possible, its last file first."""
        own = [self.worker(rank), self.states(rank), self.inner(rank)]
        for path in [self.weights, *own] if rank == 0 else own:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def save_weights(self, model: nn.Module, about: Mapping[str, Any] | None = None) -> None:
        """Write the state of ``model``, with ``about`` (JSON) as metadata.

        Raises:
            UsageError: the model's state has other values than tensors.
        """
        tensors = model.state_dict()
        if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise UsageError(f"a checkpoint holds tensors only, but the model's state also has {', '.join(odd)}")
        _write(self.weights, tensors, {"format": WEIGHTS, **(about or {})})

    def load_weights(self, model: nn.Module) -> dict[str, Any]:
        """Load the state of ``model``, before a ``Trainer`` is made for it; return what was saved as ``about``.

        Raises:
            CheckpointError: the file is missing or damaged.
            Mismatch: it belongs to another model.
        """
        tensors, about = _read(self.weights, WEIGHTS)
        tables = {name for name, module in model.named_modules() if isinstance(module, TableModule)}
        saved = {name: list(tensor.shape) for name, tensor in tensors.items() if name.rpartition(".")[0] not in tables}
        with tables_left_out():
            wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in {**wanted, **saved}:
            if saved.get(name) != wanted.get(name):
                said = [f"{shapes[name]}" if name in shapes else "nothing" for shapes in (saved, wanted)]
                raise Mismatch(
                    f"{self.weights}: another network's checkpoint: for {name!r} it has {said[0]}, and the model "
                    f"{said[1]}; make the model as in the run that saved it"
                )
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        # ``load_state_dict`` copies, which only dense tensors take whose elements have places of their own.
        found = {name: own[name] for name in tensors if name in own}
        odd = {name: tensor for name, tensor in found.items() if not is_dense(tensor) or is_expanded(tensor)}
        try:
            model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in odd}, strict=not odd)
        except RuntimeError as exc:  # a table's rows are others
            raise Mismatch(f"{self.weights}: another network's checkpoint: {exc}") from None
        for name, tensor in odd.items():
            overwrite(tensor, tensors[name].to(tensor.device))
        return about

    def read_about(self) -> dict[str, Any]:
        """Return what was saved as ``about`` with the weights.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return _read(self.weights, WEIGHTS, names=())[1]

    def save_states(self, trainer: HasStates, rank: int = 0) -> bool:
        """Write the optimizer's states; return whether this worker's file is needed.

        Rank 0's states are the same on all workers. Another worker's file is only needed for residuals of its
        compression.

        Args:
            trainer: a ``Trainer``, or an object that has its ``save_states`` and ``load_states``.
            rank: this worker's rank.
        """
        path = self.states(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_states(path)
        if rank == 0 or read_residuals(path) is not None:
            return True
        path.unlink()
        return False

    def load_states(self, trainer: HasStates, rank: int = 0) -> None:
        """Load the optimizer's states into ``trainer``. Every worker calls this.

        Args:
            trainer: a ``Trainer``, or an object that has its ``save_states`` and ``load_states``.
            rank: this worker's rank.

        Raises:
            CheckpointError: the file is missing.
            UsageError: it is damaged, or belongs to another optimizer.
        """
        path = self.states(rank) if self.states(rank).exists() else self.states()
        if not path.exists():
            raise CheckpointError(f"{path}: missing; without it the optimizer cannot continue")
        trainer.load_states(path)

    def save_worker(self, rank: int, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Write worker ``rank``'s own state: ``tensors``, and ``about`` (JSON).

        Raises:
            UsageError: ``about`` cannot be written as JSON.
        """
        _write(self.worker(rank), tensors, {"format": WORKER, **about})

    def load_worker(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what ``save_worker`` wrote for worker ``rank``.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return _read(self.worker(rank), WORKER)

    def _path(self, suffix: str) -> Path:
        batch = f"-{self.batch:06d}" if self.batch else ""
        return Path(f"{self.prefix}-{self.epoch:04d}{batch}.{suffix}")


def _write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    tensors, forms = pack(tensors, HELD)
    if forms:
        about = {**about, "forms": forms}
    try:
        text = json.dumps(about)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{path}: the metadata of a checkpoint must be valid as JSON: {exc}") from exc
    require_names(f"{path} is not written", ((name, f"tensor {name!r}") for name in tensors))
    # Copies, because tied weights share memory, which safetensors refuses.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        save_file(copies, part, {"about": text})


def _read(
    path: Path, wanted: str, names: Iterable[str] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        require_plain(path)
        with reading(path), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
            about = json.loads((file.metadata() or {}).get("about", "{}"))
    except (OSError, SafetensorError) as exc:
        for there in (path, path.with_suffix(".params")):  # MXNet's weights of the same prefix and epoch
            if (other := foreign_format(there)) is not None:
                raise CheckpointError(f"{path}: {'' if path.exists() else 'missing; '}{there.name} is {other}") from exc
        raise CheckpointError(f"{path}: missing or damaged: {exc}") from exc
    if not isinstance(about, dict) or about.pop("format", None) != wanted:
        raise CheckpointError(f"{path}: not a file that Checkpoint wrote")
    forms = about.pop("forms", {})
    if names is None and isinstance(forms, dict):
        with reading(path):
            tensors = unpack(tensors, forms)
    return tensors, about
