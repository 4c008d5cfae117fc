"""What is no message, for tests of what comes over the wire: values that are no field's, and messages that broke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

# what msgpack can carry
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, good: st.SearchStrategy[Sequence[Any]]) -> list[Any]:
    """The frames of a ``good`` message with bytes changed, left out or added, or without one of them."""
    parts = [bytearray(frame) for frame in draw(good)]
    for _ in range(draw(st.integers(1, 3))):
        part = parts[draw(st.integers(0, len(parts) - 1))]
        at = draw(st.integers(0, max(0, len(part) - 1)))
        what = draw(st.integers(0, 3))
        if what == 0 and part:
            part[at] = draw(st.integers(0, 255))
        elif what == 1:
            del part[at:]
        elif what == 2:
            part[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif len(parts) > 1:
            del parts[draw(st.integers(1, len(parts) - 1))]
    return list(parts)
