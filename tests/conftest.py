"""Shared fixtures. ``threaded.py`` beside this file makes whole jobs inside one process."""

from __future__ import annotations

import os

import pytest
import torch

# Hosts, and the MPI, Slurm and Grid Engine that run on them; each begins with the first test that asks for it.
pytest_plugins = ["cluster.fixtures"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the environment of a job that the tests themselves may run in."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "KVSTORE_", "MXNET_")):
            monkeypatch.delenv(name)
