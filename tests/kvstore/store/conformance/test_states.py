"""The optimizer's states in files, on every store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_store import BOUND, Run, every, pulled

import kvstore as kv
from kvstore.optim import states_file

# What it is about is told in tests/kvstore/client/test_optimizer.py.
pytestmark = pytest.mark.filterwarnings("ignore:.* has momentum .* gradients come late:UserWarning")


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
