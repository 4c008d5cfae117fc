"""The modules against torch's own; what they push, and when."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

import kvstore as kv
import workers

EITHER = pytest.mark.parametrize(
    "kind", [workers.Embedding, partial(workers.EmbeddingBag, mode="sum")], ids=["embedding", "bags"]
)


def ids_of(step: int, *shape: int, most: int = 40) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(step))


def twin(module: Any, **options: Any) -> Any:
    """torch's module with the same weights, of which sparse gradients are made."""
    cls = nn.Embedding if isinstance(module, workers.Embedding) else nn.EmbeddingBag
    weight = module.state_dict()["weight"]
    return cls(*weight.shape, _weight=weight, **{"sparse": True, **options})


def train(module: Any, reference: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """Make the same step with both."""
    outputs = module(*args)
    (outputs - 1).square().mean().backward()
    optimizer.zero_grad()
    expected = reference(*args)
    torch.testing.assert_close(outputs, expected)
    (expected - 1).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("mode", "each"), [("sum", 3), ("sum", 1), ("mean", 3)])
def test_bags_as_torch_with_sparse_adam_to_the_bit(mode: str, each: int) -> None:
    store = Recorded("adam", learning_rate=0.01)
    bag = workers.EmbeddingBag(40, 4, store=store, key="t", mode=mode)
    reference = twin(bag, mode=mode)
    optimizer = torch.optim.SparseAdam(reference.parameters(), lr=0.01)
    for step in range(8):
        train(bag, reference, optimizer, ids_of(step, 160 // each, each, most=25))
    assert torch.equal(bag.state_dict()["weight"], reference.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_torch_with_a_copy_in_float32(dtype: torch.dtype) -> None:
    store = Recorded("sgd", learning_rate=2.0**-10, momentum=0.5)
    tables = {"dtype": dtype, "store": store, "init": "constant"}
    modules = [
        workers.Embedding(20, 4, key="t", **tables),
        workers.Embedding(20, 4, key="p", padding_idx=19, **tables),
        workers.EmbeddingBag(20, 4, key="u", mode="sum", **tables),
    ]
    masters = [nn.Parameter(torch.ones(20, 4)) for _ in modules]
    optimizer = torch.optim.SGD(masters, lr=2.0**-10, momentum=0.5)
    factors = torch.arange(1.0, 5.0)
    ids = torch.arange(20).repeat(33, 1)
    large = torch.ones(33, 20, 1).index_fill_(0, torch.tensor([0]), 4096.0)  # to which half precision can add no 1
    for _ in range(6):
        first, padded, bags = (module(ids.T.contiguous() if module is modules[2] else ids) for module in modules)
        assert first.dtype == padded.dtype == bags.dtype == dtype
        assert torch.equal(first[0], masters[0].to(dtype))
        weights = (large * factors).to(dtype)
        ((first * weights).sum() + (padded * weights).sum() + (bags * factors.to(dtype)).sum()).backward()
        for master, total in zip(masters, (4096 + 32, 4096 + 32, 33), strict=True):
            master.grad = (factors * total).to(dtype).float().expand(20, 4).clone()
        optimizer.step()
    for module, master in zip(modules, masters, strict=True):
        assert torch.equal(module.state_dict()["weight"][:19], master[:19].to(dtype))


def test_sgd_sums_what_an_id_has_before_it_updates_as_torch_does_with_coalesced_gradients() -> None:
    store = Recorded("sgd", learning_rate=0.1)
    module = workers.Embedding(40, 4, store=store, key="t")
    references = [twin(module) for _ in range(2)]
    for step, once in ((0, True), (1, False)):
        ids = torch.randperm(40)[:20] if once else ids_of(step, 200)
        (module(ids).sin() * torch.arange(4)).sum().backward()
        for reference, coalesces in zip(references, (True, False), strict=True):
            reference.zero_grad()
            (reference(ids).sin() * torch.arange(4)).sum().backward()
            if coalesces:
                reference.weight.grad = reference.weight.grad.coalesce()
            torch.optim.SGD(reference.parameters(), lr=0.1).step()
        weight = module.state_dict()["weight"]
        assert torch.equal(weight, references[0].weight)
        assert torch.equal(weight, references[1].weight) == once
    torch.testing.assert_close(weight, references[1].weight.detach(), rtol=0, atol=1e-5)


def test_adam_counts_each_round_of_a_table_as_torch_does_with_gradients_of_no_rows() -> None:
    store = Recorded("adam", learning_rate=0.1)
    first, second = (workers.Embedding(40, 4, store=store, key=key) for key in "ab")
    references = [twin(second) for _ in range(2)]
    optimizers = [torch.optim.SparseAdam(reference.parameters(), lr=0.1) for reference in references]
    for step in range(10):
        ids = ids_of(step, 5 if step % 3 else 0)
        (first(torch.tensor([1])).sum() + (second(ids).square().sum() if len(ids) else 0)).backward()
        for reference, optimizer, leaves_out in zip(references, optimizers, (False, True), strict=True):
            optimizer.zero_grad()
            if len(ids) or not leaves_out:
                reference(ids).square().sum().backward()
            optimizer.step()
    weight = second.state_dict()["weight"]
    assert torch.equal(weight, references[0].weight)
    assert not torch.equal(weight, references[1].weight)


def test_an_embedding_as_torch_with_padding() -> None:
    store = Recorded("adam", learning_rate=0.01)
    module = workers.Embedding(40, 4, store=store, key="t", padding_idx=-37)
    assert module.padding_idx == 3
    reference = twin(module, padding_idx=3)
    optimizer = torch.optim.SparseAdam(reference.parameters(), lr=0.01)
    for step in range(4):
        train(module, reference, optimizer, ids_of(step, 5, 2, most=9))
    assert torch.equal(module.state_dict()["weight"], reference.weight)
    assert not reference.weight[3].any()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"mode": "max"}, ()),
        ({"mode": "max", "padding_idx": 2}, ()),
        ({"mode": "sum", "padding_idx": 2}, ()),
        ({"mode": "mean", "padding_idx": 2}, ()),
        ({"mode": "mean"}, (torch.tensor([0, 3, 3]),)),
        ({"mode": "sum", "include_last_offset": True}, (torch.tensor([0, 3, 12]),)),
        ({"mode": "sum"}, (torch.tensor([0, 5]), torch.arange(12.0))),
        ({"mode": "sum"}, ()),
    ],
)
def test_all_kinds_of_bags(options: dict[str, Any], arguments: tuple[torch.Tensor, ...]) -> None:
    bag = workers.EmbeddingBag(9, 4, store=Recorded(), key="t", **options)
    reference = twin(bag, sparse=False, **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        train(bag, reference, optimizer, ids_of(step, *((12,) if arguments else (4, 3)), most=9), *arguments)
    torch.testing.assert_close(bag.state_dict()["weight"], reference.weight.detach())


def test_weights_of_samples_get_their_gradients() -> None:
    bag = workers.EmbeddingBag(9, 4, store=Recorded(), key="t", mode="sum")
    reference = twin(bag, mode="sum")
    weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    for module, each in zip((bag, reference), weights, strict=True):
        module(torch.tensor([[1, 2, 2], [5, 1, 0]]), per_sample_weights=each).square().sum().backward()
    torch.testing.assert_close(*(each.grad for each in weights))
    assert torch.any(weights[0].grad != 0)


def test_one_backward_pass_is_one_push_of_all_tables() -> None:
    store = Recorded()
    first, second = (workers.Embedding(None, 2, store=store, key=key) for key in ("a", "b"))
    (first(torch.tensor([5, 2**60, 5])).sum() + first(torch.tensor([7])).sum()).backward()
    assert store.calls == [("pull", {}, {"a": 2}), ("pull", {}, {"a": 1}), ("push", {"a": 3, "b": 0}, {})]
    assert store.table_statistics("a")["rows"] == 3
    store.calls.clear()
    second(torch.tensor([[]], dtype=torch.int64)).sum().backward()
    assert store.calls[1:] == [("push", {"a": 0, "b": 0}, {})]


def test_two_uses_add_up() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="t", init="zeros")
    (module([1, 1]).sum() + 3 * module([1, 2]).sum()).backward()
    torch.testing.assert_close(module([0, 1, 2])[:, 0].detach(), torch.tensor([0.0, -0.5, -0.3]))


