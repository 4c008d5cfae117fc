"""What the program writes into parameters that the store updates is found, whatever writes it, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from trained import backward, batch, network

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer
from workers.trainer.outside_writes import SAMPLE, OutsideWrites
from workers.trainer.parameters import Parameter

Write = Callable[[nn.Module], object]


def _data(model: nn.Module) -> None:
    model[0].weight.data.clamp_(-0.01, 0.01)  # type: ignore[index, union-attr, operator]


def _numpy(model: nn.Module) -> None:
    model[2].bias.detach().numpy()[-1] = 7  # type: ignore[index, union-attr, operator]


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    model[0].weight.clamp_(-0.01, 0.01)  # type: ignore[index, union-attr, operator]


def _assigned(model: nn.Module) -> None:
    model[0].bias.data = torch.ones(8)  # type: ignore[index, union-attr]


WRITES: dict[str, Write] = {
    "data": _data,
    "numpy": _numpy,
    "clamp_": _clamp,
    "other memory": _assigned,
    "load_state_dict": lambda model: model.load_state_dict(network(1).state_dict()),
    "vector": lambda model: nn.utils.vector_to_parameters(torch.zeros(83), model.parameters()),
}


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_an_error_at_the_next_step(write: Write, steps: int) -> None:
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, kvstore="device", update_on_kvstore=True)
    for step in range(steps):
        backward(model, *batch(step))
        trainer.step()
    write(model)
    backward(model, *batch(steps))
    with pytest.raises(kv.UsageError, match=r"parameter '(0|2)\.(weight|bias)' has been written .* new Trainer"):
        trainer.step()


def test_what_is_put_back_is_no_write() -> None:
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, kvstore="device", update_on_kvstore=True)
    for step in range(3):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(network(1).state_dict())
        model.load_state_dict(kept)
        model[0].weight.data = model[0].weight.data.clone()  # type: ignore[index, union-attr, assignment]
        backward(model, *batch(step))
        trainer.step()


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": False}], ids=str)
def test_where_this_process_updates_a_write_is_taken_over(how: dict[str, object]) -> None:
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.0}, **how)  # type: ignore[arg-type]
    for step in range(2):
        backward(model, *batch(step))
        trainer.step()
        model.load_state_dict(network(step + 1).state_dict())
    assert torch.equal(model[0].weight, network(2)[0].weight)  # type: ignore[index, arg-type]


def test_a_limit_of_an_embeddings_norms_is_such_a_write() -> None:
    embedding = nn.Embedding(5, 2, max_norm=0.1)
    trainer = Trainer(embedding.named_parameters(), "sgd", {"lr": 0.1}, kvstore="device", update_on_kvstore=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(kv.UsageError, match=r"'weight' has been written .*max_norm"):
        trainer.step()


def test_a_write_before_a_join_is_not_overwritten_either() -> None:
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, kvstore="device", update_on_kvstore=True)
    _clamp(model)
    with pytest.raises(kv.UsageError, match="has been written"):
        trainer.join()


@pytest.mark.usefixtures("small_buckets")
def test_values_that_arrive_during_forward_are_no_writes_and_do_not_hide_one(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        trainer = Trainer(
            model.named_parameters(), "sgd", {"lr": 0.1}, kvstore=store, overlap=True, wait_in_forward=model
        )
        for step in range(4):
            backward(model, *batch(step))
            trainer.step()
        _clamp(model)
        with pytest.raises(kv.UsageError, match=r"'0\.weight' has been written"):
            backward(model, *batch(5))
        store.barrier()

    pair.run(work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_writes_that_torch_counts_are_found_in_large_parameters_too(dtype: torch.dtype) -> None:
    tensors = {
        "plain": torch.zeros(400, 300, dtype=dtype),
        "last": torch.zeros(2, 300, 20, 10, dtype=dtype).to(memory_format=torch.channels_last),
        "gaps": torch.zeros(400, 600, dtype=dtype)[:, ::2],
    }
    writes = OutsideWrites([Parameter(name, (tensor,)) for name, tensor in tensors.items()], (), "advice")
    for _ in range(20):
        writes.note()
        writes.require_none()
    for name, tensor in tensors.items():
        tensor[1, 30] = 1
        with pytest.raises(kv.UsageError, match=f"'{name}' has been written .* advice"):
            writes.require_none()
        writes.note()


@pytest.mark.parametrize("size", [4, 60])
def test_another_order_in_memory_is_no_write_but_does_not_hide_one(size: int) -> None:
    conv = nn.Conv2d(size, size + 1, 3)
    writes = OutsideWrites([Parameter(name, (param,)) for name, param in conv.named_parameters()], (), "advice")
    for form in (torch.channels_last, torch.contiguous_format) * 6:
        writes.note()
        conv.to(memory_format=form)  # type: ignore[call-overload]
        writes.require_none()
    with torch.no_grad():
        conv.weight[2, 1, 1, 0] += 1
    with pytest.raises(kv.UsageError, match="'weight' has been written"):
        writes.require_none()
    writes.note()
    conv.half()
    with pytest.raises(kv.UsageError, match=r"'weight' is torch.float16 now, and the store has it as torch.float32"):
        writes.require_none()


def test_of_a_large_parameter_each_element_is_looked_at_in_its_turn() -> None:
    tensor = torch.full((10 * SAMPLE,), float("nan"))
    writes = OutsideWrites([Parameter("w", (tensor,))], (), "advice")
    for _ in range(20):
        writes.note()
        writes.require_none()
    tensor.data[5] = 1
    for _ in range(200):
        try:
            writes.require_none()
        except kv.UsageError:
            return
        writes.note()
        tensor.data[5] += 1  # it is written to between all steps
    raise AssertionError("not found")


def test_frozen_parameters_may_be_written_to() -> None:
    frozen = {1}
    tensors = [torch.zeros(3), torch.zeros(3)]
    writes = OutsideWrites([Parameter(str(n), (tensor,)) for n, tensor in enumerate(tensors)], frozen, "advice")
    writes.note()
    tensors[1].fill_(1)
    writes.require_none()
    frozen.clear()
    writes.note()
    tensors[1].fill_(2)
    with pytest.raises(kv.UsageError, match="'1' has been written"):
        writes.require_none()


@pytest.mark.parametrize("kvstore", ["device", "dist_async"])
def test_values_that_the_program_pulls_from_the_store_are_no_writes(kvstore: str) -> None:
    def train(store: kv.KVStore) -> None:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, kvstore=store, update_on_kvstore=True)
        names, weights = zip(*model.named_parameters(), strict=True)
        for step in range(3):
            backward(model, *batch(step))
            trainer.step()
            store.pull(names[0], out=weights[0].data)
            store.pull(list(names[1:]), out=[weight.data for weight in weights[1:]])
        backward(model, *batch(3))
        trainer.step()
        with torch.no_grad():
            weights[0].mul_(2)
        backward(model, *batch(4))
        with pytest.raises(kv.UsageError, match="has been written"):
            trainer.step()

    if kvstore == "device":
        train(kv.create(kvstore))
    else:
        with ThreadedJob(2, 1) as pair:
            pair.run(train, mode="async")
