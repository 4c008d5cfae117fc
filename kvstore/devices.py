"""Memory of a device that a process lends to another one of its host: by CUDA IPC, or in files for tests."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from kvstore.errors import KVStoreError

UUID_BYTES = 16
OPAQUE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
MAX_BYTES = 1 << 40  # of one piece of memory
ALIGN = 64  # bytes
MOST_LOANS = 4096  # pieces of memory of one worker and store


# Waits for a copy into lent memory. When it returns, other processes read what was written.
Filling: TypeAlias = Callable[[], None]


class CannotLend(KVStoreError):
    """Memory of this device cannot be lent, or cannot be opened here; the message says why. Nothing has changed."""


class Handle(NamedTuple):
    """How another process finds memory that was lent. It is of use to processes of the same host only."""

    device: bytes
    opaque: bytes
    offset: int
    nbytes: int

    def require_valid(self) -> None:
        """Raise ``CannotLend`` unless all parts are of the right size. Whether there is such memory does not show."""
        if len(self.device) != UUID_BYTES or len(self.opaque) != OPAQUE_BYTES:
            raise CannotLend(
                f"expected a handle of {UUID_BYTES} and {OPAQUE_BYTES} bytes, got {len(self.device)} and "
                f"{len(self.opaque)}"
            )
        if not 0 < self.nbytes <= MAX_BYTES or not 0 <= self.offset <= MAX_BYTES or self.offset % ALIGN:
            raise CannotLend(
                f"expected 1 to {MAX_BYTES} bytes from a multiple of {ALIGN} up to that, got {self.nbytes} from "
                f"{self.offset}"
            )


class Lent(NamedTuple):
    """Memory that this process lends. It must be kept for as long as another process may read it."""

    memory: torch.Tensor
    handle: Handle


class DeviceMemory(Protocol):
    """Lends memory of this process's devices, and opens memory that others of the host have lent.

    Memory is opened on *one* device of the process, that which ``open`` is first called for, and read from there. So a
    process that only sums has a context on one device, not on all.
    """

    kind: str

    def lend(self, nbytes: int, device: torch.device) -> Lent:
        """Return new memory of ``device`` that others of this host can open.

        Raises:
            CannotLend: the device, or torch's allocator, has no handles for it.
        """
        ...

    def fill(self, out: torch.Tensor, parts: list[torch.Tensor]) -> Filling:
        """Begin to copy flat ``parts``, one after the other, to ``out``, a flat view of lent memory of their dtype."""
        ...

    def open(self, handle: Handle) -> torch.Tensor:
        """Return memory that another process has lent: flat, of bytes, to be read only.

        It stays mapped, and shows what its owner writes, until the last view of it is gone.

        Raises:
            CannotLend: this process cannot read it; the message says why.
        """
        ...


NAME = "kvstore-device-"
DEVICE = b"host".ljust(UUID_BYTES, b"\0")
_OPAQUE = struct.Struct("<QQ16s32x")  # OPAQUE_BYTES: process, descriptor, random number
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class HostMemory:
    """Files in memory in the place of a device: the same interface without a GPU, for tests and for nothing else.

    A file is anonymous (``memfd_create``), so nothing stays behind when a process is killed. Another process of the
    same user opens it by the process and the descriptor, and knows it by the random number in its name. It is sealed,
    so it cannot become smaller under a reader. Its devices are the CPU.

    Raises:
        CannotLend: this system has no sealed files in memory.
    """

    kind = "cpu"

    def __init__(self) -> None:
        if not _SEALS or not hasattr(os, "memfd_create"):
            raise CannotLend("this system has no memfd_create with seals")

    def lend(self, nbytes: int, device: torch.device) -> Lent:
        if device.type != self.kind:
            raise CannotLend(f"expected a tensor on the CPU, got one on {device}")
        number = secrets.token_bytes(16)
        fd = os.memfd_create(NAME + number.hex(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            array = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(array, os.close, fd)
        return Lent(torch.from_numpy(array), Handle(DEVICE, _OPAQUE.pack(os.getpid(), fd, number), 0, nbytes))

    def fill(self, out: torch.Tensor, parts: list[torch.Tensor]) -> Filling:
        torch.cat(parts, out=out)
        return lambda: None

    def open(self, handle: Handle) -> torch.Tensor:
        """Map the file that another process has lent, after proof that it is one."""
        handle.require_valid()
        pid, number, nonce = _OPAQUE.unpack(handle.opaque)
        if handle.device != DEVICE or _OPAQUE.pack(pid, number, nonce) != handle.opaque:
            raise CannotLend("expected a handle of a file in memory")
        path, name = f"/proc/{pid}/fd/{number}", f"/memfd:{NAME}{nonce.hex()} (deleted)"
        with contextlib.ExitStack() as stack:
            try:
                known = str(Path(path).readlink()) == name  # before it is opened: to open some files does something
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if known else -1
            except OSError as exc:
                raise CannotLend(f"the memory of process {pid} cannot be opened: {exc.strerror}") from None
            if fd < 0:
                raise CannotLend(f"process {pid} has no such memory")
            stack.callback(os.close, fd)
            opened = str(Path(f"/proc/self/fd/{fd}").readlink())
            if opened != name or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise CannotLend(f"process {pid} has no such memory")
            size = os.fstat(fd).st_size
            if handle.offset + handle.nbytes > size:
                raise CannotLend(f"{handle.nbytes} bytes from {handle.offset} are not in an allocation of {size} bytes")
            array = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        return torch.from_numpy(array)[handle.offset : handle.offset + handle.nbytes]


_CUDA_MALLOC = b"c"
_HEADER = 2  # bytes before the handle: version, type
NO_FILE = b"/kvstore/none"  # a name of shared memory has one slash only
_NO_EVENT = bytes(64)
_ERRORS = (RuntimeError, AttributeError, TypeError, ValueError)  # of CUDA; of a torch that has changed what it calls


# What torch does (2.5 to 2.13; ``torch/csrc/StorageSharing.cpp``, ``c10/cuda/CUDACachingAllocator.cpp``), and why this
# uses no more of it:
# - ``UntypedStorage._share_cuda_()`` returns a handle of the ``cudaMalloc`` segment that has the storage, and the
#   offset in it. The handle is a version, a type, and for the type ``c`` the 64 bytes of ``cudaIpcMemHandle_t``. The
#   type ``e`` is for segments that can grow (``expandable_segments``), whose parts other processes would take as
#   descriptors. Those are refused. ``_new_shared_cuda`` also takes the bare 64 bytes, which no version can misread, and
#   only they travel.
# - Each call counts a reference in a file in /dev/shm, and the storage's memory is not used again before the count is
#   0. The receiver takes one off, in the file and at the place that the sender names, neither of which torch checks. So
#   a member could have us write to any file there. Here the sender takes its reference off at once and keeps the
#   storage itself, and the receiver gives torch a name that no file can have, which torch passes over.
# - Offset and size are not checked against the segment. So the driver is asked for its size (``cuMemGetAddressRange``).
# - Events of other processes are not needed: a worker waits for its own copy before it sends the message that names the
#   memory, as it does for copies to the host, and the reader has read all before it answers.
#
# The memory is opened with the reader's own device current, so CUDA maps it there, and kernels read it over NVLink or
# PCIe (``cudaIpcMemLazyEnablePeerAccess``). CUDA wants peer access between the two devices for that.
class CudaMemory:
    """Memory of CUDA devices, lent by CUDA IPC with torch's own calls.

    The comments above the class say what torch does, and why this uses no more of it.

    Raises:
        CannotLend: this process has no CUDA device, or torch is of a version that shares memory in another way.
    """

    kind = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise CannotLend("this process sees no CUDA device")
        if torch.version.hip is not None:
            raise CannotLend("memory of AMD's devices is not lent")
        storage: Any = torch.UntypedStorage
        names = ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda")
        missing = [name for name in names if not hasattr(storage, name)]
        if missing:
            raise CannotLend(f"torch {torch.__version__} has no {', '.join(missing)}")
        self._storage = storage
        self._reader: int | None = None  # the device that opens all memory

    def lend(self, nbytes: int, device: torch.device) -> Lent:
        if device.type != self.kind:
            raise CannotLend(f"expected a tensor on a CUDA device, got one on {device}")
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            storage: Any = memory.untyped_storage()
            _, shared, _, offset, counter, place, _, _ = storage._share_cuda_()
            self._storage._release_ipc_counter_cuda(counter, place)
            return Lent(memory, Handle(uuid_of(memory.device), _opaque(shared), offset, nbytes))
        except _ERRORS as exc:
            raise CannotLend(f"torch cannot share memory of {device}: {_first_line(exc)}") from None

    def fill(self, out: torch.Tensor, parts: list[torch.Tensor]) -> Filling:
        """Begin the copy on the device's current stream, behind what computes the parts."""
        with torch.cuda.device(out.device):
            torch.cat(parts, out=out)
            event: torch.cuda.Event = torch.cuda.current_stream(out.device).record_event()
            wait: Filling = event.synchronize
            return wait

    def open(self, handle: Handle) -> torch.Tensor:
        handle.require_valid()
        try:
            owner = _number(handle.device)
            reader = owner if self._reader is None else self._reader
            if reader != owner and not torch.cuda.can_device_access_peer(reader, owner):
                raise CannotLend(f"GPU {reader} cannot read the memory of GPU {owner}: there is no peer access")
            torch.empty(1, dtype=torch.float32, device=torch.device("cuda", reader))  # begins CUDA there
            with torch.cuda.device(reader):
                storage = self._storage._new_shared_cuda(
                    reader, handle.opaque, handle.nbytes, handle.offset, NO_FILE, 0, _NO_EVENT, False
                )
                require_inside(storage.data_ptr(), handle)
        except _ERRORS as exc:
            raise CannotLend(f"CUDA cannot open the memory: {_first_line(exc)}") from None
        self._reader = reader
        opened = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", reader))
        return opened.set_(storage, 0, (handle.nbytes,), (1,))