def test_an_output_that_the_loss_does_not_depend_on() -> None:
    store = Recorded()
    first, second = (workers.Embedding(5, 2, store=store, key=key) for key in ("a", "b"))
    unused, used = first([1]), second([2])
    used.sum().backward()
    assert store.calls[-1] == ("push", {"a": 0, "b": 1}, {})
    unused.sum().backward()
    assert store.calls[-1] == ("push", {"a": 1, "b": 0}, {})


def test_nothing_is_pushed_or_made_in_evaluation() -> None:
    store = Recorded()
    module = workers.Embedding(None, 2, store=store, key="t", init="constant", scale=3)
    with torch.no_grad():
        assert module([1]).tolist() == [[3, 3]]
    module.eval()
    assert not module([1]).requires_grad
    assert store.names() == ["pull", "pull"]
    assert store.table_statistics("t")["rows"] == 0


def test_gradients_add_up_under_no_sync() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="t", init="zeros")
    with module.no_sync():
        module([1]).sum().backward()
        module([2]).sum().backward()
    assert "push" not in store.names()
    module([1]).sum().backward()
    assert store.calls[-1] == ("push", {"t": 3}, {})
    torch.testing.assert_close(module([1, 2])[:, 0].detach(), torch.tensor([-0.2, -0.1]))
    with module.no_sync():
        module([1]).sum().backward()
    module.flush()
    module.flush()
    assert [call for call in store.calls if call[0] == "push"][-2:] == [("push", {"t": 1}, {}), ("push", {"t": 0}, {})]


