"""Gradients that the aggregator of this host reads from the device that has them, in place of copies to the host.

A push copies them to memory of the same device that was lent to the aggregator, so the caller may change its arrays.
The memory is used again when the push has been answered: the aggregator has read it by then. A push for which no memory
is lent yet, or cannot be lent, goes the usual way.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence

import torch

from kvstore import wire
from kvstore.client.pack import Contents, is_sum
from kvstore.client.plans import Parcel, Plan, views_of
from kvstore.client.requests import Requests
from kvstore.devices import MOST_LOANS, CannotLend, DeviceMemory, Filling, device_memory
from kvstore.member.client import Client
from kvstore.member.outstanding import Question
from kvstore.spec import sum_dtype
from kvstore.ticket import Operation
from kvstore.transport import Peer
from kvstore.values import Arrays, as_dtype, tensors_of, to_buffer, without_grad

log = logging.getLogger(__name__)

MOST_COPIES = 2  # how often the gradients of all arrays may be in lent memory: two pushes of each under way


class LentLoad:
    """A ``Load`` of values in lent memory, which is in use for as long as a request of the push has this."""

    def __init__(self) -> None:
        self._parcels: dict[Parcel, tuple[_Block, Filling, bool]] = {}

    def add(self, parcel: Parcel, block: _Block, filling: Filling, in_float32: bool) -> None:
        """Note where the values of a message are copied to; ``in_float32``: see ``Push``."""
        self._parcels[parcel] = block, filling, in_float32

    def copied(self, parcel: Parcel) -> list[wire.Buffer]:
        """Return the values of a message: nobody can read them where they are any more."""
        block, filling, in_float32 = self._parcels[parcel]
        filling()
        nbytes = parcel.sum_bytes if in_float32 else parcel.nbytes
        return [to_buffer(block.memory[:nbytes].cpu())]

    def __call__(self, parcel: Parcel, _gather: bool) -> Contents:
        """Wait until the values of a message are in their memory; the message itself carries nothing of them."""
        block, filling, in_float32 = self._parcels[parcel]
        filling()
        return Contents([], in_float32=in_float32, loan=block.loan)


class _Block:
    """One piece of lent memory."""

    __slots__ = ("loan", "memory", "taken", "user")

    def __init__(self, memory: torch.Tensor, loan: int) -> None:
        self.memory = memory  # flat, of bytes
        self.loan = loan
        self.taken = False  # whether the aggregator has opened it
        self.user: weakref.ref[LentLoad] | None = None  # the push that uses it, if that is still there

    @property
    def free(self) -> bool:
        """Whether no push needs it any more."""
        return self.user is None or self.user() is None


class Lending:
    """The lent memory of one store."""

    def __init__(
        self, kind: str, requests: Requests, client: Client, aggregator: Peer, stored: Callable[[], int]
    ) -> None:
        self.nbytes = 0  # how many bytes of gradients have been pushed in lent memory
        self.refusal = ""  # why the last push has not been; empty if it has, or if there was none
        self._requests = requests
        self._client = client
        self._aggregator = aggregator
        self._memory: DeviceMemory | None = None
        self._blocks: dict[tuple[torch.device, int], list[_Block]] = {}  # by device and size
        self._made = 0
        self._made_bytes = 0
        self._stored = stored
        try:
            self._memory = device_memory(kind)
        except CannotLend as exc:
            self._stop(str(exc))

    def load(self, plan: Plan, values: Arrays | Sequence[torch.Tensor]) -> LentLoad | None:
        """Begin to copy the values of a push to lent memory; return None if it is to go the usual way."""
        memory = self._memory
        if memory is not None and self._requests.session.aggregator is None:
            self._stop("the aggregator of this host is lost")
            return None
        if memory is None:
            return None
        tensors = tensors_of(values)
        devices = {tensor.device for tensor in tensors}
        device = next(iter(devices))
        if len(devices) > 1 or device.type != memory.kind or any(not parcel.nbytes for parcel in plan.parcels):
            self.refusal = f"the values are not on one {memory.kind} device, or some are empty"
            return None
        blocks: dict[_Block, Parcel] = {}
        for parcel in plan.parcels:
            wide = is_sum(parcel, tensors)
            block = self._block(memory, device, parcel.sum_bytes if wide else parcel.nbytes, blocks)
            if block is not None:
                blocks[block] = parcel
        if len(blocks) < len(plan.parcels) or not all(block.taken for block in blocks):
            return None
        load = LentLoad()
        for block, parcel in blocks.items():
            # Weak: the load goes with the push's last request, however that has ended, so nobody gives blocks back.
            block.user = weakref.ref(load)
            wide = is_sum(parcel, tensors)
            out = block.memory.view(as_dtype(sum_dtype(parcel.dtype) if wide else parcel.dtype))
            load.add(parcel, block, without_grad(memory.fill, out, views_of(parcel, tensors)), wide)
            self.nbytes += out.nbytes
        self.refusal = ""
        return load

    def _block(
        self, memory: DeviceMemory, device: torch.device, nbytes: int, taken: Collection[_Block]
    ) -> _Block | None:
        """Return free memory of this size that is not one of ``taken``, or lend more; None if there may be no more."""
        blocks = self._blocks.setdefault((device, nbytes), [])
        for block in blocks:
            if block.free and block not in taken:
                return block
        if self._made >= MOST_LOANS or self._made_bytes + nbytes > MOST_COPIES * self._stored():
            self.refusal = "all lent memory is in use, or lent for messages of other sizes"
            return None
        try:
            lent = memory.lend(nbytes, device)
        except CannotLend as exc:
            self._stop(str(exc))
            return None
        self._made, self._made_bytes = self._made + 1, self._made_bytes + nbytes
        block = _Block(lent.memory, self._made)
        blocks.append(block)
        why = "the aggregator has not taken what was lent"
        operation = Operation("lending memory", (), self._client, lambda _: self._stop(why))
        fields = {"store": self._requests.store, "loan": block.loan, **lent.handle._asdict()}

        def answered(reply: wire.Borrowed) -> None:
            block.taken = not reply.refusal
            if reply.refusal:
                self._stop(reply.refusal)

        self.refusal = "the aggregator has not opened the memory yet"
        self._client.ask(operation, Question(self._aggregator, operation, wire.Lend, fields, answered))
        return block

    def _stop(self, why: str) -> None:
        """Lend nothing any more. What has been opened stays until the store is closed, for CUDA wants that."""
        self.refusal = why
        self._memory = None
        self._blocks = {key: [block for block in blocks if block.taken] for key, blocks in self._blocks.items()}
        log.info("gradients go to the aggregator through host memory: %s", why)
