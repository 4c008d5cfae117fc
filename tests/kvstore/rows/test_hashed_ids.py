"""``hash_ids``: the ids that its docstring promises to every language, for whatever has texts in it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.rows.hashed_ids import BLOCK

# By the package xxhash 3.5: xxh64_intdigest(text.encode()) & (2**63 - 1).
KNOWN = {
    "": 8018337217222601113,
    "a": 5930894301504237147,
    "abc": 4952883123889572249,
    "Zürich": 428368341751202425,
    "Nobody inspects the spammish repetition": 8921252889837931505,
}
TEXTS = list(KNOWN)
IDS = list(KNOWN.values())


@pytest.mark.parametrize(
    ("seed", "digest"),
    [
        (0, "f3bb6c7cc30a8b3c59f731370003aa2a873cd4effa4efa4947f33d124b9031f3"),
        (2**64 - 1, "96fc55f8c222a9250ebfd9c658b873bbe032cd949798b771a060cf499d522731"),
    ],
)
def test_texts_of_every_length_have_the_ids_of_the_published_hash(seed: int, digest: str) -> None:
    """The digest is that of what the package xxhash gives, with the highest bits cleared."""
    ids = kv.hash_ids([bytes(range(length)) for length in range(256)], seed)
    assert hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest() == digest


def test_the_docstring_has_the_ids_of_its_texts() -> None:
    rows = [line.split("|")[1:3] for line in (kv.hash_ids.__doc__ or "").splitlines() if line.strip().startswith("| ")]
    table = {text.strip(" `").replace("the empty text", ""): int(number) for text, number in rows[1:]}
    assert table == {text: KNOWN[text] for text in table}
    assert len(table) == 4


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda texts: [text.encode() for text in texts],
        lambda texts: [text.encode() if place % 2 else text for place, text in enumerate(texts)],
        np.array,
        lambda texts: np.array(texts, ">U50"),
        lambda texts: np.array(texts, object),
        lambda texts: np.array([text.encode() for text in texts]),
        lambda texts: np.repeat(np.array([text.encode() for text in texts]), 2)[::2],
    ],
    ids=["list", "tuple", "bytes", "mixed", "U", "other endianness", "object", "S", "strided"],
)
def test_the_kind_of_array_changes_nothing(kind: Any) -> None:
    ids = kv.hash_ids(kind(TEXTS))
    assert (ids.dtype, ids.tolist()) == (torch.int64, IDS)


@given(st.lists(st.text(), max_size=20), st.integers(0, 2**64 - 1))
def test_arrays_of_pyarrow_have_the_same_ids_whatever_their_type(texts: list[str], seed: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    ids = kv.hash_ids(texts, seed).tolist()
    for type_ in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()):
        array = pyarrow.array(["not this", *texts], type_)[1:]  # begins within its memory
        assert kv.hash_ids(array, seed).tolist() == ids
    for other in (
        pyarrow.chunked_array([texts, texts[:3]], pyarrow.string()),
        pyarrow.array(texts + texts[:3], "string"),
    ):
        assert kv.hash_ids(other, seed).tolist() == ids + ids[:3]
    assert kv.hash_ids(pyarrow.array(texts, "string").dictionary_encode(), seed).tolist() == ids


def test_texts_that_numpy_takes_for_numbers_of_pyarrow_are_refused() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(kv.UsageError, match="not of pyarrow's int64"):
        kv.hash_ids(pyarrow.array([1, 2]))
    with pytest.raises(kv.UsageError, match="at position 1 is null"):
        kv.hash_ids(pyarrow.array(["a", None]))
    with pytest.raises(kv.UsageError, match=r"pass table\.column"):
        kv.hash_ids(pyarrow.table({"a": ["b"]}))
    assert kv.hash_ids(pyarrow.array([b"abc"], pyarrow.binary(3))).tolist() == [KNOWN["abc"]]


def test_many_texts_are_hashed_as_few_are_and_keep_their_places() -> None:
    texts = [f"{number:0{number % 70}d}" for number in range(BLOCK + 100)]
    ids = kv.hash_ids(texts)
    assert len(set(ids.tolist())) == len(set(texts))
    few = [0, 69, BLOCK - 1, BLOCK, BLOCK + 99]
    assert ids[few].tolist() == [kv.hash_ids([texts[place]]).item() for place in few]


def test_ids_have_the_shape_of_an_array_and_are_those_of_rows() -> None:
    names = np.array([["ann", "bob"], ["ann", "eve"]])
    ids = kv.hash_ids(names)
    assert ids.shape == (2, 2)
    store = kv.create("local")
    store.init("user", kv.Table(dim=2))
    store.push("user", kv.RowSparse(kv.hash_ids(["ann"]), torch.ones(1, 2)))
    assert store.row_sparse_pull("user", row_ids=ids).sum(2).tolist() == [[2, 0], [2, 0]]
    assert kv.hash_ids([]).shape == (0,)
    assert kv.hash_ids(np.empty((0, 3), "S4")).shape == (0, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("abc", r"not a str: for one text pass \[text\]"),
        (iter("abc"), "not a str_ascii_iterator|not a str_iterator"),
        (["a", None], "at position 1 is None, a NoneType: leave out what is missing"),
        ([["a"]], r"at position 0 is \['a'\], a list"),
        (["a"] * BLOCK + [1], f"at position {BLOCK} is 1, a int"),
        (["a", "\ud800"], "at position 1 .* pass it as bytes"),
        (np.arange(3), "not an array of int64: integers are ids already"),
        (torch.arange(3), "not an array of int64"),
    ],
)
def test_what_is_no_text_is_refused_with_its_position(given: Any, said: str) -> None:
    with pytest.raises(kv.UsageError, match=said):
        kv.hash_ids(given)
    with pytest.raises(kv.UsageError, match="seed=-1"):
        kv.hash_ids(["a"], -1)