@EITHER
def test_a_backward_pass_that_fails_leaves_nothing_behind(kind: Any) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    store = Recorded()
    first, second = (kind(5, 2, store=store, key=key) for key in ("a", "b"))
    output = first([[1]])
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        (output.sum() + second([[2]]).sum()).backward()  # the second is later in forward, and earlier in backward
    assert store.names() == ["pull", "pull"]
    first([[3]]).sum().backward()
    assert store.calls[-1] == ("push", {"a": 1, "b": 0}, {})


def test_a_graph_that_is_used_twice_is_pushed_twice() -> None:
    store = Recorded()
    first, second = (workers.Embedding(5, 2, store=store, key=key) for key in ("a", "b"))
    loss = first([1]).sum() + second([2]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert store.calls[2:] == [("push", {"a": 1, "b": 1}, {})] * 2


def test_bags_push_as_embeddings_do() -> None:
    store = Recorded()
    first, second = (workers.EmbeddingBag(5, 2, store=store, key=key, mode="sum", init="zeros") for key in "ab")
    with first.no_sync():
        (first([[1, 2]]).sum() + first([[1]]).sum()).backward()
    assert store.names() == ["pull", "pull"]
    loss = first([[1, 1]]).sum() + second([[2], [3]]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert store.calls[2:] == [("push", {"a": 4, "b": 2}, {}), ("push", {"a": 1, "b": 2}, {})]
    assert first([[0], [1], [2]])[:, 0].tolist() == pytest.approx([0, -0.6, -0.1])
    with torch.no_grad():
        assert not first([[1]]).requires_grad


@EITHER
def test_a_checkpointed_part_of_a_model(kind: Any) -> None:
    store = Recorded()
    module = kind(5, 2, store=store, key="t", init="zeros")
    factor = torch.ones(2, requires_grad=True)

    def part(ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return module(ids) * factor

    first, second = (
        torch.utils.checkpoint.checkpoint(part, torch.tensor([[n]]), factor, use_reentrant=False) for n in (1, 2)
    )
    (first.sum() + second.sum()).backward()
    assert [call for call in store.calls if call[0] == "push"] == [("push", {"t": 2}, {})]


def test_the_factor_of_gradients() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="a", init="zeros", rescale_grad=0.5)
    with pytest.raises(kv.UsageError, match=r"rescale_grad=1.0 of 'b', but other tables of this store have 0.5"):
        workers.Embedding(5, 2, store=store, key="b")
    module([1]).sum().backward()
    torch.testing.assert_close(module([1]).detach(), torch.full((1, 2), -0.05))


def test_the_factor_of_the_optimizer_and_of_its_changes() -> None:
    store = Recorded(learning_rate=1.0, rescale_grad=0.5)
    module = workers.Embedding(5, 1, store=store, key="a", init="zeros")
    store.init("dense", torch.zeros(1))
    moved = 0.0
    for factor in (0.5, 0.125):
        store.set_hyperparameters(rescale_grad=factor)
        module([1]).sum().backward()
        store.push("dense", torch.ones(1))
        moved -= factor
        dense = torch.empty(1)
        store.pull("dense", dense)
        assert (module([1]).item(), dense.item()) == (moved, moved)


FREEZE: dict[str, Callable[[nn.Module], object]] = {
    "the module": lambda model: model[0].requires_grad_(False),
    "its weight": lambda model: model[0].weight.requires_grad_(False),
    "a model": lambda model: model.requires_grad_(False),
    "parameters": lambda model: [setattr(param, "requires_grad", False) for param in model.parameters()],
    "by name": lambda model: [
        param.requires_grad_(False) for name, param in model.named_parameters() if name == "0.weight"
    ],
}


@pytest.mark.parametrize("way", FREEZE)
@EITHER
def test_a_frozen_table_is_read_and_not_pushed(way: str, kind: Any) -> None:
    store = Recorded(learning_rate=1.0)
    model = nn.Sequential(kind(5, 2, store=store, key="t", init="zeros"), nn.Linear(2, 1))
    FREEZE[way](model)
    model.train()
    ids, factor = torch.tensor([[1]]), torch.ones(1, requires_grad=True)
    assert not model[0](ids).requires_grad
    (model(ids) * factor).sum().backward()
    assert store.names() == ["pull", "pull"]
    assert set(model.state_dict()) == {"0.weight", "1.weight", "1.bias"}
    assert model.state_dict()["0.weight"].shape == (5, 2)
    model.requires_grad_(True)
    model(ids).sum().backward()
    assert store.names()[-1] == "push"
    assert model.state_dict()["0.weight"][1].any()


def test_a_frozen_table_beside_one_that_is_trained() -> None:
    store = Recorded(learning_rate=1.0)
    first, second = (workers.Embedding(5, 2, store=store, key=key, init="zeros") for key in "ab")
    output = first([1]).sum() + second([2]).sum()
    first.requires_grad_(False)  # also what comes of passes before it
    output.backward()
    assert store.calls[-1] == ("push", {"b": 1}, {})
    with first.no_sync():
        (first([1]).sum() + second([2]).sum()).backward()
    second.requires_grad_(False)
    store.calls.clear()
    first.flush()
    assert not store.calls
    first.requires_grad_(True)
    second.requires_grad_(True)
    (first([1]).sum() + second([2]).sum()).backward()
    assert store.calls[-1] == ("push", {"a": 1, "b": 1}, {})
    assert first([1]).tolist() == [[-1, -1]]
    assert second([2]).tolist() == [[-2, -2]]


def test_a_frozen_copy_freezes_nothing() -> None:
    module = workers.Embedding(5, 2, store=Recorded(learning_rate=1.0), key="t", init="zeros")
    average = copy.deepcopy(module).requires_grad_(False)
    (module([1]).sum() + average([2]).sum()).backward()
    assert module([1, 2])[:, 0].tolist() == [-1, 0]


def test_that_a_table_is_frozen_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    frozen, other = (nn.Sequential(workers.Embedding(5, 2, store=Recorded(), key="t")) for _ in range(2))
    frozen.requires_grad_(False)
    other.load_state_dict(frozen.state_dict())
    assert not other[0].weight.requires_grad
    assert "table 't' was frozen when this state was saved" in caplog.text
    frozen.load_state_dict(other.requires_grad_(True).state_dict())
    assert not frozen[0].weight.requires_grad


def test_the_weight_of_a_module_has_nothing_to_train() -> None:
    model = nn.Sequential(workers.Embedding(5, 2, store=Recorded(), key="t"), nn.Linear(2, 1))
    assert [tuple(param.shape) for param in model.parameters()] == [(0, 2), (1, 2), (1,)]
    trainer = workers.Trainer(model.named_parameters(), kvstore=None)
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [2]


@pytest.mark.parametrize("grouped", [False, True], ids=["without groups", "groups"])
def test_rows_follow_the_learning_rate_of_the_trainer(grouped: bool) -> None:
    store = kv.create("local")
    items, head = workers.Embedding(4, 2, store=store, key="items"), nn.Linear(2, 1)
    params = list(head.named_parameters())
    options = {"kvstore": store, "update_on_kvstore": True}
    trainer = workers.Trainer([{"params": params}] if grouped else params, "sgd", {"lr": 1.0}, **options)
    trainer.set_learning_rate(0.0)
    before = items([1, 2])
    head(before).sum().backward()
    trainer.step()
    assert torch.equal(items([1, 2]), before)


def test_a_buffer_named_as_what_the_table_has() -> None:
    module = workers.Embedding(None, 2, store=Recorded(), key="t")
    module.register_buffer("ids", torch.zeros(1))
    with pytest.raises(kv.UsageError, match="'ids' would be a buffer or parameter of this module, and the ids of its"):
        module.state_dict()


def test_a_store_without_optimizer() -> None:
    module = workers.Embedding(5, 2, store=kv.create("local"), key="t")
    with pytest.raises(kv.UsageError, match="no optimizer is set"):
        module([1]).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"embedding_dim": 2.5}, "embedding_dim"),
        ({"padding_idx": 5}, "padding_idx=5 must be within the 5 embeddings"),
        ({"store": "dist_sync"}, "store='dist_sync' must be a KVStore"),
        ({"init": "xavier"}, "init='xavier'"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"num_embeddings": 5, "embedding_dim": 2, "store": Recorded(), "key": "t", **arguments}
    with pytest.raises(kv.UsageError, match=message):
        workers.Embedding(**given)


