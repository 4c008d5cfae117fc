"""Collectors of the real TorchRL that follow a job, in this process and in processes of their own."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from reading_job import job_with_readers

from kvstore import UsageError
from kvstore.client import DistStore

pytestmark = pytest.mark.release


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("torchrl", reason="not installed: torchrl (extra torchrl)")


@pytest.mark.filterwarnings("ignore")  # of TorchRL and its processes
def test_each_frame_is_by_one_version_and_says_which() -> None:
    from acting import NothingHappens, policy
    from torchrl.collectors import Collector, MultiSyncCollector

    from workers.torchrl import KVStoreWeightSyncScheme

    def work(store: DistStore) -> None:
        mine = policy()
        mine.module.become(1.0)
        address = job.config("reader").root
        processes = MultiSyncCollector(
            [NothingHappens, NothingHappens],
            mine,
            frames_per_batch=20,
            total_frames=60,
            weight_sync_schemes={"policy": KVStoreWeightSyncScheme(address, store=store)},
            track_policy_version=True,
        )
        here = Collector(NothingHappens(), policy(), frames_per_batch=4, total_frames=-1)
        elsewhere = KVStoreWeightSyncScheme(address, ask_every=0)  # as a collector of another program
        here.register_scheme_receiver({"policy": elsewhere})
        frames = here.iterator()
        for version, batch in enumerate(processes, 1):
            # Each of 20 frames in two processes by the weights that were sent before them.
            assert batch["action"].unique().tolist() == [version]
            assert batch["next", "policy_version"].unique().tolist() == [version]
            assert next(frames)["action"].unique().tolist() == [version]
            assert mine.module.weight.unique().tolist() == [version]
            mine.module.become(version + 1.0)
            processes.update_policy_weights_()
        assert version == 3
        assert elsewhere.receive() is not None
        assert elsewhere.receive() is None
        processes.shutdown()
        here.shutdown()
        elsewhere.shutdown()

    with TemporaryDirectory() as directory, job_with_readers(kind="shm", directory=Path(directory)) as job:
        job.run(work)


@pytest.mark.filterwarnings("ignore")
def test_a_policy_without_weights_cannot_follow() -> None:
    from workers.torchrl import KVStoreWeightSyncScheme

    scheme = KVStoreWeightSyncScheme("nowhere.json")
    scheme.init_on_receiver(model_id="policy", model=torch.tanh)
    with pytest.raises(UsageError, match="has no weights that could follow"):
        scheme.connect(worker_idx=0)
