"""Whether gradients are still what was pushed: whatever is written to them, and however."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.common import buckets
from workers.common.buckets import Progress, divide
from workers.common.pushed import CHUNK, SMALL, Hooks, PushedGradients

LARGE = SMALL  # elements: more bytes than are copied, in any dtype
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swap_rows(grad: torch.Tensor) -> None:
    grad[[0, -1]] = grad[[-1, 0]]


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "scaled": lambda grad: grad.mul_(0.5),
    "opposite": lambda grad: grad.neg_(),
    "zeros": lambda grad: grad.zero_(),
    "clamped": lambda grad: grad.clamp_(-1, 1),
    "the other way round": lambda grad: grad.copy_(grad.flip(0)),
    "columns the other way round": lambda grad: grad.copy_(grad.flip(-1)),
    "one element": lambda grad: grad.view(-1)[-1:].add_(1),
    "a bit": lambda grad: grad.view(torch.int16).view(-1)[3:4].add_(1),
    "a NaN": lambda grad: grad.view(-1)[5:6].fill_(float("nan")),
    "rows swapped": swap_rows,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("shape", [(4, 3), (300, 400), (256, 2 * CHUNK), (LARGE + 7,), (512, 2048)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_that_torch_does_not_count_are_found(
    write: Callable[[torch.Tensor], object], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    grads = {3: made((5,)), 1: made(shape, dtype), 7: made((2, 2), dtype)}
    bucket = PushedGradients(grads)
    assert bucket.written() is None
    write(grads[1].data)
    assert bucket.replaced(grads) is None
    assert bucket.written() == 1


def test_the_gradient_at_fault_is_found_among_small_and_large_ones() -> None:
    shapes = [(3,), (LARGE,), (1,), (7, 5), (LARGE + 1,), (2,)]
    for place in range(len(shapes)):
        grads = {10 - n: made(shape, seed=n) for n, shape in enumerate(shapes)}
        bucket = PushedGradients(grads)
        grads[10 - place].numpy()[0] = 9
        assert bucket.written() == 10 - place


def test_torchs_own_writes_and_other_tensors_are_found_without_a_look_at_elements() -> None:
    grads = {0: made((3,)), 1: made((4,))}
    bucket = PushedGradients(grads, noted=False)
    assert bucket.replaced(grads) is None
    assert bucket.replaced({**grads, 1: grads[1].clone()}) == 1
    assert bucket.replaced({0: None, 1: grads[1]}) == 0
    grads[0].mul_(1)
    assert bucket.replaced(grads) == 0
    grads[1].data.zero_()
    assert bucket.written() is None, "nothing was noted"


@pytest.mark.parametrize("size", [10, LARGE])
def test_equal_bits_are_no_change(size: int) -> None:
    grad = torch.full((size,), float("nan"))
    bucket = PushedGradients({0: grad})
    grad.data.copy_(grad.clone())
    assert bucket.written() is None


@pytest.mark.parametrize(
    "grad",
    [
        made((8, 16, 64, 64)).to(memory_format=torch.channels_last),
        made((2, 4, 8, 32, 32)).to(memory_format=torch.channels_last_3d),
        made((300, 200)).t(),
        made((LARGE + 3,))[1:],
        made((LARGE + 3,), torch.float16)[1:],
        made((1,)).expand(LARGE),
        made((300, 400))[:, ::2],
    ],
    ids=["channels_last", "channels_last_3d", "transposed", "odd", "odd half", "expanded", "every second"],
)
def test_any_strides(grad: torch.Tensor) -> None:
    bucket = PushedGradients({0: grad})
    assert bucket.written() is None
    grad.data[0].neg_()
    assert bucket.written() == 0


def test_what_is_sparse_is_not_looked_at() -> None:
    grad = torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (3, 2), check_invariants=True).coalesce()
    bucket = PushedGradients({0: grad})
    grad.values().data.zero_()
    assert bucket.written() is None


@given(st.integers(1, 3 * LARGE), st.data())
def test_any_bit_counts(size: int, data: st.DataObject) -> None:
    grad = made((size,), torch.float16)
    bucket = PushedGradients({0: grad})
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 15))
    grad.data.view(torch.int16)[place] ^= (1 << bit) if bit < 15 else -(1 << 15)
    assert bucket.written() == 0


# ---- Hooks that tell somebody of each gradient, during backward


class Listener:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def arrive(self, position: int) -> None:
        self.heard.append(position)


def params() -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(3)]


def backward(tensors: list[torch.Tensor]) -> None:
    first, second, third = tensors
    ((first * second) * third).sum().backward()


def test_each_gradient_is_told_by_position_when_it_is_there() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    assert hooks.active
    backward(tensors)
    assert sorted(listener.heard) == [0, 1, 2]
    assert listener.heard[0] == 2, "the last factor's comes first"


def test_in_a_pause_the_watcher_is_told_and_knows() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    with hooks.paused():
        with hooks.paused():
            pass
        assert hooks.resting, "an inner block does not end the outer one"
        backward(tensors)
    assert not hooks.resting
    assert len(listener.heard) == 3


def test_removed_hooks_tell_nothing() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    hooks.remove()
    assert not hooks.active
    backward(tensors)
    assert listener.heard == []


def test_parameters_do_not_keep_the_watcher() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    assert not hooks.active
    backward(tensors)


# ---- How parameters are divided into buckets, and which buckets may go

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], [range(1)]),
        ([1, 2, 3], [range(3)]),
        ([5, MIB], [range(1, 2), range(1)]),
        ([MIB, 5], [range(2)]),
        ([4 * MIB, 4 * MIB, 4 * MIB, MIB - 1, 1], [range(3, 5), range(1, 3), range(1)]),
        ([100 * MIB, 1, 100 * MIB, 1], [range(2, 4), range(2)]),
        ([0, 0], [range(2)]),
    ],
)
def test_the_last_parameters_go_first_and_early(sizes: list[int], expected: list[range]) -> None:
    assert divide(sizes) == expected


def test_small_buckets_are_all_as_small_as_the_first() -> None:
    sizes = [4 * MIB, MIB, MIB - 1, 1, MIB - 1, 1]
    assert divide(sizes) == [range(4, 6), range(4)]
    assert divide(sizes, small=True) == [range(4, 6), range(2, 4), range(1, 2), range(1)]


@given(st.lists(st.integers(0, 9 * MIB), min_size=1, max_size=40))
def test_every_parameter_is_in_one_bucket(sizes: list[int]) -> None:
    divided = divide(sizes)
    assert [position for bucket in reversed(divided) for position in bucket] == list(range(len(sizes)))
    limits = [buckets.FIRST_BYTES] + [buckets.BUCKET_BYTES] * len(divided)
    for bucket, limit in zip(divided, limits, strict=False):
        assert sum(sizes[bucket.start + 1 : bucket.stop]) < limit, "full without its last one"
    for bucket, limit in zip(divided[:-1], limits, strict=False):
        assert sum(sizes[position] for position in bucket) >= limit


def test_a_bucket_goes_with_its_last_gradient() -> None:
    progress = Progress([range(2, 4), range(2)])
    assert progress.num_buckets == 2
    assert [progress.arrive(position) for position in (2, 3, 1)] == [[], [range(2, 4)], []]
    assert [progress.gone(position) for position in range(4)] == [False, False, True, True]
    assert not progress.complete
    assert progress.arrive(0) == [range(2)]
    assert progress.complete


def test_buckets_go_in_order() -> None:
    progress = Progress([range(2, 3), range(1, 2), range(1)])
    assert progress.arrive(1) == []
    assert progress.arrive(1) == [], "again"
    assert progress.arrive(2) == [range(2, 3), range(1, 2)]
    assert progress.arrive(2) == [], "it has gone"


def test_a_new_step_begins_at_the_first_bucket() -> None:
    progress = Progress([range(1, 2), range(1)])
    progress.arrive(1)
    progress.restart()
    assert not progress.gone(1)
    assert progress.arrive(0) == []
