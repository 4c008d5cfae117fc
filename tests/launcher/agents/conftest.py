"""A clock that tests move, and a selector."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

import pytest
from agent_doubles import Clock

from launcher.agents import fleet as fleet_module
from launcher.agents import roll_call as roll_call_module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fleet_module, roll_call_module):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made
