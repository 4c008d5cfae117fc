"""Updates by an optimizer, on every store: gradients, rates and other hyper-parameters."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from every_store import BOUND, Run, all_of, every, mine, pulled, settled

import kvstore as kv

# What it is about is told in tests/kvstore/client/test_optimizer.py.
pytestmark = pytest.mark.filterwarnings("ignore:.* has momentum .* gradients come late:UserWarning")


@every
def test_an_optimizer_gets_the_sum(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.5)
        store.init(["a", "b"], [torch.zeros(3), torch.zeros(BOUND)])
        for rounds in (1, 2):
            values = [torch.full((3,), float(mine(store))), torch.full((BOUND,), 2.0 * mine(store))]
            settled(store, store.push(["a", "b"], values))
            assert (pulled(store, "a", (3,)) == -0.5 * rounds * all_of(store)).all()
            assert (pulled(store, "b", (BOUND,)) == -1.0 * rounds * all_of(store)).all()
            store.barrier()

    run(work)


@every
def test_an_optimizer_may_come_after_init(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.zeros(3))
        store.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.25))
        settled(store, store.push("w", torch.ones(3)))
        assert (pulled(store, "w", (3,)) == -0.25 * store.num_workers).all()

    run(work)


@every
def test_the_callers_gradient_stays_as_it_is(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=0.5, clip_gradient=0.25)
        store.init(["w", "h"], [torch.zeros(3), torch.zeros(3, dtype=torch.float16)])
        grads = torch.ones(3), torch.ones(3, dtype=torch.float16)
        outs = torch.empty(3), torch.empty(3, dtype=torch.float16)
        store.pushpull(["w", "h"], list(grads), list(outs))
        assert all((grad == 1).all() for grad in grads)
        store.barrier()

    run(work)


@every
def test_strides_of_gradients_do_not_matter(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(2, 3))
        settled(store, store.push("w", torch.arange(6.0).view(3, 2).t()))
        assert (pulled(store, "w", (2, 3)) == -store.num_workers * np.arange(6.0).reshape(3, 2).T).all()

    run(work)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
@every
def test_an_optimizer_updates_floats_only(run: Run, name: str) -> None:
    def work(store: kv.KVStore) -> None:
        value = torch.ones(2, dtype=getattr(torch, name))
        store.set_optimizer("sgd")
        store.init("n", value)
        with pytest.raises(kv.Mismatch, match=f"'n' is {name}.*floating point only"):
            store.push("n", value)
        out = torch.zeros_like(value)
        store.pull("n", out)
        assert out.tolist() == [1, 1]

    run(work)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@every
def test_an_optimizer_updates_every_float(run: Run, name: str) -> None:
    def work(store: kv.KVStore) -> None:
        value = torch.zeros(3, dtype=getattr(torch, name))
        store.set_optimizer("sgd", learning_rate=0.5)
        store.init("w", value)
        settled(store, store.push("w", torch.ones_like(value)))
        assert (pulled(store, "w", value) == -0.5 * store.num_workers).all()

    run(work)


@every
def test_half_precision_weights_do_not_lose_small_steps(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=2.0**-10 / store.num_workers)
        store.init("w", torch.ones(2, dtype=torch.bfloat16))
        for _ in range(64):
            ticket = store.push("w", torch.ones(2, dtype=torch.bfloat16))
        settled(store, ticket)
        assert pulled(store, "w", torch.empty(2, dtype=torch.bfloat16)).tolist() == [1 - 64 * 2.0**-10] * 2

    run(work)


@every
def test_a_sum_that_half_precision_lacks_is_used_in_float32(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1e-6, rescale_grad=0.25 / store.num_workers)
        store.init(["w", "h"], [torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
        big = torch.full((2,), 40_000.0)
        settled(store, store.push(["w", "h"], [[big] * 4, [big.half()] * 4]))
        expected = pulled(store, "w", (2,)).astype(np.float16)
        assert pulled(store, "h", torch.empty(2, dtype=torch.float16)).tolist() == expected.tolist()
        assert expected[0].item() == pytest.approx(-0.04, rel=0.01)
        store.barrier()

    run(work)


@every
def test_an_unknown_optimizer_or_hyper_parameter(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        with pytest.raises(kv.UnknownName, match=r"no optimizer 'sdg'; choose from .*sgd"):
            store.set_optimizer("sdg")
        with pytest.raises(kv.UnknownName, match=r"no hyper-parameter 'momentun'; choose from .*momentum"):
            store.set_optimizer("sgd", momentun=0.9)

    run(work)


@every
def test_a_new_learning_rate_keeps_the_momentum(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@every
def test_gradients_can_be_scaled_anew(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=0.5)
        store.init("w", torch.zeros(2))
        settled(store, store.push("w", torch.ones(2)))
        store.set_hyperparameters(rescale_grad=0.25)
        settled(store, store.push("w", torch.ones(2)))
        assert (pulled(store, "w", (2,)) == -0.75 * store.num_workers).all()

    run(work)


@pytest.mark.parametrize("bad", ["0.1", None, float("nan"), True])
@every
def test_a_learning_rate_is_a_number(run: Run, bad: Any) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.5)
        if bad is not None:
            with pytest.raises(kv.UsageError, match="not a finite number"):
                store.set_learning_rate(bad)
        else:
            store.set_hyperparameters(learning_rate=None, rescale_grad=None)
        assert store.learning_rate == 0.5

    run(work)


@every
def test_other_numbers_keep_the_state(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@every
def test_another_optimizer_drops_the_state_and_says_so(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("nag", learning_rate=1.0)
        store.init("w", torch.zeros(2))
        settled(store, store.push("w", torch.ones(2)))
        before = pulled(store, "w", (2,))
        store.barrier()
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        settled(store, store.push("w", torch.ones(2)))
        if "async" not in store.type:
            assert (pulled(store, "w", (2,)) == before - store.num_workers).all()

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "sgd replaces nag, whose state is dropped" in caplog.text


@every
def test_multipliers_by_key(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        keys = ["plain", "slow", "still", "bare"]
        share = 1.0 / store.num_workers if "async" not in store.type else 1.0
        mults = {"lr_mult": {"slow": 0.5, "still": 0}, "wd_mult": {"bare": 0}}
        store.set_optimizer("sgd", learning_rate=1.0, wd=0.5, **mults)
        store.init(keys, [torch.full((BOUND,), 2.0) for _ in keys])
        if store.rank == 0 or "async" not in store.type:
            store.push(keys, [torch.full((BOUND,), share) for _ in keys]).wait()
        store.barrier()
        np.testing.assert_allclose([pulled(store, key, (BOUND,))[-1] for key in keys], [0, 1, 2, 1], atol=1e-6)

    run(work)
