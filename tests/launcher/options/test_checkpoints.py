from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from parsed_options import given

from launcher.options.checkpoints import add, variables


def test_they_are_variables_of_servers_and_workers() -> None:
    options = given(add, "--checkpoint-dir", "run", "--checkpoint-every", "500r", "--checkpoint-keep", "2")
    assert variables(options) == {
        "KVSTORE_CHECKPOINT_DIR": str(Path("run").absolute()),
        "KVSTORE_CHECKPOINT_EVERY": "500r",
        "KVSTORE_CHECKPOINT_KEEP": "2",
    }
    assert variables(given(add, "--resume", "/old")) == {"KVSTORE_CHECKPOINT_RESUME": "/old"}
    assert variables(given(add)) == {}


def test_an_interval_that_is_none() -> None:
    with pytest.raises(argparse.ArgumentError, match="'10' is not valid; valid: a number of rounds such as 500r"):
        given(add, "--checkpoint-every", "10")
