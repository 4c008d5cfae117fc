import numpy as np
import pytest

from kvstore.errors import UsageError
from kvstore.rows import admission
from kvstore.rows.admission import GoneIds


def test_it_says_what_went_after_a_version():
    ids = GoneIds()
    for version in (1, 3, 3, 5):
        ids.add(np.array([version * 10, version * 10 + len(str(ids.nbytes))]), version, 0)
    assert ids.since(5).tolist() == []
    assert ids.since(3).tolist() == [50, 52]
    assert 10 in ids.since(0)


def test_the_oldest_are_forgotten_but_not_in_silence(monkeypatch):
    monkeypatch.setattr(admission, "KEPT", 4)
    ids = GoneIds()
    for version in range(1, 9):
        ids.add(np.array([version]), version, rows=0)
    assert ids.nbytes == 4 * 8
    assert ids.since(4).tolist() == [5, 6, 7, 8]
    with pytest.raises(UsageError, match="remembered since version 4 alone; save the whole table"):
        ids.since(3)
    ids.add(np.array([9]), 9, rows=100)
    assert ids.since(4).tolist() == [5, 6, 7, 8, 9]
    ids.forget(10)
    with pytest.raises(UsageError, match="since version 10"):
        ids.since(9)
    assert ids.since(10).tolist() == []
