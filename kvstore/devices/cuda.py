"""Memory of CUDA devices, lent by CUDA IPC with torch's own calls.

What torch does (2.5 to 2.13; ``torch/csrc/StorageSharing.cpp``, ``c10/cuda/CUDACachingAllocator.cpp``), and why this
uses no more of it:

- ``UntypedStorage._share_cuda_()`` returns a handle of the ``cudaMalloc`` segment that has the storage, and the offset
  in it. The handle is a version, a type, and for the type ``c`` the 64 bytes of ``cudaIpcMemHandle_t``. The type ``e``
  is for segments that can grow (``expandable_segments``), whose parts other processes would take as descriptors. Those
  are refused. ``_new_shared_cuda`` also takes the bare 64 bytes, which no version can misread, and only they travel.
- Each call counts a reference in a file in /dev/shm, and the storage's memory is not used again before the count is 0.
  The receiver takes one off, in the file and at the place that the sender names, neither of which torch checks. So a
  member could have us write to any file there. Here the sender takes its reference off at once and keeps the storage
  itself, and the receiver gives torch a name that no file can have, which torch passes over.
- Offset and size are not checked against the segment. So the driver is asked for its size (``cuMemGetAddressRange``).
- Events of other processes are not needed: a worker waits for its own copy before it sends the message that names the
  memory, as it does for copies to the host, and the reader has read all before it answers.

The memory is opened with the reader's own device current, so CUDA maps it there, and kernels read it over NVLink or
PCIe (``cudaIpcMemLazyEnablePeerAccess``). CUDA wants peer access between the two devices for that.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import torch

from kvstore.devices.memory import OPAQUE_BYTES, CannotLend, Filling, Handle, Lent

_CUDA_MALLOC = b"c"
_HEADER = 2  # bytes before the handle: version, type
NO_FILE = b"/kvstore/none"  # a name of shared memory has one slash only
_NO_EVENT = bytes(64)
_ERRORS = (RuntimeError, AttributeError, TypeError, ValueError)  # of CUDA; of a torch that has changed what it calls


class _Recorded:
    """A copy on a stream; see ``Filling``."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See ``Filling``."""
        self._event.synchronize()


class CudaMemory:
    """See ``DeviceMemory``.

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
        """See ``DeviceMemory``."""
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
        """See ``DeviceMemory``. The copy is made on the device's current stream, behind what computes the parts."""
        with torch.cuda.device(out.device):
            torch.cat(parts, out=out)
            return _Recorded(torch.cuda.current_stream(out.device).record_event())

    def open(self, handle: Handle) -> torch.Tensor:
        """See ``DeviceMemory``."""
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
    """Return which of this process's devices has a UUID.

    Raises:
        CannotLend: none has.
    """
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
