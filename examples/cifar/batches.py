"""One worker's part of a data set, and its random numbers."""

from __future__ import annotations

import numpy as np
from torch import Generator

from cifar.images import Images


def part(images: Images, rank: int, workers: int) -> Images:
    """Return every `workers`-th image, beginning with number `rank`."""
    return images[slice(rank, None, workers)]


def seeded(*seeds: int) -> Generator:
    """Return a random number generator for a tuple of seeds."""
    (state,) = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state))
