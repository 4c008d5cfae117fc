"""An optimizer beside the formula of its source, which NumPy computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Formula = Callable[[np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]  # weight, gradient, state, step from 1


def require_formula(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    formula: Formula,
    shapes: Sequence[tuple[int, ...]] = ((3, 4), (5,)),
    steps: int = 5,
) -> None:
    """Assert that the optimizer gives what ``formula`` does, for several arrays and steps."""
    random = np.random.RandomState(0)
    arrays = [random.randn(*shape) for shape in shapes]
    states: list[dict[str, Any]] = [{} for _ in arrays]
    params = [torch.from_numpy(array.copy()) for array in arrays]
    optimizer = make(params)
    for step in range(1, steps + 1):
        grads = [random.randn(*shape) for shape in shapes]
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        arrays = [formula(*each, step) for each in zip(arrays, grads, states, strict=True)]
        for param, array in zip(params, arrays, strict=True):
            np.testing.assert_allclose(param.numpy(), array, rtol=1e-9, atol=1e-12)
