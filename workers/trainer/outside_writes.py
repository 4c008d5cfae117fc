"""What else than the store's values has been written into the parameters, where the store updates them.

The store holds the weights, so whatever a program writes into a parameter between two steps (``clamp_``, the best
weights put back, ``max_norm`` of an embedding) would be overwritten by the next step. The trainer cannot take it over:
the servers change weights by gradients alone. So it is an error.

How a write is found: torch counts the writes to a tensor, but no writes through ``.data`` or NumPy, and a count alone
is no proof, for programs put a moving average in and the weights back. So what is kept of the parameters after a step
is a sample: every element of small models, and as many of larger ones, at places that change. A sum over all bits,
which is one pass over the memory, is kept of large parameters, and compared if torch has counted a write. So what torch
does not count is found for certain in small models only, and elsewhere if it touches one element in some hundreds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore import UsageError
from workers.common.tensors import as_bits, in_memory_order, memory_order
from workers.common.torch_internals import write_count
from workers.trainer.parameters import Key, Parameter

SAMPLE = 1 << 14  # elements: 64 KiB of float32 cost some 20 µs
FIRST, FIRST_SAMPLE = 10, 1 << 18  # most programs that write do it from the first steps on: look closer at these
KEEP = 8  # steps for which the places of the sample stay, for making views costs as much as reading them
LARGE = 1 << 12  # elements of a parameter from which on its sum is kept


@dataclass
class Watched:
    """One tensor, and what was known of it when it was noted.

    Attributes:
        start, stride: which elements are sampled.
        memory, strides, dtype: where and how it lay.
        sample: a view of the sampled elements.
        kept: the sampled elements as they were.
        writes: how many writes torch had counted.
        total: the sum of its bits, where it is; None if none is kept.
        pulled: whether the program has pulled the store's value into it since then.
    """

    key: Key
    tensor: torch.Tensor
    start: int
    stride: int
    memory: int = 0
    strides: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    sample: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    kept: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    writes: int = 0
    total: torch.Tensor | None = None
    pulled: bool = False

    def look(self) -> None:
        """Make the view anew, if the parameter has got other memory."""
        if self.moved or not self.memory:
            self.memory, self.strides, self.dtype = self.tensor.data_ptr(), self.tensor.stride(), self.tensor.dtype
            bits = as_bits(in_memory_order(self.tensor))
            if bits.data_ptr() != self.memory:  # a copy, which later writes do not reach: there is only the sum
                self.stride, bits = 2, bits[:0]
            self.sample = bits[self.start % self.tensor.numel() :: self.stride]

    def note(self) -> None:
        self.look()
        self.writes, self.pulled = write_count(self.tensor), False
        large = self.tensor.numel() >= LARGE or not len(self.sample)
        self.total = _total(self.tensor) if self.stride > 1 and large else None

    @property
    def moved(self) -> bool:
        """Whether the parameter lies elsewhere, and maybe in another order, as after ``to(memory_format=...)``."""
        return self.tensor.data_ptr() != self.memory

    @property
    def suspect(self) -> bool:
        """Whether torch has counted a write, and the sample may miss it; or the parameter lies elsewhere."""
        if self.moved:
            return True
        return self.total is not None and write_count(self.tensor) != self.writes

    def differs(self) -> bool:
        """Whether the parameter is another one than when it was noted, and no value of the store."""
        if self.pulled:
            return False
        tensor, sample = self.tensor.detach(), self.sample
        if self.moved:  # what was kept are values in the order in which they lay
            if tensor.dim() != len(self.strides):
                return True
            tensor = tensor.permute(memory_order(self.strides)).contiguous()
            if len(sample):
                sample = as_bits(tensor.view(-1))[self.start % tensor.numel() :: self.stride]
        if sample.dtype != self.kept.dtype or len(sample) != len(self.kept):
            return True
        # The sample first: it is small, and most writes touch it.
        if not torch.equal(sample, self.kept.to(sample.device)):
            return True
        return self.total is not None and not torch.equal(_total(tensor), self.total.to(tensor.device))


class OutsideWrites:
    """Watches the parameters that a store updates.

    Args:
        frozen: positions of parameters that the store does not have; others may take positions out of this set.
    """

    def __init__(self, params: Sequence[Parameter], frozen: Collection[int], advice: str) -> None:
        self._params, self._frozen, self._advice = params, frozen, advice
        self._steps = self._choices = 0
        self._watched: dict[int, list[Watched]] = {}  # by position, one for each device
        self._kept: list[tuple[list[Watched], torch.Tensor]] = []  # tensors of one dtype, and their samples end to end

    @torch.no_grad()
    def note(self) -> None:
        self._steps += 1
        # Other places in each of the first steps, for all elements to have had their turn soon; then seldom.
        moves = self._steps <= FIRST + 1 or self._steps % KEEP == 0
        if moves or len(self._watched) < len(self._params) - len(self._frozen):
            self._choose()
        for each in self._each():
            each.note()
        self._kept = []
        for same in _alike(self._each()):
            kept = torch.cat([each.sample for each in same])
            self._kept.append((same, kept))
            for each, piece in zip(same, torch.split(kept, [len(each.sample) for each in same]), strict=True):
                each.kept = piece

    @torch.no_grad()
    def note_one(self, position: int) -> None:
        for each in self._watched.get(position, ()):
            each.note()
            each.kept = each.sample.clone()
            self._kept = []

    def pulled(self, out: Any) -> None:
        """Note that the program pulls values of the store into ``out``, arrays in lists or not."""
        places = {tensor.data_ptr() for tensor in _tensors(out)}
        for each in self._each():
            each.pulled |= each.tensor.data_ptr() in places

    @torch.no_grad()
    def require_none(self) -> None:
        suspects = [each for each in self._each() if each.suspect]
        for same, kept in self._kept:
            if not torch.equal(torch.cat([each.sample for each in same]), kept):
                suspects += same
        if not self._kept:  # some have been noted one by one
            suspects = self._each()
        for each in suspects:
            if each.differs():
                self._refuse(each)

    @torch.no_grad()
    def require_none_of(self, position: int) -> None:
        for each in self._watched.get(position, ()):
            if each.differs():
                self._refuse(each)

    def _each(self) -> list[Watched]:
        return [each for watched in self._watched.values() for each in watched]

    def _choose(self) -> None:
        """Choose other places for the sample."""
        positions = [position for position in range(len(self._params)) if position not in self._frozen]
        elements = sum(self._params[position].tensors[0].numel() for position in positions)
        stride = max(1, elements // (FIRST_SAMPLE if self._steps <= FIRST else SAMPLE))
        self._choices += 1  # so all places have their turn
        start = self._choices % stride
        self._watched = {
            position: [Watched(self._params[position].key, tensor, start, stride) for tensor in self._tensors(position)]
            for position in positions
        }

    def _tensors(self, position: int) -> Sequence[torch.Tensor]:
        return [tensor for tensor in self._params[position].tensors if tensor.numel()]

    def _refuse(self, watched: Watched) -> None:
        if watched.dtype != watched.tensor.dtype:
            raise UsageError(
                f"parameter {watched.key!r} is {watched.tensor.dtype} now, and the store has it as {watched.dtype}: "
                "convert the model (half(), to(dtype)) before the Trainer is made, or make another Trainer with a new "
                "store"
            )
        raise UsageError(
            f"parameter {watched.key!r} has been written to since the last step (as clamp_, load_state_dict or "
            "max_norm do), but the store holds the weights, and this step would overwrite what was written: "
            f"{self._advice}"
        )


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for each in out:
            yield from _tensors(each)


def _alike(entries: Sequence[Watched]) -> list[list[Watched]]:
    """Return ``entries`` by dtype and device, so that one call reads all of them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Watched]] = {}
    for each in entries:
        groups.setdefault((each.sample.dtype, each.sample.device), []).append(each)
    return list(groups.values())


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits, eight bytes at a time, without a rest of fewer at the end."""
    raw = in_memory_order(tensor).contiguous().view(torch.uint8)
    whole = raw[: raw.numel() // 8 * 8]
    try:
        return whole.view(torch.int64).sum()
    except RuntimeError:  # it does not lie at a multiple of eight bytes
        return whole.clone().view(torch.int64).sum()
