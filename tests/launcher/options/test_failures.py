from __future__ import annotations

import argparse

import pytest
from parsed_options import given

from launcher.options.failures import add


def test_failures() -> None:
    options = given(add, "--replicas", "1", "--restarts", "0", "--inject=a", "--inject", "b")
    assert (options.replicas, options.restarts, options.inject) == (1, 0, ["a", "b"])
    assert (given(add).replicas, given(add).restarts) == (None, None), "others decide"
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 2"):
        given(add, "--replicas", "2")
