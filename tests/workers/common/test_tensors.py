"""What users give: tensors, and the store that ``kvstore=`` means."""

from __future__ import annotations

import gc
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import kvstore as kv
from kvstore import UsageError
from kvstore.client import DistStore
from workers import DistributedOptimizer, Trainer
from workers.common.checks import at_least, on_off_auto
from workers.common.chunks import ChunkRange, divide, read, wire_dtype, write
from workers.common.gather import Gather, digest, require_sums
from workers.common.row_steps import row_steps
from workers.common.run_log import log_line
from workers.common.sparse_gradients import as_gradient, as_rows, is_sparse, no_rows, table_key
from workers.common.stores import open_store, store_type
from workers.common.tensors import (
    PLAIN,
    fingerprint,
    has_parts,
    is_dense,
    overwrite,
    put_together,
    take_apart,
    to_tensor,
)
from workers.common.values import describe

# ---- what users give becomes a tensor, where it can over the same memory; tensors of every kind, and their parts


def test_a_tensor_is_itself_and_an_array_shares_its_memory() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    assert to_tensor(tensor) is tensor
    to_tensor(array)[0] = 5
    assert array.tolist() == [5, 1]


def test_numbers_and_lists_become_tensors() -> None:
    assert to_tensor([1.0, 2.0]).tolist() == [1, 2]
    assert to_tensor(3).item() == 3


def test_arrays_that_torch_cannot_read_are_copied() -> None:
    backwards, foreign = np.arange(4.0)[::-1], np.arange(4.0).astype(">f8")
    assert to_tensor(backwards).tolist() == [3, 2, 1, 0]
    assert to_tensor(foreign).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_comes_back_from_its_parts(name: str) -> None:
    tensor = odd_tensors(1)[name]
    form, parts = take_apart(tensor)
    assert {part.dtype for part in parts.values()} <= PLAIN
    assert all(is_dense(part) for part in parts.values())
    again = put_together(json.loads(json.dumps(form)), parts)
    assert (again.dtype, again.layout, again.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert fingerprint(again) == fingerprint(tensor) != fingerprint(odd_tensors(0)[name])


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_can_be_overwritten_where_it_lies(name: str) -> None:
    mine, value = odd_tensors(0)[name], odd_tensors(1)[name]
    overwrite(mine, put_together(*take_apart(value)))
    assert fingerprint(mine) == fingerprint(value)
    if mine.layout == torch.strided:
        assert mine.stride() == value.stride()


def test_equal_fingerprints_mean_equal_bits() -> None:
    zero = torch.zeros(3)
    assert fingerprint(zero) == fingerprint(torch.zeros(3).clone())
    others = [-zero, zero[:2], zero.view(3, 1), zero.double(), zero.to(torch.float8_e5m2), zero.to_sparse()]
    assert len({fingerprint(other) for other in [zero, *others]}) == 7
    nan = torch.tensor([float("nan"), float("-inf")])
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"only dense, sparse and quantized .* not one without memory \(meta\)"):
        take_apart(torch.zeros(2, device="meta"))


def test_parts_that_do_not_fit_are_an_error_not_a_crash() -> None:
    form, parts = take_apart(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="damaged"):
        put_together({**form, "shape": [1, 1]}, parts)
    with pytest.raises(ValueError, match="damaged"):
        put_together({"kind": "bytes", "dtype": "load", "shape": [1]}, {"bytes": torch.zeros(1, dtype=torch.uint8)})


# ---- Tensors whose elements lie in other tensors: refused before anything is sent, with what to pass in their place


@pytest.fixture(scope="module")
def made_of_others() -> Iterator[dict[str, tuple[torch.Tensor, str]]]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parts = [torch.ones(2, 2), torch.ones(3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nested tensors may change
        nested = torch.nested.nested_tensor(parts)
    yield {
        "nested": (nested, r"a nested tensor: .* \(tensor\.unbind\(\)\)"),
        "jagged": (torch.nested.nested_tensor(parts, layout=torch.jagged), "a nested tensor: "),
        "DTensor": (
            distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]),
            r"a DTensor: .* \(tensor\.to_local\(\)\), or all of it \(full_tensor\(\)\)",
        ),
        "subclass": (TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), "a TwoTensor, which is made of other tensors"),
    }
    distributed.destroy_process_group()


