"""Compression between the devices of one process, as MXNet's ``device`` stores have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstore.codecs import Compressor
from kvstore.codecs.described import decode
from kvstore.codecs.options import Compression
from kvstore.errors import Unsupported
from kvstore.spec import Key


class DeviceCompression:
    """What each device pushes is encoded, with a residual of its own, and decoded before it is summed.

    Nothing is sent, so it saves nothing. It is what a job with as many workers would compute, to try a codec with.

    Raises:
        Unsupported: ``compression`` is of what comes back, too.
    """

    def __init__(self, compression: Compression) -> None:
        if compression.pull is not None:
            raise Unsupported("a store in one process sends nothing back: leave out 'pull'")
        self.compression = compression
        self._compressors: list[Compressor] = []  # by position among the values of a key

    def decoded(self, given: Mapping[Key, Sequence[torch.Tensor]]) -> dict[Key, list[torch.Tensor]]:
        """Return what is left of ``given``, by key the value of each device; those of integers as they are.

        Raises:
            UsageError: some values are infinite or NaN in float32; nothing has been encoded.
        """
        most = max(map(len, given.values()), default=0)
        self._compressors += [Compressor(self.compression) for _ in range(most - len(self._compressors))]
        floats = {key: values for key, values in given.items() if values[0].is_floating_point()}
        for key, values in floats.items():
            for compressor, value in zip(self._compressors, values, strict=False):
                compressor.require_finite(key, value)
        return {
            key: [
                self._decoded(compressor, key, value) if key in floats else value
                for compressor, value in zip(self._compressors, values, strict=False)
            ]
            for key, values in given.items()
        }

    def _decoded(self, compressor: Compressor, key: Key, value: torch.Tensor) -> torch.Tensor:
        encoded = compressor.encode(key, value)
        flat = decode(self.compression, encoded.payload(0, encoded.size), value.numel())
        return flat.view(value.shape).to(value.device, value.dtype)
