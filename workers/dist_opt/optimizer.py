"""DistOpt: SINGA's distributed optimizer, for torch: backward, a way to send gradients, and an update, in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore import KVStore, Mismatch, UsageError
from workers.common.chunks import wire_dtype
from workers.common.gather import Gather, digest
from workers.dist_opt.channel import NOT_ZERO, Channel
from workers.dist_opt.communicator import Communicator
from workers.dist_opt.gradients import Gradients, joined, part

FUSED = 2097152  # elements; SINGA's default
PRESENT = "present"


class DistOpt(Communicator):
    """Wraps an optimizer of torch; every worker has one, and all call the same methods in the same order.

        sgd = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
        sgd = DistOpt(sgd)
        loss = loss_function(model(x), y)
        sgd.backward_and_update(loss)

    Methods, arguments and defaults are those of SINGA's ``opt.DistOpt``, and so is the arithmetic: gradients are summed
    over workers and divided by their number, so a loss that is a mean needs no other learning rate. As there, each
    ``backward_and_*`` computes gradients anew, whatever ``grad`` held, so there is nothing to set to zero.

    On construction every worker gets rank 0's parameters. A parameter that no worker's loss depends on is not updated;
    one that some worker's does not depend on has a gradient of zeros there.

    Ways to send can be mixed. What is compressed has stores of its own, made at first use, so that what one way holds
    back is not lost while another is used. In one process, which sends nothing, gradients become what they would
    become on their way.

    Args:
        opt: any optimizer of ``torch.optim`` whose ``step`` needs no closure.
        kvstore: the type of store to make, or a synchronous store without optimizer, for this alone, to use for all
            that is not compressed. None for stores of the process's group (``workers.init``), which is joined if it
            has not been.
        other: none; SINGA's ``nccl_id`` and its like are refused, as who starts the processes tells each who it is.

    Attributes:
        opt: the optimizer, for learning-rate schedulers and ``state_dict``.

    Raises:
        UsageError: not an optimizer, without parameters, a store that does not sum, or other arguments.
        Mismatch: another worker has other parameters.
    """

    def __init__(self, opt: torch.optim.Optimizer, kvstore: KVStore | str | None = None, **other: Any) -> None:
        if other:
            raise UsageError(
                f"DistOpt takes opt and kvstore, and no {', '.join(other)}: launch.py, launcher.run, torchrun, mpirun "
                "or srun starts the processes, and tells each which one it is"
            )
        if not isinstance(opt, torch.optim.Optimizer):
            raise UsageError(
                "opt is an optimizer of torch, such as torch.optim.SGD(model.parameters(), lr=0.005), "
                f"not {type(opt).__name__}"
            )
        self.opt = opt
        self._gradients = Gradients(opt)
        super().__init__(kvstore)
        self._turn = 0  # of which partition
        self._apart = False
        self._agree()
        self._plain.broadcast(self._weights(range(len(self._gradients.params))))

    def backward_and_update(self, loss: torch.Tensor, threshold: int = FUSED) -> None:
        """Compute gradients, average them over workers, and update.

        Args:
            loss: what the gradients are of, one element.
            threshold: a gradient of more elements than this goes alone; smaller ones gather in one message until
                together they have more. No result depends on it.

        Raises:
            UsageError: the optimizer has got other parameters, or a gradient is sparse.
            KVStoreError: what the store raises; nothing has been updated then.
        """
        self._gradients.compute(loss)
        self.step(threshold)

    def __call__(self, loss: torch.Tensor) -> None:
        """See ``backward_and_update``."""
        self.backward_and_update(loss)

    def backward_and_update_half(
        self,
        loss: torch.Tensor,
        threshold: int = FUSED,
        clipping: bool = False,
        clip_Value: float = 100,  # noqa: N803 (SINGA's)
    ) -> None:
        """The same, with gradients and their sums sent as float16.

        What rounding takes away goes with the next step, other than in SINGA; what is beyond float16's range, too.

        Args:
            loss: as for ``backward_and_update``.
            threshold: as for ``backward_and_update``.
            clipping: whether to clip gradients before they are sent.
            clip_Value: the magnitude to which the elements are clipped.

        Raises:
            UsageError: a gradient is infinite or NaN; otherwise as for ``backward_and_update``.
        """
        if clipping and not 0 < clip_Value < math.inf:
            raise UsageError(f"clip_Value={clip_Value!r} must be positive and finite")
        self._gradients.compute(loss)
        grads, present = self._gradients.read()
        if clipping:
            for grad in grads.values():
                grad.clamp_(-clip_Value, clip_Value)
        channel = self._channel("half")
        channel.compress({"type": "fp16", "pull": "fp16"})
        self._average_and_update(channel, threshold, grads, present)

    def backward_and_partial_update(self, loss: torch.Tensor, threshold: int = FUSED) -> None:
        """Update with this worker's own gradients, then replace one partition of the parameters by its mean.

        Partitions take turns; the last layers' comes first. In between workers differ. To evaluate or save what they
        have learned together, average all parameters, as SINGA's guide does at the beginning::

            for param in model.parameters():
                sgd.all_reduce(param.data)
                param.data /= sgd.world_size

        The other ways to send do that by themselves, before their first update, with the optimizer's states too.
        ``PartialSync`` cuts more evenly.

        Args:
            loss: as for ``backward_and_update``.
            threshold: a parameter of more elements than this is a partition; smaller ones gather in one until together
                they have more.

        Raises:
            UsageError: as for ``backward_and_update``.
            KVStoreError: what the store raises; the local update has been made then.
        """
        partitions = self._gradients.groups(threshold)
        self._gradients.compute(loss)
        self._apart = self._apart or len(partitions) > 1
        self.opt.step()
        self._average(self._weights(partitions[self._turn % len(partitions)]))
        self._turn = (self._turn + 1) % len(partitions)

    def backward_and_sparse_update(
        self,
        loss: torch.Tensor,
        threshold: int = FUSED,
        spars: float = 0.05,
        topK: bool = False,  # noqa: N803 (SINGA's)
        corr: bool = True,
    ) -> None:
        """``backward_and_update`` with only the largest elements of the gradients sent, as positions and values.

        Args:
            loss: as for ``backward_and_update``.
            threshold: as for ``backward_and_update``; with ``topK`` the largest are those among gradients that go
                together.
            spars: which elements are sent: those of magnitude ``spars`` or more; with ``topK``, that part of all.
            topK: see ``spars``.
            corr: add what was not sent to the next step's gradients (error feedback). It is forgotten when ``spars`` or
                ``corr`` change.

        Raises:
            UsageError: ``spars`` is out of range, or a gradient is infinite or NaN; otherwise as for
                ``backward_and_update``.
        """
        if topK and not 0 < spars <= 1:
            raise UsageError(f"spars={spars!r} is the part of the elements to send, above 0 and at most 1")
        if not 1e-37 < spars < 1e37:
            raise UsageError(f"spars={spars!r} is the magnitude from which elements are sent, a positive number")
        self._gradients.compute(loss)
        grads, present = self._gradients.read()
        groups = self._gradients.groups(threshold)
        flats = [joined([grads[i] for i in its]) for its in groups]
        channel = self._channel("topk" if topK else "threshold")
        which = {"type": "topk", "ratio": spars} if topK else {"type": "threshold", "threshold": spars}
        channel.compress({**which, "pull": NOT_ZERO}, keep=corr)
        keys = [f"{its[0]}-{its[-1]}/{digest(str(its))}" for its in groups]
        channel.sum([{**dict(zip(keys, flats, strict=True)), PRESENT: present}])
        for its, flat in zip(groups, flats, strict=True):
            part(flat, [grads[i] for i in its])
        self._update(grads, present)

    backward_and_spars_update = backward_and_sparse_update  # its older name

    def step(self, threshold: int = FUSED) -> None:
        """Average the gradients that are there, and update: for loops that call ``loss.backward()`` themselves.

        They may be of several batches, or clipped; they stay until ``opt.zero_grad()``. Where there are none on any
        worker, as after ``update``, this changes nothing.
        """
        self._average_and_update(self._plain, threshold, *self._gradients.read())

    def update(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update one parameter with ``grad``, a sum over workers, divided by their number. Its ``grad`` is None then.

        Raises:
            UsageError: the optimizer has no such parameter.
        """
        params = self._gradients.params
        if not any(its is param for its in params):
            raise UsageError(f"the optimizer has no such parameter, of shape {list(param.shape)}")
        kept = [None if its is param else its.grad for its in params]
        mean = grad.detach() / self.world_size
        for its in params:
            its.grad = mean if its is param else None
        self.opt.step()
        for its, its_grad in zip(params, kept, strict=True):
            its.grad = its_grad

    def _agree(self) -> None:
        """Require that the store sums, and that all workers have the same parameters."""
        mine = digest(self._gradients.describe())
        for rank, (theirs, *_) in enumerate(Gather(self._store, "/marks", shared=False).exchange([mine])):
            if theirs != mine:
                raise Mismatch(
                    f"worker {rank}'s optimizer has other parameters than this one's: their order, shapes, dtypes and "
                    "whether they require a gradient must be the same on all"
                )

    def _average_and_update(
        self, channel: Channel, threshold: int, grads: Mapping[int, torch.Tensor], present: torch.Tensor
    ) -> None:
        messages = [{str(i): grads[i] for i in its} for its in self._gradients.groups(threshold)]
        messages[-1][PRESENT] = present
        channel.sum(messages)
        self._update(grads, present)

    def _update(self, sums: Mapping[int, torch.Tensor], present: torch.Tensor) -> None:
        self._meet()
        self._gradients.put({i: total.div_(self.world_size) for i, total in sums.items()}, present)
        self.opt.step()

    def _meet(self) -> None:
        """After partial updates, make workers equal, momentum included: what is added to unequals leaves them so."""
        if self._apart:
            self._average({**self._weights(self._gradients.trained), **self._states()})
            self._apart, self._turn = False, 0

    def _average(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace values by their means over workers."""
        sums = {f"mean/{key}": value.to(wire_dtype(value.dtype), copy=True) for key, value in values.items()}
        self._plain.sum([sums])
        for value, total in zip(values.values(), sums.values(), strict=True):
            value.copy_(total / self.world_size)

    def _weights(self, due: Sequence[int]) -> dict[str, torch.Tensor]:
        return {str(i): self._gradients.params[i].detach() for i in due}

    def _states(self) -> dict[str, torch.Tensor]:
        """The optimizer's states but for counts of steps, which are the same everywhere."""
        return {
            f"{i}/{name}": value
            for i in self._gradients.trained
            for name, value in sorted(self.opt.state.get(self._gradients.params[i], {}).items())
            if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point()
        }
