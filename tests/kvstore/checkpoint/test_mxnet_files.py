"""MXNet's files of arrays and of states, written by MXNet itself, and damaged."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import ODD, changed, error_of, fields
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from written import write

import kvstore as kv
from kvstore.checkpoint.command import main
from kvstore.checkpoint.mxnet_conversion import ABOUT
from kvstore.checkpoint.mxnet_params import (
    DENSE,
    HEAD,
    NO_MAGIC,
    ROW_SPARSE,
    V1,
    V2,
    V3,
    MXNetArray,
    MXNetFile,
    parsed,
    read_params,
    written,
)
from kvstore.checkpoint.mxnet_states import read_states

FILES = sorted((Path(__file__).parent / "mxnet").glob("*.params"))
FOUR = struct.pack("<iii4f", 1, 0, 0, 1, 2, 3, 4) + struct.pack("<QQ", 1, 1) + b"w"
OLDER = {  # MXNet 1.9.1 loads these, too
    "v1": HEAD + struct.pack("<QIiqq", 1, V1, 2, 2, 2) + FOUR,
    "no magic": HEAD + struct.pack("<QIII", 1, 2, 2, 2) + FOUR,
}


def file_named(name: str) -> Path:
    (path,) = [path for path in FILES if path.stem == name]
    return path


def bytes_of(file: MXNetFile) -> bytes:
    return b"".join(map(bytes, written(file)))


def parsed_bytes(data: bytes) -> MXNetFile:
    return parsed(np.frombuffer(bytearray(data), np.uint8))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, kv.RowSparse):
        return one.shape == other.shape and torch.equal(one.ids, other.ids) and torch.equal(one.rows, other.rows)
    if one.layout != torch.strided:
        return torch.equal(one.coalesce().indices(), other.coalesce().indices()) and one.shape == other.shape
    return bool(torch.equal(one, other))


# ---- to safetensors and back


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_mxnet_wrote_becomes_safetensors_and_the_same_bytes_again(path: Path, tmp_path: Path) -> None:
    plain, back = tmp_path / "plain.safetensors", tmp_path / "back.params"
    count = kv.import_mxnet(path, plain)
    assert kv.export_mxnet(plain, back) == count
    assert back.read_bytes() == path.read_bytes()
    direct, imported = kv.read_checkpoint(path), kv.read_checkpoint(plain)
    assert direct.keys() == imported.keys()
    assert all(same(direct[name], imported[name]) for name in direct)


@pytest.mark.parametrize("kind", OLDER)
def test_files_of_older_versions_are_read_and_written_as_they_were(kind: str, tmp_path: Path) -> None:
    path, plain, back = tmp_path / "old.params", tmp_path / "plain.safetensors", tmp_path / "back.params"
    path.write_bytes(OLDER[kind])
    kv.import_mxnet(path, plain)
    kv.export_mxnet(plain, back)
    assert back.read_bytes() == OLDER[kind]
    assert load_file(plain)["w"].tolist() == [[1, 2], [3, 4]]


def test_every_dtype_has_its_values() -> None:
    values: Any = kv.read_checkpoint(file_named("dtypes"))
    assert values.pop("bfloat16").tolist() == [1, -2]
    assert values.pop("bool").tolist() == [[False, True, True], [True, True, True]]
    assert {name: str(value.dtype) for name, value in values.items()} == {name: f"torch.{name}" for name in values}
    assert len(values) == 7
    assert all(value.tolist() == [[0, 1, 2], [3, 4, 5]] for value in values.values())


def test_sparse_arrays_have_their_rows_and_shapes() -> None:
    values: Any = kv.read_checkpoint(file_named("sparse"))
    assert (values["rows"].ids.tolist(), values["rows"].shape) == ([1, 4], (6, 2, 2))
    assert torch.equal(values["rows"].rows, torch.arange(8, dtype=torch.float16).view(2, 2, 2))
    assert values["line"].to_dense().tolist() == [5, 0, 0, 7]
    assert (len(values["none"].ids), values["none"].shape) == (0, (6, 3))
    assert values["csr"].to_dense().tolist() == [[2, 0, 1, 0], [0, 0, 0, 0], [0, 3, 0, 0]]
    store = kv.create("local")
    store.init("none", values["none"])
    assert store.row_sparse_pull("none", row_ids=[5]).tolist() == [[0, 0, 0]]


def test_values_that_mxnet_had_not_waited_for_are_there() -> None:
    """MXNet notes their shape too early, and does not use it when it loads the file."""
    (array,) = read_params(file_named("unwaited")).arrays
    assert (array.noted, array.parts[0].tolist()) == ((0,), [1] * 20)


def test_numbers_without_dimensions_are_read_also_where_mxnet_cannot() -> None:
    for name in ("number", "numpy"):
        values: Any = kv.read_checkpoint(file_named(name))
        assert (values["number"].shape, values["number"].item(), values["after"].tolist()) == ((), 3.5, [1, 1])
    assert values["empty"].shape == (0, 3)


def test_names_are_those_of_torch_unless_two_would_be_one() -> None:
    assert set(kv.read_checkpoint(file_named("gluon"))) == {
        *("0.weight", "0.bias", "1.gamma", "1.beta", "1.running_mean", "1.running_var")
    }
    assert {"dense0_weight", "batchnorm0_running_var"} < set(kv.read_checkpoint(file_named("symbol-0001")))
    arrays = [MXNetArray(V2, DENSE, (1,), parts=(torch.ones(1),))] * 2
    assert MXNetFile(arrays, ["arg:w", "aux:w"]).plain_names == ["arg:w", "aux:w"]
    assert MXNetFile(arrays, []).plain_names == ["0", "1"]


def test_a_torch_model_becomes_a_file_for_mxnet(tmp_path: Path) -> None:
    plain, out = tmp_path / "model.safetensors", tmp_path / "model.params"
    model = {"arg:w": torch.rand(2, 3), "half": torch.rand(2).bfloat16(), "empty": torch.zeros(0, 2)}
    save_file(model, plain)
    assert kv.export_mxnet(plain, out) == 3
    file = read_params(out)
    assert dict(zip(file.names, [array.magic for array in file.arrays], strict=True)) == dict.fromkeys(model, V2)
    assert all(same(array.parts[0], model[name]) for name, array in zip(file.names, file.arrays, strict=True))
    for odd, said in (
        (torch.tensor(1), "'n' has no dimensions"),
        (torch.ones(1).to(torch.float8_e4m3fn), "float8_e4m3fn, which MXNet"),
    ):
        save_file({"n": odd}, plain)
        with pytest.raises(kv.CheckpointError, match=said):
            kv.export_mxnet(plain, out)
    assert read_params(out).names == file.names


def test_tensors_that_were_trained_since_go_back_in_their_places(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out.params"
    kv.import_mxnet(file_named("sparse"), plain)
    with safe_open(plain, "pt") as file:
        # Copies: some versions of safetensors write into the file that is mapped.
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"rows": tensors["rows"] + 1}, plain, metadata)
    kv.export_mxnet(plain, out)
    assert [*kv.read_checkpoint(out)["rows"].rows.view(-1)] == [*range(1, 9)]  # type: ignore[union-attr]
    for odd, said in (
        ({"rows.ids": torch.tensor([1, 6])}, r"the ids of 'rows' do not rise from 0 on to at most 5"),
        ({"csr.indices": torch.tensor([2, 0, 4])}, r"the columns of 'csr' are not from 0 to 3"),
        ({"csr.indptr": torch.tensor([0, 2, 1, 3])}, "the rows of 'csr' do not follow"),
        ({"csr.indptr": torch.tensor([0, 3])}, "'csr' has 3 rows, but 2 places"),
        ({"csr.indptr": torch.ones(4)}, "indices of 'csr' are no lists of integers"),
        ({"rows": torch.ones(2, 2)}, r"row_sparse of \[6, 2, 2\], but its values are \[2, 2\]"),
        ({"more": torch.ones(1)}, "tensor 'more' is not among what MXNet's file had"),
    ):
        save_file(tensors | odd, plain, metadata)
        with pytest.raises(kv.CheckpointError, match=said) as caught:
            kv.export_mxnet(plain, out)
        assert str(plain) in str(caught.value)


def test_each_field_of_what_is_kept_of_mxnet_may_be_damaged(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out.params"
    kv.import_mxnet(file_named("sparse"), plain)
    with safe_open(plain, "pt") as file:
        about, tensors = json.loads(file.metadata()[ABOUT]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tried = {json.dumps(changed(about, way, change)): None for way in fields(about) for change in ODD}
    assert len(tried) > 500
    for text in list(tried)[::7]:
        save_file(tensors, plain, {ABOUT: text})
        for call in (lambda: kv.export_mxnet(plain, out), lambda: kv.read_checkpoint(plain)):
            assert str(plain) in (error_of(call) or str(plain))


# ---- the command


def test_the_command_reads_and_writes_mxnets_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.params"
    model.write_bytes(file_named("symbol-0001").read_bytes())
    assert main(["import", str(model)]) == 0
    assert main(["export", str(tmp_path / "model.safetensors"), str(tmp_path / "again.params")]) == 0
    assert (tmp_path / "again.params").read_bytes() == model.read_bytes()
    write(
        tmp_path / "run", 3, {"fc.weight": torch.arange(300.0).view(3, 100)}, {("fc.weight", "m"): torch.ones(3, 100)}
    )
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "job.params"), "--states"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'job.params'}: 2 arrays from {tmp_path / 'run'}"
    job: Any = kv.read_checkpoint(tmp_path / "job.params")
    assert torch.equal(job["fc.weight"], torch.arange(300.0).view(3, 100))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("again.params", "job.params", "model.params", "model.safetensors", "run")
    ]
    model.write_bytes(model.read_bytes()[:-1])
    assert main(["import", str(model)]) == 1
    assert "model.params: damaged: at byte" in capsys.readouterr().err
    (tmp_path / "model.states").write_bytes(b"\x80\x04}\x94.")
    assert main(["import", str(tmp_path / "model.states")]) == 1
    assert "a pickle, as MXNet's .states are" in capsys.readouterr().err


# ---- damaged files


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(len(HEAD)), "does not begin as"),
        (HEAD, "the number of arrays would have 8 bytes, of which 0 are there"),
        (HEAD + struct.pack("<Q", 2**60), "says 1152921504606846976 arrays, and 0 bytes are left"),
        (HEAD + struct.pack("<QI", 1, 0xF993FACB), "begins with 0xf993facb, which no version"),
        (HEAD + struct.pack("<QIi", 1, V2, 3), "has storage 3"),
        (HEAD + struct.pack("<QIi", 1, V3, 1), "has storage 1"),
        (HEAD + struct.pack("<QIii", 1, V2, 0, 33), "33 dimensions, not 0 to 32"),
        (HEAD + struct.pack("<QIiiq", 1, V2, 0, 1, -1), r"a shape is \[-1\]"),
        (HEAD + struct.pack("<QIii3q", 1, V2, 0, 3, 0, 2**40, 2**40), "a shape is"),
        (HEAD + struct.pack("<QIiiqiii", 1, V2, 0, 1, 2**40, 1, 0, 0), "values of array 0 would have 4398046511104"),
        (HEAD + struct.pack("<QIiiqiii", 1, V2, 0, 1, 1, 1, 0, 13), "a dtype has number 13, not 0 to 12"),
        (HEAD + struct.pack("<QIiiqiiiB", 1, V2, 0, 1, 1, 1, 0, 7, 2), "are bools, and are neither 0 nor 1"),
        (OLDER["v1"][:-1] + b"\xff", "not in UTF-8"),
        (OLDER["v1"] + b"\0", "1 bytes come after the names"),
        (OLDER["v1"][:-17] + struct.pack("<QQQ", 2, 0, 0), "1 arrays, but 2 names"),
        (HEAD + struct.pack("<QIIQQ", 2, 0, 0, 2, 0) + struct.pack("<Q", 0), "two arrays have the same name"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_allocated(data: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(kv.CheckpointError, match=said):
        parsed_bytes(data)
    path = tmp_path / "x.params"
    path.write_bytes(data)
    with pytest.raises(kv.CheckpointError, match=str(path)):
        read_params(path)


GOOD = [path.read_bytes() for path in FILES] + list(OLDER.values())
NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "byte", "number", "insert", "remove"]))
        if kind == "cut":
            del data[place:]
        elif kind == "byte":
            data[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "remove":
            del data[place : place + draw(st.integers(1, 9))]
        else:
            data[place : place + 8] = struct.pack("<Q", draw(NUMBERS))
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_a_damaged_file_is_an_error_or_is_read_exactly(data: bytes) -> None:
    try:
        file = parsed_bytes(data)
    except kv.CheckpointError:
        return
    assert bytes_of(file) == data
    assert sum(part.nbytes for array in file.arrays for part in array.parts) <= len(data)


@st.composite
def files(draw: st.DrawFn) -> MXNetFile:
    magic = draw(st.sampled_from([NO_MAGIC, V1, V2, V3]))
    arrays = []
    for _ in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        dtype = draw(
            st.sampled_from([torch.float32, torch.float16, torch.int8, torch.bool, torch.uint16, torch.uint64])
        )
        storage = ROW_SPARSE if magic == V2 and draw(st.booleans()) else DENSE
        parts: tuple[torch.Tensor, ...] = (torch.ones(shape).to(dtype),)
        if storage == ROW_SPARSE:
            ids = torch.tensor(sorted(draw(st.sets(st.integers(0, 9), max_size=3))), dtype=torch.int64)
            parts = (torch.ones(len(ids), *shape[1:]).to(dtype), ids)
            shape = (10, *shape[1:])
        absent = draw(st.integers(0, 5)) == 0
        arrays.append(
            MXNetArray(magic, DENSE, None)
            if absent
            else MXNetArray(
                magic, storage, shape, (2, 1), parts, tuple(parts[0].shape) if storage == ROW_SPARSE else ()
            )
        )
    names = draw(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"])), min_size=len(arrays), max_size=len(arrays), unique=True
        )
    )
    return MXNetFile(arrays, names if draw(st.booleans()) else [])


@settings(max_examples=60, deadline=None)
@given(files())
def test_any_arrays_come_back_as_they_were_written(file: MXNetFile) -> None:
    found = parsed_bytes(bytes_of(file))
    assert found.names == file.names
    for one, other in zip(found.arrays, file.arrays, strict=True):
        assert (one.magic, one.storage, one.shape, one.noted) == (other.magic, other.storage, other.shape, other.noted)
        assert all(torch.equal(*pair) for pair in zip(one.parts, other.parts, strict=True))


# ---- states of optimizers, which MXNet pickles

HERE = Path(__file__).parent / "mxnet"
GRAD = torch.arange(6.0).view(2, 3)


def test_the_arrays_of_mxnets_optimizers() -> None:
    momentum: Any = kv.read_checkpoint(HERE / "sgd.states")
    assert torch.equal(momentum.pop("3"), -GRAD)
    adam: Any = kv.read_checkpoint(HERE / "adam.states")
    torch.testing.assert_close(adam.pop("3.0"), GRAD * 0.1)
    torch.testing.assert_close(adam.pop("3.1"), GRAD.square() * 0.001)
    assert momentum == adam == kv.read_checkpoint(HERE / "none.states") == {}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of one array: those of a file of one, between its head and the number of names."""
    file = MXNetFile([MXNetArray(V2, DENSE, tuple(tensor.shape), parts=(tensor,))], [])
    return b"".join(map(bytes, written(file)))[24:-8]


