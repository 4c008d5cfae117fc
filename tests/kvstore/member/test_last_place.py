"""A text that one process writes and another reads, whenever that is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.member.pulse import LastPlace


@pytest.fixture
def ends() -> Iterator[tuple[LastPlace, LastPlace]]:
    """Who writes, and who reads."""
    writer = LastPlace()
    reader = LastPlace(os.dup(writer.fd))
    yield writer, reader
    writer.close()
    reader.close()


def test_the_latest_text_is_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    assert reader.read() == ""
    for text in ("train.py:41 in load_batch", "a.py:1 in f", "a.py:1 in f", "", "\u00e9" * 2):
        writer.write(text)
        assert reader.read() == text


def test_a_long_text_is_cut(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("x" * 10_000)
    assert reader.read() == "x" * 512


def test_a_text_that_is_half_written_is_not_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("train.py:41 in load_batch")
    os.pwrite(writer.fd, b"other", 10)
    assert reader.read() == ""
