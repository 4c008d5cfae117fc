"""What workers call about checkpoints, in a job that has none."""

from __future__ import annotations

from typing import Any

import pytest
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.errors import UsageError


class Stateless:
    """A thing whose state nobody may ask for."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_job_without_a_directory_says_how_to_get_one_unless_the_call_is_for_what_is_due() -> None:
    def work(store: DistStore) -> None:
        assert store.attach("stateless", Stateless()) is False
        with pytest.raises(UsageError, match=r"attach\('step', ...\) takes an object with .* load_state_dict, not int"):
            store.attach("step", 3)  # type: ignore[arg-type]
        assert store.save_checkpoint(if_due=True) is None
        with pytest.raises(UsageError, match="set KVSTORE_CHECKPOINT_DIR for all its processes"):
            store.save_checkpoint()

    with ThreadedJob(1, 1) as job:
        job.run(work)
