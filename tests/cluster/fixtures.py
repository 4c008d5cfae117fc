"""Fixtures of the real things. ``tests/conftest.py`` makes them everybody's; each starts when a test first asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from cluster import hosts as clusters
from cluster import sge as grid_engine
from cluster import slurm as slurms
from cluster.hosts import Hosts
from cluster.missing import need
from cluster.mpi import KINDS, Mpi, mpi
from cluster.sge import Sge
from cluster.slurm import Slurm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask for any of these: ``-m "not cluster"`` leaves them out, and so does ``make test``."""
    ours = {"hosts", "mpirun", "slurm", "sge", "site", "managed"}  # the last two are of sites.py, one over any of these
    for item in items:
        if ours & set(getattr(item, "fixturenames", ())):
            item.add_marker("cluster")
            item.add_marker("long")


@pytest.fixture(scope="session")
def _pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts for the whole run."""
    need(*clusters.PROGRAMS)
    with Hosts.up(4, shared=[tmp_path_factory.getbasetemp()]) as made:
        yield made


@pytest.fixture
def hosts(_pool: Hosts) -> Iterator[Hosts]:
    """Four hosts, in order. They see what is in ``tmp_path``; the rest of /tmp is their own, as is their /root.

    A test may leave them cut and with processes, but not crashed: for that, ``Hosts.up`` makes others.
    """
    yield _pool
    _pool.clear()


@pytest.fixture(params=KINDS)
def mpirun(request: pytest.FixtureRequest, hosts: Hosts) -> Mpi:
    """Open MPI and MPICH over the hosts, in turn."""
    return mpi(request.param, hosts)


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need(*clusters.PROGRAMS, *slurms.PROGRAMS)
    with Hosts.up(2, shared=[tmp_path_factory.getbasetemp()]) as nodes, slurms.slurm(nodes) as running:
        yield running


@pytest.fixture
def slurm(_slurm: Slurm) -> Iterator[Slurm]:
    """A Slurm of two nodes that see what is in ``tmp_path``, with no jobs; ``env`` may be changed."""
    yield dataclasses.replace(_slurm, env=dict(_slurm.env))
    _slurm.clear()


@pytest.fixture(scope="session")
def _sge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sge]:
    need(*clusters.PROGRAMS, *grid_engine.PROGRAMS)
    with Hosts.up(2, shared=[tmp_path_factory.getbasetemp()]) as nodes, grid_engine.sge(nodes) as running:
        yield running


@pytest.fixture
def sge(_sge: Sge) -> Iterator[Sge]:
    """A Grid Engine of two hosts that see what is in ``tmp_path``, with no jobs; ``env`` may be changed."""
    yield dataclasses.replace(_sge, env=dict(_sge.env))
    _sge.clear()
