"""Gradients averaged over workers while backward runs, and final when it returns, as with torch's DDP.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (arXiv:2006.15704). Whatever a
program does between backward and the step, it does with averages: clipping, a GradScaler's search for infinities, a
second backward that adds to them. So all workers decide alike.

Buckets go in a fixed order, each when all of its gradients are there; what is missing when backward ends goes as zeros.
A last small message counts which parameters got a gradient anywhere: one that got none stays without.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from kvstore import KVStore, UsageError
from kvstore.ticket import Ticket
from workers.common.buckets import Progress, divide
from workers.common.hooks import Hooks

REMEDY = "pass overlap=False to DistributedOptimizer, so that nothing goes before backward has ended"


@dataclass
class Sent:
    """One backward's messages so far.

    Attributes:
        grads: by position, what has been sent, and how often torch had written to it; None for zeros.
        sums: by position, the values that come back.
        counts: by position, how many workers have a gradient; None while backward runs.
        tickets: of the pushes.
        streams: those on which gradients were computed.
    """

    grads: dict[int, tuple[torch.Tensor, int] | None] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None
    tickets: list[Ticket] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)


class Gradients:
    """The gradients of parameters, the same on all workers when a backward has ended.

    The parameters do not keep it alive: with it go its hooks.

    Args:
        params: by name, leaves of any floating dtype and device; in the same order on all workers.
        store: a synchronous store for this alone, without optimizer, in which the names are keys already.
        used: the key of as many integers of 32 bits as there are parameters.
        average: else gradients are summed.
        passes: of so many backwards only the last one sends, what all have added up.
        sparse_as_dense: make sparse gradients dense; else they are an error.
        overlap: send while backward runs; else when it ends.
    """

    def __init__(
        self,
        params: dict[str, torch.Tensor],
        store: KVStore,
        used: str,
        *,
        average: bool,
        passes: int,
        sparse_as_dense: bool,
        overlap: bool,
    ) -> None:
        self._names, self._tensors = list(params), list(params.values())
        self._store, self._used = store, used
        self._average = average
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._overlap = overlap
        self._buckets = divide([its.numel() * its.element_size() for its in self._tensors])
        self._progress = Progress(self._buckets)
        self._sent = Sent()
        self._last: dict[int, torch.Tensor] = {}  # what has been summed since the last step
        self._pass = 0  # backwards that have ended since gradients were sent
        self._running = self._final = False
        self._lock = threading.Lock()  # hooks of parameters on different devices run in different threads
        self._hooks = Hooks(self, self._tensors)

    @property
    def final(self) -> bool:
        """Whether all that backward has made so far has been averaged."""
        return self._final

    def step_over(self) -> None:
        """Take note that the gradients have been used, or dropped: what comes next is a new step."""
        self._final, self._pass = False, 0
        self._last.clear()

    def paused(self) -> AbstractContextManager[None]:
        """Send nothing for backwards in this block."""
        return self._hooks.paused()

    def require_between(self, what: str) -> None:
        """Raise ``UsageError`` if gradients are on their way."""
        if self._sent.grads:
            raise UsageError(f"{what} during backward()")

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

    def exchange(self) -> None:
        """Send what has not been sent; return when every gradient is the average, or sum. All workers call it.

        Raises:
            UsageError: a gradient is sparse, or has changed since it was sent.
            KVStoreError: what the store raises. No gradient has changed.
        """
        self._send()
        self._receive()

    # ---- during backward

    @torch.no_grad()
    def arrive(self, position: int) -> None:
        """Take note that the gradient of a parameter has been accumulated."""
        # One call for each hook: a backward that was given up leaves none of its own behind.
        _at_end(self, Gradients.end)
        with self._lock:
            tensor = self._tensors[position]
            if self._last.get(position) is tensor.grad is not None:
                raise UsageError(
                    f"a second backward() adds to the gradient of {self._names[position]!r}, which is a sum over "
                    "workers already: call zero_grad() before, or pass backward_passes_per_step"
                )
            self._running, self._final = True, False
            if self._progress.gone(position):
                raise UsageError(
                    f"the gradient of {self._names[position]!r} comes twice: in one backward(), or because one before "
                    f"has failed; {REMEDY}"
                )
            if tensor.is_cuda:
                self._sent.streams.add(torch.cuda.current_stream(tensor.device))
            if self._overlap and self._due:
                for bucket in self._progress.arrive(position):
                    self._push(bucket)

    def end(self) -> None:
        """Take note that a backward has ended."""
        if not self._running:
            return
        self._running = False
        if self._due:
            self._send()
            _at_end(self, Gradients._receive)  # after all others have sent, so that none waits for another's turn
        elif not self._hooks.resting:
            self._pass += 1

    @torch.no_grad()
    def _send(self) -> None:
        """Push what has not been pushed."""
        for bucket in self._buckets:
            if bucket.start not in self._sent.grads:
                self._push(bucket)
        flags = [self._sent.grads[position] is not None for position in range(len(self._tensors))]
        self._sent.counts = torch.tensor(flags, dtype=torch.int32)
        self._sent.tickets.append(self._store.pushpull(self._used, self._sent.counts, wait=False))

    @torch.no_grad()
    def _receive(self) -> None:
        """Wait for the sums and write them, if any are on their way."""
        sent, self._sent = self._sent, Sent()
        self._progress.restart()
        if sent.counts is None:
            return
        self._pass = 0
        for ticket in sent.tickets:
            ticket.wait()
        for position, its in sent.grads.items():
            if its is not None and (its[0] is not self._tensors[position].grad or its[0]._version != its[1]):
                raise UsageError(f"the gradient of {self._names[position]!r} changed after it was sent; {REMEDY}")
        for position, total in sent.sums.items():
            if sent.counts[position]:
                self._write(self._tensors[position], total)
        self._final = True
        if not self._average:
            self._last = {n: its.grad for n, its in enumerate(self._tensors) if its.grad is not None}

    @property
    def _due(self) -> bool:
        return not self._hooks.resting and self._pass + 1 >= self._passes

    def _push(self, bucket: range) -> None:
        for stream in self._sent.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        values: list[torch.Tensor] = []
        for position in bucket:
            tensor, grad = self._tensors[position], self._gradient(position)
            self._sent.grads[position] = None if grad is None else (grad, grad._version)
            values.append(torch.zeros_like(tensor, device="cpu") if grad is None else self._scaled(grad))
        sums = {n: torch.empty(its.shape, dtype=its.dtype) for n, its in zip(bucket, values, strict=True)}
        self._sent.sums |= sums
        keys = [self._names[position] for position in bucket]
        order = -self._buckets.index(bucket)
        ticket = self._store.pushpull(keys, values, list(sums.values()), order, wait=False, copy=False)
        self._sent.tickets.append(ticket)

    def _gradient(self, position: int) -> torch.Tensor | None:
        tensor, name = self._tensors[position], self._names[position]
        if tensor.grad is not None and tensor.grad.layout != torch.strided:
            if not self._sparse_as_dense:
                raise UsageError(
                    f"the gradient of {name!r} is sparse: pass sparse_as_dense=True to send it as a dense one, or make "
                    "its layer with sparse=False"
                )
            tensor.grad = tensor.grad.to_dense()
        return tensor.grad

    def _scaled(self, grad: torch.Tensor) -> torch.Tensor:
        """What goes: float16 is divided before, since it ends at 65504, where a sum may come sooner than its mean."""
        return grad / self._store.num_workers if self._average and grad.dtype == torch.float16 else grad.detach()

    def _write(self, tensor: torch.Tensor, total: torch.Tensor) -> None:
        if tensor.grad is None:
            tensor.grad = torch.empty_like(tensor)
        grad = tensor.grad.detach()
        if not self._average or grad.dtype == torch.float16:
            grad.copy_(total)
        elif grad.is_cpu:
            torch.div(total, self._store.num_workers, out=grad)
        else:
            grad.copy_(total)
            grad.div_(self._store.num_workers)


def _at_end(gradients: Gradients, what: Callable[[Gradients], None]) -> None:
    """Call ``what`` when the backward that runs has ended, as DistributedDataParallel and FSDP do."""
    me = weakref.ref(gradients)

    def call() -> None:
        its = me()
        if its is not None:
            what(its)

    torch.autograd.Variable._execution_engine.queue_callback(call)
