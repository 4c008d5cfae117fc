"""Gradients averaged over workers while backward runs, and final when it returns, as in torch's DDP.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (arXiv:2006.15704). Whatever a
program does between backward and the step, it does with averages: clipping, a GradScaler's search for infinities, a
second backward that adds to them. So all workers decide alike.

Buckets are sent in a fixed order, each when all of its gradients are there. Gradients that are missing when backward
ends are sent as zeros. A last small message counts the workers that have each gradient: a parameter that got no
gradient anywhere keeps none. It also counts the workers whose gradient is sparse: from then on only the rows of such a
parameter are sent (``SummedRows``). And it has each worker's mark, so that none steps where others would do
something else (``workers/alike.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore import KVStore, RowSparse, Table, UsageError
from kvstore.spec import shorten
from kvstore.ticket import Ticket
from workers.alike import BACKWARD, WIDTH, Alike, in_one_phase
from workers.common.buckets import divide
from workers.common.hand_over import HandOver
from workers.common.pushed import BackwardPushes, PushedGradients, settle
from workers.common.sparse_gradients import RoundRows, as_gradient, as_rows, is_sparse, push_rows, table_key
from workers.common.torch_internals import after_backward, raise_late

_HALVES = (torch.float16, torch.bfloat16)
REMEDY = "pass overlap=False to DistributedOptimizer, so that nothing is sent before backward has ended"


class SummedRows:
    """The parameters whose gradients are sparse on some worker; on all workers alike."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], store: KVStore, known: set[str]) -> None:
        self.positions: list[int] = []
        self._names, self._tensors = names, tensors
        self._store = store
        self._known = known

    def add(self, positions: Collection[int]) -> list[int]:
        """Note that the gradients of the parameters at ``positions`` are sparse; return which are new. Collective."""
        new = [position for position in positions if position not in self.positions]
        made = {
            str(key): position for key, position in zip(self._keys(new), new, strict=True) if key not in self._known
        }
        if made:
            tensors = [self._tensors[position] for position in made.values()]
            tables = [Table(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in tensors]
            self._store.init(list(made), tables)
            self._known.update(made)
        self.positions += new
        return new

    def push(self, positions: Sequence[int], absent: bool = False) -> RoundRows:
        """Push the rows of these gradients: none of a parameter without a gradient, and none at all if ``absent``."""
        tensors = [self._tensors[position] for position in positions]
        values = [
            RowSparse.zeros(tensor.shape, tensor.dtype) if absent or tensor.grad is None else as_rows(tensor.grad)
            for tensor in tensors
        ]
        return push_rows(self._store, positions, self._keys(positions), values, tensors)

    def write(self, came: RoundRows, counts: Sequence[int], divisor: int) -> None:
        """Wait for sums. Divided, they become the gradients of the parameters that have one on some worker."""
        came.ticket.wait()
        for position, rows in zip(came.positions, came.rows, strict=True):
            tensor = self._tensors[position]
            if counts[position]:
                tensor.grad = as_gradient(rows, tensor)
                tensor.grad.div_(divisor)

    def _keys(self, positions: Sequence[int]) -> list[str | int]:
        return [table_key(self._names[position]) for position in positions]


@dataclass
class Sent:
    """The messages of one backward pass, beside its gradients.

    Attributes:
        grads: by position, whether a gradient was sent; else zeros were.
        rows: the rows of sparse gradients that come back.
        counts: by position the number of workers with a gradient, then that of workers with a sparse one, then the
            sums of marks; None while backward runs.
        counted: the ticket of ``counts``.
    """

    grads: dict[int, bool] = field(default_factory=dict)
    rows: list[RoundRows] = field(default_factory=list)
    counts: torch.Tensor | None = None
    counted: Ticket | None = None


class GradientAverager(BackwardPushes):
    """Makes the gradients of parameters the same on all workers when a backward pass ends.

    Args:
        params: leaves by name, of any floating dtype and device; in the same order on all workers.
        store: a synchronous store without optimizer, for this alone. The names are already keys in it.
        used: the key of ``counts_of`` so many parameters.
        known: the keys of the store; the keys of tables are added.
        passes: how many backward passes add up before the last one sends the sum.
        sparse_as_dense: make sparse gradients dense; otherwise their rows are summed.
        handed: is told of the first push of a step.
    """

    def __init__(
        self,
        params: dict[str, torch.Tensor],
        store: KVStore,
        used: str,
        alike: Alike,
        known: set[str],
        *,
        average: bool,
        passes: int,
        sparse_as_dense: bool,
        overlap: bool,
        handed: HandOver | None = None,
    ) -> None:
        names, tensors = list(params), list(params.values())
        self._buckets = divide([tensor.numel() * tensor.element_size() for tensor in tensors])
        super().__init__(names, tensors, store, self._buckets)
        self._names, self._used, self._alike, self._handed = names, used, alike, handed
        self.rounds = 0
        self._average = average
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._overlap = overlap
        self._sent = Sent()
        self._rows = SummedRows(names, tensors, store, known)
        self._last: dict[int, torch.Tensor] = {}  # gradients that have been summed since the last step
        self._pass = 0  # backward passes since gradients were last sent
        self._running = self._final = False

    @property
    def final(self) -> bool:
        """Whether all gradients that backward has made so far are averages."""
        raise_late()
        return self._final

    def step_over(self) -> None:
        self._final, self._pass = False, 0
        self._last.clear()

    def note_final(self) -> None:
        self._final = True

    def require_between(self, what: str) -> None:
        if self._sent.grads:
            raise UsageError(f"{what} was called during backward(); call it between two steps")

    def exchange(self) -> None:
        """Send the rest; return when every gradient is the average, or the sum. All workers call this."""
        self._send()
        self._receive()

    def state(self) -> dict[str, Any]:
        """Return what a worker that comes back must know between two steps."""
        return {"names": self._names, "sparse": self._rows.positions, "rounds": self.rounds}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on as the worker that has returned ``state``."""
        if state["names"] != self._names:
            raise UsageError(
                f"the others average the gradients of {shorten(state['names'])}, and this worker, which was started "
                f"again, those of {shorten(self._names)}: unfreeze and add the same before it comes back"
            )
        self._rows.add(state["sparse"])
        self.rounds = state["rounds"]

    # ---- during backward

    @torch.no_grad()
    def arrive(self, position: int) -> None:
        # Queued by each hook: torch drops the queue of a backward that fails.
        _at_end(self, GradientAverager.end)
        with self._lock:
            tensor = self._tensors[position]
            if self._last.get(position) is tensor.grad is not None:
                raise UsageError(
                    f"a second backward() adds to the gradient of {self._keys[position]!r}, which is already a sum "
                    "over workers: call zero_grad() before, or pass backward_passes_per_step"
                )
            self._running, self._final = True, False
            if self._progress.gone(position):
                raise UsageError(
                    f"the gradient of {self._keys[position]!r} came twice: in one backward(), or because an "
                    f"earlier one failed; {REMEDY}"
                )
            if tensor.is_cuda:
                self._flight.streams.add(torch.cuda.current_stream(tensor.device))
            if self._overlap and self._due:
                for bucket in self._progress.arrive(position):
                    self._push(bucket)

    def end(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._due:
            self._send()
            # Behind what other optimizers have queued: all have sent then, and none waits for another's turn.
            _at_end(self, GradientAverager._receive)
        elif not self._hooks.resting:
            self._pass += 1

    @torch.no_grad()
    def _send(self) -> None:
        for bucket in self._buckets:
            if bucket.start not in self._sent.grads:
                self._push(bucket)
        if self._rows.positions:
            self._sent.rows.append(self._rows.push(self._rows.positions))
        # Sums of flags tell all workers alike which parameters have a gradient. Each worker deciding by its own
        # gradients would leave some with a None where others have an average.
        flags = [self._sent.grads[position] for position in range(len(self._tensors))]
        frozen = [name for name, tensor in zip(self._names, self._tensors, strict=True) if not tensor.requires_grad]
        mark = self._alike.mark(BACKWARD, frozen)
        self._sent.counts = torch.tensor(
            [*flags, *map(is_sparse, self._tensors), *mark], dtype=torch.int64, device="cpu"
        )
        self._sent.counted = self._store.pushpull(self._used, self._sent.counts, wait=False)
        self.rounds += 1

    def meet(self, phase: int, unfrozen: Sequence[str] = ()) -> None:
        """Compare marks with the other workers, outside of backward; see ``Alike.mark``."""
        flags = [0] * (2 * len(self._tensors))
        counts = torch.tensor([*flags, *self._alike.mark(phase, unfrozen)], dtype=torch.int64, device="cpu")
        self._store.pushpull(self._used, counts)
        self.rounds += 1
        sums = counts[-WIDTH:].tolist()
        if in_one_phase(sums):
            self._alike.require(sums)
            return
        # The others have sent gradients, and their store waits for these until it is closed.
        for bucket in self._buckets:
            self._push(bucket, absent=True)
        if self._rows.positions:
            self._rows.push(self._rows.positions, absent=True)
        self._sent = Sent()
        self._land()
        self._alike.require(sums)

    @torch.no_grad()
    def _receive(self) -> None:
        sent, self._sent = self._sent, Sent()
        flight = self._land()
        if sent.counts is None or sent.counted is None:
            return
        self._pass = 0
        written = [bucket.written() for bucket in flight.seen]  # while others send
        # Before the gradients: a worker that meets here, and not in backward, sends none.
        sent.counted.wait()
        counts = sent.counts.tolist()
        self._alike.require(counts[-WIDTH:])
        settle([ticket for ticket, _ in flight.pushed])
        now = {position: self._tensors[position].grad for position in sent.grads}
        for position in (*written, *(bucket.replaced(now) for bucket in flight.seen)):
            if position is not None:
                raise UsageError(f"the gradient of {self._keys[position]!r} changed after it was sent; {REMEDY}")
        number = len(self._tensors)
        # A parameter becomes sparse on all workers in the same round: a worker that pushed rows alone would wait for
        # ever.
        if new := self._rows.add([place for place, count in enumerate(counts[number : 2 * number]) if count]):
            sent.rows.append(self._rows.push(new))
        for _, held in flight.pushed:
            for position, total in held.items():
                if counts[position] and position not in self._rows.positions:
                    self._write(self._tensors[position], total)
        for rows in sent.rows:
            self._rows.write(rows, counts, self._store.num_workers if self._average else 1)
        self._final = True
        if not self._average:
            # An average that is averaged again stays what it is. A sum that is summed again is not, so it is
            # recognized.
            self._last = {n: tensor.grad for n, tensor in enumerate(self._tensors) if tensor.grad is not None}

    @property
    def _due(self) -> bool:
        return not self._hooks.resting and self._pass + 1 >= self._passes

    def _push(self, bucket: range, absent: bool = False) -> None:
        """Send the gradients of ``bucket``, or zeros if this worker is ``absent`` from the round."""
        if self._handed is not None:
            self._handed.begin_step()
        if self._flight.streams:
            self._wait_for_streams()
        values: dict[int, torch.Tensor] = {}
        grads: dict[int, torch.Tensor] = {}
        for position in bucket:
            tensor, grad = self._tensors[position], None if absent else self._gradient(position)
            self._sent.grads[position] = grad is not None
            if grad is not None:
                grads[position] = grad
            if position not in self._rows.positions:  # a first sparse gradient is seen when all workers know of it
                if grad is None or is_sparse(tensor):
                    values[position] = torch.zeros_like(tensor, device="cpu")
                else:
                    values[position] = grad.detach()
        self._flight.seen.append(PushedGradients(grads, noted=self._running))
        halves = {position: value for position, value in values.items() if self._divided_there(value)}
        priority = -self._buckets.index(bucket)
        if whole := {position: value for position, value in values.items() if position not in halves}:
            self._pushpull(list(whole), list(whole.values()), priority=priority)
        if halves:
            try:
                rescale = 1 / self._store.num_workers
                self._pushpull(list(halves), list(halves.values()), priority=priority, rescale=rescale)
            finally:
                # It stays for all later pushes of the store otherwise, also of the gradients that are divided here.
                self._store.set_hyperparameters(rescale_grad=1.0)

    def _gradient(self, position: int) -> torch.Tensor | None:
        tensor = self._tensors[position]
        if self._sparse_as_dense and tensor.grad is not None and is_sparse(tensor):
            tensor.grad = tensor.grad.to_dense()
        return tensor.grad

    def _divided_there(self, tensor: torch.Tensor) -> bool:
        """Whether the store makes the mean: a sum of half precision may be out of its range where the mean is not."""
        return self._average and tensor.dtype in _HALVES and self._store.num_workers > 1

    def _write(self, tensor: torch.Tensor, total: torch.Tensor) -> None:
        if tensor.grad is None:
            tensor.grad = torch.empty_like(tensor)
        grad = tensor.grad.detach()
        if not self._average or self._divided_there(grad):
            grad.copy_(total)
        # Into the gradient's own memory: the optimizer, a GradScaler or the program may hold the tensor.
        elif grad.is_cpu:
            torch.div(total, self._store.num_workers, out=grad)
        else:
            grad.copy_(total)
            grad.div_(self._store.num_workers)


def counts_of(params: int) -> torch.Tensor:
    """Return the zeros of which an averager of so many parameters makes its counts."""
    return torch.zeros(2 * params + WIDTH, dtype=torch.int64, device="cpu")


def _at_end(gradients: GradientAverager, what: Callable[[GradientAverager], None]) -> None:
    # What is queued lives until the pass ends, and in compiled autograd longer.
    me = weakref.ref(gradients)

    def call() -> None:
        averager = me()
        if averager is not None:
            what(averager)

    after_backward(call)
