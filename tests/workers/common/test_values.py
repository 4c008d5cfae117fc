"""What is averaged and sent beside gradients: values, hyper-parameters, bundles; and what is used of torch."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR

import kvstore as kv
from kvstore import UsageError
from workers.alike import CurrentHyperparameters, Hyperparameter, difference
from workers.common import bundle
from workers.common.torch_internals import (
    after_backward,
    current_backward,
    held_batches,
    is_compiled,
    multiply,
    note_step,
    write_count,
)
from workers.common.values import buffers_around, buffers_of, module_of, parameters_of

# ---- what is averaged: an optimizer's parameters and a model's buffers, by name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embedding.weight


def test_parameters_of_a_module() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    found = parameters_of(model, torch.optim.SGD(model.parameters()))
    assert list(found) == ["embedding.weight", "norm.weight", "norm.bias", "out.bias"]
    assert found["embedding.weight"] is model.out.weight
    some = parameters_of(model, torch.optim.SGD([model.out.bias, model.norm.bias]))
    assert list(some) == ["norm.bias", "out.bias"], "in the order of the model"


@pytest.mark.parametrize(
    "give",
    [
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: dict(model.named_parameters(remove_duplicate=False)),
    ],
)
def test_parameters_by_name(give: Any) -> None:
    model = Tied()
    found = parameters_of(give(model), torch.optim.SGD(model.parameters()))
    assert list(found) == ["embedding.weight", "norm.weight", "norm.bias", "out.bias"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ([], r"of shape \[2\] that is not among the model's"),
        (nn.Linear(2, 2), "not among the model's: pass the model"),
        (3, "pass a module, or its named_parameters"),
        ([torch.zeros(2)], "not Tensor"),
        ([("w", 3)], "not tuple"),
        ([("w", torch.zeros(2))] * 2, "the same name"),
    ],
)
def test_what_is_no_model(model: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parameters_of(model, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))


def test_a_model_without_elements() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    with pytest.raises(UsageError, match="has no parameters to average"):
        parameters_of({"w": empty}, torch.optim.SGD([empty]))


def test_buffers_are_floating_point_and_found_when_assigned_anew() -> None:
    model = Tied()
    model.register_buffer("scale", torch.ones(2))
    found = buffers_of(model)
    assert list(found) == ["scale", "norm.running_mean", "norm.running_var"]
    model.scale = torch.full((2,), 3.0)
    assert found["scale"].tensor.tolist() == [3, 3]
    assert buffers_of(model.named_parameters()) == {}


def test_an_optimizers_parameters_lead_to_the_buffers_of_their_model() -> None:
    model, other = nn.ModuleDict({"inner": Tied(), "free": nn.BatchNorm1d(2, affine=False)}), Tied()
    found = buffers_around([model["inner"].out.bias])
    assert {id(buffer) for buffer in found.values()} == {id(buffer) for buffer in model.buffers()}
    assert "ModuleDict.inner.norm.running_mean" in found
    assert not {id(buffer) for buffer in other.buffers()} & {id(buffer) for buffer in found.values()}
    assert buffers_around([torch.zeros(2)]) == {}


def test_to_look_for_modules_disturbs_no_tuple_that_another_thread_is_making() -> None:
    """Python raised SystemError there: somebody else had a reference to a tuple that was not done."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            buffers_around([])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(5000):
            tuple(str(number) for number in range(100))
    finally:
        over.set()
        looking.join()
        sys.setswitchinterval(interval)


def test_modules_that_the_collector_does_not_show_are_missed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    model = Tied()
    gc.unfreeze()
    buffers_around([torch.zeros(2)])
    assert not caplog.records
    gc.freeze()
    try:
        assert buffers_around(model.parameters()) == {}
        later = Tied()
        assert len(buffers_around(later.parameters())) == 3
    finally:
        gc.unfreeze()
    (record,) = caplog.records
    assert f"the modules of {len(list(model.parameters()))} parameters are not found" in record.getMessage()


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_of_one_class_have_names_by_the_order_of_the_optimizer(first: int) -> None:
    models = [Tied(), Tied()]
    ordered = [models[first], models[1 - first]]
    found = buffers_around(param for model in ordered for param in model.parameters())
    for prefix, model in zip(("Tied", "Tied 2"), ordered, strict=True):
        assert found[f"{prefix}.norm.running_mean"] is model.norm.running_mean
    assert len(found) == 6


