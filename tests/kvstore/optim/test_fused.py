"""Arrays that lie back to back are updated as one: to the bits of one by one, however they are grouped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.optim.fused import LANE, alike
from kvstore.optim.optimizer import describe, names
from kvstore.optim.updater import Updater
from kvstore.spec import Key

# Whole vectors, nothing, numbers, and sizes that leave a rest.
SHAPES: dict[Key, tuple[int, ...]] = {
    "a": (2, LANE),
    "b": (LANE,),
    "none": (0, 3),
    "c": (4, 8, 4),
    "number": (),
    "d": (LANE,),
    "rest": (13, 5),
    "e": (7,),
}
MATRICES: dict[Key, tuple[int, ...]] = {"a": (2, LANE), "b": (LANE, 1), "c": (5, 5)}
HYPER: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "amsgrad": True},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 3.0},
}


class Flat:
    """Weights back to back, as a server has them."""

    def __init__(self, updater: Updater, shapes: dict[Key, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.updater = updater
        self.shapes = shapes
        self.values = randoms(shapes, 0, dtype)

    def update(self, keys: Sequence[Key], seed: int) -> int:
        """Update some, pushed together; return as how many parameters."""
        dtype = next(iter(self.values.values())).dtype
        flat = torch.cat([self.values[key].reshape(-1) for key in keys])
        group = self.updater.group(keys, [self.shapes[key] for key in keys], flat)
        moved = flat.clone()
        group.point(moved)
        for step in range(2):
            grads = randoms(self.shapes, seed + step, dtype)
            total = torch.cat([grads[key].reshape(-1) for key in keys]).to(group.params[0].dtype)
            self.updater.step([group], [total])
        parts = moved.split([math.prod(self.shapes[key]) for key in keys])
        self.values |= {key: part.view(self.shapes[key]) for key, part in zip(keys, parts, strict=True)}
        return len(group.params)


def randoms(shapes: dict[Key, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[Key, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}


def alone(updater: Updater, values: dict[Key, torch.Tensor], keys: Sequence[Key], seed: int) -> None:
    """The same update, key by key."""
    shapes = {key: tuple(value.shape) for key, value in values.items()}
    for step in range(2):
        grads = randoms(shapes, seed + step, next(iter(values.values())).dtype)
        for key in keys:
            updater.update([(key, values[key], grads[key])])


def require_same(flat: Flat, other: Updater, values: dict[Key, torch.Tensor]) -> None:
    for key, value in values.items():
        assert torch.equal(flat.values[key], value), key
    mine, others = flat.updater.states.of(values), other.states.of(values)
    assert mine.keys() == others.keys()
    for where, state in others.items():
        assert mine[where].shape == state.shape, where
        assert torch.equal(mine[where], state), where


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", sorted({*names()} - {"sgld"}))  # its noise is never the same
def test_lists_of_all_kinds_one_after_the_other_are_as_one_by_one(name: str, dtype: torch.dtype) -> None:
    description = describe(name, HYPER.get(name, {"lr": 0.05}))
    shapes = MATRICES if description.whole else SHAPES
    flat, other = Flat(Updater(description), shapes, dtype), Updater(description)
    values = randoms(shapes, 0, dtype)
    every = list(shapes)
    # All; some, which leaves others' parameter; all again, which have made more steps or fewer; all in another order.
    for seed, keys in enumerate([every, every[1:3], every, every[::-1], every[:1], every]):
        flat.update(keys, 10 * seed)
        alone(other, values, keys, 10 * seed)
        require_same(flat, other, values)


def test_what_is_alike_is_one_parameter() -> None:
    flat = Flat(Updater(describe("adam", {"lr_mult": {"d": 0.5}})), SHAPES, torch.float32)
    assert flat.update(["a", "b", "none", "c"], 0) == 1
    assert flat.update(["a", "b"], 10) == 1
    assert flat.update(["a", "b", "none", "c"], 20) == 2, "two have made more steps than the others"
    assert flat.update(["a", "b", "d", "rest", "e"], 30) == 4, "no steps, another rate, and no whole vectors"


def test_weights_that_must_be_whole_are_not_put_together() -> None:
    flat = Flat(Updater(describe("adafactor", {})), MATRICES, torch.float32)
    assert flat.update(["a", "b", "c"], 0) == 3


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_come_and_go(name: str, dtype: torch.dtype) -> None:
    description = describe(name, HYPER[name])
    flat, every = Flat(Updater(description), SHAPES, dtype), list(SHAPES)
    flat.update(every, 0)
    kept = {where: state.clone() for where, state in flat.updater.states.of(every).items()}
    values = {key: value.clone() for key, value in flat.values.items()}
    flat.update(every, 10)
    some = {where: state for where, state in kept.items() if where[0] in ("b", "c", "e")}
    flat.updater.states.load(some, flat.values)  # into the midst of a parameter
    flat.values |= {key: values[key].clone() for key in ("b", "c", "e")}
    flat.update(["b", "c", "e"], 10)
    other = Updater(description)
    other.states.load(kept, values)
    alone(other, values, every, 10)
    require_same(flat, other, values)


def test_what_is_configured_anew_is_grouped_anew() -> None:
    before, after = {"lr": 0.1}, {"lr": 0.1, "amsgrad": True, "groups": [{"keys": ["b"], "lr": 0.5}]}
    flat, other = Flat(Updater(describe("adam", before)), SHAPES, torch.float32), Updater(describe("adam", before))
    values, every = randoms(SHAPES, 0, torch.float32), list(SHAPES)
    for seed, how in enumerate([before, after, before]):
        for updater in (flat.updater, other):
            updater.configure(describe("adam", how))
        flat.update(every, 10 * seed)
        alone(other, values, every, 10 * seed)
        require_same(flat, other, values)


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 1, LANE, LANE + 1, 3 * LANE]))))
def test_ranges_are_all_places_and_only_the_last_of_each_has_a_rest(arrays: list[tuple[int, int]]) -> None:
    kinds, sizes = [kind for kind, _ in arrays], [size for _, size in arrays]
    ranges = alike(kinds, sizes)
    assert [place for start, stop in ranges for place in range(start, stop)] == list(range(len(arrays)))
    for start, stop in ranges:
        assert len(set(kinds[start:stop])) == 1
        assert not any(size % LANE for size in sizes[start : stop - 1])
    for (start, stop), _ in itertools.pairwise(ranges):
        assert kinds[start] != kinds[stop] or sizes[stop - 1] % LANE, "these could be one"
