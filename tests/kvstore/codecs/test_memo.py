"""What is kept of a key: where it lies, and the random numbers of its next encoding."""

from __future__ import annotations

import pytest
import torch

from kvstore.codecs.base import Memo


def drawn(memo: Memo, seed: int = 0) -> list[float]:
    return memo.noise(seed).uniform(4).tolist()


def test_random_numbers_follow_from_seed_key_and_step() -> None:
    memo, other = Memo("w", torch.zeros(2)), Memo("w", torch.ones(3))
    assert drawn(memo) == drawn(other), "of what is kept they do not depend"
    other.step += 1
    different = [
        drawn(memo),
        drawn(other),
        drawn(memo, seed=1),
        drawn(Memo("v", torch.zeros(2))),
        drawn(Memo(1, torch.zeros(2))),
    ]
    assert len({tuple(numbers) for numbers in different}) == 5


@pytest.mark.parametrize("kept", [{}, {"velocity": torch.ones(2)}, {"basis": torch.ones(1, 2)}])
def test_all_that_is_kept_is_moved(kept: dict[str, torch.Tensor]) -> None:
    memo = Memo("w", torch.zeros(2), **kept)  # type: ignore[arg-type]
    memo.to(torch.device("meta"))
    assert memo.residual.is_meta
    assert {name for name in ("velocity", "basis") if getattr(memo, name) is not None} == kept.keys()
    assert all(getattr(memo, name).is_meta for name in kept)
