"""Copies between devices and host memory, which the wire reads and writes; pinned where a GPU is the other end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.values.addresses import Column
from kvstore.values.lists import Arrays


class Leaving:
    """Arrays on their way to the host: copies from CUDA devices go on while the first arrays are being sent.

    Args:
        values: contiguous tensors; on the CPU they are what they are.
    """

    def __init__(self, values: Arrays | Sequence[torch.Tensor]) -> None:
        self._events: dict[int, torch.cuda.Event] = {}
        self._arrays = values if isinstance(values, Arrays) else Arrays.of(self._begin(values))

    def _begin(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on the host; copies of those on devices are under way."""
        on_host = list(tensors)
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for position, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                continue
            stream = streams.get(tensor.device)
            if stream is None:
                stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                on_host[position] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                on_host[position].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                self._events[position] = stream.record_event()
        return on_host

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All arrays, of which some may not be complete."""
        return self._arrays.tensors

    def arrived(self, positions: Column) -> Arrays:
        """Return all arrays, of which those at ``positions`` are complete."""
        if self._events:
            for position in positions.tolist():
                event = self._events.get(position)
                if event is not None:
                    event.synchronize()
                    self._events.pop(position, None)  # not before: an exception may have ended the wait
        return self._arrays


def from_host(flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> set[torch.cuda.Stream]:
    """Write ``flat``, a host tensor, into each of ``outs``, which have its size and dtype and any device or strides.

    Returns:
        The CUDA streams on which copies are still under way.
    """
    pinned: torch.Tensor | None = None
    for out in outs:
        if out.is_cuda:
            pinned = flat.pin_memory() if pinned is None else pinned
            out.copy_(pinned.view(out.shape), non_blocking=True)
        else:
            out.copy_(flat.view(out.shape))
    return {torch.cuda.current_stream(out.device) for out in outs if out.is_cuda}
