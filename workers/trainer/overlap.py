"""Communication while backward runs: gradients are pushed as they come, and a step waits for the rest.

A push cannot be taken back. So everything it depends on must be final when backward has made the gradient: the gradient
itself, the factor it is scaled by, the learning rate. The first ten steps are therefore only watched. If something
changes between backward and the end of one of them, pushing early would be wrong for this program, and never begins.
Either outcome is logged once. If a later step differs from the watched ones, it raises an error; it never makes a
different update in silence. Writes that torch does not count are found, too (``workers/common/pushed.py``).

New values are held back until the step, or until the forward passes after it, because backward and the program may
still read the old weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvstore import KVStore, KVStoreError, UsageError
from workers.common.buckets import divide
from workers.common.hand_over import HandOver
from workers.common.pushed import BackwardPushes, PushedGradients, settle
from workers.trainer.arrivals import Arrivals, require_waiting, write
from workers.trainer.outside_writes import OutsideWrites
from workers.trainer.parameters import Parameter
from workers.trainer.rates import Snapshot, TrainerRates, changed

log = logging.getLogger(__name__)

WATCHED_STEPS = 10  # GANs alternate every few steps, and some steps run backward through what others train
INSTEAD = "run that backward() under `with trainer.no_sync():`, or pass overlap=False to Trainer"


@dataclass
class Step:
    """What a step has shown so far.

    Attributes:
        refused: the error with which the store refused a push.
        objection: why pushing early would have been wrong in this watched step.
    """

    rates: Snapshot | None = None
    refused: KVStoreError | None = None
    objection: str | None = None


class Overlap(BackwardPushes):
    """Pushes the gradients of one device's parameters from hooks that run during backward.

    Args:
        rates: the hyper-parameters, if the store updates. If it only sums, neither they nor the factor matter here.
        share: replace the parameters' ``data`` by new values where that saves a copy.
        asked: begin after the first step whatever it was like, so that a program that does not fit gets an error.
        forward: the model whose modules wait for new values instead of the steps; only for a store that updates.
        writes: is told of values that are written into parameters between the steps.
        handed: is told of the first push of a step.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        buckets: Sequence[range],
        store: KVStore,
        *,
        rates: TrainerRates | None,
        share: bool,
        asked: bool,
        forward: nn.Module | None = None,
        frozen: Collection[int] = (),
        writes: OutsideWrites | None = None,
        handed: HandOver | None = None,
    ) -> None:
        super().__init__(
            [param.key for param in params], [param.tensors[0] for param in params], store, buckets, frozen
        )
        self._params = params
        self._rates = rates
        self._share = share and rates is not None
        self._asked = asked
        self._to_watch = 1 if asked else WATCHED_STEPS  # how many steps are still to be watched
        self._excluded: set[int] = set(frozen)
        self._rescale: float | None = None  # the factor of the watched steps
        self._step = Step()
        self._handed = handed
        self._arrivals = None if forward is None else Arrivals(forward, self._tensors, self._share, writes)

    def exclude(self, positions: Collection[int]) -> None:
        """Leave the parameters at ``positions`` to others from now on: their gradients are sparse."""
        self._excluded.update(positions)

    def finish(self, rescale: float | None = None, *, lasting: bool = True, left_out: Collection[int] = ()) -> None:
        """Push the rest; return when the parameters have their new values, or the gradients are sums.

        If forward passes wait for the values, this does not. The step is over even if this raises: what has been pushed
        stays pushed.
        """
        # Values of the last step that are still on their way would be written over the ones of this step.
        self.synchronize()  # modules that were not called have not waited
        try:
            grads = {
                position: param.gradients()[0]
                for position, param in enumerate(self._params)
                if position not in left_out
            }
            self._require_final(grads, rescale, lasting)
            self._exchange(grads, rescale)
            if self._watching and self._hooks.active:
                self._judge(rescale)
        finally:
            self.restart()

    def restart(self) -> None:
        """Begin a new step. What has been pushed stays pushed."""
        self._land()
        self._step = Step()

    @property
    def begun(self) -> bool:
        """Whether gradients are pushed during backward now: the first steps, which are only watched, are over."""
        return self._hooks.active and not self._watching

    def require_between_steps(self, what: str) -> None:
        if self._flight.seen:
            self._object(f"{what} between backward() and step(): some gradients have been pushed already")

    def synchronize(self) -> None:
        if self._arrivals is not None:
            self._arrivals.settle()

    def close(self) -> None:
        """Remove the hooks. From now on ``finish`` pushes everything, and waits for it."""
        super().close()
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.close()

    # ---- during backward

    def arrive(self, position: int) -> None:
        with self._lock:
            key = self._keys[position]
            if self._arrivals is not None and position in self._arrivals:
                raise UsageError(
                    f"{key!r} was used outside of its module's forward pass, before its new value had arrived: call "
                    "trainer.synchronize() first, or leave wait_in_forward out"
                )
            if self._progress.gone(position):
                self._object(f"a second backward() before step() adds to the gradient of {key!r}, pushed by the first")
            # After the check above: a backward pass under ``no_sync`` would add to a gradient that is gone already,
            # too.
            if self._hooks.resting:
                return
            tensor = self._tensors[position]
            if tensor.is_cuda:
                self._flight.streams.add(torch.cuda.current_stream(tensor.device))
            for bucket in self._progress.arrive(position):
                self._go(bucket)

    def _go(self, bucket: range) -> None:
        if self._flight.streams:
            self._wait_for_streams()
        grads: list[torch.Tensor] = []
        positions = [position for position in bucket if position not in self._excluded]
        for position in positions:
            grad = self._tensors[position].grad
            if grad is None:
                self._object(f"the gradient of {self._keys[position]!r} was dropped between two backward()")
                return
            grads.append(grad)
        if positions:
            self._flight.seen.append(PushedGradients(dict(zip(positions, grads, strict=True))))
        if self._rates is not None and self._step.rates is None:
            # Servers take hyper-parameters with the push, so they are sent before the first one, and compared in the
            # step.
            self._step.rates = self._rates.apply()
        if self._watching or self._step.refused is not None or not positions:
            return
        if self._handed is not None:
            self._handed.begin_step()
        try:
            # The next forward pass needs the first layers' values first, though backward makes their gradients last.
            self._pushpull(positions, grads, priority=-min(positions), rescale=self._rescale)
        except KVStoreError as exc:  # raised by step(), whose caller expects it
            self._step.refused = exc

    # ---- in step

    def _require_final(self, grads: Mapping[int, torch.Tensor], rescale: float | None, lasting: bool) -> None:
        for name, before in changed(self._step.rates, self._rates.apply()) if self._rates is not None else ():
            words = "learning rate" if name == "lr" else name
            self._object(f"the {words} changed between backward() and step(), from {before}")
        if self._watching and not lasting:
            self._object("step() was given a batch size, and the next may be another")
        elif self._flight.seen and not self._watching and rescale != self._rescale:
            self._object("this step() was given another batch size than the first ones")
        for bucket in self._flight.seen:
            if (position := bucket.replaced(grads)) is not None:
                self._object(f"the gradient of {self._keys[position]!r} changed between backward() and step()")

    def _require_unwritten(self) -> None:
        """Object to writes to gradients since they were pushed that torch has not counted."""
        for bucket in self._flight.seen:
            if (position := bucket.written()) is not None:
                self._object(
                    f"the gradient of {self._keys[position]!r} changed between its push and step(), through "
                    ".data or numpy, or by a hook that was registered after Trainer's"
                )

    @property
    def _watching(self) -> bool:
        return self._to_watch > 0

    def _object(self, reason: str) -> None:
        if not self._watching:
            raise UsageError(f"{reason}; {INSTEAD}")
        self._step.objection = self._step.objection or reason

    def _exchange(self, grads: Mapping[int, torch.Tensor], rescale: float | None) -> None:
        if self._step.refused is not None:
            raise self._step.refused
        outs = grads if self._rates is None else self._tensors
        pushed = {position for _, held in self._flight.pushed for position in held}
        missing = [position for position in grads if position not in pushed]
        later = None if self._watching else self._arrivals
        # Even if the first pushes failed, the others follow: workers must agree on how often they have pushed.
        if missing:
            values = [grads[position] for position in missing]
            # Backward is over, so new values may go straight into the tensors, unless forward passes wait for them.
            here = None if later is not None else [outs[position] for position in missing]
            copy = later is None and not self._share
            self._pushpull(missing, values, here, priority=-min(missing), rescale=rescale, copy=copy)
        self._require_unwritten()  # while servers work
        if later is not None:
            for ticket, held in self._flight.pushed:
                later.expect(ticket, held)
            later.take(grads.keys() - later.covered)
            return
        settle([ticket for ticket, _ in self._flight.pushed])
        for _, held in self._flight.pushed:
            for position, value in held.items():
                write(outs[position], value, self._share)

    def _judge(self, rescale: float | None) -> None:
        """Decide, after a watched step, whether to begin, to go on watching, or never to begin."""
        if self._step.objection is not None and not self._asked:
            log.info("gradients will not be pushed during backward: %s", self._step.objection)
            self.close()
        # A step in which not all gradients came by backward shows nothing: its buckets would never have been sent
        # early.
        elif self._asked or self._progress.complete:
            self._to_watch -= 1
            self._rescale = rescale
            if not self._watching:
                log.info("gradients are pushed during backward from now on, in %d messages", self._progress.num_buckets)
                if self._arrivals is not None:
                    self._arrivals.begin()


def overlapping(
    params: Sequence[Parameter],
    store: KVStore,
    frozen: Collection[int],
    wanted: bool | None,
    *,
    updates: bool,
    share_gradients: bool,
    forward: nn.Module | None,
) -> list[range] | None:
    """Return the buckets in which an ``Overlap`` pushes the gradients of ``params``; None if there is to be none."""
    firsts = [param.tensors[0] for param in params]
    one_device = len(params[0].tensors) == 1
    dist = store.type.startswith("dist") and one_device
    if wanted and not one_device:
        raise UsageError("overlap=True needs a store, and one device per process")
    if forward is not None:
        require_waiting(forward, firsts, updates_there=dist and updates)
        if wanted is False or share_gradients:
            raise UsageError("wait_in_forward works neither with overlap=False nor with share_gradients=True")
    # Modules wait for whole buckets, so these are small with ``forward``.
    sizes = [0 if at in frozen else first.numel() * first.element_size() for at, first in enumerate(firsts)]
    buckets = divide(sizes, small=forward is not None)
    if not one_device or (len(buckets) == 1 and forward is None):
        return None
    return buckets if (dist and all(first.is_leaf for first in firsts) if wanted is None else wanted) else None
