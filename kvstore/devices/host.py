"""Files in memory in the place of a device: the same interface without a GPU, for tests and for nothing else.

A file is anonymous (``memfd_create``), so nothing stays behind when a process is killed. Another process of the same
user opens it by the process and the descriptor, and knows it by the random number in its name. It is sealed, so it
cannot become smaller under a reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from pathlib import Path

import numpy as np
import torch

from kvstore.devices.memory import UUID_BYTES, CannotLend, Filling, Handle, Lent

NAME = "kvstore-device-"
DEVICE = b"host".ljust(UUID_BYTES, b"\0")
_OPAQUE = struct.Struct("<QQ16s32x")  # OPAQUE_BYTES: process, descriptor, random number
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class _Complete:
    """A copy that was complete when it returned; see ``Filling``."""

    def wait(self) -> None:
        """Return at once."""


class HostMemory:
    """See ``DeviceMemory``. Its devices are the CPU.

    Raises:
        CannotLend: this system has no sealed files in memory.
    """

    kind = "cpu"

    def __init__(self) -> None:
        if not _SEALS or not hasattr(os, "memfd_create"):
            raise CannotLend("this system has no memfd_create with seals")

    def lend(self, nbytes: int, device: torch.device) -> Lent:
        """See ``DeviceMemory``."""
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
        """See ``DeviceMemory``."""
        torch.cat(parts, out=out)
        return _Complete()

    def open(self, handle: Handle) -> torch.Tensor:
        """See ``DeviceMemory``."""
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
