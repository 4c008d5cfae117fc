"""Arrays of all kinds: of numpy and torch, laid out in many ways, and of some other library."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Foreign:
    """DLPack, and nothing else; of version 0 if ``old``."""

    def __init__(self, tensor: torch.Tensor | np.ndarray[Any, Any], old: bool = False) -> None:
        self.tensor = tensor
        self.old = old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("no options here")
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


# ---- what makes an array of one kind, with the values of another array


def plain(array: np.ndarray[Any, Any]) -> Any:
    return array.copy()


def read_only(array: np.ndarray[Any, Any]) -> Any:
    made = array.copy()
    made.flags.writeable = False
    return made


def strided(array: np.ndarray[Any, Any]) -> Any:
    return np.stack([array, array], axis=-1)[..., 1]


def swapped(array: np.ndarray[Any, Any]) -> Any:
    return array.astype(array.dtype.newbyteorder())


def tensor(array: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(array.copy())


def strided_tensor(array: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(np.stack([array, array], axis=-1))[..., 1]


def parameter(array: np.ndarray[Any, Any]) -> Any:
    made = tensor(array)
    return torch.nn.Parameter(made, requires_grad=made.is_floating_point())


def lent(array: np.ndarray[Any, Any]) -> Any:
    return Foreign(array.copy())
