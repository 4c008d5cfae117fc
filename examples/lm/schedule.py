"""The learning rate over a run: up from nothing, then down along a cosine (Loshchilov and Hutter, arXiv:1608.03983)."""

from __future__ import annotations

import math


def learning_rate(step: int, steps: int, warmup: int, highest: float, lowest: float) -> float:
    """Return the rate of a step, from 0: `highest` at the end of the warm-up, near `lowest` in the last step."""
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
