"""The group of workers of a process that is alone; ddp/test_optimizer.py has one with others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from kvstore.job.config import Config
from kvstore.member.session import Session
from workers import Trainer, group


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    workers.shutdown()
    yield
    workers.shutdown()


def test_a_process_that_nobody_has_launched_is_a_group_of_one() -> None:
    place = workers.init()
    assert place.rank == workers.rank() == workers.local_rank() == 0
    assert workers.size() == workers.local_size() == 1
    assert workers.is_main()
    assert place.device == torch.device("cuda", 0) if torch.cuda.is_available() else place.device == torch.device("cpu")
    assert group.store().type == "device"


@pytest.mark.parametrize(
    "call",
    [workers.rank, workers.is_main, workers.size, workers.local_rank, workers.local_size, group.store, group.new_store],
)
def test_whatever_comes_before_init_says_so(call) -> None:
    with pytest.raises(kv.UsageError, match=r"call workers.init\(\) first"):
        call()


def test_init_may_be_called_again() -> None:
    first = workers.init()
    store = group.store()
    assert workers.init() == workers.init("dist_sync") == first
    assert group.store() is store


def test_init_with_something_else_needs_a_shutdown() -> None:
    workers.init()
    with pytest.raises(kv.UsageError, match=r"initialized with 'device'; call shutdown\(\)"):
        workers.init("local")
    with pytest.raises(kv.UsageError, match="initialized with 'device'"):
        workers.init(kv.create("local"))
    workers.shutdown()
    assert not workers.is_initialized()
    mine = kv.create("device")
    workers.init(mine)
    workers.init(mine)
    assert workers.is_initialized()
    assert group.store() is mine


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_only_stores_that_sum_will_do(kind: str) -> None:
    with pytest.raises(kv.UsageError, match="averages need 'dist_sync' or 'local'"):
        workers.init(kind)
    assert not workers.is_initialized()


def test_a_store_that_does_not_exist_leaves_no_group() -> None:
    with pytest.raises(kv.UnknownName, match="choose from"):
        workers.init("pigeon")
    assert not workers.is_initialized()


def test_half_a_job_in_the_environment_is_an_error_and_not_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    with pytest.raises(kv.ConfigError, match="DMLC_PS_ROOT_URI"):
        workers.init()


def test_new_stores_have_keys_of_their_own_and_end_with_the_group() -> None:
    workers.init()
    one, two = group.new_store(), group.new_store()
    for store in (group.store(), one, two):
        store.init("w", torch.zeros(1))
    closed: list[kv.KVStore] = []
    for store in (one, two):
        store.close = lambda store=store: closed.append(store)  # type: ignore[method-assign]
    workers.shutdown()
    assert closed == [two, one]


def test_a_user_of_its_own_gets_a_new_store_of_the_group_or_the_one_that_is_named() -> None:
    mine = kv.create("local")
    assert group.store_for(mine) is mine
    assert group.store_for("local").type == "local"
    with pytest.raises(kv.UsageError, match=r"call workers.init\(\) first"):
        group.store_for("auto")
    workers.init()
    for nothing in ("auto", None):
        store = group.store_for(nothing)
        assert store.type == "device"
        assert store is not group.store()


class Two(kv.KVStore):
    """Claims to be the second of two workers."""

    rank, num_workers = 1, 2  # type: ignore[assignment]


def test_the_place_on_the_host_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    workers.init(Two("two"))
    with pytest.raises(kv.UsageError, match="KVSTORE_LOCAL_RANK"):
        workers.local_rank()
    monkeypatch.setenv("KVSTORE_LOCAL_RANK", "1")
    monkeypatch.setenv("KVSTORE_LOCAL_SIZE", "2")
    assert (workers.local_rank(), workers.local_size()) == (1, 2)
    assert (Config.from_env().local_rank, Config.from_env().local_size) == (1, 2)


def test_each_worker_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("KVSTORE_LOCAL_RANK", "3")
    monkeypatch.setenv("KVSTORE_LOCAL_SIZE", "4")
    store = Two("two")
    for gpus, index in ((8, 3), (4, 3), (2, 1), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert workers.init(store) == (1, torch.device("cuda", index))


def test_two_stores_of_a_step_are_joined_at_once() -> None:
    def work(session: Session) -> tuple[int, torch.Tensor, torch.Tensor]:
        tables, store = DistStore(session), DistStore(session)
        tables.set_optimizer("sgd", learning_rate=0.1)
        module = workers.Embedding(5, 2, store=tables, key="t", init="zeros")
        head = nn.Linear(2, 1, bias=False)
        nn.init.ones_(head.weight)
        trainer = Trainer(head.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        for _ in range(2):
            for _ in range(1 + 2 * session.rank):
                trainer.zero_grad()
                head(module([session.rank, 4]).detach() + module([session.rank, 4])).sum().backward()
                trainer.step()
            last = workers.join(trainer, tables)
        return last, module.state_dict()["weight"], head.weight.detach()

    with ThreadedJob(workers=2, servers=2) as job:
        one, two = job.run_sessions(work)
    assert one[0] == two[0] == 1
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[2], two[2])
    assert one[1][:, 0].ne(0).tolist() == [True, True, False, False, True]


def test_one_process_joins_at_once() -> None:
    assert workers.join(kv.create("local"), kv.create("device")) == 0
    assert workers.join() == 0
