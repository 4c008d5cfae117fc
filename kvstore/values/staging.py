"""Between devices and the host memory that the wire reads and writes; pinned where a GPU is at the other end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Leaving:
    """Tensors on their way to the host: those of CUDA devices come while the first are being sent already.

    Args:
        tensors: contiguous; on the CPU they are what they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._events: dict[int, torch.cuda.Event] = {}
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for position, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                continue
            stream = streams.get(tensor.device)
            if stream is None:
                stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                here.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                self._tensors[position] = here
                self._events[position] = stream.record_event()

    def arrived(self, positions: Iterable[int]) -> Sequence[torch.Tensor]:
        """Return all tensors, of which those at ``positions`` are complete."""
        if self._events:
            for position in positions:
                event = self._events.get(position)
                if event is not None:
                    event.synchronize()
                    self._events.pop(position, None)  # not before: an exception may have ended the wait
        return self._tensors


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
