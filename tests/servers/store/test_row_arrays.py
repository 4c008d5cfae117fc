"""Arrays of rows in buffers."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import WireError
from servers.store.row_arrays import array_of, bytes_of, integers


def test_an_array_comes_back_and_cannot_be_written_to() -> None:
    rows = np.arange(6, dtype=np.float64).reshape(3, 2)
    back = array_of(bytes_of(rows), 3, 2, "float64", "rows")
    assert np.array_equal(back, rows)
    assert not back.flags.writeable
    assert integers(bytes_of(np.array([5, -1]))).tolist() == [5, -1]


def test_no_rows_are_no_bytes() -> None:
    assert array_of(bytes_of(np.empty((0, 3), np.float32)), 0, 3, "float32", "rows").shape == (0, 3)
    assert integers(b"").shape == (0,)


def test_another_length_is_refused() -> None:
    with pytest.raises(WireError, match="2 rows are 24 bytes, not 20"):
        array_of(bytes(20), 2, 3, "float32", "rows")
    with pytest.raises(WireError, match="1 numbers are 8 bytes, not 9"):
        integers(bytes(9))
