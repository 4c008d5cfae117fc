"""Buffers that are no ordinary arrays of floats. Each seed has others; the sparse ones then store other positions."""

from __future__ import annotations

import warnings

import torch


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(4, 6, generator=generator)
    few = dense * (dense > 0.2 * seed)
    channels = torch.full((4,), 0.1 + seed), torch.full((4,), 3 + seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that quantized and compressed sparse tensors may change
        return {
            "float8": dense.to(torch.float8_e4m3fn),
            "bool": dense > 0,
            "uint16": (dense * 100).abs().to(torch.uint16),
            "conjugated": torch.randn(3, generator=generator, dtype=torch.complex64).conj(),
            "expanded": dense[:1].clone().expand(3, 6),
            "expanded scalar": torch.tensor(1.5 + seed).expand(2, 2),
            "channels last": torch.randn(1, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
            "coo": few.to_sparse(),
            "coo, not coalesced": torch.sparse_coo_tensor(
                torch.tensor([[0, 0, seed]]), torch.ones(3), (9,), is_coalesced=False
            ),
            "coo of complex": few.to(torch.complex64).to_sparse(),
            "csr": few.to_sparse_csr(),
            "csc": few.to_sparse_csc(),
            "bsr": few.to_sparse_bsr((2, 3)),
            "bsc": few.to_sparse_bsc((2, 3)),
            "quantized": torch.quantize_per_tensor(dense, 0.1 + seed, 3 + seed, torch.qint8),
            "quantized by channel": torch.quantize_per_channel(dense, *channels, 0, torch.quint8),
        }