def pushed(value: torch.Tensor) -> None:
    store = kv.create("local")
    store.init("w", torch.ones(4, 2))
    store.push("w", value)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "init": lambda value: kv.create("local").init("w", value),
    "push": pushed,
    "a list of 20": lambda value: kv.create("local").init(list(range(20)), [torch.ones(2)] * 19 + [value]),
    "Trainer": lambda value: Trainer({"a": nn.Parameter(torch.ones(1)), "w": nn.Parameter(value)}, kvstore="local"),
    "DistributedOptimizer": lambda value: DistributedOptimizer(
        torch.optim.SGD([nn.Parameter(value)], 0.1), kvstore="local"
    ),
    "parts": take_apart,
}


@pytest.mark.parametrize("kind", ["nested", "jagged", "DTensor", "subclass"])
@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_that_is_made_of_others_is_refused(
    made_of_others: dict[str, tuple[torch.Tensor, str]], kind: str, call: str
) -> None:
    value, said = made_of_others[kind]
    with pytest.raises(kv.UsageError, match=said):
        CALLS[call](value)
    assert not is_dense(value)
    assert not has_parts(value)


def test_rows_of_gradients_and_back() -> None:
    weight = torch.zeros(5, 2, requires_grad=True)
    grad = torch.sparse_coo_tensor([[4, 1]], [[1.0, 2], [3, 4]], (5, 2), check_invariants=True)
    rows = as_rows(grad)
    assert (rows.ids.tolist(), rows.shape) == ([4, 1], (5, 2))
    back = as_gradient(as_rows(grad.coalesce()), weight)
    assert torch.equal(back.to_dense(), grad.to_dense())
    assert back.is_coalesced()
    assert as_rows(torch.eye(2)).ids.tolist() == [0, 1]
    assert not is_sparse(weight)
    weight.grad = no_rows(weight)
    assert is_sparse(weight)
    assert not weight.grad.to_dense().any()


def test_keys_of_tables_are_of_their_parameters_kind() -> None:
    assert (table_key("a.weight"), table_key(0), table_key(3)) == ("a.weight/rows", -1, -4)


# ---- How a model is cut into chunks: every element once, none too large, the same on all workers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


values = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.builds(
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=8,
)


def nbytes(values: dict[str, torch.Tensor], chunk: list[ChunkRange]) -> int:
    return sum((part.stop - part.start) * wire_dtype(values[part.name].dtype).itemsize for part in chunk)


