"""The workers of a job as a process group of ``torch.distributed``, whose collectives are sums on the servers.

torch lets Python classes derive from ``ProcessGroup``, and registers them as backends. So DDP sends its buckets here
while backward runs, and what is built on DDP keeps its own way to clip, to accumulate, to save and to log. All else
that tools ask of a group is a sum, too: of bytes, to which the other workers contribute zeros.
"""
# torch declares each collective twice, and calls one of the two.
# mypy: disable-error-code=override

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvstore import KVStore, Unsupported, UsageError
from kvstore.dynamo import outside_graphs
from kvstore.store.maker import UNNAMED
from kvstore.ticket import Ticket
from workers import group
from workers.common.pushed import settle
from workers.common.tensors import as_real
from workers.common.torch_internals import after_backward, in_backward_node

BACKEND = "kvstore"
# Elements in a piece of what is no gradient. Keys stay on the servers, so there is one for each power of two: a key for
# each length would fill them, where the predictions of every batch are gathered.
SMALLEST, LARGEST = 1 << 10, 1 << 20
_COMBINE: tuple[tuple[Any, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
)


def init() -> group.RankAndDevice:
    """Make the workers of this job the group of ``torch.distributed``. Every worker calls this first.

        from workers.integrations import torch_distributed

        torch_distributed.init()
        model = torch.nn.parallel.DistributedDataParallel(model)

    Tools that look for such a group, and for ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` in the
    environment, find them: accelerate, transformers, torchmetrics. A second call changes nothing. Outside of a job it
    is a group of one, and the environment stays as it is.

    Returns:
        The rank and the device, as ``workers.init()``.

    Raises:
        UsageError: ``torch.distributed`` has a group of another backend already; or as ``workers.init()``.
    """
    found = group.init()
    if dist.is_initialized():
        if dist.get_backend() != BACKEND:
            raise UsageError(
                f"torch.distributed has a group of {dist.get_backend()!r} already: leave out the call that makes it, "
                "or destroy_process_group() first"
            )
        return found
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    if group.size() > 1:
        os.environ |= {"RANK": f"{found.rank}", "WORLD_SIZE": f"{group.size()}"}
        os.environ |= {"LOCAL_RANK": f"{group.local_rank()}", "LOCAL_WORLD_SIZE": f"{group.local_size()}"}
        # Nobody connects to it. Yet with several hosts accelerate demands one.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        if found.device.type == "cpu":  # accelerate believes otherwise that a process without GPUs is alone
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    # Other backends would meet in this store. One without methods fails at once, where one of this process's own would
    # wait for ever.
    nowhere = dist.Store()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=nowhere, rank=found.rank, world_size=group.size())
    return found


def _make(_store: Any, _rank: int, size: int, _timeout: timedelta) -> StoreGroup:
    if size != group.size():
        raise Unsupported(
            f"a group of {size} of the {group.size()} workers: backend={BACKEND!r} has groups of all only"
        )
    return StoreGroup(group.new_store("torch.distributed", UNNAMED))


