"""What the tests of whole jobs in virtual time have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Crashes are what this is about: nobody needs to read of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
