"""The updater against plain torch.optim, and against MXNet: the same weights, for every optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mxnet_reference import cases
from mxnet_reference.rows import results
from stepped_rows import Stepped
from updating import equal, numbers, updated

from kvstore.errors import UsageError
from kvstore.optim import updater
from kvstore.optim.algorithms.tensorwise import eager
from kvstore.optim.optimizer import builtin, describe, names, names_for_rows, require_shapes
from kvstore.optim.updater import RowHyperparameters, RowUpdater, Updater
from kvstore.spec import Key
from kvstore.table import Table, TableSpec

STEPS = 4
CLASSES = {name: known.cls for name, known in builtin().items()}
OPTIONS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1},
    "rmsprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "rprop": {"lr": 0.01, "step_sizes": (1e-5, 1.0)},
    "signum": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.1},
    "dcasgd": {"lr": 0.1, "momentum": 0.9},
    "lars": {"lr": 0.1, "momentum": 0.9, "momentum_correction": False},
    "lamb": {"lr": 0.1, "lower_bound": 0.5, "upper_bound": 1.5, "bias_correction": False},
}


def plain(cls: Any, weights: dict[Key, torch.Tensor], steps: int = STEPS, **options: Any) -> dict[Key, torch.Tensor]:
    """What torch.optim alone makes of ``weights``."""
    optimizer = cls(weights.values(), **options)
    for step in range(steps):
        for key, grad in numbers(100 + step).items():
            weights[key].grad = grad
        optimizer.step()
    return weights


@pytest.mark.parametrize("options", ["defaults", "chosen"])
@pytest.mark.parametrize("name", sorted({*names()} - {"nag", "sgld"}))
def test_every_optimizer_is_its_class(name: str, options: str) -> None:
    chosen: dict[str, Any] = OPTIONS.get(name, {"lr": 0.05}) if options == "chosen" else {}
    updater, weights = Updater(describe(name, chosen)), numbers(1)
    for step in range(STEPS):
        updated(updater, weights, 100 + step)
    assert not torch.equal(weights["a"], numbers(1)["a"])
    equal(weights, plain(CLASSES[name], numbers(1), **chosen), atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_fused_where_torch_has_it_is_the_same_to_the_bit(name: str) -> None:
    updater, weights = Updater(describe(name, {"lr": 0.1})), numbers(1)
    for step in range(STEPS):
        updated(updater, weights, 100 + step)
    equal(weights, plain(CLASSES[name], numbers(1), lr=0.1, fused=True))


def test_nag_is_nesterovs_momentum() -> None:
    updater, weights = Updater(describe("nag", {"learning_rate": 0.1})), numbers(1)
    for step in range(STEPS):
        updated(updater, weights, 100 + step)
    equal(weights, plain(torch.optim.SGD, numbers(1), lr=0.1, momentum=0.9, nesterov=True), atol=1e-6)


def test_the_gradient_is_scaled_and_then_clipped() -> None:
    updater = Updater(describe("sgd", {"lr": 1.0, "rescale_grad": 0.5, "clip_gradient": 1.0}))
    weight = torch.zeros(4)
    updater.update([("w", weight, torch.tensor([1.0, 3.0, -9.0, 0.0]))])
    assert weight.tolist() == [-0.5, -1.0, 1.0, 0.0]


def test_weight_decay_is_added_after_clipping_as_in_mxnet() -> None:
    updater = Updater(describe("sgd", {"lr": 1.0, "clip_gradient": 1.0, "wd": 0.5}))
    weight = torch.tensor([10.0])
    updater.update([("w", weight, torch.tensor([7.0]))])
    assert weight.tolist() == [10.0 - 1.0 - 5.0]


def test_multipliers_by_key() -> None:
    options = {"lr": 1.0, "wd": 0.5, "lr_mult": {"slow": 0.5, "still": 0}, "wd_mult": {"bare": 0}}
    updater = Updater(describe("sgd", options))
    weights: dict[Key, torch.Tensor] = {key: torch.tensor([2.0]) for key in ("plain", "slow", "still", "bare")}
    updater.update([(key, weight, torch.tensor([1.0])) for key, weight in weights.items()])
    assert {key: weight.item() for key, weight in weights.items()} == {"plain": 0, "slow": 1, "still": 2, "bare": 1}


def test_multipliers_know_a_key_by_another_name() -> None:
    updater = Updater(describe("sgd", {"lr": 1.0, "lr_mult": {"w": 0.5}}), lambda _: "w")
    weight = torch.zeros(1)
    grad = torch.ones(1)
    updater.step([updater.group([7], [(1,)], weight)], [grad])
    assert weight.item() == -0.5


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "adagrad", "adamax"])
def test_many_keys_in_one_call_are_as_one_by_one(name: str) -> None:
    options = {"lr": 0.1, "lr_mult": {"b": 0.5}, "rescale_grad": 0.25, "clip_gradient": 0.2}
    together, alone = Updater(describe(name, options)), Updater(describe(name, options))
    one, many = numbers(1), numbers(1)
    for step in range(3):
        updated(together, many, step)
        for key, grad in numbers(step).items():
            alone.update([(key, one[key], grad)])
    equal(many, one)


def test_keys_that_are_not_in_a_call_stay() -> None:
    updater, weights = Updater(describe("adam", {"lr": 0.1, "wd": 0.1})), numbers(1)
    updated(updater, weights, 2)
    before = {key: weight.clone() for key, weight in weights.items()}
    updater.update([("a", weights["a"], torch.ones(4, 3))])
    assert not torch.equal(weights["a"], before["a"])
    assert torch.equal(weights["b"], before["b"])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
def test_strides_of_gradients_do_not_matter(name: str) -> None:
    results = []
    for strided in (False, True):
        updater, weight = Updater(describe(name, {"lr": 0.1})), torch.zeros(3, 4)
        grad = torch.arange(12.0).view(3, 4)
        updater.update([("w", weight, grad.t().contiguous().t() if strided else grad)])
        results.append(weight)
    assert torch.equal(*results)


def test_the_learning_rate_can_change_between_updates() -> None:
    updater, weight = Updater(describe("sgd", {"lr": 1.0, "momentum": 0.5})), torch.zeros(1)
    updater.update([("w", weight, torch.ones(1))])
    updater.lr = 0.1
    updater.update([("w", weight, torch.ones(1))])
    assert weight.item() == pytest.approx(-1 - 0.1 * 1.5)


def test_mxnets_momentum_keeps_the_rate_of_each_step() -> None:
    ends = []
    for style in ("torch", "mxnet"):
        updater, weight = (
            Updater(describe("sgd", {"lr": 1.0, "momentum": 0.5, "momentum_style": style})),
            torch.zeros(1),
        )
        for rate in (1.0, 0.5):
            updater.lr = rate
            updater.update([("w", weight, torch.full((1,), 2.0))])
        ends.append(weight.item())
    assert ends == [-3.5, -4.0]


def test_mxnets_momentum_writes_gradients_and_torchs_does_not() -> None:
    assert Updater(describe("sgd", {"momentum": 0.5})).reads_only()
    assert not Updater(describe("sgd", {"momentum": 0.5, "momentum_style": "mxnet"})).reads_only()


def test_configure_keeps_the_state() -> None:
    updater, weight = Updater(describe("sgd", {"lr": 1.0, "momentum": 0.5})), torch.zeros(1)
    updater.update([("w", weight, torch.ones(1))])
    updater.configure(describe("sgd", {"lr": 0.1, "momentum": 0.25, "rescale_grad": 2.0}))
    assert (updater.lr, updater.rescale_grad) == (0.1, 2.0)
    updater.update([("w", weight, torch.ones(1))])
    assert weight.item() == pytest.approx(-1 - 0.1 * (0.25 + 2))


def test_configure_with_numbers_that_torch_refuses_changes_nothing() -> None:
    updater, weight = Updater(describe("sgd", {"lr": 1.0, "momentum": 0.5})), torch.zeros(1)
    updater.update([("w", weight, torch.ones(1))])
    with pytest.raises(ValueError, match="momentum"):
        updater.configure(describe("sgd", {"lr": 5.0, "momentum": -1}))
    updater.update([("w", weight, torch.ones(1))])
    assert weight.item() == -2.5


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("adam", {}, {"amsgrad": True}),
        ("adamw", {}, {"amsgrad": True}),
        ("rmsprop", {}, {"momentum": 0.9}),
        ("rmsprop", {}, {"centered": True}),
        ("sgd", {}, {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9}, {}),
        ("adam", {"amsgrad": True}, {}),
    ],
)
def test_configure_begins_state_that_was_not_needed_before(name: str, before: Any, after: Any) -> None:
    updater, weight = Updater(describe(name, before)), torch.ones(2, 2)
    for options in (before, after):
        updater.configure(describe(name, options))
        last = weight.clone()
        updater.update([("w", weight, torch.ones(2, 2))])
        assert weight.isfinite().all()
        assert (weight < last).all()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("sgd", {"momentum": 0.9}, {}),
        ("sgd", {}, {"momentum": 0.9}),
        ("adam", {"amsgrad": True}, {}),
        ("rmsprop", {"momentum": 0.9, "centered": True}, {}),
    ],
)
def test_states_can_be_loaded_after_configure(name: str, before: Any, after: Any) -> None:
    updater, weight = Updater(describe(name, before)), torch.ones(2, 2, dtype=torch.bfloat16)
    updater.update([("w", weight, torch.ones_like(weight))])
    updater.configure(describe(name, after))
    states = {key: value.clone() for key, value in updater.states.of(["w"]).items()}
    Updater(describe(name, after)).states.load(states, {"w": weight})
    updater.update([("w", weight, torch.ones_like(weight))])
    assert weight.isfinite().all()


def test_adagrads_state_begins_at_its_initial_accumulator() -> None:
    updater, weight = Updater(describe("adagrad", {"lr": 1.0, "initial_accumulator_value": 3.0})), torch.zeros(1)
    updater.update([("w", weight, torch.ones(1))])
    assert weight.item() == pytest.approx(-0.5)
    assert updater.states.of(["w"])["w", "sum"].item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_half_precision_weights_have_a_float32_master(name: str, dtype: torch.dtype) -> None:
    updater = Updater(describe(name, {"lr": 1e-3}))
    weight, master = torch.ones(8, dtype=dtype), torch.ones(8)
    optimizer = CLASSES[name]([master], lr=1e-3)
    for _ in range(20):  # each step is less than half precision can tell from 1
        grad = torch.full((8,), 0.125)
        updater.update([("w", weight, grad.to(dtype))])
        master.grad = grad
        optimizer.step()
    assert weight.dtype == dtype
    torch.testing.assert_close(weight, master.detach().to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(updater.states.of(["w"])["w", "master"], master.detach(), rtol=0, atol=1e-6)


def test_float64_stays_float64() -> None:
    updater, weight = Updater(describe("adam", {"lr": 0.1})), torch.ones(3, dtype=torch.float64)
    updater.update([("w", weight, torch.full((3,), 1e-12, dtype=torch.float64))])
    assert weight.dtype == torch.float64
    assert weight[0] != 1


def test_numbers_and_empty_arrays_are_updated_too() -> None:
    updater = Updater(describe("adam", {"lr": 0.1}))
    number, nothing = torch.tensor(1.0), torch.zeros(0)
    updater.update([("n", number, torch.tensor(1.0)), ("e", nothing, torch.zeros(0))])
    assert number.item() == pytest.approx(0.9)


def test_a_weight_that_moves_takes_its_state_along() -> None:
    still, moved = Updater(describe("adam", {"lr": 0.1})), Updater(describe("adam", {"lr": 0.1}))
    one, two = torch.ones(3), torch.ones(3)
    for step in range(3):
        still.update([("w", one, torch.full((3,), float(step)))])
        two = two.clone()
        moved.update([("w", two, torch.full((3,), float(step)))])
    assert torch.equal(one, two)


def test_nothing_to_update_is_nothing() -> None:
    Updater(describe("sgd", {})).update([])


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop"])
def test_weights_that_are_new_and_weights_that_are_not_in_one_call(name: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9} if name == "sgd" else {"lr": 0.1}
    together, alone = Updater(describe(name, options)), Updater(describe(name, options))
    one, other = torch.ones(3), torch.ones(3)
    plain = [torch.ones(3), torch.ones(3)]
    together.update([("a", one, torch.ones(3))])
    alone.update([("a", plain[0], torch.ones(3))])
    for _ in range(2):
        together.update([("a", one, torch.ones(3)), ("b", other, torch.ones(3))])
        alone.update([("a", plain[0], torch.ones(3))])
        alone.update([("b", plain[1], torch.ones(3))])
    assert torch.equal(one, plain[0])
    assert torch.equal(other, plain[1])


@pytest.mark.parametrize("name", sorted({*names()} - {"sgld"}))
def test_arrays_without_elements_change_nothing(name: str) -> None:
    with_empty, without = Updater(describe(name, {})), Updater(describe(name, {}))
    weights, same = numbers(1), numbers(1)
    for step in range(2):
        torch.manual_seed(step)
        empty = [("none", torch.ones(0, 3), torch.ones(0, 3)), ("nothing", torch.ones(0), torch.ones(0))]
        grads = numbers(100 + step)
        with_empty.update([*empty, *((key, weights[key], grads[key].clone()) for key in weights)])
        torch.manual_seed(step)
        without.update([(key, same[key], grads[key].clone()) for key in same])
    equal(weights, same)


def test_an_update_of_nothing_but_empty_arrays_is_none() -> None:
    updater = Updater(describe("adafactor", {}))
    updater.update([("none", torch.ones(0), torch.ones(0))])
    assert not updater.states.of(["none"])


def _stepped_once(optimizer: Any, hyper: RowHyperparameters, grad: float = 1.0) -> float:
    """Return what one step makes of a row that is 1."""
    rows = torch.ones(1, 1)
    updater = RowUpdater(optimizer, "table", "float32", 1, grows=True)
    updater.step(1, rows, torch.full((1, 1), grad), {}, hyper)
    return float(rows)


def test_gradients_are_rescaled_and_then_clipped() -> None:
    optimizer = describe("sgd", {"learning_rate": 1.0, "rescale_grad": 0.25, "clip_gradient": 0.5})
    assert _stepped_once(optimizer, RowHyperparameters()) == 0.75
    assert _stepped_once(optimizer, RowHyperparameters(), grad=-8.0) == 1.5
    assert _stepped_once(optimizer, RowHyperparameters(rescale=0.125)) == 0.875


def test_groups_and_multipliers_are_by_the_tables_key() -> None:
    optimizer = describe("sgd", {"lr": 1.0, "groups": [{"keys": ["table"], "lr": 0.5, "wd": 1.0}]})
    assert _stepped_once(optimizer, RowHyperparameters(lr=8.0)) == 0.0  # a group's own rate comes first
    optimizer = describe("sgd", {"lr": 1.0, "wd": 1.0, "lr_mult": {"table": 0.5}, "wd_mult": {"table": 0.0}})
    assert _stepped_once(optimizer, RowHyperparameters()) == 0.5


def test_hyper_parameters_with_a_push_are_of_this_push_alone() -> None:
    rows = Stepped("sgd", torch.zeros(1, 1), lr=1.0)
    rows.step([0], torch.ones(1, 1), lr=0.25)
    assert rows.weight.item() == -0.25
    rows.step([0], torch.ones(1, 1))
    assert rows.weight.item() == -1.25
    changes = {(0, "weight_decay"): 1.0}
    assert _stepped_once(describe("sgd", {"lr": 0.5}), RowHyperparameters(None, None, changes)) == 0.0


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        *((name, {}) for name in names_for_rows()),
        *(("sgd", {one: value}) for one, value in [("wd", 0.1), ("clip_gradient", 0.5), ("rescale_grad", 0.5)]),
        *(("sgd", {"momentum": 0.9, one: True}) for one in ("maximize", "nesterov")),
        ("sgd", {"momentum": 0.9, "momentum_style": "mxnet"}),
        *(("adam", {one: value}) for one, value in [("wd", 0.1), ("maximize", True), ("rescale_grad", 0.5)]),
        ("adamw", {"wd": 0.1}),
    ],
)
def test_gradients_can_be_kept(name: str, hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater, "BLOCK", 12)
    torch.manual_seed(3)
    first, grads = torch.randn(10, 3), torch.randn(10, 3)
    results = []
    for keep in (False, True):
        stepped = Stepped(name, first, **hyper)
        for count in (1, 2):
            given = grads.clone()
            stepped.updater.step(count, stepped.weight, given, stepped.states, keep=keep)
        results.append([stepped.weight, *stepped.states.values()])
    assert torch.equal(given, grads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", names_for_rows())
@pytest.mark.parametrize("width", [3, 64])
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    first, grads = torch.randn(100, width), [torch.randn(100, width) for _ in range(2)]
    together, apart, blocks = (Stepped(name, first) for _ in range(3))
    for grad in grads:
        together.step(torch.arange(100), grad)
        count = apart.count
        for start, stop in ((0, 1), (1, 8), (8, 41), (41, 100)):  # as if on four servers
            apart.count = count
            apart.step(torch.arange(start, stop), grad[start:stop])
    monkeypatch.setattr(updater, "BLOCK", 7 * width)
    for grad in grads:
        blocks.step(torch.arange(100), grad)
    assert torch.equal(together.weight, apart.weight)
    assert torch.equal(together.weight, blocks.weight)


def test_lazy_update_is_mxnets() -> None:
    assert RowUpdater(describe("adam", {}), "table", "float32", 4, grows=False).lazy
    assert describe("adam", {"lazy_update": True}) == describe("adam", {})
    optimizer = describe("adam", {"lazy_update": False, "groups": [{"keys": ["user"], "lazy_update": True}]})
    assert not RowUpdater(optimizer, "item", "float32", 4, grows=False).lazy
    assert RowUpdater(optimizer, "user", "float32", 4, grows=True).lazy
    with pytest.raises(UsageError, match="key 'item' is a table that grows"):
        RowUpdater(optimizer, "item", "float32", 4, grows=True)
    with pytest.raises(UsageError, match="lazy_update='no' must be True or False"):
        describe("adam", {"lazy_update": "no"})
    assert describe("adadelta", {"lazy_update": False}) == describe("adadelta", {})  # of no use there


def test_all_rows_with_zero_gradients_decay_and_move_as_torchs() -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    first = torch.randn(10, 4)
    weight = first.clone().requires_grad_()
    torchs, ours = eager(torch.optim.SGD)([weight], **hyper), Stepped("sgd", first, **hyper)
    for number in range(5):
        grads = torch.zeros(10, 4)
        grads[number] = 1.0
        weight.grad = grads.clone()
        torchs.step()
        ours.step(torch.arange(10), grads)
    torch.testing.assert_close(ours.weight, weight.detach())


def test_an_optimizer_without_a_rule_is_refused_with_those_that_have_one() -> None:
    specs = [("user", TableSpec.of(Table(dim=4)))]
    for name in set(names()) - set(names_for_rows()):
        with pytest.raises(UsageError, match=rf"{name} cannot update key 'user', a table.*adagrad, adam, adamw.*sgd"):
            require_shapes(describe(name, {}), specs)
    for name in names_for_rows():
        require_shapes(describe(name, {}), specs)


def test_groupadagrad_takes_tables_of_any_shape() -> None:
    require_shapes(describe("groupadagrad", {}), [("user", TableSpec.of(Table(dim=(2, 3))))])


def test_sparseadam_is_adam() -> None:
    expected = describe("adam", {"lr": 0.5})
    assert describe("SparseAdam", {"lr": 0.5}) == expected
    assert describe(torch.optim.SparseAdam, {"lr": 0.5}) == expected
    instance = torch.optim.SparseAdam([torch.zeros(1)], lr=0.5, betas=(0.8, 0.9))
    found = describe(instance, {})
    assert (found.name, found.lr, tuple(found.hyper["betas"])) == ("adam", 0.5, (0.8, 0.9))


def test_states_that_updaters_of_one_rule_keep_may_differ() -> None:
    plain, moving = (
        RowUpdater(describe("sgd", hyper), "table", "float32", 4, grows=True) for hyper in ({}, {"momentum": 0.9})
    )
    assert plain.rule == moving.rule
    assert not plain.states
    assert set(moving.states) == {"momentum_buffer"}


def test_numbers_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        RowUpdater(describe("adam", {"lr": -1.0}), "table", "float32", 4, grows=True)


def test_every_rule_says_what_it_keeps() -> None:
    for name in names_for_rows():
        rule = builtin()[name].rows
        assert rule is not None
        updater = RowUpdater(describe(name, {}), "table", "float64", 4, grows=True)
        assert all(state.dtype == "float64" and state.columns in (None, 1) for state in updater.states.values())


REFERENCE = results()


def described(case: str) -> Any:
    name, options, ours, _ = cases.CASES[case]
    given = {key: value for key, value in (options | ours).items() if value is not None}
    lr_mult = {} if name == "adadelta" else {"lr_mult": {1: cases.LR_MULT}}  # MXNet's ignores all rates
    wd_mult = {} if name == "groupadagrad" else {"wd_mult": {1: 0.0 if name == "lars" else cases.WD_MULT}}
    return describe(name, given | lr_mult | wd_mult)


@pytest.mark.parametrize("case", cases.CASES)
def test_the_weights_are_mxnets(case: str) -> None:
    updater = Updater(described(case))
    rate, factors = updater.lr, cases.CASES[case][-1]
    weights = [torch.from_numpy(value) for value in cases.arrays(case, 0)]
    after: list[list[torch.Tensor]] = []
    for step in range(cases.STEPS):
        updater.lr = rate * factors[step]
        grads = map(torch.from_numpy, cases.arrays(case, step + 1))
        updater.update([(key, weight, grad) for key, (weight, grad) in enumerate(zip(weights, grads, strict=True))])
        if step in cases.SHOWN:
            after.append([weight.clone() for weight in weights])
    tolerance = 2e-3 if cases.dtype(case) == "float16" else 2e-6  # MXNet rounds half-precision gradients once more
    for ours, theirs in zip(after, REFERENCE["cases"][case], strict=True):
        for weight, values in zip(ours, theirs, strict=True):
            expected = torch.tensor(values).view(weight.shape)
            torch.testing.assert_close(weight.float(), expected, rtol=tolerance, atol=tolerance)


def test_every_case_is_of_this_mxnet() -> None:
    assert REFERENCE["mxnet"] == "1.9.1"
    assert list(REFERENCE["cases"]) == list(cases.CASES)
    # Noise has no reference; adamw, lans and adabelief came with MXNet 2, which was never released; the row-wise ones
    # are FBGEMM's.
    beyond = {"sgld", "adamw", "lans", "adabelief", "rowwiseadagrad", "rowwiseadam"}
    torchs = {"adafactor", "asgd", "muon", "radam", "rprop"}
    assert {case[0] for case in cases.CASES.values()} == set(names()) - beyond - torchs
