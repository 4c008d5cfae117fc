"""MXNet's files of optimizer states: what MXNet 1.9.1 wrote (``mxnet/make.py``), older and other pickles."""

from __future__ import annotations

import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv
from kvstore.checkpoint.mxnet_params import DENSE, V2, MXNetArray, MXNetFile, written
from kvstore.checkpoint.mxnet_states import read_states

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


GOOD = [(HERE / f"{name}.states").read_bytes() for name in ("adam", "sgd")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(GOOD), st.integers(0, 700), st.binary(max_size=6), st.integers(0, 6))
def test_damage_is_an_error_or_is_read(tmp_path_factory: Any, data: bytes, at: int, new: bytes, gone: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "model.states"
    path.write_bytes(data[:at] + new + data[at + gone :])
    try:
        read_states(path)
    except kv.CheckpointError as exc:
        assert str(path) in str(exc)  # noqa: PT017 - it may be read, too
