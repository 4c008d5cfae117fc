"""Between devices and the host memory that the wire reads and writes; pinned where a GPU is at the other end."""

from __future__ import annotations

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat, contiguous copy of ``tensor`` in host memory, complete on return."""
    if tensor.device.type == "cpu":
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype)
        copy.view(tensor.shape).copy_(tensor)
        return copy
    copy = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    copy.view(tensor.shape).copy_(tensor, non_blocking=True)
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def from_host(flat: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """Write ``flat``, a host tensor, into each of ``outs``, which have its size and dtype and any device or strides."""
    for out in outs:
        source = flat.view(out.shape)
        if out.device.type == "cuda":
            out.copy_(source.pin_memory(), non_blocking=True)
        else:
            out.copy_(source)
    for device in {out.device for out in outs if out.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
