"""A compression in a message: it arrives as it was, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coded import COMPRESSIONS, NAMES

from kvstore.codecs import Compression, parse
from kvstore.codecs.options import described, travelling
from kvstore.errors import UnknownName, UsageError


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_it_arrives_as_it_was(compression: Compression) -> None:
    assert described(travelling(compression)) == compression
    assert described(travelling(replace(compression, pull=parse({"type": "fp16"})))) == compression, "one way each"


def test_none_is_none() -> None:
    assert travelling(None) is None
    assert described(None) is None


def test_what_is_none_is_refused() -> None:
    with pytest.raises(UnknownName, match="3bit"):
        described(["3bit", []])
    with pytest.raises(UsageError, match="threshold"):
        described(["2bit", [["threshold", -1.0]]])
