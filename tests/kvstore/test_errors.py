"""One tree of errors, how one that crossed the wire becomes itself again, and logging that is limited in rate."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvstore as kv
import workers
import workers.metrics
from kvstore import errors
from kvstore.codecs import options as codecs
from kvstore.errors import BY_NAME, DeadlineExceeded, KVStoreError, PeerError, UsageError, rebuild
from kvstore.rare_log import Drops, worth_a_line

# ---- one tree of errors, and how one that crossed the wire becomes itself again


ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVStoreError)]


def test_every_error_is_public_and_in_the_picture() -> None:
    for cls in ALL:
        assert getattr(kv, cls.__name__) is cls
        assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("cls", "parents"),
    [
        (kv.UnknownName, (UsageError, ValueError)),
        (kv.KeyNotInitialized, (UsageError, KeyError)),
        (kv.AlreadyInitialized, (UsageError,)),
        (kv.Mismatch, (UsageError, ValueError)),
        (kv.Unsupported, (UsageError, NotImplementedError)),
        (kv.ConfigError, (UsageError,)),
        (kv.NodeLost, (PeerError,)),
        (kv.ServerError, (PeerError,)),
        (kv.WireError, (PeerError,)),
        (kv.DeadlineExceeded, (KVStoreError, TimeoutError)),
    ],
)
def test_blame(cls: type[KVStoreError], parents: tuple[type[Exception], ...]) -> None:
    assert all(issubclass(cls, parent) for parent in parents)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_an_error_is_rebuilt_by_its_name(name: str) -> None:
    error = rebuild(name, "what happened to 'w'")
    assert type(error) is BY_NAME[name]
    assert str(error) == "what happened to 'w'"


@pytest.mark.parametrize("name", ["ValueError", "SystemExit", "KVStoreError", "", "__class__"])
def test_an_unknown_name_is_a_server_error(name: str) -> None:
    error = rebuild(name, "text")
    assert type(error) is kv.ServerError
    assert str(error) == "text"


def test_everything_but_the_inner_nodes_can_cross() -> None:
    assert set(BY_NAME.values()) == set(ALL) - {KVStoreError, PeerError}


def test_a_deadline_keeps_who_was_silent() -> None:
    error = DeadlineExceeded("late", ("server 1",))
    assert error.silent == ("server 1",)
    again = copy.copy(error)
    assert (str(again), again.silent) == ("late", ("server 1",))


@pytest.mark.parametrize("module", [kv, errors])
@pytest.mark.parametrize(
    ("old", "new"), [("AlreadyInitialised", kv.AlreadyInitialized), ("KeyNotInitialised", kv.KeyNotInitialized)]
)
def test_an_old_name_is_the_same_class_and_warns(module: Any, old: str, new: type[KVStoreError]) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"{module.__name__}.{old} is now {module.__name__}.{new.__name__}"
    ) as caught:
        assert getattr(module, old) is new
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", [kv, errors])
def test_a_name_that_never_was_is_missing(module: Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Ticked'"):
        _ = module.Ticked


def test_choices_are_sorted() -> None:
    assert errors.choices({"b", "a", 3}) == "3, a, b"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda _: kv.create("dist_snyc"), "dist_sync"),
        (lambda _: kv.create("local", check_finit=True), "check_finite"),
        (lambda store: store.set_optimizer("adma"), "adam"),
        (lambda store: store.set_optimizer("sgd", leaning_rate=1.0), "learning_rate"),
        (lambda store: (store.set_optimizer("sgd"), store.set_hyperparameters(momentun=0.5)), "momentum"),
        (lambda _: codecs.parse({"type": "2bits"}), "2bit"),
        (lambda _: codecs.parse({"type": "2bit", "treshold": 1.0}), "threshold"),
        (lambda _: workers.metrics.create("acuracy"), "accuracy"),
        (lambda _: workers.fit(torch.nn.Linear(1, 1), [], num_epoch=1, kvstor="local"), "kvstore"),
    ],
)
def test_who_misspells_a_name_is_told_which_was_meant(call: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(kv.UnknownName, match=rf"choose from .*; did you mean '{name}'\?$"):
        call(kv.create("local"))


def test_a_name_that_is_like_no_other_gets_no_guess() -> None:
    assert errors.meant("zzz", ["adam", "sgd"]) == errors.meant(3, ["adam"]) == errors.meant("adma", []) == ""


# ---- rate-limited logging: the first, the tenth, the hundredth


def test_lines_become_rarer_by_tens() -> None:
    assert [count for count in range(2000) if worth_a_line(count)] == [1, 10, 100, 1000]


def test_drops_are_counted_and_now_and_then_logged(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops(logging.getLogger("somewhere"))
    for number in range(1, 151):
        drops.note("a message", f"reason {number}")
    assert [record.getMessage() for record in caplog.records] == [
        "dropped a message (1 so far): reason 1",
        "dropped a message (10 so far): reason 10",
        "dropped a message (100 so far): reason 100",
    ]
    assert {record.name for record in caplog.records} == {"somewhere"}


def test_each_counts_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Drops(logging.getLogger("somewhere")).note("a message", "no reason")
    assert len(caplog.records) == 2
