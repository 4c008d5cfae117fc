"""A row's bits do not depend on the other rows of its batch, and so not on how many servers have rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stepped_rows import Stepped

from kvstore.optim.optimizer import names_for_rows

HYPER: dict[str, list[dict[str, Any]]] = {
    "adam": [{}, {"amsgrad": True, "weight_decay": 0.01}],
    "nag": [{"momentum": 0.9}],
    "sgd": [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "momentum_style": "mxnet"}],
}
CASES = [(name, hyper) for name in names_for_rows() for hyper in HYPER.get(name, [{}])]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Rows of fewer elements than a vector, of some vectors and some elements more; and of so many that torch sums one by
# itself with several threads.
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(41, 3, torch.float32), (41, 17, torch.float64), (41, 67, torch.float32), (2, 40_009, torch.float32)],
)
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(
    name: str, hyper: dict[str, Any], rows: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    first = torch.randn(rows, width, generator=generator, dtype=dtype)
    batches = [
        (torch.rand(rows, generator=generator) < 0.7).nonzero().flatten() if step else torch.arange(rows)
        for step in range(3)
    ]
    grads = [torch.randn(len(ids), width, generator=generator, dtype=dtype) for ids in batches]
    found = {}
    for servers in (1, 2, 3, 5, rows):
        torch.set_num_threads(2 if rows == servers else 1)
        stripes = [Stepped(name, first, learning_rate=0.05, rescale_grad=1 / 3, **hyper) for _ in range(servers)]
        for ids, of in zip(batches, grads, strict=True):
            for stripe, stepped in enumerate(stripes):
                mine = ids % servers == stripe
                stepped.step(ids[mine], of[mine])
        held = torch.arange(rows) % servers
        whole = {
            state: torch.stack([stripes[int(held[row])].states[state][row] for row in range(rows)])
            for state in stripes[0].states
        } | {"rows": torch.stack([stripes[int(held[row])].weight[row] for row in range(rows)])}
        for state, value in whole.items():
            assert torch.equal(value, found.setdefault(state, value)), f"{state} on {servers} servers"