@outside_graphs
class StoreGroup(dist.ProcessGroup):
    """All workers of ``store``, which is synchronous, without optimizer, and for this alone."""

    def __init__(self, store: KVStore) -> None:
        if store.min_workers:  # a lost rank would be zeros in all_gather and in MIN, and DDP hands no weights over
            raise Unsupported(
                "a process group has all its ranks to the end, and this job goes on without some (--min-workers): "
                "start it without --min-workers, or train with workers.DistributedOptimizer, workers.Trainer or fit"
            )
        super().__init__(store.rank, store.num_workers)  # type: ignore[call-arg]
        self._store = store
        self.keys: set[str] = set()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    # ---- what torch.distributed calls

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> SumWork:
        (tensor,) = tensors
        if tensor.layout != torch.strided:
            raise Unsupported(
                f"all_reduce of a {tensor.layout} tensor: make the gradient dense (sparse=False), or train with "
                "workers.DistributedOptimizer"
            )
        op, flat = opts.reduceOp, _flat(tensor)
        if op == dist.ReduceOp.SUM and in_backward_node():  # a bucket of DDP, of the same size in each step
            return SumWork([self._push(flat)], lambda: _write(flat, tensor), tensors)
        if op == dist.ReduceOp.SUM:
            return self._summed(flat, lambda: _write(flat, tensor), tensors)
        if op == dist.ReduceOp.AVG:
            return self._summed(flat, lambda: _write(flat / self.size(), tensor), tensors)
        combine = next((combine for each, combine in _COMBINE if op == each), None)
        if combine is None:
            raise Unsupported(f"backend={BACKEND!r} has SUM, AVG, MAX, MIN and PRODUCT alone, not {op.op}")
        return self._rows(tensor, lambda rows: tensor.copy_(combine(rows)), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> SumWork:
        return _together([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SumWork:
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> SumWork:
        return self._summed(torch.ones(1, dtype=torch.int64, device="cpu"), _nothing, [])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SumWork:
        (tensor,) = tensors
        flat = _flat(tensor)
        if opts.rootRank != self.rank():
            flat.zero_()
        return self._summed(flat.view(torch.uint8), lambda: _write(flat, tensor), tensors)

    def allgather(self, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any = None) -> SumWork:
        (to,), (tensor,) = outs, ins
        return self._rows(tensor, lambda rows: _divide(rows, to), to)

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> SumWork:
        return self._rows(tensor, lambda rows: out.copy_(rows.view(out.shape)), [out])

    _allgather_base = all_gather_single  # type: ignore[assignment] # its name before torch 2.13

    def gather(self, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any) -> SumWork:
        (tensor,) = ins
        return self._rows(tensor, lambda rows: _divide(rows, outs[0]) if outs else None, ins)

    def scatter(self, outs: list[torch.Tensor], ins: list[list[torch.Tensor]], opts: Any) -> SumWork:
        (out,) = outs
        rows = torch.stack(ins[0] if ins else [torch.zeros_like(out)] * self.size()).detach()
        flat = rows.view(-1).view(torch.uint8)
        return self._summed(flat, lambda: out.copy_(rows[self.rank()]), outs)

    def alltoall(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None) -> SumWork:
        return self._rows(torch.stack(ins), lambda rows: _divide(rows[:, self.rank()], outs), outs)

    # ---- how it is done

    def _rows(self, tensor: torch.Tensor, take: Callable[[torch.Tensor], object], result: Any) -> SumWork:
        """Give ``take`` the tensors of all workers, in the order of ranks. They have one shape and dtype everywhere."""
        rows = torch.zeros((self.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        rows[self.rank()] = tensor.detach()
        return self._summed(rows.view(-1).view(torch.uint8), lambda: take(rows), result)

    def _summed(self, flat: torch.Tensor, finish: Callable[[], object], result: Any) -> SumWork:
        """Begin to replace ``flat`` by its sum over the workers, after which ``finish`` is called."""
        size = min(LARGEST, max(SMALLEST, 1 << (len(flat) - 1).bit_length()))
        *whole, last = torch.split(flat, size)
        padded = flat.new_zeros(size)
        padded[: len(last)] = last

        def land() -> None:
            last.copy_(padded[: len(last)])
            finish()

        return SumWork([self._push(piece) for piece in (*whole, padded)], land, result)

    def _push(self, flat: torch.Tensor) -> Ticket:
        key = f"{flat.dtype}/{len(flat)}"
        if key not in self.keys:
            self._store.init(key, torch.zeros_like(flat, device="cpu"))
            self.keys.add(key)
        return self._store.pushpull(key, flat, wait=False)


class SumWork(dist.Work):
    """What a collective returns. Nothing but its ``wait`` lets it go on; inside backward, the end of it waits."""

    def __init__(self, tickets: Sequence[Ticket], finish: Callable[[], object], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._tickets, self._finish, self._result = tickets, finish, result
        self._done = False
        self._future: SumFuture | None = None

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            settle(self._tickets)
            self._finish()
            self._done = True
            self._tickets, self._finish = (), _nothing  # which hold memory
            if self._future is not None:
                self._future.end(self._result)
        return True

    def _end(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(ticket.done() for ticket in self._tickets) and self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        # C++ waits for a future and asks nobody to complete it. DDP does so in a callback at the end of backward, which
        # it queues after it has sent its last bucket: the one that is queued here comes before. What it sends in such a
        # callback, as of static graphs in their first step, it waits for at once.
        if self._future is None:
            self._future = SumFuture(self, [tensor.device for tensor in self._result if tensor.is_cuda])
            if self._done:
                self._future.end(self._result)
            elif in_backward_node():
                after_backward(self._end)
            else:
                self.wait()
        return self._future


class SumFuture(torch.futures.Future[list[torch.Tensor]]):
    """A future whose ``wait`` completes it: communication hooks of DDP wait for one inside of another's callback."""

    def __init__(self, work: SumWork, devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self._work: SumWork | None = work

    def wait(self) -> list[torch.Tensor]:
        if self._work is not None:
            self._work.wait()
        return super().wait()

    def end(self, result: list[torch.Tensor]) -> None:
        self._work = None  # which has this
        self.set_result(result)


def _together(works: list[SumWork], result: list[torch.Tensor]) -> SumWork:
    return SumWork([], lambda: [work.wait() for work in works], result)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor``, over its own memory if that is without gaps."""
    return as_real(tensor.detach()).contiguous().view(-1)


def _write(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    real = as_real(tensor.detach())
    if flat.data_ptr() != real.data_ptr():
        real.copy_(flat.view(real.shape))


def _divide(rows: torch.Tensor, to: Sequence[torch.Tensor]) -> None:
    for tensor, row in zip(to, rows, strict=True):
        tensor.copy_(row)


def _nothing() -> None:
    pass


def _refused(name: str) -> Callable[..., SumWork]:
    def refuse(*_args: Any) -> SumWork:
        raise Unsupported(f"{name}: backend={BACKEND!r} has what DDP needs; shards and pipelines need another backend")

    return refuse


for _name in ("send", "recv", "recv_anysource", "all_to_all_single", "alltoall_base"):
    setattr(StoreGroup, _name, _refused(_name))
for _name in ("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"):
    setattr(StoreGroup, _name, _refused(_name))