def test_modes_that_there_are_not() -> None:
    with pytest.raises(kv.UsageError, match="mode='median' must be one of max, mean, sum"):
        workers.EmbeddingBag(5, 2, store=Recorded(), key="t", mode="median")


def test_a_key_that_is_taken() -> None:
    store = Recorded()
    first = workers.Embedding(5, 2, store=store, key="t")  # by a name: it may be collected otherwise, and is forgotten
    with pytest.raises(kv.AlreadyInitialized, match=r"EmbeddingBag\.of\(module\), or Embedding\.of, makes a second"):
        workers.Embedding(5, 2, store=store, key="t")
    assert first.key == "t"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_and_bags_of_the_same_items_share_a_table(ahead: bool) -> None:
    """As two of torch's modules with one weight: a step has the gradients of both, in one push."""
    store = Recorded("sgd", learning_rate=0.1)
    items = workers.Embedding(40, 4, store=store, key="item", padding_idx=0)
    history = workers.EmbeddingBag.of(items, mode="sum")
    again = workers.Embedding.of(history)
    reference = twin(items, padding_idx=0)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    batches = [(ids_of(step, 6), ids_of(step + 50, 6, 3)) for step in range(5)]
    store.names()
    ids: dict[Any, Any] = {items: lambda batch: batch[0].int(), history: lambda batch: batch[1]}
    for sequence, bags in workers.lookahead(batches, ids) if ahead else batches:
        (items(sequence).sin().sum() + history(bags).cos().sum()).backward()
        optimizer.zero_grad()
        bagged = nn.functional.embedding_bag(bags, reference.weight, mode="sum", sparse=True, padding_idx=0)
        (reference(sequence).sin().sum() + bagged.cos().sum()).backward()
        optimizer.step()
    names = store.names()
    assert (names.count("push") + names.count("pushpull"), names.count("pull")) == (5, 1 if ahead else 10)
    state = nn.ModuleDict({"item": items, "history": history}).state_dict()
    torch.testing.assert_close(state["item.weight"], reference.weight.detach())
    assert torch.equal(state["history.weight"], state["item.weight"])
    assert torch.equal(again(torch.arange(40)), state["item.weight"])
    assert (again.padding_idx, repr(history)) == (0, "EmbeddingBag(40, 4, key='item', padding_idx=0, mode='sum')")


