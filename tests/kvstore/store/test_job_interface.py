"""The job's part of the interface, for a store that says nothing of a job, or only how many workers it has."""

from __future__ import annotations

import pytest

import kvstore as kv


class Alone(kv.KVStore):
    """Of one worker."""


class Several(kv.KVStore):
    """Of three workers."""

    @property
    def num_workers(self) -> int:
        return 3


def test_a_barrier_of_one_worker_is_passed_and_join_returns_its_rank() -> None:
    store = Alone()
    store.barrier()
    assert (store.join(), store.rank, store.num_workers, store.num_dead_nodes()) == (0, 0, 1, 0)
    assert not store.check_finite
    store.report({"loss": 0.5}, input_s=0.1)  # to nobody


def test_workers_that_have_others_cannot_join_by_themselves() -> None:
    with pytest.raises(kv.Unsupported, match="a 'several' store has no join"):
        Several().join()
