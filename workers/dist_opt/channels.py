"""What ``DistOpt`` sends: the gradients of an optimizer, which of them share a message, and sums by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from kvstore import KVStore, Unsupported, UsageError
from kvstore.codecs import Compressor, decode, parse
from workers.common.checks import at_least
from workers.common.pushed import settle
from workers.common.tensors import require_own_memory
from workers.common.values import describe

# The sums on the way back are mostly zeros: everything else is sent, exactly.
NOT_ZERO: Mapping[str, object] = {"type": "threshold", "threshold": 2.0**-126}


class Channel:
    """An all-reduce by key, either plain or compressed.

    A store in one process sends nothing back. There, values lose here what compression of both ways would take from
    them, so that a script gives the same results alone as in a job of one worker.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._known: set[str] = set()
        self._alone: list[Compressor] = []  # alone: a compressor for the way up, and one for the way back
        self._options: Mapping[str, object] | None = None

    def compress(self, options: Mapping[str, object], keep: bool = True) -> None:
        """Compress from now on. With ``keep``, the residuals of earlier encodings stay if the options are the same."""
        if keep and options == self._options:
            return
        self._options, self._alone = options, []
        try:
            self.store.set_gradient_compression(None)
            self.store.set_gradient_compression(options)
        except Unsupported:
            upward = parse(options)
            self._alone = [Compressor(way) for way in (upward, upward.pull) if way is not None]

    def sum(self, messages: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace values, one dict by key for each message, by their sums over workers. All workers call this alike."""
        for values in messages:
            self.prepare(values)
        for values in messages:
            for key, value in values.items():
                if value.is_floating_point():
                    self._lose(key, value)
        tickets = [self.store.pushpull(list(values), list(values.values()), wait=False) for values in messages]
        settle(tickets)

    def prepare(self, values: Mapping[str, torch.Tensor]) -> None:
        new = [key for key in values if key not in self._known]
        if new:
            self.store.init(new, [torch.zeros_like(values[key]) for key in new])
            self._known.update(new)

    def _lose(self, key: str, value: torch.Tensor) -> None:
        for compressor in self._alone:
            encoded = compressor.encode(key, value)
            kept = decode(compressor.compression, encoded.payload(0, encoded.size), encoded.size)
            value.copy_(kept.view(value.shape))


def fuse(sizes: Sequence[int], threshold: int) -> list[list[int]]:
    """Return the positions of the values that share a message: SINGA's fusion.

    A value larger than the threshold gets a message of its own. Smaller ones gather, in order, until they are together
    larger than the threshold.
    """
    groups: list[list[int]] = []
    held: list[int] = []
    for position, size in enumerate(sizes):
        if size > threshold:
            groups.append([position])
            continue
        held.append(position)
        if sum(sizes[i] for i in held) > threshold:
            groups.append(held)
            held = []
    return [*groups, held] if held else groups


# A key keeps its shape and dtype in a store, and SINGA's ``all_reduce`` takes another tensor in each call.
def keyed(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by keys made of dtype, shape, and a number among the tensors of the same dtype and shape."""
    counts: Counter[str] = Counter()
    by_key = {}
    for tensor in tensors:
        kind = f"{tensor.dtype}{list(tensor.shape)}"
        by_key[f"{kind}/{counts[kind]}"] = tensor
        counts[kind] += 1
    return by_key


class OptimizerGradients:
    """The gradients of one optimizer. Its last parameters come first, which is the order of backward, and of SINGA."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self._opt = opt
        self.params = self._now()
        require_own_memory(dict(enumerate(self.params)))
        if isinstance(opt, torch.optim.LBFGS):
            raise UsageError("DistOpt steps without a closure, which LBFGS needs: use workers.DistributedOptimizer")
        self.trained = _requiring(self.params)
        if not self.trained:
            raise UsageError(
                "the optimizer has no parameter that requires a gradient; give DistOpt one of a model that is trained"
            )

    def describe(self) -> str:
        return describe({f"{i} {i in self.trained}": param for i, param in enumerate(self.params)})

    def compute(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``; earlier gradients are dropped."""
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss must be a tensor that was computed from the parameters, not {type(loss).__name__}")
        self.changed()
        for param in self.params:
            param.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self._require_dense()

    def read(self) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return the gradients by position (zeros where there is none), and for every parameter whether it has one."""
        self.changed()
        self._require_dense()
        grads = {}
        for i in self.trained:
            grad = self.params[i].grad
            grads[i] = torch.zeros_like(self.params[i]) if grad is None else grad
        return grads, torch.tensor([param.grad is not None for param in self.params], dtype=torch.int32, device="cpu")

    def put(self, grads: Mapping[int, torch.Tensor], present: torch.Tensor) -> None:
        """Set the gradients whose ``present`` is not 0, and drop the others."""
        for i, grad in grads.items():
            self.params[i].grad = grad if present[i] else None

    def groups(self, threshold: int) -> list[list[int]]:
        """The positions of the gradients that share a message."""
        at_least("threshold", threshold, 0)
        fused = fuse([self.params[i].numel() for i in self.trained], threshold)
        return [[self.trained[j] for j in group] for group in fused]

    def _now(self) -> list[torch.Tensor]:
        return [param for group in self._opt.param_groups for param in group["params"]][::-1]

    def changed(self) -> list[str]:
        """Return which parameters have been frozen or unfrozen, in words; raise ``UsageError`` if there are others."""
        params = self._now()
        if [*map(id, params)] != [*map(id, self.params)]:
            raise UsageError("the optimizer's parameters have changed: make a new DistOpt, on all workers")
        if (now := _requiring(params)) == self.trained:
            return []
        return [f"{i} of shape {list(params[i].shape)}" for i in sorted({*now} ^ {*self.trained})]

    def require_same(self) -> None:
        if changed := self.changed():
            raise UsageError(
                f"requires_grad has changed, of {'; '.join(changed)}, counted from the last: make a new DistOpt, on "
                "all workers"
            )

    def _require_dense(self) -> None:
        for param in self.params:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of a parameter of shape {list(param.shape)} is sparse: create its layer with "
                    "sparse=False"
                )


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return values as one flat float32 tensor, on the device of the first."""
    return torch.cat([value.reshape(-1).to(values[0].device, torch.float32) for value in values])


def split_into(flat: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Write ``flat``, which has the layout of ``joined(values)``, back to ``values``."""
    start = 0
    for value in values:
        value.copy_(flat[start : start + value.numel()].view(value.shape))
        start += value.numel()


def _requiring(params: Sequence[torch.Tensor]) -> list[int]:
    return [i for i, param in enumerate(params) if param.requires_grad]
