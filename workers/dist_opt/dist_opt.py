"""``DistOpt``, after SINGA's: one call runs a backward pass, sends the gradients in some way, and updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore import KVStore, Mismatch, UsageError
from kvstore.job.config import Config
from kvstore.store.maker import UNNAMED
from kvstore.values import as_output
from workers import group
from workers.alike import STEP, WIDTH, Alike
from workers.broadcast import load_optimizer_state, optimizer_state
from workers.common.chunks import wire_dtype
from workers.common.gather import Gather, digest
from workers.common.hand_over import HandOver, take_buffers, take_values, values_state
from workers.common.stores import AUTO
from workers.common.values import buffers_around
from workers.dist_opt.channels import NOT_ZERO, Channel, OptimizerGradients, joined, keyed, split_into

PRESENT = "present"


class DistOpt:
    """Wraps a torch optimizer. Every worker has one, and all call the same methods in the same order.

        sgd = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
        sgd = DistOpt(sgd)
        loss = loss_function(model(x), y)
        sgd.backward_and_update(loss)

    Methods, arguments, defaults and arithmetic are as in SINGA's ``opt.DistOpt``: gradients are summed
    over workers and divided by their number, so a loss that is a mean needs no other learning rate. Each
    ``backward_and_*`` computes new gradients, whatever ``grad`` held, so there is no need to set them to zero.

    On construction every worker gets rank 0's parameters, and the states and hyper-parameters of its optimizer. Workers
    whose hyper-parameters differ in an update get ``Mismatch``, before it is made. Those with fewer batches ``join``. A
    parameter that no worker's loss depends on is not updated. If only some workers' losses depend on it, its gradient
    is zeros on the others.

    Ways to send can be mixed. Each compressed way has its own store, made at first use, so that its residuals are kept
    while another way is used. In one process nothing is sent, but gradients lose what compression would take from them.

    In a job that goes on without workers that die (``launch.py --min-workers``), one that is started again comes back
    before its first forward pass in training, or in ``come_back``. It takes over the parameters, buffers, states and
    hyper-parameters of another worker, which hands them over before its next update. Residuals begin with zeros there:
    what the lost process had left unsent is lost. A loop of ``all_reduce`` and ``update`` passes a store as
    ``kvstore``, and calls its ``boundary`` before the first batch and after each step.

    Args:
        opt: any optimizer of ``torch.optim`` whose ``step`` needs no closure.
        kvstore: the type of the stores to make, or a synchronous store without optimizer, for this alone, which is used
            for everything that is not compressed. ``auto``: stores of the process's group (``workers.init``), which is
            joined if needed.
        other: refused. SINGA's ``nccl_id``, ``local_rank`` and so on are not needed: the launcher sets the ranks.

    Attributes:
        opt: the optimizer, for learning-rate schedulers and ``state_dict``.
        marks_steps: whether the program's step ends with each update; False for all but the last of several optimizers
            that step in turn.

    Raises:
        UsageError: ``opt`` is not an optimizer, or has no parameters; the store does not sum; or other arguments.
        Mismatch: another worker has different parameters.
    """

    def __init__(self, opt: torch.optim.Optimizer, kvstore: KVStore | str | None = "auto", **other: Any) -> None:
        if other:
            raise UsageError(
                f"DistOpt takes opt and kvstore, and no {', '.join(other)}: launch.py, launcher.run, torchrun, mpirun "
                "or srun starts the processes and sets their ranks"
            )
        if not isinstance(opt, torch.optim.Optimizer):
            raise UsageError(
                "opt must be a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.005), "
                f"not {type(opt).__name__}"
            )
        self.opt = opt
        self._gradients = OptimizerGradients(opt)
        self._type = AUTO if kvstore is None else kvstore if isinstance(kvstore, str) else kvstore.type
        if self._type == AUTO and not group.is_initialized():
            group.init()
        self._made: list[KVStore] = []
        self._store = kvstore if isinstance(kvstore, KVStore) else self._new_store()
        self._plain = Channel(self._store)
        self._compressed: dict[str, Channel] = {}
        self._turn = 0  # counts partial updates
        self._turns_known = False
        self._updates = 0  # since the last join
        self._apart = False
        self.marks_steps = True
        self._handed = HandOver(self._store, "DistOpt")
        self._agree()
        self._alike: Alike | None = None
        if self.world_size > 1:
            self._alike = Alike(opt, self._store, "DistOpt")
            self._plain.prepare({PRESENT: self._with_mark(self._gradients.read()[1])})  # also if it joins without one
            if not self._handed.waits:
                self._alike.give(self._weights(range(len(self._gradients.params))))
                self._alike.give_buffers()
        self._plain.prepare(self._weights(self._gradients.trained))
        if self.world_size > 1:
            self._handed.attach("parameters", self._state, self._take_over, self._gradients.params, self._buffers)

    def backward_and_update(self, loss: torch.Tensor, threshold: int = 2097152) -> None:
        """Compute gradients, average them over workers, and update.

        Args:
            loss: the loss, one element.
            threshold: a gradient of more elements than this gets a message of its own. Smaller ones share a message
                until together they have more. Results do not depend on it. The default is SINGA's.

        Raises:
            UsageError: the optimizer's parameters have changed, or a gradient is sparse.
            KVStoreError: an error of the store. Nothing has been updated.
        """
        self._gradients.compute(loss)
        self.step(threshold)

    def come_back(self) -> bool:
        """Let this worker into a job that has gone on without it, if it was started again; return whether it was.

        The first forward pass in training does it, too.

        Raises:
            UsageError: the others train other parameters.
            KVStoreError: as for ``KVStore.boundary``.
        """
        return self._handed.come_back()

    def __call__(self, loss: torch.Tensor) -> None:
        self.backward_and_update(loss)

    def backward_and_update_half(
        self,
        loss: torch.Tensor,
        threshold: int = 2097152,
        clipping: bool = False,
        clip_Value: float = 100,  # noqa: N803 (SINGA's)
    ) -> None:
        """``backward_and_update`` with gradients and their sums sent as float16.

        Unlike in SINGA, rounding errors, and what exceeds the range of float16, are added to the next step's gradients.

        Args:
            loss: as for ``backward_and_update``.
            threshold: as for ``backward_and_update``.
            clipping: clip gradients before they are sent.
            clip_Value: the magnitude to which elements are clipped.

        Raises:
            UsageError: a gradient is infinite or NaN; see also ``backward_and_update``.
        """
        if clipping and not 0 < clip_Value < math.inf:
            raise UsageError(f"clip_Value={clip_Value!r} must be positive and finite")
        self._gradients.compute(loss)
        grads, present = self._gradients.read()
        if clipping:
            for grad in grads.values():
                grad.clamp_(-clip_Value, clip_Value)
        self._handed.begin_step()
        channel = self._channel("half")
        channel.compress({"type": "fp16", "pull": "fp16"})
        self._average_and_update(channel, threshold, grads, present)

    def backward_and_partial_update(self, loss: torch.Tensor, threshold: int = 2097152) -> None:
        """Update with this worker's own gradients, then replace one partition of the parameters by its mean.

        Partitions take turns, the last layers' first. In between, workers differ. To evaluate or save what they have
        learned together, average all parameters, as SINGA's guide does at the start:

            for param in model.parameters():
                sgd.all_reduce(param.data)
                param.data /= sgd.world_size

        The other ways to send do that themselves before their first update, with the optimizer's states too.
        ``PartialSync`` cuts more evenly.

        Args:
            loss: as for ``backward_and_update``.
            threshold: a parameter of more elements than this is a partition. Smaller ones share a partition until
                together they have more.

        Raises:
            UsageError: as for ``backward_and_update``.
            KVStoreError: an error of the store. The local update has been made.
        """
        partitions = self._gradients.groups(threshold)
        if not self._turns_known:  # the keys of all turns, since a worker may join in the middle of them
            self._plain.prepare(_mean_keys(self._weights(self._gradients.trained)))
            self._turns_known = True
        self._gradients.require_same()
        self._gradients.compute(loss)
        self._handed.begin_step()
        self._apart = self._apart or len(partitions) > 1
        self._updates += 1
        self.opt.step()
        self._average(self._weights(partitions[self._turn % len(partitions)]))
        self._turn = (self._turn + 1) % len(partitions)
        self._end_step()

    def backward_and_sparse_update(
        self,
        loss: torch.Tensor,
        threshold: int = 2097152,
        spars: float = 0.05,
        topK: bool = False,  # noqa: N803 (SINGA's)
        corr: bool = True,
    ) -> None:
        """``backward_and_update`` with only the largest elements of the gradients sent, as positions and values.

        Args:
            loss: as for ``backward_and_update``.
            threshold: as for ``backward_and_update``. With ``topK``, the largest elements are chosen per message.
            spars: the magnitude from which elements are sent; with ``topK``, the part of the elements to send.
            topK: see ``spars``.
            corr: add what was not sent to the next step's gradients (error feedback). The residuals are dropped when
                ``spars`` or ``corr`` changes.

        Raises:
            UsageError: ``spars`` is out of range, or a gradient is infinite or NaN; see also ``backward_and_update``.
        """
        if topK and not 0 < spars <= 1:
            raise UsageError(f"spars={spars!r} must be the part of the elements to send, above 0 and at most 1")
        if not 1e-37 < spars < 1e37:
            raise UsageError(f"spars={spars!r} must be the magnitude from which elements are sent, from 1e-37 to 1e37")
        self._gradients.compute(loss)
        grads, present = self._gradients.read()
        grads = _wide(grads)
        groups = self._gradients.groups(threshold)
        flats = [joined([grads[i] for i in due]) for due in groups]
        self._handed.begin_step()
        channel = self._channel("topk" if topK else "threshold")
        which = {"type": "topk", "ratio": spars} if topK else {"type": "threshold", "threshold": spars}
        channel.compress({**which, "pull": NOT_ZERO}, keep=corr)
        keys = [f"{due[0]}-{due[-1]}/{digest(str(due))}" for due in groups]
        present = self._with_mark(present)
        channel.sum([{**dict(zip(keys, flats, strict=True)), PRESENT: present}])
        for due, flat in zip(groups, flats, strict=True):
            split_into(flat, [grads[i] for i in due])
        self._update(grads, present)

    backward_and_spars_update = backward_and_sparse_update  # its older name

    def step(self, threshold: int = 2097152) -> None:
        """Average the current gradients, and update: for loops that call ``loss.backward()`` themselves.

        Gradients may be of several batches, or clipped; they stay until ``opt.zero_grad()``. Parameters without a
        gradient on any worker, as after ``update``, do not change.

        Args:
            threshold: as for ``backward_and_update``.
        """
        grads, present = self._gradients.read()
        self._handed.begin_step()
        self._average_and_update(self._plain, threshold, grads, present)

    def update(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update ``param`` with ``grad``, a sum over workers, divided by their number. The parameter's own is dropped.

        Raises:
            UsageError: the optimizer does not have the parameter.
        """
        params = self._gradients.params
        if not any(other is param for other in params):
            raise UsageError(
                f"the optimizer has no such parameter, of shape {list(param.shape)}; pass one of opt.param_groups"
            )
        # Torch's optimizers step all parameters that have a gradient; there is no step for one.
        kept = [None if other is param else other.grad for other in params]
        mean = grad.detach() / self.world_size
        for other in params:
            other.grad = mean if other is param else None
        self.opt.step()
        for other, kept_grad in zip(params, kept, strict=True):
            other.grad = kept_grad

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches; return when all have, with weights and states of the last.

            for epoch in range(epochs):
                for x, y in my_batches:  # as many as this worker has
                    sgd(loss_function(model(x), y))
                last = sgd.join()

        The others go on without this worker: its gradients count as zeros, and sums are divided as before, so every
        sample weighs the same; means of weights are over the other workers. See ``KVStore.join``. Afterwards all
        workers have the parameters, states and hyper-parameters of the worker that has made most updates; after partial
        updates, the mean of all workers' parameters. A way to send that is used first after a worker has joined raises
        ``UsageError``.

        Args:
            timeout: how long to wait for each store, in seconds; None for the store's deadline, which the others'
                remaining batches may exceed.

        Returns:
            The rank that joined last; 0 if there is one worker.

        Raises:
            DeadlineExceeded: other workers still have batches; the message names them. Call again to wait on.
            NodeLost: a worker has died, or left without joining.
        """
        if self._alike is None:
            return 0
        last, uneven = self._alike.join(timeout, self._updates)
        every = self._weights(range(len(self._gradients.params)))
        apart = torch.tensor(int(self._apart), dtype=torch.int64, device="cpu")
        self._plain.sum([{"apart": apart}])
        if apart:
            self._average(self._weights(self._gradients.trained))
        if apart or uneven:
            self._alike.give(every, last)
        self._updates, self._apart, self._turn = 0, False, 0
        return last

    def begin_join(self) -> None:
        """Say that this worker has run out of batches, and return at once; ``join`` waits for the others."""
        if self._alike is not None:
            self._alike.begin_join()

    def all_reduce(self, tensor: Any) -> None:
        """Replace ``tensor`` by its sum over workers, and return when that is done.

        Args:
            tensor: a tensor on any device, a numpy array, or an array with DLPack; of the same shape and dtype on all
                workers.
        """
        self.fused_all_reduce([tensor])

    def fused_all_reduce(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce`` of several tensors, in one message.

        Args:
            tensor: the list of tensors.
            send: False does nothing. In SINGA it prepares a later call.
        """
        if send:
            self._plain.sum([keyed([as_output(out) for out in tensor])])

    def all_reduce_half(self, tensor: Any) -> None:
        """``all_reduce`` of floats that are sent as float16.

        Args:
            tensor: as for ``all_reduce``. Values and sums beyond float16's range, 65504, become infinite.
        """
        self.fused_all_reduce_half([tensor])

    def fused_all_reduce_half(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce_half`` of several tensors, in one message.

        Args:
            tensor: the list of tensors.
            send: False does nothing, as for ``fused_all_reduce``.
        """
        if send:
            outs = [as_output(out) for out in tensor]
            halves = [out.half() for out in outs]
            self._plain.sum([keyed(halves)])
            for out, half in zip(outs, halves, strict=True):
                out.copy_(half)

    def wait(self) -> None:
        """Do nothing: every method returns when it is done. SINGA's scripts call this after ``all_reduce``."""

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._store.num_workers

    @property
    def rank_in_global(self) -> int:
        """This worker's rank, from 0."""
        return self._store.rank

    @property
    def rank_in_local(self) -> int:
        """This worker's rank among the workers of its host, from 0.

        Raises:
            UsageError: the launcher has not set it.
        """
        if self.world_size == 1:
            return 0
        number = Config.from_env().local_rank
        if number < 0:
            raise UsageError(
                "this worker's rank on its host is unknown: KVSTORE_LOCAL_RANK is not set; launch.py sets it"
            )
        return number

    # SINGA's later names for these.
    global_rank = rank_in_global
    local_rank = rank_in_local

    def close(self) -> None:
        """Close the stores that were made here. Not needed at the end of a program."""
        for store in self._made:
            store.close()

    def _channel(self, name: str) -> Channel:
        """Return the compressed channel ``name``, which has its own store."""
        if name not in self._compressed:
            # Through the store that all have: a new one would wait in vain for a worker that has joined before.
            Gather(self._store, f"/{name}", 1).exchange([1])
            self._make_channel(name)
        return self._compressed[name]

    def _make_channel(self, name: str) -> None:
        store = self._new_store()
        self._compressed[name] = Channel(store)
        if self._alike is not None:
            self._alike.reserve(store)

    def _new_store(self) -> KVStore:
        self._made.append(group.store_for(self._type, "DistOpt", UNNAMED))
        return self._made[-1]

    def _agree(self) -> None:
        mine = digest(self._gradients.describe())
        for rank, (theirs, *_) in Gather(self._store, "/marks", shared=False).exchange([mine]).items():
            if theirs != mine:
                raise Mismatch(
                    f"worker {rank}'s optimizer has different parameters: shapes, dtypes, their order and which of "
                    "them require a gradient must be the same on all workers"
                )

    def _average_and_update(
        self, channel: Channel, threshold: int, grads: Mapping[int, torch.Tensor], present: torch.Tensor
    ) -> None:
        sums = _wide(grads)  # under keys of their own, where the plain ones are of weights in float16
        keys = {i: str(i) if sums[i].dtype == grads[i].dtype else f"sum/{i}" for i in grads}
        messages = [{keys[i]: sums[i] for i in due} for due in self._gradients.groups(threshold)]
        # With the last gradients, and not before: a message of its own costs a round trip.
        messages[-1][PRESENT] = present = self._with_mark(present)
        channel.sum(messages)
        self._update(sums, present)

    def _with_mark(self, present: torch.Tensor) -> torch.Tensor:
        changed = self._gradients.changed()  # said before it is an error: other workers may have changed nothing
        mark = [0] * WIDTH if self._alike is None else self._alike.mark(STEP, changed)
        return torch.cat([present.to(torch.int64), torch.tensor(mark, dtype=torch.int64, device="cpu")])

    def _update(self, sums: Mapping[int, torch.Tensor], present: torch.Tensor) -> None:
        """Update with sums of gradients; ``present`` has the sum of marks behind it."""
        if self._alike is not None:
            self._alike.require(present[-WIDTH:].tolist())
        self._gradients.require_same()
        self._updates += 1
        self._meet()
        dtypes = {i: self._gradients.params[i].dtype for i in sums}
        self._gradients.put({i: total.div_(self.world_size).to(dtypes[i]) for i, total in sums.items()}, present)
        self.opt.step()
        self._end_step()

    def _end_step(self) -> None:
        if self.marks_steps:
            self._store.end_step()

    def _meet(self) -> None:
        """After partial updates, make workers equal, momentum included; equal updates would leave them different."""
        if self._apart:
            self._average({**self._weights(self._gradients.trained), **self._states()})
            self._apart, self._turn = False, 0

    def _average(self, values: Mapping[str, torch.Tensor]) -> None:
        sums = _mean_keys(values)
        # Workers that have joined give nothing. Of floats, because where a worker is lost, only sums of these stand for
        # all workers.
        count = torch.ones((), dtype=torch.float64, device="cpu")
        self._plain.sum([{**sums, "mean of": count}])
        for value, total in zip(values.values(), sums.values(), strict=True):
            value.copy_(total / float(count))

    # ---- workers that come back

    def _state(self) -> dict[str, Any]:
        """Return what a worker that comes back takes over, between two steps."""
        return {
            "values": values_state(self._weights(range(len(self._gradients.params)))),
            "buffers": values_state(buffers_around(self._gradients.params)),
            "optimizer": optimizer_state(self.opt),
            "place": [self._turn, self._updates, self._apart],
            "channels": list(self._compressed),
        }

    def _take_over(self, state: Mapping[str, Any]) -> None:
        for name in state["channels"]:  # that the others have made together, without this worker
            if name not in self._compressed:
                self._make_channel(name)
        take_values(self._weights(range(len(self._gradients.params))), state["values"])
        take_buffers(buffers_around(self._gradients.params), state["buffers"])
        load_optimizer_state(self.opt, state["optimizer"])
        self._turn, self._updates, self._apart = state["place"]

    def _buffers(self) -> list[torch.Tensor]:
        return list(buffers_around(self._gradients.params).values())

    def _weights(self, due: Sequence[int]) -> dict[str, torch.Tensor]:
        return {str(i): self._gradients.params[i].detach() for i in due}

    def _states(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's states, without step counts, which are the same everywhere."""
        return {
            f"{i}/{name}": value
            for i in self._gradients.trained
            for name, value in sorted(self.opt.state.get(self._gradients.params[i], {}).items())
            if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point()
        }


def _wide(grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return gradients as they are sent: a sum of float16 may be out of its range where the mean is not."""
    return {i: grad.to(wire_dtype(grad.dtype)) for i, grad in grads.items()}


def _mean_keys(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of ``values`` as they are summed for a mean, by key."""
    return {f"mean/{key}": value.to(wire_dtype(value.dtype), copy=True) for key, value in values.items()}
