from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvstore.devices import CannotLend, device_memory
from kvstore.devices.host import HostMemory


def test_the_setting_says_which_memory_it_is():
    assert type(device_memory("host")) is HostMemory
    if not torch.cuda.is_available():
        with pytest.raises(CannotLend):
            device_memory("cuda")


def test_a_store_brings_neither_kind_before_it_is_asked_for():
    code = "import sys, kvstore.client; sys.exit(sum(name in sys.modules for name in (%r, %r)))"
    words = [sys.executable, "-c", code % ("kvstore.devices.cuda", "kvstore.devices.host")]
    assert subprocess.run(words, check=False).returncode == 0
