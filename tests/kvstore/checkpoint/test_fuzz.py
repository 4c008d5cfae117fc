"""Every field of every file of a checkpoint, damaged: whoever reads it says so by name, or reads something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import ODD, changed, error_of, fields
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import contents, headers

from kvstore.checkpoint import folders
from kvstore.checkpoint.any_checkpoint import read_checkpoint
from kvstore.checkpoint.checkpoint_reader import state_name, value_name, verify
from kvstore.checkpoint.command import main
from kvstore.checkpoint.manifest import Manifest, StoredSegment, StoredStore, from_json, load_manifest, save_manifest
from kvstore.checkpoint.stateful import packed, unpacked
from kvstore.checkpoint.tables import IDS, NUMBERS, VALUES, page_name, rest_name, shared_out
from kvstore.checkpoint.tensors import write_tensors
from kvstore.client.resuming import Resumed
from kvstore.errors import KVStoreError
from kvstore.rows.stripe import STATE
from kvstore.sealed_folders import MANIFEST, record_of
from kvstore.spec import Spec
from kvstore.table import MinCount, Table, TableSpec, Unseen

GROWS = Table(dim=2, admit=MinCount(2), evict=[Unseen(5)])
FIXED = Table(shape=(4, 2), init="constant", scale=0.5)
SPECS: dict[Any, Spec] = {"w": Spec((2, 3), "float32"), 7: TableSpec.of(GROWS), "rows": TableSpec.of(FIXED)}

MOST = 40  # damaged checkpoints of each kind that are read in whole


def tensors() -> dict[str, torch.Tensor]:
    made = {value_name(0): torch.ones(4), value_name(1): torch.ones(2)}
    made |= {state_name(0, "momentum_buffer"): torch.ones(4), state_name(1, "momentum_buffer"): torch.ones(2)}
    for segment, ids in ((2, [5, 9]), (3, [0, 3])):
        made[page_name(segment, 0, IDS)] = torch.tensor(ids)
        made[page_name(segment, 0, VALUES)] = torch.ones(2, 2)
        made[page_name(segment, 0, f"{STATE}momentum_buffer")] = torch.ones(2, 2)
        made[rest_name(segment, NUMBERS)] = torch.tensor([3, 3, 2, 0, 0])
    made[rest_name(2, "young.ids")], made[rest_name(2, "young.counts")] = torch.tensor([4]), torch.tensor([1])
    return made


def write(folder: Path, held: dict[str, torch.Tensor], state: tuple[dict[str, torch.Tensor], str]) -> None:
    """Write a checkpoint of one server and one worker, whatever is in its files."""
    files = [
        write_tensors(folder / "store-0.server-0.safetensors", headers(held), contents(held), {}),
        write_tensors(folder / "worker-0.safetensors", headers(state[0]), contents(state[0]), {"state": state[1]}),
    ]
    segments = [
        StoredSegment(0, "w", 0, 4, 9, 0),
        StoredSegment(1, "w", 4, 6, 9, 0),
        StoredSegment(2, 7, 0, 0, 9, 0),
        StoredSegment(3, "rows", 0, 8, 9, 0),
    ]
    store = StoredStore(1, "sync", "sgd", SPECS, segments)
    save_manifest(folder, Manifest(1, 9, 1, 1, "2026-01-01T00:00:00Z", [store], files, {0: 1}))


def attached() -> tuple[dict[str, torch.Tensor], str]:
    return packed({"mine": {"t": torch.ones(2), "n": (1, None), 3: [True]}})


def read_all(folder: Path, out: Path) -> None:
    """Do with a checkpoint whatever is done with one; only errors of this package's may come of it."""
    for words in (["list", folder.parent], ["verify", folder], ["export", folder, out, "--states"]):
        assert main([*map(str, words)]) in (0, 1)
    error_of(lambda: read_checkpoint(folder, states=True))
    try:
        verify(folder)
        resumed = Resumed(folder, 0, 1)
        for key, spec in SPECS.items():
            if resumed.has_store(1) and resumed.has(1, key):
                resumed.optimizer(1), resumed.shapes(1), resumed.require(1, key, spec)
                if isinstance(spec, TableSpec):
                    pages = list(resumed.pages(1, key))
                    shared_out(spec.table, resumed.rests(1, key), [sum(len(page.ids) for page in pages), 0])
                else:
                    resumed.value(1, key, spec)
                    resumed.states(1, [key])
        for shared in (False, True):
            resumed.part("mine", shared)
    except KVStoreError:
        pass


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("run")
    return folders.begin(directory, 1), directory / "out.safetensors"


