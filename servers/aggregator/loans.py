"""Memory of devices that workers of this host have lent: values that are summed where they lie."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvstore import wire
from kvstore.devices import MOST_LOANS, CannotLend, DeviceMemory, Handle
from kvstore.errors import ServerError, UsageError, WireError
from kvstore.spec import ITEMSIZE
from kvstore.values import as_dtype
from servers.aggregator.gathering import SegmentList

log = logging.getLogger(__name__)


class Loans:
    """The memory that is open here.

    ``make_memory`` returns what opens it, or raises ``CannotLend``. It is called when the first worker lends something,
    for CUDA begins then. None opens nothing.
    """

    def __init__(self, make_memory: Callable[[], DeviceMemory] | None) -> None:
        self._make_memory = make_memory
        self._memory: DeviceMemory | None = None
        self._open: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by store and worker, then by loan

    def take(self, message: wire.Lend) -> wire.Borrowed:
        """Open memory; the answer says why that is not possible, where it is not."""
        loans = self._open.setdefault((message.store, message.node.rank), {})
        loans.pop(message.loan, None)
        try:
            if len(loans) >= MOST_LOANS:
                raise CannotLend(f"worker {message.node.rank} has lent {MOST_LOANS} pieces of memory already")
            handle = Handle(message.device, message.opaque, message.offset, message.nbytes)
            loans[message.loan] = self._opener().open(handle)
        except CannotLend as exc:
            log.info("sums of worker %d are made on the CPU: %s", message.node.rank, exc)
            return wire.Borrowed(message.seq, str(exc))
        return wire.Borrowed(message.seq)

    def values(self, push: wire.PushLent, listed: SegmentList) -> torch.Tensor:
        """Return the values of a push, flat, where they lie."""
        memory = self._open.get((push.store, push.node.rank), {}).get(push.loan)
        if memory is None:
            raise UsageError(f"{push.node} names loan {push.loan}, which is not open here")
        dtype = push.plain().dtype(listed.dtype)
        nbytes = listed.size * ITEMSIZE[dtype]
        if memory.numel() < nbytes:
            raise WireError(f"{nbytes} bytes of values are not in lent memory of {memory.numel()} bytes")
        return memory[:nbytes].view(as_dtype(dtype))

    def forget(self, store: int, rank: int) -> None:
        """Close what a worker has lent in a store: it reads its memory as its own again."""
        self._open.pop((store, rank), None)

    def _opener(self) -> DeviceMemory:
        if self._make_memory is None:
            raise CannotLend("sums on devices are off at the aggregator of this host; see KVSTORE_DEVICE_SUM")
        if self._memory is None:
            self._memory = self._make_memory()
        return self._memory


@contextmanager
def reading() -> Iterator[None]:
    """Within this block, memory of devices is read: errors of the device become ``ServerError``."""
    try:
        yield
    except RuntimeError as exc:  # torch's errors of CUDA, too
        raise ServerError(f"the aggregator could not read values on their device: {exc}") from exc
