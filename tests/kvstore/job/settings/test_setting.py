"""How a setting is read from the environment."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.job.settings import Setting
from kvstore.job.valid_values import Integer


def setting(values: Any, default: Any = None, *aliases: str) -> Setting[Any]:
    return Setting("KVSTORE_X", values, default, "what it is for", aliases=aliases)


def test_the_default_stands_for_what_is_not_set_or_empty() -> None:
    number = setting(Integer(0), 7)
    assert number.read({}) == number.read({"KVSTORE_X": " "}) == 7
    assert number.read({}, 8) == 8
    assert number.read({"KVSTORE_X": "9"}, 8) == 9


def test_the_name_goes_before_its_aliases() -> None:
    number = setting(Integer(0), 0, "OLD_X")
    assert number.read({"OLD_X": "3"}) == 3
    assert number.read({"OLD_X": "3", "KVSTORE_X": "4"}) == 4
    with pytest.raises(ConfigError, match=r"^OLD_X='x'"):
        number.read({"OLD_X": "x"})