def test_an_iterator_of_a_module_knows_it_until_it_is_read() -> None:
    model = Tied()
    assert module_of(model) is module_of(model.named_parameters()) is module_of(model.parameters()) is model
    assert module_of(dict(model.named_parameters())) is module_of(tensor for tensor in [model.out.bias]) is None
    read = model.parameters()
    next(read)
    assert module_of(list(read)) is None


# ---- hyper-parameters as plain numbers: what counts as the same, and what has changed


def named(groups: list[dict[str, Any]]) -> tuple[Hyperparameter, ...]:
    current = CurrentHyperparameters(SimpleNamespace(param_groups=groups))  # type: ignore[arg-type]
    return current.items(current.read())


def adam(**options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], **options)


def same(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    currents = [CurrentHyperparameters(optimizer) for optimizer in (one, two)]
    values = [current.read() for current in currents]
    first, second = (current.items(its) for current, its in zip(currents, values, strict=True))
    alike = len({current.fingerprint(its) for current, its in zip(currents, values, strict=True)}) == 1
    assert alike is (difference(first, second) is None)
    return alike


def test_numbers_are_compared_whatever_holds_them() -> None:
    assert same(adam(lr=0.5), adam(lr=torch.tensor(0.5)))
    assert same(adam(lr=1), adam(lr=1.0))
    assert same(adam(lr=np.float64(0.25), betas=[0.5, 0.75]), adam(lr=0.25, betas=(0.5, 0.75)))
    assert same(adam(lr=0.5, foreach=True), adam(lr=0.5, foreach=False)), "how it is computed does not matter"
    assert not same(adam(lr=0.5), adam(lr=0.5 + 1e-12))
    assert not same(adam(weight_decay=0.1), adam())
    assert not same(adam(amsgrad=True), adam())


def test_what_is_no_number_is_left_out() -> None:
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.5, "odd": object(), "many": torch.ones(3), "name": "a"}]
    assert [(item.name, item.group, item.value) for item in named(groups)] == [("lr", 0, 0.5), ("name", 0, "a")]


def test_a_difference_names_its_group_if_there_are_several() -> None:
    one = named([{"lr": 0.1}])
    two = named([{"lr": 0.1}, {"lr": 0.2}])
    assert difference(one, named([{"lr": 0.3}])) == ("learning rate", 0.1, 0.3)
    assert difference(one, two) == ("learning rate of group 1", None, 0.2)
    assert difference(two, two) is None


def rate(value: Any) -> Any:
    return lambda group: group.update(lr=value)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (0.5, rate(0.25)),
        (0.5, rate(torch.tensor(0.25))),
        (torch.tensor(0.5), lambda group: group["lr"].fill_(0.25)),
        (torch.tensor(0.5), lambda group: group["lr"].data.fill_(0.25)),
        (torch.tensor(0.5), rate(torch.tensor(0.25))),
        (torch.tensor(0.5), rate(torch.tensor([0.25, 0.5]))),
        (0.5, lambda group: group["betas"].__setitem__(0, 0.7)),
        (0.5, lambda group: group.update(new=3)),
    ],
)
def test_what_has_changed_is_read_anew_and_nothing_else(first: Any, change: Any) -> None:
    optimizer = adam(lr=first)
    optimizer.param_groups[0]["betas"] = [0.5, 0.75]
    current = CurrentHyperparameters(optimizer)
    before = current.read()
    assert current.read() is before
    optimizer.param_groups[0]["eps"] = float(optimizer.param_groups[0]["eps"])
    assert current.read() is before
    change(optimizer.param_groups[0])
    after = current.read()
    assert after is not before
    assert current.items(after) == named(optimizer.param_groups)
    assert current.fingerprint(after) != current.fingerprint(before)
    assert current.read() is after


# ---- bundles: what goes in comes out; nothing else goes in, and no bytes do harm


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda its: st.lists(its) | st.tuples(its, its) | st.dictionaries(st.text() | st.integers(0, 9), its),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    packed, tensors = bundle.pack(value)
    back = bundle.unpack(packed, tensors)
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_go_beside_it() -> None:
    value = {"a": [torch.ones(2, 3), {"b": (torch.tensor(5), None)}], 3: torch.zeros(0, dtype=torch.bfloat16)}
    packed, tensors = bundle.pack(value)
    assert [(form.dtype, form.shape, form.cpu) for form in bundle.forms(packed)] == [
        (torch.float32, (2, 3), True),
        (torch.int64, (), True),
        (torch.bfloat16, (0,), True),
    ]
    back = bundle.unpack(packed, tensors)
    assert back["a"][0] is tensors[0]
    assert back["a"][1]["b"] == (tensors[1], None)


