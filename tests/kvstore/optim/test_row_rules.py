"""What all rules do with gradients before their own formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stepped_rows import Stepped, sparse_batches, step_torchs

from kvstore.optim.algorithms.tensorwise import eager
from kvstore.optim.optimizer import find, names_for_rows
from kvstore.optim.row_rules import prepare


@pytest.mark.parametrize(
    ("maximize", "decay", "expected"), [(False, 0.0, 1.0), (True, 0.0, -1.0), (False, 0.5, 2.0), (True, 0.5, 0.0)]
)
def test_gradients_are_turned_round_and_then_decay_is_added(maximize: bool, decay: float, expected: float) -> None:
    rows, grads = torch.full((2, 3), 2.0), torch.ones(2, 3)
    prepare(rows, grads, {"maximize": maximize, "weight_decay": decay})
    assert torch.equal(grads, torch.full((2, 3), expected))
    assert torch.equal(rows, torch.full((2, 3), 2.0))


DTYPES = [torch.float32, torch.float64]
ADAGRAD = {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}


@pytest.mark.parametrize("width", [1, 10, 64])
@pytest.mark.parametrize(
    ("name", "torchs", "hyper", "states", "dtype"),
    [
        ("adagrad", torch.optim.Adagrad, ADAGRAD, {"sum"}, torch.float32),
        *(
            ("adam", torch.optim.SparseAdam, {"lr": 0.01, "betas": (0.8, 0.99)}, {"exp_avg", "exp_avg_sq"}, dtype)
            for dtype in DTYPES
        ),
        ("sgd", torch.optim.SGD, {"lr": 0.05}, set(), torch.float32),
    ],
)
def test_it_is_torchs_of_sparse_gradients_to_the_bit(
    name: str, torchs: Any, hyper: dict[str, Any], states: set[str], dtype: torch.dtype, width: int
) -> None:
    first = torch.randn(50, width, dtype=dtype)
    weight = first.clone().requires_grad_()
    theirs, ours = eager(torchs)([weight], **hyper), Stepped(name, first, **hyper)
    for ids, grads in sparse_batches(first, 30):
        step_torchs(theirs, weight, ids, grads)
        ours.step(ids, grads)
    assert torch.equal(ours.weight, weight.detach())
    assert set(ours.states) == states
    assert all(torch.equal(ours.states[state], theirs.state[weight][state]) for state in states)


def test_decay_is_added_to_the_gradient() -> None:
    Stepped.require_as_torch("adagrad", eager(torch.optim.Adagrad), lr=0.05, weight_decay=0.1, maximize=True)


@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}])
def test_adamw_of_all_rows_is_torchs(hyper: dict[str, float]) -> None:
    Stepped.require_as_torch("adamw", eager(torch.optim.AdamW), lr=0.01, **hyper)


def test_adam_with_decay_adds_it_to_the_gradient() -> None:
    Stepped.require_as_torch("adam", eager(torch.optim.Adam), lr=0.01, eps=1e-12, weight_decay=0.1, amsgrad=True)


@pytest.mark.parametrize(
    "hyper",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
)
def test_of_all_rows_it_is_torchs(hyper: dict[str, Any]) -> None:
    Stepped.require_as_torch("sgd", eager(torch.optim.SGD), lr=0.05, **hyper)


def test_nag_has_nesterovs_momentum() -> None:
    rows = Stepped("nag", torch.zeros(1, 2), lr=0.5, momentum=0.5)
    rows.step([0], torch.ones(1, 2))
    assert rows.weight.tolist() == [[-0.75, -0.75]]


def test_momentum_as_mxnets_keeps_the_rate_of_each_step() -> None:
    rows = Stepped("sgd", torch.zeros(1, 1), lr=1.0, momentum=0.5, momentum_style="mxnet")
    rows.step([0], torch.ones(1, 1))
    rows.step([0], torch.ones(1, 1), lr=0.0)
    assert rows.weight.tolist() == [[-1.5]]
    assert rows.states["momentum_buffer"].tolist() == [[0.5]]


def test_a_row_without_a_gradient_keeps_its_momentum() -> None:
    rows = Stepped("sgd", torch.zeros(2, 1), lr=1.0, momentum=0.5)
    rows.step([0, 1], torch.ones(2, 1))
    rows.step([0], torch.ones(1, 1))
    assert rows.weight.tolist() == [[-2.5], [-1.0]]
    assert rows.states["momentum_buffer"].tolist() == [[1.5], [1.0]]


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("adabelief", {"weight_decay": 0.1}),
        ("ftrl", {"lamda1": 0.1, "beta": 0.5, "weight_decay": 0.1}),
        ("groupadagrad", {}),
        ("rowwiseadagrad", {"initial_accumulator_value": 0.5, "weight_decay": 0.1}),
        ("rowwiseadam", {"weight_decay": 0.1}),
    ],
)
def test_of_all_rows_it_is_that_of_a_matrix(name: str, hyper: dict[str, Any]) -> None:
    Stepped.require_as_torch(name, find(name).cls, lr=0.05, **hyper)


@pytest.mark.parametrize("name", ["adabelief", "ftrl", "groupadagrad", "rowwiseadagrad", "rowwiseadam"])
def test_rows_without_a_gradient_stay(name: str) -> None:
    first = torch.randn(50, 6)
    rows = Stepped(name, first, lr=0.05)
    rows.step([3, 7], torch.randn(2, 6))
    changed = (rows.weight != first).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3, 7]
    for state in rows.states.values():
        assert (state != 0).any(dim=1).nonzero().flatten().tolist() == [3, 7]


def test_ftrl_makes_small_weights_zero() -> None:
    rows = Stepped("ftrl", torch.full((2, 3), 0.01), lr=0.1, lamda1=1.0)
    for ids, grads in sparse_batches(rows.weight, 1):
        rows.step(ids, grads * 1e-3)
        assert not rows.weight[ids].any()


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


# Rows of fewer elements than a vector, and of some vectors and some elements more.
SHAPES = [(11, 3, torch.float32), (11, 17, torch.float64), (11, 67, torch.float32)]
# Rows that torch sums by themselves with several threads, for the rules that sum, and the one with most states.
WIDE = 2, 40_009, torch.float32
OF_WIDE = {"adam", "groupadagrad", "rowwiseadagrad", "rowwiseadam"}


@pytest.mark.parametrize(
    ("name", "hyper", "rows", "width", "dtype"),
    [(*case, *shape) for case in CASES for shape in (*SHAPES, *([WIDE] if case[0] in OF_WIDE else []))],
    ids=str,
)
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
    for servers in sorted({1, min(3, rows), rows}):
        torch.set_num_threads(2 if rows == servers else 1)
        stripes = [Stepped(name, first, learning_rate=0.05, rescale_grad=1 / 3, **hyper) for _ in range(servers)]
        for ids, of in zip(batches, grads, strict=True):
            for stripe, stepped in enumerate(stripes):
                mine = ids % servers == stripe
                stepped.step(ids[mine], of[mine])
        kept = [stripe.states | {"rows": stripe.weight} for stripe in stripes]
        whole = {state: torch.stack([kept[row % servers][state][row] for row in range(rows)]) for state in kept[0]}
        for state, value in whole.items():
            assert torch.equal(value, found.setdefault(state, value)), f"{state} on {servers} servers"