class NDArray:
    """Pickled as MXNet's, whose module this test pretends to have."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return NDArray, (None,), {"handle": bytearray(raw(self.tensor))}


@pytest.fixture
def mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("mxnet.ndarray.ndarray")
    module.NDArray = NDArray
    for name in ("mxnet", "mxnet.ndarray", "mxnet.ndarray.ndarray"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(NDArray, "__module__", "mxnet.ndarray.ndarray")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.usefixtures("mxnet")
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    states = {0: NDArray(GRAD), "w": (None, NDArray(GRAD[0].half())), 2**40: [], 7: None, 8: ([NDArray(GRAD + 1)],)}
    path = tmp_path / "model.states"
    path.write_bytes(pickle.dumps(states, protocol))
    found: Any = kv.read_checkpoint(path)
    assert {name: value.tolist() for name, value in found.items()} == {
        "0": GRAD.tolist(),
        "w.1": [0, 1, 2],
        "8.0.0": (GRAD + 1).tolist(),
    }


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.usefixtures("mxnet")
def test_nothing_in_a_file_is_run_and_what_is_no_state_is_refused(tmp_path: Path) -> None:
    path, folder = tmp_path / "model.states", tmp_path / "made"
    twice = NDArray(GRAD)
    nested: Any = NDArray(GRAD)
    for _ in range(5):
        nested = (nested,)
    for value, said in (
        ({0: Runs(folder)}, "something in place of an array"),
        (Runs(folder), "no dict of states"),
        ([1], "no dict of states"),
        ({(1, 2): None}, "no dict of states"),
        ({0: 1.5}, "state 0 is neither an array nor a tuple of arrays"),
        ({0: nested}, "state 0.0.0.0.0 is neither"),
        ({0: twice, 1: (twice, twice)}, "an array is in it twice"),
        ({0: {1, 2}}, "it has the step EMPTY_SET"),
    ):
        path.write_bytes(pickle.dumps(value))
        with pytest.raises(kv.CheckpointError, match=said) as caught:
            kv.read_checkpoint(path)
        assert str(path) in str(caught.value)
        assert "Pickles are not read, because they can run any code" in str(caught.value)
    assert not folder.exists()
    (tmp_path / "x.pt").write_bytes(
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    )  # as torch once saved
    with pytest.raises(kv.CheckpointError, match=r"torch\.save's files were"):
        kv.read_checkpoint(tmp_path / "x.pt")
    with pytest.raises(kv.CheckpointError, match="missing or unreadable"):
        read_states(tmp_path / "none")


SAVED = [(HERE / f"{name}.states").read_bytes() for name in ("adam", "sgd")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAVED), st.integers(0, 700), st.binary(max_size=6), st.integers(0, 6))
@example(b"\x80\x04K\x01K\x02\x93.", 700, b"", 0)  # STACK_GLOBAL of two numbers
def test_damage_is_an_error_or_is_read(tmp_path_factory: Any, data: bytes, at: int, new: bytes, gone: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "model.states"
    path.write_bytes(data[:at] + new + data[at + gone :])
    try:
        read_states(path)
    except kv.CheckpointError as exc:
        assert str(path) in str(exc)  # noqa: PT017 - it may be read, too
