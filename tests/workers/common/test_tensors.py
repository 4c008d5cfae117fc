"""What users give becomes a tensor, where it can over the same memory."""

from __future__ import annotations

import numpy as np
import torch

from workers.common.tensors import to_tensor


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
