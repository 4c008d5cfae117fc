"""Files of a checkpoint that are damaged: whatever they say, it is an error that names what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import go_on, loader
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim.lr_scheduler import StepLR

import kvstore as kv
from workers import Checkpoint, CheckpointError, callbacks
from workers.fitting import randomness


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Let ``change`` have what a file of a checkpoint says, and its tensors, and write them again."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(file.metadata()["about"])
    change(about, tensors)
    save_file(tensors, path, {"about": json.dumps(about)})


def drawn(place: int, left: int) -> torch.Tensor:
    """A state of torch's generator that is at word ``place``, and believes that so many are left."""
    words = bytearray(torch.Generator().get_state().numpy().tobytes())
    struct.pack_into("=iiQ", words, 8, left, 1, place)
    return torch.frombuffer(words, dtype=torch.uint8)


NUMPY: dict[str, Any] = {
    "before its words": {"state": {"key": [1] * 624, "pos": -1}},
    "behind its words": {"state": {"key": [1] * 624, "pos": 625}},
    "far away": {"state": {"key": [1] * 624, "pos": 10**9}},
    "at no place": {"state": {"key": [1] * 624, "pos": True}},
    "too few words": {"state": {"key": [1] * 623, "pos": 5}},
    "a word too large": {"state": {"key": [2**32] * 624, "pos": 5}},
    "no words": {"state": {"key": "x" * 624, "pos": 5}},
    "nothing": {"state": {}},
    "another generator": {"bit_generator": "PCG64"},
    "two numbers left": {"has_gauss": 2},
    "no number left": {"gauss": None},
}


@pytest.mark.parametrize("how", NUMPY)
def test_numpys_state_is_looked_at(saved: Checkpoint, how: str) -> None:
    rewrite(saved.worker(0), lambda own, _: own["random"]["numpy"].update(NUMPY[how]))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


@pytest.mark.parametrize(
    "python", [None, [3, [1] * 624, None], [3, [1] * 624 + [625], None], [3, [10**30] * 625, None], [3, [1] * 625, "x"]]
)
def test_pythons_state_is_looked_at(saved: Checkpoint, python: Any) -> None:
    rewrite(saved.worker(0), lambda own, _: own["random"].update(python=python))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


@pytest.mark.parametrize(
    "words",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(5056, dtype=torch.uint8),
        torch.full((5056,), 255, dtype=torch.uint8),
        torch.zeros(5056),
        drawn(624, 600),  # torch itself would take it, and read past its words
        drawn(0, 2),
    ],
)
def test_torchs_state_is_looked_at(saved: Checkpoint, words: torch.Tensor) -> None:
    rewrite(saved.worker(0), lambda _, tensors: tensors.update({"random/torch": words}))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


def test_a_state_of_torchs_is_where_it_should_be() -> None:
    """What is looked at is torch's own layout, whatever was drawn."""
    for count in (0, 1, 7, 623, 624, 625, 1249):
        with torch.random.fork_rng():
            torch.manual_seed(count)
            torch.rand(count)
            randomness.require(*randomness.state([]), [])


FIELDS = ["run", "samples", "random", "metric", "callbacks", "data"]


@pytest.mark.parametrize("value", ["nothing", None, -1, float("nan"), "x", [], [1], {}, {"0": 1}, True])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_or_of_another_kind(saved: Checkpoint, field: str, value: Any) -> None:
    """Each is refused, or is one that may be there."""
    within = Checkpoint(saved.prefix, 0, 1)
    fine = {"callbacks": ({}, {"0": 1}), "data": (None,)}.get(field, ())

    def change(own: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        own[field] = value
        if value == "nothing":
            del own[field]

    rewrite(within.worker(0), change)
    if any(value is it or value == it for it in fine):
        go_on(within, num_epoch=1)
        return
    with pytest.raises(kv.UsageError):
        go_on(within, num_epoch=1)


@pytest.mark.parametrize("value", [float("nan"), None, -1, "2", [], True])
@pytest.mark.parametrize("field", ["num_workers", "run"])
def test_weights_that_do_not_say_whose_they_are(saved: Checkpoint, field: str, value: Any) -> None:
    rewrite(saved.weights, lambda about, _: about.update({field: value}))
    with pytest.raises(CheckpointError, match=rf"model-0001.safetensors: damaged: its {field} is no int"):
        go_on(saved)


def test_buffers_of_another_shape(saved: Checkpoint) -> None:
    rewrite(saved.worker(0), lambda _, tensors: tensors.update({"buffer/0.1.running_mean": torch.tensor(1.0)}))
    with pytest.raises(kv.Mismatch, match=r"worker.0: of '0.1.running_mean' it has \[\], not \[8\]"):
        go_on(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "5", "{", '{"format": 5}'])
def test_what_a_file_says_is_none(saved: Checkpoint, text: str) -> None:
    for path in (saved.weights, saved.worker(0)):
        before = path.read_bytes()
        save_file({}, path, {"about": text})
        with pytest.raises(CheckpointError, match=path.name):
            go_on(saved)
        path.write_bytes(before)


def test_a_shape_that_cannot_be(saved: Checkpoint) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}})
    saved.weights.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match=saved.weights.name):
        go_on(saved)


CALLBACKS: dict[str, tuple[Any, list[Any]]] = {
    "EarlyStopping.0": (
        lambda: callbacks.EarlyStopping("accuracy"),
        [5, {}, *({"best": 1.0, "best_epoch": 0, "waited": 0} | odd for odd in ({"best": "x"}, {"waited": None}))],
    ),
    "TorchScheduler.0": (
        lambda: callbacks.TorchScheduler(lambda optimizer: StepLR(optimizer, 1)),
        [5, {}, {"bundle": 5}, {"bundle": "x"}, {"bundle": "kA=="}, {"bundle": "k6RsaXN0kaRkaWN0kaRkaWN0"}],
    ),
}


@pytest.mark.parametrize(("which", "odd"), [(which, odd) for which, (_, odds) in CALLBACKS.items() for odd in odds])
def test_what_callbacks_do_not_remember(saved: Checkpoint, which: str, odd: Any) -> None:
    rewrite(saved.worker(0), lambda own, _: own["callbacks"].update({which: odd}))
    with pytest.raises(kv.UsageError, match=r"damaged|the checkpoint's state is not that of such a StepLR"):
        go_on(saved, eval_data=loader(8, 4), eval_end_callback=CALLBACKS[which][0]())
