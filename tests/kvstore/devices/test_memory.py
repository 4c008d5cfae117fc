from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.devices import CannotLend, Handle

GOOD = Handle(bytes(16), bytes(64), 1 << 20, 1)


@given(st.integers(0, 1 << 34), st.integers(1, 1 << 40))
def test_a_handle_of_the_right_sizes_is_valid(grains: int, nbytes: int):
    GOOD._replace(offset=64 * grains, nbytes=nbytes).require_valid()


@pytest.mark.parametrize(
    "changes",
    [
        {"device": bytes(15)},
        {"opaque": bytes(65)},
        {"nbytes": 0},
        {"nbytes": (1 << 40) + 1},
        {"offset": -64},
        {"offset": 1},
        {"offset": 1 << 41},
    ],
)
def test_others_are_refused(changes: dict[str, Any]):
    with pytest.raises(CannotLend, match=r"^expected "):
        GOOD._replace(**changes).require_valid()