def uuid_of(device: torch.device) -> bytes:
    """Return the UUID of a device, or of a part of one (MIG)."""
    text = str(torch.cuda.get_device_properties(device).uuid)
    return uuid.UUID(text.removeprefix("GPU-").removeprefix("MIG-")).bytes


def _number(device: bytes) -> int:
    """Return which of this process's devices has a UUID."""
    for number in range(torch.cuda.device_count()):
        if uuid_of(torch.device("cuda", number)) == device:
            return number
    raise CannotLend(f"this process does not see GPU {uuid.UUID(bytes=device)}: CUDA_VISIBLE_DEVICES leaves it out")


def _opaque(shared: bytes) -> bytes:
    """Return the bare handle in one of torch's.

    Raises:
        CannotLend: it is not of memory that ``cudaMalloc`` has made.
    """
    if len(shared) == OPAQUE_BYTES:  # of older versions of torch
        return shared
    if len(shared) == _HEADER + OPAQUE_BYTES and shared[1:_HEADER] == _CUDA_MALLOC:
        return shared[_HEADER:]
    raise CannotLend(
        "torch's allocator has memory here that has no handle of CUDA's, as with expandable_segments:True in "
        "PYTORCH_CUDA_ALLOC_CONF"
    )


def require_inside(address: int, handle: Handle) -> None:
    """Raise ``CannotLend`` unless the memory at ``address`` is all in the allocation that was mapped."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        get_range = driver.cuMemGetAddressRange_v2
    except (OSError, AttributeError) as exc:
        raise CannotLend(f"the size of the memory cannot be checked: {exc}") from None
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    # Asked for where the allocation begins: behind its end may be another one.
    result = get_range(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address - handle.offset))
    if result:
        raise CannotLend(f"the size of the memory cannot be checked: CUDA's driver says {result}")
    if address + handle.nbytes > base.value + size.value:
        raise CannotLend(f"{handle.nbytes} bytes from {handle.offset} are not in an allocation of {size.value} bytes")


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


def device_memory(kind: str) -> DeviceMemory:
    """Return the memory that this process lends and opens; see the setting ``KVSTORE_DEVICE_SUM``.

    Raises:
        CannotLend: this system has no such memory.
    """
    return HostMemory() if kind == "host" else CudaMemory()