@settings(max_examples=200)
@given(values, st.integers(8, 600))
def test_every_element_is_in_one_chunk_and_chunks_are_full(values: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    chunks = divide(values, chunk_bytes)
    ends = dict.fromkeys(values, 0)
    for part in (part for chunk in chunks for part in chunk):
        assert ends[part.name] == part.start < part.stop, "parts of a value follow each other"
        assert part.whole == (part.stop - part.start == values[part.name].numel())
        ends[part.name] = part.stop
    assert ends == {name: value.numel() for name, value in values.items()}
    sizes = [nbytes(values, chunk) for chunk in chunks]
    assert all(0 < size <= chunk_bytes for size in sizes)
    assert all(size > chunk_bytes - 8 for size in sizes[:-1])
    keys = [part.key for chunk in chunks for part in chunk]
    assert len(set(keys)) == len(keys)


@settings(max_examples=50)
@given(values, st.integers(8, 600))
def test_chunks_depend_on_names_shapes_and_dtypes_alone(values: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    others = {
        name: torch.ones_like(value).movedim(0, -1).contiguous().movedim(-1, 0)
        if value.ndim
        else torch.ones_like(value)
        for name, value in values.items()
    }
    assert divide(values, chunk_bytes) == divide(others, chunk_bytes)
    assert describe(values) == describe(others)


@given(values)
def test_without_a_size_there_is_one_chunk(values: dict[str, torch.Tensor]) -> None:
    chunks = divide(values, None)
    assert len(chunks) == any(value.numel() for value in values.values())
    assert all(part.whole for chunk in chunks for part in chunk)


def test_the_last_value_comes_first_and_large_ones_are_cut() -> None:
    values = {"w": torch.empty(5, 4), "b": torch.empty(6), "half": torch.empty(3, dtype=torch.float16)}
    keys = [[part.key for part in chunk] for chunk in divide(values, 40)]
    assert keys == [["half", "b", "w[0:1]"], ["w[1:11]"], ["w[11:20]"]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["contiguous", "transposed", "channels_last", "strided"])
def test_runs_are_read_and_written_where_they_belong(dtype: torch.dtype, form: str) -> None:
    value = torch.arange(120.0).view(2, 3, 4, 5).to(dtype)
    value = {
        "contiguous": lambda: value.clone(),
        "transposed": lambda: value.clone().transpose(1, 3),
        "channels_last": lambda: value.to(memory_format=torch.channels_last),
        "strided": lambda: torch.zeros(2, 3, 4, 10, dtype=dtype)[..., ::2].copy_(value),
    }[form]()
    strides, expected = value.stride(), value.reshape(-1).clone()
    (whole,) = divide({"w": value}, None)
    for part in (whole[0], ChunkRange("w", 7, 31, False)):
        elements = read(value, part)
        assert elements.is_contiguous()
        assert torch.equal(elements.to(dtype), expected[part.start : part.stop])
        expected[part.start : part.stop] = -elements.to(dtype)
        write(value, part, -elements.double())
        assert value.stride() == strides
        assert torch.equal(value.reshape(-1), expected)


def test_what_is_contiguous_is_not_copied() -> None:
    value = torch.zeros(4, 6)
    assert read(value, ChunkRange("w", 5, 9, False)).data_ptr() == value[0, 5].data_ptr()


# ---- which store ``kvstore=`` means


STARTED_BY = [
    {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
]


def test_auto_is_this_process_alone_outside_of_a_job() -> None:
    assert store_type("auto") == store_type("Auto") == "device"
    store = open_store("auto")
    assert (store.type, store.num_workers) == ("device", 1)


@pytest.mark.parametrize("variables", STARTED_BY, ids=["launch.py", "torchrun", "mpirun", "srun"])
def test_auto_is_synchronous_in_a_job(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert store_type("auto") == "dist_sync"
    assert store_type("local") == "local"


def test_other_names_are_what_kvstore_has_under_them() -> None:
    assert store_type("dist_async") == "dist_async"
    with pytest.raises(kv.UnknownName, match="choose from"):
        open_store("pigeon")


def test_a_store_is_used_as_it_is() -> None:
    store = kv.create("local")
    assert open_store(store) is store
    assert store_type(store) == "local"


# ---- a few integers of every worker, for all


def test_every_worker_gets_the_rows_of_all_by_rank(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> Any:
        gather = Gather(store, "/test", 3)
        return [gather.exchange([store.rank + 1, 2**62 + turn]) for turn in range(2)]

    workers = range(cluster.workers)
    rows = [{rank: [rank + 1, 2**62 + turn, 0] for rank in workers} for turn in range(2)]
    assert cluster.run(work) == [rows for _ in workers]


def test_a_mean_is_the_same_to_the_bit_on_all(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        return Gather(store, "/test", 2).mean([0.1, 0.2][store.rank])

    assert pair.run(work) == [(0.1 + 0.2) / 2] * 2


@given(st.floats(allow_nan=False))
def test_alone_a_mean_is_the_number(number: float) -> None:
    assert Gather(kv.create("local"), "/test", 2).mean(number) == number


def test_a_table_is_shared_or_says_that_the_store_is_in_use() -> None:
    store = kv.create("local")
    Gather(store, "/test")
    Gather(store, "/test")
    with pytest.raises(kv.UsageError, match=r"make a second one with kvstore\.create"):
        Gather(store, "/test", shared=False)


@pytest.mark.parametrize("before", [True, False])
def test_a_store_that_does_not_sum_is_refused(before: bool) -> None:
    def update(key: Any, pushed: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(pushed)

    store = kv.create("local")
    if before:
        store.set_updater(update)
    gather = Gather(store, "/test")
    if not before:
        store.set_updater(update)
    with pytest.raises(kv.UsageError, match="does not sum what is pushed"):
        gather.exchange([1])


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_stores_where_every_push_is_an_update_cannot_sum(kind: str) -> None:
    with pytest.raises(kv.UsageError, match=f"'{kind}' store updates for every push"):
        require_sums(kind)
    require_sums("dist_sync")
    require_sums("device")


def test_a_digest_is_small_enough_to_be_added_and_differs() -> None:
    texts = [f"parameter {number}" for number in range(1000)]
    assert len({digest(text) for text in texts}) == 1000
    assert all(0 <= digest(text) < 2**52 for text in texts)
    assert digest("a") == digest("a")


class Caller:
    def has_gradients(self) -> bool:
        return True


def test_trainer_and_tables_of_one_store_find_each_other() -> None:
    store = kv.create("local")
    steps = row_steps(store)
    assert row_steps(store) is steps
    assert row_steps(kv.create("local")) is not steps
    with steps.pushes.paused():
        steps.pushes.step_over()  # nothing is there yet


def test_a_trainer_is_known_as_long_as_it_lives() -> None:
    steps, trainer = row_steps(kv.create("local")), Caller()
    assert steps.trainer_has_gradients is None
    steps.begin(trainer.has_gradients)
    assert steps.trainer_has_gradients is not None
    assert steps.trainer_has_gradients()
    del trainer
    gc.collect()
    assert steps.trainer_has_gradients is None


# ---- Lines of a training: seen without a set-up of logging, and records of the root logger with one


def test_without_a_set_up_of_logging_rank_0_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a program finds it
    for rank in (0, 1):
        log_line(rank, "Epoch[%d] Train-%s=%f", rank, "accuracy", 0.5)
    assert tuple(capsys.readouterr()) == ("", "Epoch[0] Train-accuracy=0.500000\n")
    assert not logging.getLogger().handlers
    monkeypatch.setattr(logging.getLogger().manager, "disable", logging.INFO)  # as by logging.disable
    log_line(0, "not wanted")
    assert capsys.readouterr().err == ""


def test_with_one_lines_are_records_of_the_root_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log_line(0, "below the level of the root logger")
    caplog.set_level(logging.INFO)
    log_line(1, "Epoch[%d] Time cost=%.3f", 1, 2.0)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("root", "INFO", "Epoch[1] Time cost=2.000")
    assert record.filename == "test_tensors.py"
    assert capsys.readouterr().err == ""


# ---- Checks of arguments: integers of a range, and switches that may be left to decide themselves


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_kind_become_plain_ones(value: Any) -> None:
    assert type(at_least("n", value, 3)) is int
    assert at_least("n", value, 3) == 3


@pytest.mark.parametrize("value", [2, -1, 3.0, True, "3", None, np.float32(3)])
def test_what_is_no_integer_or_too_small(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"n=.* must be an integer, at least 3"):
        at_least("n", value, 3)


def test_the_largest_is_64_bits_unless_it_is_said() -> None:
    assert at_least("n", 2**63 - 1, 0) == 2**63 - 1
    with pytest.raises(kv.UsageError, match=f"at most {2**63 - 1}"):
        at_least("n", 2**63, 0)
    with pytest.raises(kv.UsageError, match="n=6 must be an integer, at most 5"):
        at_least("n", 6, 0, 5)


@pytest.mark.parametrize(("value", "meaning"), [(True, True), (False, False), ("auto", None), (None, None)])
def test_a_switch(value: Any, meaning: bool | None) -> None:
    assert on_off_auto("overlap", value) is meaning


@pytest.mark.parametrize("value", ["on", 1, 0, "Auto"])
def test_what_is_no_switch(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"overlap=.* must be True, False or 'auto'"):
        on_off_auto("overlap", value)
