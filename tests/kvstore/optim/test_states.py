"""The states of an optimizer: out and in again to the bit, checked; and whatever parameters their keys are in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from updating import SHAPES, equal, numbers, updated

from kvstore import wire
from kvstore.errors import Mismatch, UsageError, WireError
from kvstore.optim.fused import LANE, alike
from kvstore.optim.optimizer import describe, names
from kvstore.optim.param_groups import ParamGroups, Rates, first_state
from kvstore.optim.states import SegmentState, StateStore, pack_parts, pack_states, unpack_parts, unpack_states
from kvstore.optim.updater import Updater
from kvstore.spec import Key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", sorted({*names()} - {"sgld"}))  # its noise is never the same
def test_states_resume_to_the_bit(name: str, dtype: torch.dtype) -> None:
    first, weights = Updater(describe(name, {})), numbers(1, dtype)
    for step in range(2):
        updated(first, weights, step)
    copies = {key: weight.clone() for key, weight in weights.items()}
    second = Updater(describe(name, {}))
    second.states.load({key: value.clone() for key, value in first.states.of(SHAPES).items()}, copies)
    for step in range(2, 4):
        updated(first, weights, step)
        updated(second, copies, step)
    equal(copies, weights)
    one, two = first.states.of(SHAPES), second.states.of(SHAPES)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[where], two[where]) for where in one)


def test_states_are_copied_when_they_are_loaded() -> None:
    updater, weight = Updater(describe("sgd", {"lr": 1.0, "momentum": 0.5})), torch.zeros(1)
    momentum = torch.ones(1)
    updater.states.load({("w", "momentum_buffer"): momentum}, {"w": weight})
    updater.update([("w", weight, torch.zeros(1))])
    assert weight.item() == -0.5
    assert momentum.item() == 1


OTHERS: dict[str, tuple[str, dict[str, torch.Tensor]]] = {  # states of b, which torch's steps would take unseen
    "one number for all": ("adam", {"exp_avg": torch.tensor(1.0)}),
    "a number, and no count": ("sgd", {"momentum_buffer": torch.tensor(1.0)}),
    "one column": ("sgd", {"momentum_buffer": torch.ones(3, 1)}),
    "one column of Adagrad": ("adagrad", {"sum": torch.ones(3, 1)}),
    "transposed": ("adam", {"exp_avg_sq": torch.ones(4, 3)}),
    "flat": ("adam", {"exp_avg_sq": torch.ones(12)}),
    "another dtype": ("adam", {"exp_avg": torch.ones(3, 4, dtype=torch.float64)}),
    "many counts": ("adam", {"step": torch.ones(3, 4)}),
    "a whole count": ("adagrad", {"step": torch.tensor(1)}),
    "a count below 0": ("adam", {"step": torch.tensor(-1.0)}),
    "a count that is none": ("adam", {"step": torch.tensor(torch.nan)}),
    "one more": ("sgd", {"other": torch.ones(3, 4)}),
    "a copy that is not needed": ("adam", {"master": torch.ones(3, 4)}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_states_that_the_optimizer_does_not_make_change_nothing(which: str) -> None:
    name, odd = OTHERS[which]
    updater = Updater(describe(name, {"lr": 0.1, **({"momentum": 0.9} if name == "sgd" else {})}))
    weights = updated(updater, numbers(1), 1)
    before = {where: value.clone() for where, value in updater.states.of(SHAPES).items()}
    given = {where: value + 1 for where, value in before.items()} | {("b", its): value for its, value in odd.items()}
    with pytest.raises(Mismatch, match="key 'b'"):
        updater.states.load(given, weights)
    after = updater.states.of(SHAPES)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[where], before[where]) for where in before)


@pytest.mark.parametrize("missing", ["step", "exp_avg_sq", "master"])
def test_states_that_lack_something_change_nothing(missing: str) -> None:
    updater = Updater(describe("adam", {}))
    weights = updated(updater, numbers(1, torch.float16), 1)
    given = {where: value.clone() for where, value in updater.states.of(SHAPES).items() if where != ("c", missing)}
    fresh = Updater(describe("adam", {}))
    with pytest.raises(Mismatch, match=rf"adam's states of key 'c': .* were given, .*{missing} float32.* belong there"):
        fresh.states.load(given, weights)
    assert fresh.states.of(SHAPES) == {}


def test_states_of_a_weight_that_cannot_be_updated_change_nothing() -> None:
    updater = Updater(describe("sgd", {"momentum": 0.9}))
    given = {(key, "momentum_buffer"): torch.ones(2) for key in ("a", "b")}
    good: dict[Key, torch.Tensor] = {"a": torch.zeros(2)}
    with pytest.raises(UsageError, match="the weight of 'b' has gaps between its elements"):
        updater.states.load(given, good | {"b": torch.zeros(4)[::2]})
    with pytest.raises(Mismatch, match=r"'b' is int64.*floating point only"):
        updater.states.load(given, good | {"b": torch.zeros(2, dtype=torch.int64)})
    assert updater.states.of(["a", "b"]) == {}


def test_a_key_without_updates_has_no_state() -> None:
    updater = Updater(describe("adam", {}))
    assert updater.states.of(["w"]) == {}
    updater.update([("w", torch.zeros(1), torch.zeros(1))])
    assert {name for _, name in updater.states.of(["w", "v"])} == {"step", "exp_avg", "exp_avg_sq"}


def store_of(name: str, **options: Any) -> StateStore:
    return StateStore(ParamGroups(describe(name, options)))


def test_fused_keys_have_their_own_states_and_keep_them_when_released() -> None:
    states = store_of("sgd", momentum=0.9)
    weights: dict[Key, torch.Tensor] = {"a": torch.zeros(2), "b": torch.zeros(2, 2)}
    given = {("a", "momentum_buffer"): torch.tensor([1.0, 2.0]), ("b", "momentum_buffer"): torch.full((2, 2), 3.0)}
    states.load(given, weights)
    (parameter,) = states.fuse([(["a", "b"], [(2,), (2, 2)])], [torch.zeros(6)])
    assert states.by_param[parameter.tensor]["momentum_buffer"].tolist() == [1, 2, 3, 3, 3, 3]
    states.by_param[parameter.tensor]["momentum_buffer"] += 1  # as a step does
    states.release("b")
    assert not states.by_param
    assert {where: value.tolist() for where, value in states.of(weights).items()} == {
        ("a", "momentum_buffer"): [2, 3],
        ("b", "momentum_buffer"): [[4, 4], [4, 4]],
    }


def test_a_key_alone_keeps_its_parameter_as_long_as_its_weight_stays() -> None:
    states, weight = store_of("adam"), torch.zeros(4)
    parameter = states.alone("w", weight)
    assert states.alone("w", weight) is parameter
    assert states.alone("w", weight.view(4)) is parameter, "the same memory"
    assert states.alone("w", weight.clone()) is not parameter


def test_forgotten_parameters_have_no_state() -> None:
    states = store_of("adagrad", initial_accumulator_value=1.0)
    tensors = [states.alone(key, torch.zeros(2)).tensor for key in ("a", "b")]
    assert {key for key, _ in states.of(["a", "b"])} == {"a", "b"}, "Adagrad's state is there before the first step"
    states.forget(tensors[:1])
    assert {key for key, _ in states.of(["a", "b"])} == {"b"}


def test_keys_are_alike_only_with_the_same_counts_of_steps() -> None:
    states = store_of("adam")
    weights: dict[Key, torch.Tensor] = {key: torch.zeros(2) for key in ("a", "b", "c")}
    for key, step in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        moments = {(key, name): torch.zeros(2) for name in ("exp_avg", "exp_avg_sq")}
        states.load({(key, "step"): torch.tensor(step), **moments}, weights)
    rates = ParamGroups(describe("adam", {})).rates(["a"])[0]
    a, b, c, new = (states.likeness(key, rates) for key in ("a", "b", "c", "new"))
    assert a == b
    assert len({a, c, new}) == 3


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_states_of_what_is_fused_are_one(name: str) -> None:
    updater = Updater(describe(name, {"momentum": 0.9} if name == "sgd" else {}))
    flat = torch.ones(64 + 64 + 3)
    group = updater.group(["a", "b"], [(64,), (8, 8)], flat[:128])
    updater.step([group], [torch.arange(128.0)])
    updater.update([("c", flat[128:], torch.ones(3))])
    updater.states.release("c")
    parts = updater.states.parts(["a", "b", "c", "none"])
    of_each = updater.states.of(["a", "b", "c"])
    assert {keys for keys, _, _ in parts} == {("a", "b"), ("c",)}
    for keys, name_, value in parts:
        together = [of_each[key, name_].reshape(-1) for key in keys]
        assert torch.equal(value.reshape(-1), torch.cat(together) if value.dim() else together[0])
    assert len(parts) == len({name_ for _, name_ in of_each}) * 2


STATES = [
    SegmentState(3, "momentum", torch.arange(6.0).view(2, 3).t()),
    SegmentState(3, "step", torch.tensor(7)),
    SegmentState(1, "large", torch.ones(40_000, dtype=torch.float64)),
    SegmentState(1, "empty", torch.zeros(0, 4, dtype=torch.float16)),
]


def message() -> wire.OptimizerStates:
    sent = wire.encode(wire.OptimizerStates(1, optimizer=None, **pack_states(STATES)))
    arrived = wire.decode([bytearray(frame) for frame in sent])
    assert isinstance(arrived, wire.OptimizerStates)
    return arrived


def test_they_arrive_as_they_were() -> None:
    arrived = unpack_states(message())
    assert [state[:2] for state in arrived] == [state[:2] for state in STATES]
    for (_, _, value), (_, _, expected) in zip(arrived, STATES, strict=True):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert torch.equal(value, expected)


def test_tensors_that_do_not_fit_their_shapes_are_refused() -> None:
    with pytest.raises(WireError):
        unpack_states(replace(message(), shapes=[[2, 2], [], [40_000], [0, 4]]))


SENT_SHAPES = {3: (2, 3), 1: (40_000,), 7: (2,)}
PARTS = [
    ((3, 1), "momentum", torch.arange(40_006.0)),
    ((3, 1), "step", torch.tensor(7.0)),
    ((7,), "momentum", torch.ones(2)),
]


def sent_states() -> tuple[wire.Updated, list[wire.Buffer]]:
    fields, frames = pack_parts(PARTS)
    sent = wire.encode(wire.Updated(0, list(SENT_SHAPES), [2, 1], [5, 5], **fields, buffers=frames))
    arrived = wire.decode([bytearray(frame) for frame in sent])
    assert isinstance(arrived, wire.Updated)
    return arrived, list(arrived.buffers)


def test_states_of_several_segments_arrive_as_those_of_each() -> None:
    arrived = unpack_parts(*sent_states(), SENT_SHAPES)
    momenta = PARTS[0][2]
    expected = {
        (3, "momentum"): momenta[:6].view(2, 3),
        (1, "momentum"): momenta[6:],
        (3, "step"): torch.tensor(7.0),
        (1, "step"): torch.tensor(7.0),
        (7, "momentum"): torch.ones(2),
    }
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[where], expected[where]) for where in expected)


def test_states_of_other_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="40006 elements of momentum for segments of"):
        unpack_parts(*sent_states(), {**SENT_SHAPES, 3: (2, 2)})


GROUPED: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.9,
    "wd": 0.5,
    "lr_mult": {"w": 2.0},
    "wd_mult": {"b": 0.0},
    "groups": [{"keys": ["b"], "momentum": 0.5}, {"keys": ["c"], "lr": 0.3}],
}


def groups() -> ParamGroups:
    return ParamGroups(describe("sgd", GROUPED))


def test_each_key_has_its_group_and_multipliers() -> None:
    assert groups().rates(["w", "b", "c", "x"]) == [Rates(0, 2.0, 1.0), Rates(1, 1.0, 0.0), Rates(2, 1.0, 1.0), Rates()]
    assert groups().number("c") == 2


def test_keys_may_have_other_names_in_the_description() -> None:
    named = ParamGroups(describe("sgd", GROUPED), {7: "w", 8: "c"}.__getitem__)
    assert named.rates([7, 8]) == [Rates(0, 2.0, 1.0), Rates(2, 1.0, 1.0)]
    assert named.number(8) == 2


def test_without_groups_and_multipliers_all_keys_are_alike() -> None:
    assert ParamGroups(describe("sgd", {})).rates(["a", "b"]) == [Rates(0, 1.0, 1.0)] * 2


def settings(key: str, lr: float = 0.1, changes: Any = None) -> tuple[float, float, float]:
    made = groups()
    settings = made.settings(made.rates([key])[0], lr, changes or {})
    return settings["lr"], settings["momentum"], settings["weight_decay"]


def test_settings_are_those_of_the_group_times_the_multipliers() -> None:
    assert settings("w") == (0.2, 0.9, 0.5)
    assert settings("b") == (0.1, 0.5, 0.0)
    assert settings("c") == (0.3, 0.9, 0.5)


def test_a_new_learning_rate_is_for_groups_that_have_none_of_their_own() -> None:
    assert settings("w", lr=1.0)[0] == 2.0
    assert settings("b", lr=1.0)[0] == 1.0
    assert settings("c", lr=1.0)[0] == 0.3


def test_changes_of_all_keys_leave_what_a_group_has_of_its_own() -> None:
    changes = {(0, "momentum"): 0.25, (2, "lr"): 4.0}
    assert settings("w", changes=changes) == (0.2, 0.25, 0.5)
    assert settings("b", changes=changes) == (0.1, 0.5, 0.0)
    assert settings("c", changes=changes) == (4.0, 0.25, 0.5)


def test_settings_do_not_add_up() -> None:
    made = groups()
    (rates,) = made.rates(["w"])
    assert made.settings(rates, 0.1, {(0, "momentum"): 0.0})["momentum"] == 0.0
    assert made.settings(rates, 0.1, {}) == made.settings(rates, 0.1, {})
    assert made.settings(rates, 0.1, {})["momentum"] == 0.9


@pytest.mark.parametrize("options", [{"lr": -1}, {"momentum": -1}, {"groups": [{"keys": ["a"], "weight_decay": -1}]}])
def test_torchs_own_refusals_are_passed_on(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        ParamGroups(describe("sgd", options))


def test_the_first_state_is_that_after_a_step() -> None:
    cpu = torch.device("cpu")
    assert first_state(describe("adam", {}), 0, cpu).keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert first_state(describe("adam", {"amsgrad": True}), 0, cpu).keys() > {"max_exp_avg_sq"}
    assert not any(torch.is_tensor(value) for value in first_state(describe("sgd", {}), 0, cpu).values())


# Whole vectors, nothing, numbers, and sizes that leave a rest.
FUSED: dict[Key, tuple[int, ...]] = {
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
    shapes = MATRICES if description.whole else FUSED
    flat, other = Flat(Updater(description), shapes, dtype), Updater(description)
    values = randoms(shapes, 0, dtype)
    every = list(shapes)
    # All; some, which leaves others' parameter; all again, which have made more steps or fewer; all in another order.
    for seed, keys in enumerate([every, every[1:3], every, every[::-1], every[:1], every]):
        flat.update(keys, 10 * seed)
        alone(other, values, keys, 10 * seed)
        require_same(flat, other, values)


def test_what_is_alike_is_one_parameter() -> None:
    flat = Flat(Updater(describe("adam", {"lr_mult": {"d": 0.5}})), FUSED, torch.float32)
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
    flat, every = Flat(Updater(description), FUSED, dtype), list(FUSED)
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
    flat, other = Flat(Updater(describe("adam", before)), FUSED, torch.float32), Updater(describe("adam", before))
    values, every = randoms(FUSED, 0, torch.float32), list(FUSED)
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
