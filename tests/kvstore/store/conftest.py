"""A registry of the test's own."""

from __future__ import annotations

import pytest

import kvstore as kv
from kvstore.store import registry as names_of_stores


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[kv.KVStore]]:
    """What is registered in a test is forgotten after it."""
    monkeypatch.setattr(names_of_stores, "REGISTERED", {})
    return names_of_stores.REGISTERED