def test_a_shared_table_is_trained_unless_all_its_modules_are_frozen() -> None:
    items = workers.Embedding(5, 2, store=Recorded(), key="t", init="zeros")
    bag = workers.EmbeddingBag.of(items)
    items.requires_grad_(False)
    (items([1]).sum() + bag([[2]]).sum()).backward()
    assert items(range(5)).sum(1).ne(0).tolist() == [False, False, True, False, False]
    bag.requires_grad_(False)
    assert not bag([[1]]).requires_grad
    with pytest.raises(kv.UsageError, match=r"EmbeddingBag\.of takes a workers\.Embedding or .* not a Linear"):
        workers.EmbeddingBag.of(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="mode='median'"):
        workers.EmbeddingBag.of(items, mode="median")


def test_copies_have_the_same_table() -> None:
    module = workers.Embedding(5, 2, store=Recorded(), key="t")
    other = copy.deepcopy(nn.Sequential(module))[0]
    other([1]).sum().backward()
    assert torch.equal(module([1]), other([1]))
    with pytest.raises(kv.Unsupported, match="state_dict"):
        pickle.dumps(module)


def test_how_they_look() -> None:
    store = Recorded()
    assert repr(workers.Embedding(None, 2, store=store, key=1)) == "Embedding(grows, 2, key=1)"
    bag = workers.EmbeddingBag(5, 2, store=store, key=2, padding_idx=0)
    assert repr(bag) == "EmbeddingBag(5, 2, key=2, padding_idx=0, mode='mean')"
    assert bag.store is store


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [([1, 2], None), (1, None), (torch.zeros(2, 2, 2, dtype=torch.long), None), ([[1, 2]], torch.tensor([0]))],
)
def test_bags_that_are_none_are_refused_with_what_would_work(ids: Any, offsets: Any) -> None:
    bag = workers.EmbeddingBag(40, 4, store=Recorded("sgd", learning_rate=1.0), key="t")
    with pytest.raises(kv.UsageError, match=r"pass ids of shape \(bags, ids of each\), or .* offsets="):
        bag(ids, offsets)


@pytest.mark.parametrize("rows", [12, None])
def test_loading_the_rows_that_are_there_leaves_their_states_alone(rows: int | None) -> None:
    store = Recorded("adagrad", learning_rate=1.0)
    module = workers.Embedding(rows, 2, store=store, key="t", init="zeros", dtype="float16")
    module([1, 4, 9]).sum().backward()
    module.load_state_dict(module.state_dict())
    state = module.state_dict()
    state["weight" if rows else "rows"][4 if rows else 1] = 3  # that of id 4
    module.load_state_dict(state)
    module([1, 4, 9]).sum().backward()
    second = -1 - 2**-0.5
    assert module([1, 4, 9, 2])[:, 0].tolist() == pytest.approx([second, 2, second, 0], abs=2e-3)
