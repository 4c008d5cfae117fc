"""Running jobs for all tests of a file, buckets that small networks have several of, and a checkpoint."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fitted import SGD, loader, network
from layers import BUCKET_BYTES
from threaded import ThreadedJob, shared_job

from workers import Checkpoint, callbacks, fit
from workers.common import buckets

# torch's first optimizer imports 800 modules, for a second. Processes that are forked from this one have them. And the
# freeze of tests/conftest.py hides their objects, through which optimizers of ours look for the modules of parameters.
torch.optim.SGD([torch.zeros(1)])


@pytest.fixture(scope="module", autouse=True)
def _hidden_imports() -> None:
    """Hide from this file's optimizers what earlier files have imported, such as the compiler, as above."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", params=[1, 2, 3])
def cluster(request: pytest.FixtureRequest) -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=request.param, servers=2, bigarray_bound=30) as cluster:
        yield cluster


pair = shared_job(workers=2, servers=2, bigarray_bound=30)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layer; see ``layers``."""
    monkeypatch.setattr(buckets, "FIRST_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", BUCKET_BYTES)


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkpoint after an epoch."""
    folder = tmp_path_factory.mktemp("trained")
    prefix = str(folder / "model")
    fit(
        *(network(), loader(8, 4)),
        num_epoch=1,
        optimizer_params=SGD,
        epoch_end_callback=callbacks.do_checkpoint(prefix),
        batch_end_callback=callbacks.do_batch_checkpoint(prefix, 1),
    )
    return folder


@pytest.fixture
def saved(trained_folder: Path, tmp_path: Path) -> Checkpoint:
    """A checkpoint after an epoch, in files of the test's own."""
    shutil.copytree(trained_folder, tmp_path / "new")
    return Checkpoint(str(tmp_path / "new" / "model"), 1)
