"""Files of vectors: as word2vec, gensim, GloVe and fastText write them, and damaged ones."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv

NAMES = ["the", ",", "ü", "x" * 300, "7"]
ROWS = torch.tensor([[1.5, -2.0, 3.0], [0.1, 1e-7, 2e8], [0.0, -0.0, 1.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])


def text(header: bool, end: str = "\n", names: list[str] = NAMES) -> bytes:
    lines = [f"{len(names)} 3"] if header else []
    for name, row in zip(names, ROWS.tolist(), strict=False):
        lines.append(" ".join([name, *(f"{number:.9g}" for number in row)]))
    return (end.join(lines) + end).encode()


def binary(end: bytes, names: list[bytes] | None = None) -> bytes:
    """``end``: word2vec's program writes a line's end behind each vector, gensim nothing."""
    names = [name.encode() for name in NAMES] if names is None else names
    rows = [struct.pack("<3f", *row) for row in ROWS.tolist()]
    return b"%d 3\n" % len(names) + b"".join(name + b" " + row + end for name, row in zip(names, rows, strict=False))


FILES = {
    "word2vec": binary(b"\n"),
    "gensim": binary(b""),
    "word2vec text": text(True, " \n"),
    "fastText": text(True),
    "GloVe": text(False),
    "of another system": text(False, "\r\n").replace(b" ", b"\t"),
}


def read(path: Path, count: int = 2) -> tuple[list[Any], torch.Tensor]:
    parts = list(kv.read_vectors(path, count))
    assert all(len(part.names) == len(part.rows) <= count for part in parts)
    return [name for part in parts for name in part.names], torch.cat([part.rows for part in parts] or [ROWS[:0]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_vectors_of_every_kind_of_file(kind: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("vectors.gz" if packed else "vectors")
    path.write_bytes(gzip.compress(FILES[kind]) if packed else FILES[kind])
    names, rows = read(path)
    assert names == NAMES
    assert torch.equal(rows, ROWS)


def test_vectors_become_rows_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "vectors").write_bytes(FILES["GloVe"])
    store = kv.create("local")
    store.init("word", kv.Table(dim=3))
    for part in kv.read_vectors(tmp_path / "vectors"):
        store.put_rows("word", kv.RowSparse(kv.hash_ids(part.names), part.rows))
    assert torch.equal(store.row_sparse_pull("word", row_ids=kv.hash_ids(["ü", "the"])), ROWS[[2, 0]])


def test_names_may_have_spaces_in_text_come_again_and_be_no_text_at_all(tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    path.write_bytes(text(False, names=["a", ". . .", "a", "b"]))
    assert read(path)[0] == ["a", ". . .", "b"]
    assert torch.equal(read(path)[1], ROWS[[0, 1, 3]])
    path.write_bytes(binary(b"", [b"caf\xc3", b"b"]))
    assert read(path)[0] == [b"caf\xc3", "b"]
    assert len(kv.hash_ids(read(path)[0])) == 2


def test_long_files_are_read_piece_by_piece(tmp_path: Path) -> None:
    rows = torch.rand(3000, 200)
    header = b"3000 200\n"
    body = b"".join(b"w%d %s\n" % (number, row.numpy().tobytes()) for number, row in enumerate(rows))
    (tmp_path / "vectors").write_bytes(header + body)
    names, found = read(tmp_path / "vectors", 1000)
    assert names == [f"w{number}" for number in range(3000)]
    assert torch.equal(found, rows)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no file of vectors"),
        (b"word\n", "no file of vectors"),
        (b"3 0\n", "no file of vectors"),
        (b"3 999999999999\n", "no file of vectors"),
        (text(True)[:-3], "line 6 is no name and 3 numbers"),
        (text(False) + b"word 1 2\n", "line 6 is no name and 3 numbers: b'word 1 2"),
        (text(False) + b"word 1 2 x\n", "line 6 is no name"),
        (text(True).replace(b"5 3", b"6 3", 1), "says that it has 6 vectors, and has 5"),
        (binary(b"\n").replace(b"5 3", b"4 3", 1), "more comes after the 4 vectors"),
        (binary(b"").replace(b"5 3", b"999999999 3", 1), "says that it has 999999999 vectors, and has 5"),
        (binary(b"")[:-1], "has 5 vectors, and has 4"),
        (b"2 3\n" + bytes(1 << 18), "has 2 vectors, and has 0"),
    ],
)
def test_what_is_no_file_of_vectors_is_an_error(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    path.write_bytes(data)
    with pytest.raises(kv.CheckpointError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(FILES["GloVe"])[:-9])
    (tmp_path / "none.gz").write_bytes(FILES["GloVe"])
    for name in ("pipe", "missing", "cut.gz", "none.gz"):
        with pytest.raises(kv.CheckpointError, match=name):
            read(tmp_path / name)
    with pytest.raises(kv.UsageError, match="count=0"):
        read(tmp_path / "pipe", 0)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.integers(0, 60), st.binary(max_size=4), st.integers(0, 3))
def test_damage_is_an_error_or_other_vectors(tmp_path_factory: Any, kind: str, at: int, new: bytes, gone: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "vectors"
    data = FILES[kind]
    path.write_bytes(data[:at] + new + data[at + gone :])
    try:
        read(path)
    except kv.CheckpointError as exc:
        assert str(path) in str(exc)  # noqa: PT017 - it may be read, too
