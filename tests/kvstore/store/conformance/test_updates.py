"""Updates by an optimizer, on every store: gradients, rates and other hyper-parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_store import all_of, assigning, every, everywhere, mine, pulled, settle
from small_jobs import BOUND
from store_kinds import Run

import kvstore as kv
from kvstore.optim import states_file

# What it is about is told in tests/kvstore/client/test_optimizer.py.
pytestmark = pytest.mark.filterwarnings("ignore:.* has momentum .* gradients come late:UserWarning")


@everywhere
def test_an_optimizer_gets_the_sum(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=0.5)
    store.init(["a", "b"], [torch.zeros(3), torch.zeros(BOUND)])
    for rounds in (1, 2):
        values = [torch.full((3,), float(mine(store))), torch.full((BOUND,), 2.0 * mine(store))]
        settle(store, store.push(["a", "b"], values))
        assert (pulled(store, "a", (3,)) == -0.5 * rounds * all_of(store)).all()
        assert (pulled(store, "b", (BOUND,)) == -1.0 * rounds * all_of(store)).all()
        store.barrier()


@every
def test_an_optimizer_may_come_after_init(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(3))
    store.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.25))
    settle(store, store.push("w", torch.ones(3)))
    assert (pulled(store, "w", (3,)) == -0.25 * store.num_workers).all()


@every
def test_the_callers_gradient_stays_as_it_is(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0, momentum=0.9, wd=0.1, rescale_grad=0.5, clip_gradient=0.25)
    store.init(["w", "h"], [torch.ones(3), torch.ones(3, dtype=torch.float16)])
    grads = torch.ones(3), torch.ones(3, dtype=torch.float16)
    outs = torch.empty(3), torch.empty(3, dtype=torch.float16)
    store.pushpull(["w", "h"], list(grads), list(outs))
    assert all((grad == 1).all() for grad in grads)
    store.barrier()


@every
def test_strides_of_gradients_do_not_matter(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", torch.zeros(2, 3))
    settle(store, store.push("w", torch.arange(6.0).view(3, 2).t()))
    assert (pulled(store, "w", (2, 3)) == -store.num_workers * np.arange(6.0).reshape(3, 2).T).all()


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
@every
def test_an_optimizer_updates_floats_only(store: kv.KVStore, name: str) -> None:
    value = torch.ones(2, dtype=getattr(torch, name))
    store.set_optimizer("sgd")
    store.init("n", value)
    with pytest.raises(kv.Mismatch, match=f"'n' is {name}.*floating point only"):
        store.push("n", value)
    out = torch.zeros_like(value)
    store.pull("n", out)
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@every
def test_an_optimizer_updates_every_float(store: kv.KVStore, name: str) -> None:
    value = torch.zeros(3, dtype=getattr(torch, name))
    store.set_optimizer("sgd", learning_rate=0.5)
    store.init("w", value)
    settle(store, store.push("w", torch.ones_like(value)))
    assert (pulled(store, "w", value) == -0.5 * store.num_workers).all()


@every
def test_half_precision_weights_do_not_lose_small_steps(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=2.0**-10 / store.num_workers)
    store.init("w", torch.ones(2, dtype=torch.bfloat16))
    for _ in range(64):
        ticket = store.push("w", torch.ones(2, dtype=torch.bfloat16))
    settle(store, ticket)
    assert pulled(store, "w", torch.empty(2, dtype=torch.bfloat16)).tolist() == [1 - 64 * 2.0**-10] * 2


@every
def test_a_sum_that_half_precision_lacks_is_used_in_float32(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1e-6, rescale_grad=0.25 / store.num_workers)
    store.init(["w", "h"], [torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
    big = torch.full((2,), 40_000.0)
    settle(store, store.push(["w", "h"], [[big] * 4, [big.half()] * 4]))
    expected = pulled(store, "w", (2,)).astype(np.float16)
    assert pulled(store, "h", torch.empty(2, dtype=torch.float16)).tolist() == expected.tolist()
    assert expected[0].item() == pytest.approx(-0.04, rel=0.01)
    store.barrier()


@every
def test_an_unknown_optimizer_or_hyper_parameter(store: kv.KVStore) -> None:
    with pytest.raises(kv.UnknownName, match=r"no optimizer 'sdg'; choose from .*sgd"):
        store.set_optimizer("sdg")
    with pytest.raises(kv.UnknownName, match=r"no hyper-parameter 'momentun'; choose from .*momentum"):
        store.set_optimizer("sgd", momentun=0.9)


@every
def test_a_new_learning_rate_keeps_the_momentum(store: kv.KVStore) -> None:
    share = 1.0 / store.num_workers
    store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    assert store.learning_rate == 1.0
    store.init("w", torch.zeros(2))
    if store.rank == 0 or "async" not in store.type:
        grad = torch.full((2,), share if "async" not in store.type else 1.0)
        store.push("w", grad).wait()
        store.set_learning_rate(0.25)
        store.push("w", grad).wait()
        assert store.learning_rate == 0.25
    store.barrier()
    np.testing.assert_allclose(pulled(store, "w", (2,)), -1 - 0.25 * 1.5, rtol=1e-6)


@every
def test_gradients_can_be_scaled_anew(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=0.5)
    store.init("w", torch.zeros(2))
    settle(store, store.push("w", torch.ones(2)))
    store.set_hyperparameters(rescale_grad=0.25)
    settle(store, store.push("w", torch.ones(2)))
    assert (pulled(store, "w", (2,)) == -0.75 * store.num_workers).all()


@every
def test_a_multiplier_of_a_group_changes(store: kv.KVStore) -> None:
    groups = [{"keys": ["w"], "lr_mult": 0.5}]
    store.set_optimizer("sgd", learning_rate=1.0, groups=groups, lr_mult={"v": 2.0})
    store.init(["v", "w"], [torch.zeros(2)] * 2)
    store.set_hyperparameters(groups=[{"lr_mult": 0.25}])
    settle(store, store.push(["v", "w"], [torch.ones(2)] * 2))
    for key, change in (("v", 2.0), ("w", 0.25)):
        assert (pulled(store, key, (2,)) == -change * store.num_workers).all()
    with pytest.raises(kv.UsageError, match=r"keys have factors of their own, as here 1, 2"):
        store.set_hyperparameters(lr_mult=3.0)


@assigning
def test_pushes_may_have_weights(store: kv.KVStore) -> None:
    """Worker r pushes r + 1, with a weight of r + 1; then, outside of the block, with the same weight as all."""
    number = store.num_workers
    store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=1 / number)
    store.init(["a", "b"], [torch.zeros(3), torch.zeros(BOUND)])
    values = [torch.full((3,), float(mine(store))), torch.full((BOUND,), float(mine(store)))]
    with store.weighted(mine(store)):
        settle(store, store.push(["a", "b"], values))
    mean = sum(rank * rank for rank in range(1, number + 1)) / all_of(store)
    np.testing.assert_allclose(pulled(store, "a", (3,)), -mean, rtol=1e-6)
    np.testing.assert_allclose(pulled(store, "b", (BOUND,)), -mean, rtol=1e-6)
    settle(store, store.push(["a", "b"], values))
    np.testing.assert_allclose(pulled(store, "b", (BOUND,)), -mean - all_of(store) / number, rtol=1e-6)


@every
def test_weights_that_a_store_does_not_take(store: kv.KVStore) -> None:
    if "async" in store.type:
        with pytest.raises(kv.UsageError, match="no rounds, whose mean a weight could change"):
            store.weighted(1)
        return
    for bad in (-1, float("nan"), "1", True):
        with pytest.raises(kv.UsageError, match="weight="), store.weighted(bad):  # type: ignore[arg-type]
            raise AssertionError


@pytest.mark.parametrize("bad", ["0.1", None, float("nan"), True])
@every
def test_a_learning_rate_is_a_number(store: kv.KVStore, bad: Any) -> None:
    store.set_optimizer("sgd", learning_rate=0.5)
    if bad is not None:
        with pytest.raises(kv.UsageError, match="not a finite number"):
            store.set_learning_rate(bad)
    else:
        store.set_hyperparameters(learning_rate=None, rescale_grad=None)
    assert store.learning_rate == 0.5


@every
def test_other_numbers_keep_the_state(store: kv.KVStore) -> None:
    alone = store.rank == 0 or "async" not in store.type
    share = torch.full((2,), 1.0 / (store.num_workers if "async" not in store.type else 1))
    store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    store.init("w", torch.zeros(2))
    for lr in (1.0, 0.25):
        store.set_optimizer("sgd", learning_rate=lr, momentum=0.5)
        assert store.learning_rate == lr
        if alone:
            store.push("w", share).wait()
        store.barrier()
    np.testing.assert_allclose(pulled(store, "w", (2,)), -1 - 0.25 * 1.5, rtol=1e-6)


@every
def test_another_optimizer_drops_the_state_and_says_so(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("nag", learning_rate=1.0)
        store.init("w", torch.zeros(2))
        settle(store, store.push("w", torch.ones(2)))
        before = pulled(store, "w", (2,))
        store.barrier()
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        settle(store, store.push("w", torch.ones(2)))
        if "async" not in store.type:
            assert (pulled(store, "w", (2,)) == before - store.num_workers).all()

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "sgd replaces nag, whose state is dropped" in caplog.text


@every
def test_multipliers_by_key(store: kv.KVStore) -> None:
    keys = ["plain", "slow", "still", "bare"]
    share = 1.0 / store.num_workers if "async" not in store.type else 1.0
    mults = {"lr_mult": {"slow": 0.5, "still": 0}, "wd_mult": {"bare": 0}}
    store.set_optimizer("sgd", learning_rate=1.0, wd=0.5, **mults)
    store.init(keys, [torch.full((BOUND,), 2.0) for _ in keys])
    if store.rank == 0 or "async" not in store.type:
        store.push(keys, [torch.full((BOUND,), share) for _ in keys]).wait()
    store.barrier()
    np.testing.assert_allclose([pulled(store, key, (BOUND,))[-1] for key in keys], [0, 1, 2, 1], atol=1e-6)


# What it is about is told in tests/kvstore/client/test_optimizer.py.


@every
def test_without_an_optimizer_there_is_nothing_to_set_or_save(run: Run, tmp_path: Path) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(2))
        with pytest.raises(kv.UsageError, match="optimizer"):
            _ = store.learning_rate
        with pytest.raises(kv.UsageError, match="set_optimizer"):
            store.save_optimizer_states(tmp_path / "s")

    run(work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("optimizer", "keys"), [("adam", ["a", "b", "n"]), ("adagrad", [2**64 - 1, -(2**63), 7]), ("sgd", ["a", "b", "n"])]
)
@every
def test_a_run_goes_on_from_saved_states_to_the_bit(run: Run, optimizer: str, keys: list[Any], tmp_path: Path) -> None:
    shapes = dict(zip(keys, [(3, 2), (BOUND + 3,), ()], strict=True))
    options = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer == "sgd" else {})}

    def begin(store: kv.KVStore, weights: dict[Any, torch.Tensor]) -> None:
        store.init(list(weights), list(weights.values()))
        store.set_optimizer(optimizer, **options)

    def step(store: kv.KVStore, number: int) -> None:
        if store.rank == 0 or "async" not in store.type:
            generator = torch.Generator().manual_seed(10 * number + store.rank)
            store.push(list(shapes), [torch.randn(shape, generator=generator) for shape in shapes.values()])

    def weights_of(store: kv.KVStore) -> dict[Any, torch.Tensor]:
        return {key: torch.from_numpy(pulled(store, key, shape)) for key, shape in shapes.items()}

    def whole(store: kv.KVStore) -> tuple[Any, Any]:
        begin(store, {key: torch.ones(shape) for key, shape in shapes.items()})
        for number in (0, 1):
            step(store, number)
        middle = weights_of(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "s")
        store.barrier()
        for number in (2, 3):
            step(store, number)
        return middle, weights_of(store)

    middle, end = run(whole)[0]

    def second_half(store: kv.KVStore) -> Any:
        begin(store, middle)
        store.load_optimizer_states(tmp_path / "s")
        for number in (2, 3):
            step(store, number)
        return weights_of(store)

    again = run(second_half)[0]
    assert all(torch.equal(again[key], end[key]) for key in shapes)
    assert not torch.equal(middle[keys[1]], end[keys[1]])


@every
def test_states_that_do_not_belong_here(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"

    def save(store: kv.KVStore) -> None:
        store.set_optimizer("adam")
        store.init("w", torch.zeros(2))
        if store.rank == 0 or "async" not in store.type:
            store.push("w", torch.ones(2)).wait()
        if store.rank == 0:
            store.save_optimizer_states(path)

    def refuse(optimizer: str, key: str, shape: tuple[int, ...], text: str) -> Callable[[kv.KVStore], None]:
        def work(store: kv.KVStore) -> None:
            store.set_optimizer(optimizer)
            store.init(key, torch.zeros(shape))
            if store.rank == 0:
                with pytest.raises(kv.UsageError, match=text):
                    store.load_optimizer_states(path)

        return work

    run(save)
    run(refuse("sgd", "w", (2,), "the states of adam, but the optimizer is sgd"))
    run(refuse("adam", "v", (2,), "key 'w', which has not been initialized"))
    run(refuse("adam", "w", (3,), r"of shape \[2\] for key 'w'"))
    path.write_bytes(b"nonsense")
    run(refuse("adam", "w", (2,), "damaged"))


@pytest.mark.parametrize("shape", [(), (BOUND, 1)])
@every
def test_states_that_torch_would_read_past_are_refused(run: Run, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "s"
    states_file.write(path, "sgd", {("w", "momentum_buffer"): torch.ones(shape)})

    def work(store: kv.KVStore) -> Any:
        store.init("w", torch.zeros(BOUND, 3))
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        if store.rank == 0:
            with pytest.raises(kv.UsageError, match=r"momentum_buffer.* of key 'w'|states of key 'w': momentum_buffer"):
                store.load_optimizer_states(path)
        store.barrier()
        if store.rank == 0 or "async" not in store.type:
            store.push("w", torch.ones(BOUND, 3))
        return pulled(store, "w", (BOUND, 3))

    assert len(np.unique(run(work)[0])) == 1  # the state is none, so all elements were updated alike


@every
def test_of_a_file_of_states_all_are_taken_or_none(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    keys = [f"k{number}" for number in range(6)]  # on several servers
    good = {(key, "momentum_buffer"): torch.ones(4) for key in keys}
    states_file.write(path, "sgd", good | {(keys[-1], "momentum_buffer"): torch.ones(())})

    def work(store: kv.KVStore) -> Any:
        store.init(keys, [torch.zeros(4)] * len(keys))
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        if store.rank == 0:
            with pytest.raises(kv.UsageError, match="states of key 'k5': momentum_buffer"):
                store.load_optimizer_states(path)
        store.barrier()
        if store.rank == 0 or "async" not in store.type:
            store.push(keys, [torch.zeros(4)] * len(keys))  # moves what has a momentum
        store.barrier()
        return [pulled(store, key, (4,)) for key in keys]

    assert not np.any(run(work)[0])
