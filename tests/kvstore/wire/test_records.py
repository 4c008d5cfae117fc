"""Messages that describe a server's state."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import any_message, with_shorter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (wire.ClosedRounds, "versions"),
        (wire.BucketState, "splits"),
        (wire.Updated, "versions"),
        (wire.Updated, "names"),
        (wire.StatesState, "names"),
        (wire.EncoderState, "steps"),
        (wire.EncoderState, "versions"),
    ],
)
@settings(max_examples=5)
@given(st.data())
def test_lists_of_different_lengths_are_refused(cls: Any, field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="one length"):
        wire.decode(with_shorter(message, field))
