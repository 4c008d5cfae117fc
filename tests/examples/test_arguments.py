"""What several command lines have in common."""

from __future__ import annotations

import argparse

import pytest
from arguments import default_store, natural, positive


def test_the_store_is_dist_sync_in_a_job_only(monkeypatch):
    assert default_store() == "local"
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    assert default_store() == "dist_sync"


def test_whole_numbers():
    assert (natural("0"), natural("17"), positive("1")) == (0, 17, 1)
    for text in ("-1", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            natural(text)
    with pytest.raises(argparse.ArgumentTypeError, match="must be 1 or more"):
        positive("0")
