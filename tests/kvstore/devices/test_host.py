"""Files in memory in the place of devices: what only they have to get right."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from kvstore.devices import CannotLend, Handle
from kvstore.devices.host import NAME, HostMemory

CPU = torch.device("cpu")


def test_memory_is_gone_with_its_last_view():
    memory = HostMemory()
    lent = memory.lend(100, CPU)
    handle, part = lent.handle, lent.memory[10:]
    opened = memory.open(handle)
    descriptor = int.from_bytes(handle.opaque[8:16], "little")
    del lent
    gc.collect()
    assert NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink())
    del part
    gc.collect()
    with pytest.raises(CannotLend, match=r"cannot be opened|no such memory"):
        memory.open(handle)
    assert opened.tolist() == [0] * 100, "who has opened it keeps it"


def test_a_file_of_another_kind_is_not_opened(tmp_path: Path):
    memory = HostMemory()
    lent = memory.lend(100, CPU)
    fd = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    try:
        opaque = lent.handle.opaque[:8] + fd.to_bytes(8, "little") + lent.handle.opaque[16:]
        with pytest.raises(CannotLend, match="no such memory"):
            memory.open(lent.handle._replace(opaque=opaque))
    finally:
        os.close(fd)


def test_a_handle_of_a_gpu_is_not_taken():
    with pytest.raises(CannotLend, match="of a file in memory"):
        HostMemory().open(Handle(bytes(16), bytes(64), 0, 1))


def test_memory_without_seals_is_not_opened():
    name = NAME + bytes(16).hex()
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        memory = HostMemory()
        lent = memory.lend(100, CPU)
        opaque = os.getpid().to_bytes(8, "little") + fd.to_bytes(8, "little") + bytes(48)
        with pytest.raises(CannotLend, match="no such memory"):
            memory.open(lent.handle._replace(opaque=opaque))
    finally:
        os.close(fd)
