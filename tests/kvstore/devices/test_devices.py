from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore import devices
from kvstore.devices import NAME, NO_FILE, CannotLend, CudaMemory, Handle, HostMemory, device_memory

GOOD = Handle(bytes(16), bytes(64), 1 << 20, 1)


@given(st.integers(0, 1 << 34), st.integers(1, 1 << 40))
def test_a_handle_of_the_right_sizes_is_valid(grains: int, nbytes: int):
    GOOD._replace(offset=64 * grains, nbytes=nbytes).require_valid()


@pytest.mark.parametrize(
    "changes",
    [
        {"device": bytes(15)},
        {"opaque": bytes(65)},
        {"nbytes": 0},
        {"nbytes": (1 << 40) + 1},
        {"offset": -64},
        {"offset": 1},
        {"offset": 1 << 41},
    ],
)
def test_others_are_refused(changes: dict[str, Any]):
    with pytest.raises(CannotLend, match=r"^expected "):
        GOOD._replace(**changes).require_valid()


def test_the_setting_says_which_memory_it_is():
    assert type(device_memory("host")) is HostMemory
    if not torch.cuda.is_available():
        with pytest.raises(CannotLend):
            device_memory("cuda")


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


CUDA = torch.device("cuda:0")
UUID = bytes(range(16))

bytes_storage = torch.Tensor.untyped_storage


class Storage:
    """What torch's storage class does with CUDA, noted.

    Attributes:
        shared: the handle that ``_share_cuda_`` returns.
        error: what it raises instead, if anything.
        released: the references that were taken off.
        opened: the arguments of ``_new_shared_cuda``.
    """

    shared = b"\x03c" + bytes(range(64))
    error = ""
    released: list[tuple[Any, ...]]
    opened: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.released, self.opened = [], []

    def _share_cuda_(self) -> tuple[Any, ...]:
        if self.error:
            raise RuntimeError(self.error)
        return 0, self.shared, 512, 1024, b"/torch_1_2", 17, bytes(64), True

    def _release_ipc_counter_cuda(self, *what: Any) -> None:
        self.released.append(what)

    def _new_shared_cuda(self, *what: Any) -> torch.UntypedStorage:
        self.opened.append(what)
        return bytes_storage(torch.zeros(what[2], dtype=torch.uint8))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A machine with two devices, which cannot read each other's memory; tensors are on the CPU all the same."""
    storage = Storage()
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _number: torch.no_grad())
    monkeypatch.setattr(torch, "UntypedStorage", storage)
    monkeypatch.setattr(torch, "empty", lambda size, dtype=None, device=None: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda _tensor: storage)
    monkeypatch.setattr(devices, "uuid_of", lambda device: UUID if device.index in (None, 0) else UUID[::-1])
    monkeypatch.setattr(devices, "require_inside", lambda _address, _handle: None)
    return storage


def test_without_a_device_nothing_is_lent():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(CannotLend, match="sees no CUDA device"):
        device_memory("cuda")


def test_the_bare_handle_travels_and_the_reference_is_taken_off(storage: Storage):
    lent = CudaMemory().lend(512, CUDA)
    assert lent.handle == Handle(UUID, bytes(range(64)), 1024, 512)
    assert storage.released == [(b"/torch_1_2", 17)]


@pytest.mark.parametrize("shared", [b"\x03e" + bytes(64), b"\x03e" + bytes(200), b"\x03c" + bytes(63), b""])
def test_memory_that_cuda_has_no_handle_of_is_not_lent(storage: Storage, shared: bytes):
    storage.shared = shared
    with pytest.raises(CannotLend, match="expandable_segments"):
        CudaMemory().lend(512, CUDA)
    assert len(storage.released) == 1


def test_what_torch_refuses_is_said(storage: Storage):
    storage.error = "CUDA error: invalid argument\nand much more"
    with pytest.raises(CannotLend, match=r"cannot share memory of cuda:0: CUDA error: invalid argument$"):
        CudaMemory().lend(512, CUDA)


def test_nothing_that_another_process_says_is_opened_but_the_memory(storage: Storage):
    opened = CudaMemory().open(Handle(UUID, bytes(range(64)), 1024, 512))
    assert opened.shape == (512,)
    assert storage.opened == [(0, bytes(range(64)), 512, 1024, b"/kvstore/none", 0, bytes(64), False)]


def test_no_shared_memory_has_the_name_that_torch_is_given():
    opens = ctypes.CDLL(None, use_errno=True).shm_open
    assert opens(NO_FILE, 0o102, 0o600) == -1  # to read and write, and to make it


def test_a_device_that_is_not_visible_is_named(storage: Storage):
    with pytest.raises(CannotLend, match="does not see GPU 01010101-"):
        CudaMemory().open(Handle(b"\x01" * 16, bytes(64), 0, 512))


def test_all_memory_is_opened_on_the_first_device(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    memory = CudaMemory()
    memory.open(Handle(UUID[::-1], bytes(64), 0, 512))
    with pytest.raises(CannotLend, match="GPU 1 cannot read the memory of GPU 0"):
        memory.open(Handle(UUID, bytes(64), 0, 512))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    memory.open(Handle(UUID, bytes(64), 0, 512))
    assert [arguments[0] for arguments in storage.opened] == [1, 1]