def test_numpy_numbers_become_plain_ones() -> None:
    assert bundle.unpack(*bundle.pack([np.float32(0.5), np.int64(3)])) == [0.5, 3]


def deep() -> Any:
    value: Any = 0
    for _ in range(40):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, object()]}, r"\['a'\]\[1\] is of type object"),
        (print, "the value is of type builtin_function"),
        (2**63, "more than 64 bits"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (deep(), "nested more than 32 deep"),
    ],
)
def test_all_else_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        bundle.pack(value)


@pytest.mark.parametrize(
    "tree",
    [
        [],
        ["set", 1],
        [["list"], 1],
        {"a": 1},
        ["dict", [1]],
        ["dict", [["list"], 1]],
        ["tensor", "float32", [2]],
        ["tensor", "float31", [2], True],
        ["tensor", "float32", [-2], True],
        ["tensor", "float32", [2**50], True],
        ["tensor", "float32", [True], True],
        ["tensor", "float32", [2], 1],
    ],
)
def test_other_trees_are_no_bundles(tree: Any) -> None:
    with pytest.raises(kv.WireError, match="not a bundle"):
        bundle.forms(msgpack.packb(tree))


@given(st.binary())
def test_any_bytes_are_a_bundle_or_a_wire_error(data: bytes) -> None:
    try:
        bundle.forms(data)
    except kv.WireError:
        return


def test_the_tensors_must_be_those_of_the_bundle() -> None:
    packed, _ = bundle.pack([torch.zeros(2)])
    for tensors in ([], [torch.zeros(3)], [torch.zeros(2).double()]):
        with pytest.raises(kv.WireError, match="do not have the dtypes and shapes of this bundle"):
            bundle.unpack(packed, tensors)
    with pytest.raises(kv.WireError, match="more tensors"):
        bundle.unpack(packed, [torch.zeros(2), torch.zeros(2)])


# ---- what is used of torch's internals: it does what is needed, and says so where a version of torch lacks it


def test_writes_are_counted_but_for_those_around_torch() -> None:
    tensor = torch.zeros(2)
    before = write_count(tensor)
    tensor.add_(1)
    assert write_count(tensor) == before + 1
    tensor.numpy()[0] = 5
    assert write_count(tensor) == before + 1


def test_a_torch_that_does_not_count_writes_is_named() -> None:
    with pytest.raises(kv.Unsupported, match=r"has no Tensor\._version.*overlap=False"):
        write_count(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("lacking", [False, True])
def test_tensors_are_multiplied_in_place(lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking:
        monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.ones(2), torch.tensor(3.0)]
    multiply(tensors, torch.tensor(0.5))
    assert tensors[0].tolist() == [0.5, 0.5]
    assert tensors[1].item() == 1.5


def test_what_is_to_come_after_backward_comes_when_all_gradients_are_there() -> None:
    first, last = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen: list[tuple[bool, bool]] = []

    def note() -> None:
        seen.append((first.grad is not None, last.grad is not None))

    last.register_post_accumulate_grad_hook(lambda _: after_backward(note))
    (first * 2 * last).sum().backward()
    assert seen == [(True, True)]


def test_a_torch_without_that_callback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    with pytest.raises(kv.Unsupported, match="no callback for the end of backward"):
        after_backward(lambda: None)


def test_each_backward_pass_has_a_number() -> None:
    leaf, seen = torch.ones(1, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append(current_backward()))
    assert current_backward() == -1
    for _ in range(2):
        (leaf * 2).sum().backward()
    assert current_backward() == -1
    assert seen[0] != seen[1]
    assert min(seen) >= 0


def test_a_torch_without_these_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(kv.Unsupported, match="does not tell which backward pass runs"):
        current_backward()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_modules_are_told_from_others() -> None:
    module = nn.Linear(1, 1)
    assert not is_compiled(module)
    assert is_compiled(torch.compile(module))
    assert is_compiled(torch.jit.trace(module, torch.zeros(1, 1)))
    module.compile()
    assert is_compiled(module)


def test_a_scheduler_does_not_warn_after_a_step_that_was_noted() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = StepLR(optimizer, 1)
    note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_torch_that_does_not_show_what_its_loaders_hold_is_no_loader_that_holds_nothing() -> None:
    class Iterator:
        _num_workers = 2

    assert held_batches(Iterator()) is None
    assert held_batches(None) == ()
