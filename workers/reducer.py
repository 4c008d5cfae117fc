"""Sums and averages over all workers of what is not trained: metrics, batch-norm statistics; rank 0's values for all.

What all workers have equal is never averaged. A mean of equal numbers is not always the number, infinities and the most
negative number among them: two times ``finfo.min`` is -inf, and a third of three times a number may differ in its last
bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import kvstore as kv
from kvstore import KVStore, Mismatch
from kvstore.errors import warn_renamed
from kvstore.store.maker import UNNAMED, made_by
from workers.broadcast import broadcast_parameters
from workers.common.gather import Gather, bits_of, digest, number_of
from workers.common.stores import store_type
from workers.common.tensors import as_real, fingerprint, headroom, is_averaged, is_dense, overwrite
from workers.common.values import buffers_of, describe, everything_of, other_buffers_of

MOST_NAMED = 200  # characters
COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Differing(NamedTuple):
    """Tensors, by name, that are not the same on all workers; and the ranks of these, in order."""

    tensors: dict[str, torch.Tensor]
    ranks: list[int]


class Reducer:
    """All-reduces by name, through its own synchronous store, whatever store the parameters have.

    Its methods are collective: every worker calls them with the same names.

    Args:
        kvstore: the training's store, or its type. With a ``dist_*`` store the sums are over all workers of the job,
            with any other they are this process's own. ``auto``: all workers in a job, this process outside of one.
        kind: the former name of ``kvstore``; it warns.
    """

    def __init__(self, kvstore: KVStore | str = "auto", *, kind: str | None = None) -> None:
        if kind is not None:
            warn_renamed("kind=", "kvstore=")
            kvstore = kind
        # A store of its own, because the training's may be asynchronous, have an optimizer or compress.
        with made_by("Reducer", UNNAMED):
            self._store = kv.create("dist_sync" if store_type(kvstore).startswith("dist") else "local")
        self._known: set[str] = set()

    @classmethod
    def over(cls, store: KVStore) -> Reducer:
        """A reducer that uses ``store``: synchronous, without optimizer, for this alone."""
        reducer = cls("local")
        reducer._store = store
        return reducer

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the sum over the workers of each of ``numbers``, by name, in the order of ranks."""
        rows = list(self.gather(numbers).values())
        return {name: float(sum(row[name] for row in rows)) for name in numbers}

    def gather(self, numbers: Mapping[str, float]) -> dict[int, dict[str, float]]:
        """Return every worker's ``numbers``, by rank and then by name.

            losses = [row["loss"] for row in reducer.gather({"loss": loss.item()}).values()]

        A worker that is lost, in a job that goes on without it, or inside ``join``, has no row.
        """
        # As integers: sums of floats stand for all workers where some are lost, and these are to be exact.
        names = sorted(numbers)
        said = " ".join(names)
        if len(said) > MOST_NAMED:  # keys cannot be as long as one wishes
            said = f"{len(names)} numbers/{digest(said)}"
        gather = Gather(self._store, f"/sums/{said}", len(names) + 1)
        rows = gather.exchange([1, *(bits_of(numbers[name]) for name in names)])
        return {rank: dict(zip(names, map(number_of, row[1:]), strict=True)) for rank, row in rows.items()}

    def average(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace each of ``tensors``, by name, by its mean over the workers.

        A tensor that is the same on all workers, to the bit, stays as it is: constants, masks with infinities. Means
        are computed in float64, where sums do not overflow, and rounded once. Means of integers (batch counts) are
        rounded down. What has no mean becomes rank 0's: bool, float8, sparse and quantized tensors.

        Raises:
            Mismatch: workers pass tensors of other names, shapes or dtypes.
        """
        differing = self._differing(tensors)
        counts = {name for name, tensor in differing.tensors.items() if is_dense(tensor) and tensor.dtype in COUNTS}
        self._average(differing, counts)

    def average_buffers(self, model: nn.Module) -> None:
        """Average the buffers of ``model`` that are floating-point or complex; the others become rank 0's.

        For loops of one's own with batch normalization, before an evaluation or a checkpoint: ``fit`` does the same
        after each epoch. As in ``average``, a buffer that is the same on all workers stays as it is.

        Raises:
            Mismatch: workers have other models.
        """
        buffers = buffers_of(model) | other_buffers_of(model)
        self._average(self._differing({name: buffer.tensor for name, buffer in buffers.items()}))

    def broadcast(self, params: Any) -> None:
        """Overwrite every worker's values with rank 0's; as ``broadcast_parameters``, but send what differs.

        Args:
            params: a module, for all its parameters and buffers, or tensors by name.

        Raises:
            Mismatch: workers pass other names, shapes or dtypes.
        """
        differing, ranks = self._differing(everything_of(params))
        if differing:
            broadcast_parameters(differing, ranks[0], kvstore=self._store)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *exc: Any) -> None:
        if exc[0] is None:
            self.close()

    def _differing(self, tensors: Mapping[str, torch.Tensor]) -> _Differing:
        """Return the ``tensors`` that are not the same on all workers, as fingerprints show."""
        if self._store.num_workers == 1 or not tensors:
            return _Differing({}, [0])
        # By name: workers may have made their dicts in another order.
        ordered = dict(sorted(tensors.items()))
        prints = [fingerprint(tensor) for tensor in ordered.values()]
        about = digest(describe(ordered)) + 1  # a row must not begin with 0
        rows = Gather(self._store, f"/fingerprints/{len(prints)}", len(prints) + 1).exchange([about, *prints])
        for rank, (theirs, *_) in rows.items():
            if theirs != about:
                raise Mismatch(
                    f"worker {rank} averages other tensors than this one: names, shapes and dtypes must be the same on "
                    "all workers"
                )
        columns = zip(*(theirs for _, *theirs in rows.values()), strict=True)
        differing = {name: ordered[name] for name, column in zip(ordered, columns, strict=True) if len(set(column)) > 1}
        return _Differing(differing, list(rows))

    def _average(self, differing: _Differing, counts: Collection[str] = ()) -> None:
        """Replace tensors that differ by means; ``counts`` are rounded down. The rest becomes the first worker's."""
        tensors, ranks = differing
        if not tensors:
            return
        number = self._store.num_workers
        down = headroom(number)
        means = [name for name, tensor in tensors.items() if is_averaged(tensor)]
        sums = {
            f"tensor/{name}": as_real(tensors[name].detach()).to("cpu", torch.float64, copy=True).mul_(down)
            for name in means
        }
        sums |= {f"count/{name}": tensors[name].to("cpu", torch.int64, copy=True) for name in counts}
        self._allreduce(sums)
        for name in means:
            tensor, mean = tensors[name], sums[f"tensor/{name}"].div_(number).div_(down)
            overwrite(tensor, torch.view_as_complex(mean) if tensor.is_complex() else mean)
        for name in counts:  # sums of floats stand for all workers where some are lost, those of integers do not
            overwrite(tensors[name], sums[f"count/{name}"].div_(len(ranks), rounding_mode="floor"))
        rest = {name: tensor for name, tensor in tensors.items() if name not in counts and not is_averaged(tensor)}
        if rest:
            broadcast_parameters(rest, ranks[0], kvstore=self._store)

    def _allreduce(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not tensors:
            return
        new = [name for name in tensors if name not in self._known]
        if new:
            self._store.init(new, [tensors[name] for name in new])
            self._known.update(new)
        self._store.pushpull(list(tensors), list(tensors.values()))
