"""What a compressor keeps of one key between encodings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore.codecs.noise import Noise
from kvstore.spec import Key

RESIDUAL, VELOCITY, STEP = "residual", "velocity", "step"  # what they are called in messages


@dataclass
class Memo:
    """The state of one key.

    Attributes:
        key: which.
        residual: flat float32: the error of the encodings so far.
        step: how many encodings there have been.
        velocity: flat float32: the momentum of the elements that have not been sent; None without momentum.
        basis: the last right factor of PowerSGD, float32 of shape (rank, columns); None before the first.
    """

    key: Key
    residual: torch.Tensor
    step: int = 0
    velocity: torch.Tensor | None = None
    basis: torch.Tensor | None = None

    def noise(self, seed: int) -> Noise:
        """Return the random numbers of this step."""
        return Noise(seed, self.key, self.step)

    def to(self, device: torch.device) -> None:
        """Move the tensors to ``device``."""
        self.residual = self.residual.to(device)
        self.velocity = None if self.velocity is None else self.velocity.to(device)
        self.basis = None if self.basis is None else self.basis.to(device)
