"""The state of the global random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_WORDS = 624  # in the state of a Mersenne Twister; all three are one on the CPU


def state(devices: Iterable[torch.device]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of all generators, CUDA ``devices`` included: tensors, and JSON values."""
    tensors = {"torch": torch.get_rng_state()}
    for number, device in enumerate(devices):
        if device.type == "cuda":
            tensors[f"cuda.{number}"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    return tensors, {"python": [version, list(words), gauss], "numpy": _plain(np.random.get_state(legacy=False))}


def require(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Check states before ``load``: with an invalid one, numpy and torch read past their memory."""
    torch.Generator().set_state(tensors["torch"])
    left, _, place = struct.unpack_from("=iiQ", tensors["torch"].numpy().tobytes(), 8)  # after the seed
    if left + place != _WORDS + 1 and (left, place) != (1, 0):  # (1, 0) is a seed from which nothing was drawn
        raise ValueError(f"torch's generator is at word {place} with {left} left; they must add up to {_WORDS + 1}")
    for number, device in enumerate(devices):
        if device.type == "cuda" and f"cuda.{number}" in tensors:
            torch.Generator(device).set_state(tensors[f"cuda.{number}"])
    version, words, gauss = plain["python"]
    random.Random(0).setstate((version, tuple(words), gauss))  # noqa: S311 - only checks it
    if not isinstance(gauss, float | None):
        raise TypeError(f"Python's next Gaussian number is {gauss!r:.20}, not a float or None")
    _require_numpy(**plain["numpy"])


def load(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Load what ``state`` returned, for the same devices. Check states from files with ``require`` first."""
    torch.set_rng_state(tensors["torch"])
    for number, device in enumerate(devices):
        if device.type == "cuda" and f"cuda.{number}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{number}"], device)
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(plain["numpy"])


def _require_numpy(bit_generator: str, state: Mapping[str, Any], has_gauss: int, gauss: float) -> None:
    words, place = state["key"], state["pos"]
    if bit_generator != "MT19937" or len(words) != _WORDS or not all(_within(word, 2**32 - 1) for word in words):
        raise ValueError("numpy's generator must be a Mersenne Twister with 624 words of 32 bits")
    if not (_within(place, _WORDS) and _within(has_gauss, 1) and isinstance(gauss, float)):
        raise ValueError(f"numpy's generator has an invalid position: {place!r:.20}")


def _within(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _plain(value: Any) -> Any:
    """Return ``value`` with Python lists and numbers in place of numpy's."""
    if isinstance(value, Mapping):
        return {name: _plain(element) for name, element in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
