"""Between devices and host memory; what a GPU does with it is in the tests of GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.values import Arrays, Leaving, from_host


def test_arrays_on_the_host_leave_as_they_are() -> None:
    tensors = [torch.ones(3), torch.zeros(2)]
    arrays = Leaving(tensors).arrived(np.array([0, 1]))
    assert [array.data_ptr() for array in arrays.tensors] == [tensor.data_ptr() for tensor in tensors]


def test_lists_of_arrays_are_not_listed_again() -> None:
    arrays = Arrays.of([torch.ones(3)])
    assert Leaving(arrays).arrived(np.array([0])) is arrays


def test_values_are_written_into_every_output_whatever_its_strides() -> None:
    flat = torch.arange(6.0)
    outs = [torch.empty(2, 3), torch.empty(3, 2).t(), torch.empty(6)]
    assert from_host(flat, outs) == set(), "nothing is under way without a GPU"
    assert outs[0].tolist() == outs[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert outs[2].tolist() == flat.tolist()


@pytest.mark.gpu
def test_arrays_of_a_gpu_have_arrived_when_they_are_asked_for() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors = [torch.full((1 << 20,), 3.0, device="cuda"), torch.ones(2)]
    leaving = Leaving(tensors)
    tensors[0].fill_(-1)  # the copy was begun before
    (far, near) = leaving.arrived(np.array([0, 1])).tensors
    assert not far.is_cuda
    assert (far == 3).all()
    assert near is tensors[1]
