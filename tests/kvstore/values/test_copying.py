"""Copies between flat tensors, small and large ones."""

from __future__ import annotations

import pytest
import torch

from kvstore.values import spread
from kvstore.values.arrays import LARGE, copy_each

SIZES = {
    "small": [3, 128, 1, 0, 64],
    "large and small": [7, LARGE // 4, 5, LARGE // 2],
    "just below": [LARGE // 4 - 1],
    "none": [],
    "of nothing": [0, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_each_part_goes_into_its_own_target(sizes: list[int], dtype: torch.dtype):
    flat = torch.arange(sum(sizes)).remainder(251).to(dtype)
    memory = torch.zeros(sum(sizes) + len(sizes), dtype=dtype)  # an element between any two, which stays as it is
    targets = [part[:-1] for part in memory.split_with_sizes([size + 1 for size in sizes])]
    spread(flat, sizes, targets)
    assert torch.equal(torch.cat([*targets, flat[:0]]), flat)
    assert not any(part[-1] for part in memory.split_with_sizes([size + 1 for size in sizes]))


@pytest.mark.parametrize("sizes", [SIZES["small"], SIZES["large and small"]], ids=["small", "large"])
def test_autograd_learns_that_a_target_has_changed(sizes: list[int]):
    targets = [torch.zeros(size, requires_grad=True) for size in sizes]
    before = [target._version for target in targets]
    with torch.no_grad():
        spread(torch.ones(sum(sizes)), sizes, [target.view(-1) for target in targets])
    assert all(target._version > version for target, version in zip(targets, before, strict=True) if target.numel())


def test_copies_of_any_size():
    sources = [torch.full((size,), float(size)) for size in (1, 100, LARGE // 4, LARGE)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))
