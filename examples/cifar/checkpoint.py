"""Checkpoints: what a network has learned, and what its optimizer remembers, after an epoch."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from cifar.files import replacing


class CheckpointError(Exception):
    """A checkpoint is missing, damaged or of another network."""


class States(Protocol):
    """What is needed of workers.Trainer: its optimizer's states, to a file and back."""

    def save_states(self, path: Path) -> None:
        """Write them."""

    def load_states(self, path: Path) -> None:
        """Read them."""


@dataclass(frozen=True)
class Checkpoint:
    """The two files of one epoch. Epochs are counted from 1 here, as in MXNet."""

    prefix: str
    epoch: int

    @property
    def weights(self) -> Path:
        """Weights and batch-norm statistics, with the arguments of the run, in safetensors' format."""
        return Path(f"{self.prefix}-{self.epoch:04d}.safetensors")

    @property
    def states(self) -> Path:
        """The optimizer's states."""
        return Path(f"{self.prefix}-{self.epoch:04d}.states")

    def save(self, model: nn.Module, trainer: States, args: Namespace) -> None:
        """Write both files; the weights come last, so that whoever finds them finds a whole checkpoint."""
        self.weights.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_states(self.states)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        with replacing(self.weights) as part:
            save_file(tensors, part, {"epoch": str(self.epoch), "arguments": json.dumps(vars(args), default=str)})
        logging.info('Saved checkpoint to "%s"', self.weights)

    def load_weights(self, model: nn.Module) -> None:
        """Make the model what it was; the trainer, which is made after it, gets its states by `load_states`."""
        try:
            with safe_open(self.weights, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                arguments = json.loads((file.metadata() or {}).get("arguments", "{}"))
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{self.weights}: there is no whole checkpoint: {exc}") from exc
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in model.state_dict().items()}:
            made = f"--network {arguments.get('network')} --num-layers {arguments.get('num_layers')}"
            raise CheckpointError(f"{self.weights}: this is another network's checkpoint, made with {made}")
        model.load_state_dict(tensors)

    def load_states(self, trainer: States) -> None:
        """Make the trainer's optimizer remember what it did."""
        if not self.states.exists():
            raise CheckpointError(f"{self.states}: missing; the optimizer cannot go on where it was")
        trainer.load_states(self.states)
