"""A store as what updates: what it does not do is an error, and what follows from what it does."""

from __future__ import annotations

from typing import Any

import pytest

import kvstore as kv


class Bare(kv.KVStore):
    pass


class Updating(kv.KVStore):
    def __init__(self) -> None:
        super().__init__()
        self.set: list[dict[str, Any]] = []

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        self.set.append({"optimizer": optimizer, **hyperparameters})

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        self.set.append(hyperparameters)


def test_what_a_store_does_not_do_is_unsupported() -> None:
    store = Bare()
    for call in (
        lambda: store.set_optimizer("sgd"),
        lambda: store.set_updater(lambda key, pushed, stored: None),
        lambda: store.learning_rate,
        lambda: store.set_learning_rate(0.1),
        lambda: store.set_hyperparameters(rescale_grad=1.0),
        lambda: store.save_optimizer_states("s"),
        lambda: store.load_optimizer_states("s"),
    ):
        with pytest.raises(NotImplementedError, match="a 'bare' store has no"):
            call()


def test_a_rate_is_a_hyper_parameter() -> None:
    store = Updating()
    store.set_learning_rate(0.25)
    assert store.set == [{"learning_rate": 0.25}]


def test_a_store_is_capable_of_an_optimizer_if_it_takes_one() -> None:
    assert Updating().is_capable("Optimizer")
    assert not Bare().is_capable("optimizer")
    with pytest.raises(kv.UnknownName, match="there is no capability 'updater'; choose from optimizer"):
        Bare().is_capable("updater")
