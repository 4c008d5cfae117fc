"""The names that ``import kvstore as kv`` offers, and one word for a thing in all its signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import kvstore as kv


def public_calls() -> list[Callable[..., Any]]:
    """Every public function and method, and how a ticket is made."""
    calls = [kv.create, kv.Ticket]
    for cls in (kv.KVStore, kv.Ticket):
        calls += [call for name, call in vars(cls).items() if not name.startswith("_") and inspect.isfunction(call)]
    return calls


def test_dir_lists_the_public_names_alone() -> None:
    assert dir(kv) == sorted([*kv.__all__, "__version__"])


def test_every_public_name_is_there_and_documented() -> None:
    for name in kv.__all__:
        assert getattr(kv, name).__doc__, name


def test_the_old_names_are_not_listed() -> None:
    assert not [name for name in dir(kv) if "Initialised" in name]


@pytest.mark.parametrize("call", public_calls(), ids=lambda call: call.__qualname__)
def test_a_deadline_is_called_timeout_everywhere(call: Callable[..., Any]) -> None:
    names = list(inspect.signature(call).parameters)
    assert not [name for name in names if name != "timeout" and ("timeout" in name or "deadline" in name)]


@pytest.mark.parametrize(("name", "default"), [("push", False), ("pull", True), ("pushpull", True)])
def test_what_returns_a_ticket_takes_wait(name: str, default: bool) -> None:
    wait = inspect.signature(getattr(kv.KVStore, name)).parameters["wait"]
    assert (wait.default, wait.kind) == (default, inspect.Parameter.KEYWORD_ONLY)
