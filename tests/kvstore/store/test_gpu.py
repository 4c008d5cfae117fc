"""Stores with values on a CUDA device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob, shared_job

import kvstore as kv
from kvstore.client import DistStore
from kvstore.optim.optimizer import names
from kvstore.rule import Rule
from kvstore.values import Leaving, as_tensor, from_host, reduce_to

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

GPU = "cuda:0"


cluster = shared_job(workers=2, servers=2, bigarray_bound=100)


def summing_on(store: kv.KVStore) -> list[tuple[str, str]]:
    """Let the store keep its sums; return a list of where each sum was made, and where the value is."""
    devices: list[tuple[str, str]] = []

    def keep(_key: Any, total: Any, stored: Any) -> None:
        devices.append((str(total.device), str(stored.device)))
        stored.copy_(total)

    store.set_updater(keep)
    return devices


def test_the_sum_of_values_on_a_device_is_made_there() -> None:
    store = kv.create("device")
    devices = summing_on(store)
    store.init("w", torch.zeros(3))
    store.push("w", [torch.ones(3, device=GPU), torch.ones(3, device=GPU)])
    assert devices == [(GPU, GPU)]
    outs = [torch.empty(3, device=GPU), torch.empty(3)]
    store.pull("w", outs)
    assert [out.tolist() for out in outs] == [[2, 2, 2]] * 2


def test_a_local_store_sums_on_the_cpu() -> None:
    store = kv.create("local")
    devices = summing_on(store)
    store.init("w", torch.zeros(3, device=GPU))
    store.push("w", [torch.ones(3, device=GPU), torch.ones(3)])
    assert devices == [("cpu", "cpu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", names())
def test_optimizers_on_a_device_do_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", GPU):
        store = kv.create("device")
        store.set_optimizer(name)
        weight = torch.linspace(-1, 1, 16, dtype=dtype, device=device).view(4, 4)
        store.init("w", weight)
        for _ in range(3):
            store.pushpull("w", torch.full((4, 4), 0.5, dtype=dtype, device=device), weight)
        results.append(weight.cpu().float())
    exact = dtype == torch.float32 and name != "muon"  # which multiplies in bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-5 if exact else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_follow_a_key_to_another_device(dtype: torch.dtype) -> None:
    moved, still = kv.create("device"), kv.create("device")
    for store in (moved, still):
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("w", torch.ones(4, dtype=dtype))
    for device in ("cpu", GPU, GPU, "cpu"):
        moved.push("w", torch.ones(4, dtype=dtype, device=device))
        still.push("w", torch.ones(4, dtype=dtype))
    outs = [torch.empty(4, dtype=dtype) for _ in range(2)]
    moved.pull("w", outs[0])
    still.pull("w", outs[1])
    torch.testing.assert_close(*outs)


def test_states_are_saved_from_and_loaded_to_a_device(tmp_path: Path) -> None:
    one, two = kv.create("device"), kv.create("device")
    weight, grad = torch.ones(4, device=GPU), torch.full((4,), 0.5, device=GPU)
    for store in (one, two):
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("w", weight)
    one.push("w", grad)
    one.save_optimizer_states(tmp_path / "s")
    two.push("w", grad)
    two.load_optimizer_states(tmp_path / "s")
    outs = [torch.empty(4, device=GPU) for _ in range(2)]
    one.pushpull("w", grad, outs[0])
    two.pushpull("w", grad, outs[1])
    assert torch.equal(*outs)


def test_host_copies_go_through_pinned_memory() -> None:
    value = torch.arange(6.0, device=GPU).view(2, 3).t()
    here = torch.ones(2)
    copy, same = Leaving([value.contiguous(), here]).arrived(np.array([0, 1])).tensors
    assert copy.is_pinned()
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert same is here
    outs = [torch.zeros(3, 2, device=GPU), torch.zeros(2, 3, device=GPU).t(), torch.zeros(3, 2)]
    for stream in from_host(copy.view(-1), outs):
        stream.synchronize()
    assert all(torch.equal(out.cpu(), value.cpu()) for out in outs)
    assert reduce_to([value, value], torch.device("cpu")).tolist() == (2 * value).tolist()


@pytest.mark.parametrize("on_device", [False, True])
def test_dist_stores_take_and_fill_device_arrays(cluster: ThreadedJob, on_device: bool) -> None:
    def work(session: Any) -> None:
        with DistStore(session, "dist_device_sync", Rule("sync"), on_device) as store:
            shapes = [(3,), (10, 20)]
            store.init(["small", "big"], [torch.zeros(shape, device=GPU) for shape in shapes])
            values = [[torch.full(shape, float(store.rank + 1), device=GPU) for _ in range(2)] for shape in shapes]
            outs = [
                [
                    torch.empty(shape, device=GPU),
                    torch.empty(shape[::-1], device=GPU).t() if len(shape) > 1 else torch.empty(shape),
                ]
                for shape in shapes
            ]
            store.pushpull(["small", "big"], values, outs)
            assert all((out == 6).all() for its in outs for out in its)

    cluster.run_sessions(work)


def test_rows_of_tables_come_from_a_device_and_go_there(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("t", kv.Table(shape=(10, 3)))
        done = store.num_workers
        grad = kv.RowSparse(torch.tensor([4, 4, 7], device=GPU), torch.ones(3, 3, device=GPU), (10, 3))
        out, rows = torch.empty(2, 3, device=GPU), kv.RowSparse([], torch.empty(0, 3, device=GPU))
        store.pushpull("t", [grad, grad.to_sparse_coo()], out, row_ids=torch.tensor([7, 4], device=GPU))
        assert out[:, 0].tolist() == [-2 * done, -4 * done]
        store.row_sparse_pull("t", out=rows, row_ids=[7, 4])
        assert str(rows.rows.device) == GPU
        assert rows.rows[:, 0].tolist() == [-4 * done, -2 * done]

    for name in ("local", "device"):
        with kv.create(name) as store:
            work(store)
    cluster.run(work)


def test_cupy_arrays() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    import cupy

    store = kv.create("device")
    value = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)
    assert as_tensor(value).device == torch.device(GPU)
    store.init("w", value)
    out = cupy.zeros((2, 3), dtype=cupy.float32)
    store.pushpull("w", [value, value], out)
    assert (out == 2 * value).all()
