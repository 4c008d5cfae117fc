"""The random numbers that a program draws without saying from where: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


def state(devices: Iterable[torch.device]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of all generators, those of CUDA ``devices`` included: tensors, and what is fit for JSON."""
    tensors = {"torch": torch.get_rng_state()}
    for number, device in enumerate(devices):
        if device.type == "cuda":
            tensors[f"cuda.{number}"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    return tensors, {"python": [version, list(words), gauss], "numpy": _plain(np.random.get_state(legacy=False))}


def load(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Take what ``state`` returned, for the same devices."""
    torch.set_rng_state(tensors["torch"])
    for number, device in enumerate(devices):
        if device.type == "cuda" and f"cuda.{number}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{number}"], device)
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(plain["numpy"])


def _plain(value: Any) -> Any:
    """``value`` with lists and numbers of Python in the place of numpy's."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
