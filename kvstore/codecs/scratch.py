"""Memory to work in, one buffer for a thread and a purpose: fresh memory costs more than most operations on it."""

from __future__ import annotations

import threading

import torch

_KEPT = 1 << 18  # elements; more is not kept between calls

_mine = threading.local()


def scratch(name: str, like: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Return a flat, uninitialized float32 tensor on the device of ``like``.

    It belongs to the caller until the same thread asks for the same ``name`` again.

    Args:
        name: the purpose.
        like: gives the device, and the size by default.
        size: how many elements.
    """
    size = like.numel() if size is None else size
    if not like.is_cpu or size > _KEPT:  # CUDA's allocator keeps memory itself
        return torch.empty(size, dtype=torch.float32, device=like.device)
    kept: dict[str, torch.Tensor] = _mine.__dict__
    room = kept.get(name)
    if room is None or room.numel() < size:
        room = kept[name] = torch.empty(size, dtype=torch.float32, device="cpu")
    return room if room.numel() == size else room[:size]
