"""The random numbers that a program draws without saying from where: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of a Mersenne Twister, which all three are on the CPU


def state(devices: Iterable[torch.device]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of all generators, those of CUDA ``devices`` included: tensors, and what is fit for JSON."""
    tensors = {"torch": torch.get_rng_state()}
    for number, device in enumerate(devices):
        if device.type == "cuda":
            tensors[f"cuda.{number}"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    return tensors, {"python": [version, list(words), gauss], "numpy": _plain(np.random.get_state(legacy=False))}


def require(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Look closely at what ``load`` is to take: neither numpy nor torch keeps a wrong one from reading past its memory.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, RuntimeError: they are no states of these generators.
    """
    torch.Generator().set_state(tensors["torch"])
    left, _, place = struct.unpack_from("=iiQ", tensors["torch"].numpy().tobytes(), 8)  # behind the seed
    if left + place != _WORDS + 1 and (left, place) != (1, 0):  # the other is a seed from which nothing was drawn
        raise ValueError(f"torch's generator is at word {place}, and {left} are left")
    for number, device in enumerate(devices):
        if device.type == "cuda" and f"cuda.{number}" in tensors:
            torch.Generator(device).set_state(tensors[f"cuda.{number}"])
    version, words, gauss = plain["python"]
    random.Random(0).setstate((version, tuple(words), gauss))  # noqa: S311 - only looks at it
    if not isinstance(gauss, float | None):
        raise TypeError("Python's next number is none")
    _require_numpy(**plain["numpy"])


def load(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Take what ``state`` returned, for the same devices; if it comes from a file, ``require`` has looked at it."""
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
        raise ValueError("numpy's generator is no Mersenne Twister")
    if not (_within(place, _WORDS) and _within(has_gauss, 1) and isinstance(gauss, float)):
        raise ValueError(f"numpy's generator cannot be at word {place!r:.20}")


def _within(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _plain(value: Any) -> Any:
    """``value`` with lists and numbers of Python in the place of numpy's."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
