"""A table that a RowUpdater steps, beside torch's optimizers of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowHyperparameters, RowUpdater


class Stepped:
    """Rows and their states, and an updater of them.

    Args:
        name: of the optimizer.
        first: the rows, which are copied.
        hyper: of the optimizer.
    """

    def __init__(self, name: str, first: torch.Tensor, **hyper: Any) -> None:
        dtype = str(first.dtype).removeprefix("torch.")
        self.updater = RowUpdater(describe(name, hyper), "table", dtype, first.shape[1], grows=False)
        self.weight = first.clone()
        self.count = 0
        self.states = {
            name: torch.full((len(first), state.columns or first.shape[1]), float(state.initial), dtype=first.dtype)
            for name, state in self.updater.states.items()
        }

    def step(self, ids: Sequence[int] | torch.Tensor, grads: torch.Tensor, lr: float | None = None) -> None:
        """Gather rows, make a step, and scatter them."""
        self.count += 1
        ids = torch.as_tensor(ids)
        rows, states = self.weight[ids], {name: state[ids] for name, state in self.states.items()}
        self.updater.step(self.count, rows, grads.clone(), states, RowHyperparameters(lr))
        self.weight[ids] = rows
        for name, state in states.items():
            self.states[name][ids] = state

    @staticmethod
    def require_as_torch(name: str, cls: Any, **hyper: Any) -> None:
        """Assert that steps of all rows give what ``cls`` gives of the matrix."""
        torch.manual_seed(1)
        first = torch.randn(20, 6)
        weight = first.clone().requires_grad_()
        torchs, ours = cls([weight], **hyper), Stepped(name, first, **hyper)
        for _ in range(10):
            grads = torch.randn(20, 6)
            weight.grad = grads.clone()
            torchs.step()
            ours.step(torch.arange(20), grads)
        torch.testing.assert_close(ours.weight, weight.detach())
        assert not torch.equal(ours.weight, first)


def step_torchs(optimizer: torch.optim.Optimizer, weight: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Make a step of torch's with a sparse gradient."""
    with torch.sparse.check_sparse_tensor_invariants(enable=True):  # else torch warns that it does not
        weight.grad = torch.sparse_coo_tensor(ids[None], grads, weight.shape)
        optimizer.step()


def sparse_batches(like: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield sorted ids of some rows of ``like``, sometimes of none, and gradients of them."""
    generator = torch.Generator().manual_seed(7)
    for number in range(count):
        chosen = torch.rand(len(like), generator=generator) < (0.4 if number % 5 else 0.0 if number else 1.0)
        ids = chosen.nonzero().flatten()
        yield ids, torch.randn(len(ids), like.shape[1], generator=generator, dtype=like.dtype)