def test_the_checkpoint_that_is_damaged_here_is_whole(place: tuple[Path, Path]) -> None:
    write(place[0], tensors(), attached())
    assert main(["export", str(place[0]), str(place[1]), "--states"]) == 0
    resumed = Resumed(place[0], 0, 1)
    assert resumed.part("mine", shared=True)["n"] == (1, None)
    assert len(list(resumed.pages(1, "rows"))) == 1
    read_all(*place)


def test_each_field_of_the_manifest(place: tuple[Path, Path]) -> None:
    folder, out = place
    write(folder, tensors(), attached())
    good = json.loads((folder / MANIFEST).read_text())
    tried = {json.dumps(changed(good, way, change)): None for way in fields(good) for change in ODD}
    accepted = []
    for text in tried:
        if error_of(lambda text=text: from_json(text)) is None:
            accepted.append(text)
    assert len(tried) > 1000
    for text in accepted[:: max(1, len(accepted) // MOST)]:
        (folder / MANIFEST).write_text(text)
        read_all(folder, out)
    (folder / MANIFEST).write_text("{}")
    assert str(folder / MANIFEST) in str(error_of(lambda: load_manifest(folder)))


odd_tensors = st.sampled_from(
    [
        *(torch.ones(shape, dtype=dtype) for shape in ((), (0,), (2,), (4,), (2, 2)) for dtype in (torch.float32,)),
        torch.tensor([5, 5]),
        torch.tensor([-1, 2**62]),
        torch.tensor([1, 2]).int(),
        torch.tensor([3, 3]),
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(5, dtype=torch.int64),
        torch.full((5,), 2**62),
        torch.full((5,), -1),
    ]
)


@settings(max_examples=MOST, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_tensor_of_a_servers_file(place: tuple[Path, Path], data: st.DataObject) -> None:
    held = tensors()
    for name in data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, max_size=2, unique=True)):
        value = data.draw(st.none() | odd_tensors)
        if value is None:
            del held[name]
        else:
            held[name] = value
    for name in data.draw(st.lists(st.sampled_from(["2/rows/1/ids", "2/rows/x/ids", "2/rest/", "9", "2/rows", "0/"]))):
        held[name] = torch.ones(2)
    write(place[0], held, attached())
    read_all(*place)


def test_each_field_of_what_a_worker_adds(place: tuple[Path, Path]) -> None:
    named, text = attached()
    good = json.loads(text)
    texts = [json.dumps(changed(good, way, change)) for way in fields(good) for change in ODD]
    refused = [text for text in texts if error_of(lambda text=text: unpacked(named, text)) is not None]
    assert 10 < len(refused) < len(texts)
    write(place[0], tensors(), (named, refused[0]))
    said = error_of(lambda: Resumed(place[0], 0, 1).part("mine", shared=False))
    assert f"{place[0]}: the part of worker 0: a state is damaged" in str(said)


@pytest.mark.parametrize("name", [MANIFEST, "store-0.server-0.safetensors", "worker-0.safetensors"])
def test_bytes_that_are_cut_off_or_other_ones(place: tuple[Path, Path], name: str) -> None:
    folder, out = place
    write(folder, tensors(), attached())
    good, manifest = (folder / name).read_bytes(), json.loads((folder / MANIFEST).read_text())
    for at in range(0, min(len(good), 1500), 150):
        for bad in (good[:at], good[:at] + b"\xff" + good[at + 1 :], good[:at] + b'{"' + good[at + 2 :]):
            (folder / name).write_bytes(bad)
            if name != MANIFEST:  # as if it had been written so
                files = [
                    dict(zip(("name", "nbytes", "sha256"), record_of(folder / file["name"]), strict=True))
                    for file in manifest["files"]
                ]
                (folder / MANIFEST).write_text(json.dumps({**manifest, "files": files}))
            read_all(folder, out)
