"""Memory of a device that a process lends to another one of its host: handles, and the interface."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kvstore.errors import KVStoreError

UUID_BYTES = 16
OPAQUE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
MAX_BYTES = 1 << 40  # of one piece of memory
ALIGN = 64  # bytes
MOST_LOANS = 4096  # pieces of memory of one worker and store


class CannotLend(KVStoreError):
    """Memory of this device cannot be lent, or cannot be opened here; the message says why. Nothing has changed."""


class Handle(NamedTuple):
    """How another process finds memory that was lent. It is of use to processes of the same host only.

    Attributes:
        device: the UUID of the device that has the memory, ``UUID_BYTES`` long.
        opaque: names an allocation of that device, ``OPAQUE_BYTES`` long.
        offset: of the memory in the allocation, in bytes.
        nbytes: how much memory it is.
    """

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
    """Memory that this process lends. It must be kept for as long as another process may read it.

    Attributes:
        memory: flat, of bytes, on the device.
        handle: for the other process.
    """

    memory: torch.Tensor
    handle: Handle


class Filling(Protocol):
    """A copy into lent memory that may be under way."""

    def wait(self) -> None:
        """Return when the copy is complete: from then on other processes read what was written."""
        ...


class DeviceMemory(Protocol):
    """Lends memory of this process's devices, and opens memory that others of the host have lent.

    Memory is opened on *one* device of the process, that which ``open`` is first called for, and read from there. So a
    process that only sums has a context on one device, not on all.

    Attributes:
        kind: the type of its torch devices.
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
