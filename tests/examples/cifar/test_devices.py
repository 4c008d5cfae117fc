"""The devices that the command line asks for."""

from __future__ import annotations

import pytest
import torch
from cifar.devices import DeviceError, find_devices

CPU = torch.device("cpu")


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"--gpus 0,1: .* sees no CUDA device; without --gpus the CPU is used"):
        find_devices([0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"--gpus 2: .* only CUDA devices 0 to 1"):
        find_devices([1, 2])
    assert find_devices([0, 1]) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert find_devices(None) == find_devices([]) == [CPU]
