"""The versions of one store's values on one server: made when rounds close, and read while training goes on. Pure.

A version is made of a bucket at its round, in one pass over the bucket, before the next update. Two whole versions can
be read: the newest and an older one. The older one is the version before, or the one that a reader fetches: that stays
until the reader has it. Otherwise a slow reader, which needs more time than there is between two versions, would never
have a whole one. A standby makes a version when its primary has: only then has it the primary's values for sure.
"""

from __future__ import annotations

import functools
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore import wire
from kvstore.codecs.changes import checksum, checksum_change, encode_changes, may_be_shorter
from kvstore.errors import KeyNotInitialized, UsageError, WireError
from kvstore.lineage import UNKNOWN
from kvstore.spec import ITEMSIZE, Key
from kvstore.values import as_dtype
from kvstore.wire import Buffer
from kvstore.wire.versions import pieces, published_as
from servers.store.buckets import Buckets
from servers.store.recording import Recording
from servers.store.rounds import Rounds
from servers.store.tables.published_rows import PublishedRows
from servers.store.target import AnyTarget

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Few: TypeAlias = tuple[Array, Array, Array]  # positions, and the bits there before and now

BLOCK = 1 << 18  # elements at a time: what is rounded is compared while the cache has it

# Marks are the numbers of changes, 1 to 255; 0 is older than all of these. When 255 is in use, the oldest become 0 and
# the others move down, in one pass over the marks. With more at a time, versions would be forgotten earlier; with
# fewer, the passes would cost more than 1 % of the time of all versions.
_MARKS = 256
_FORGOTTEN = 16  # numbers at a time: the last 240 changes are known

# The bits of a rounded NaN depend on the processor's vectors and on where the element lies in memory. So this one is
# published for all. By dtype: the bits without sign, those of infinity, above which are NaNs, and the published NaN.
_NAN = {
    "bfloat16": (0x7FFF, 0x7F80, 0x7FC0),
    "float16": (0x7FFF, 0x7C00, 0x7E00),
    "float32": (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
}

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16

PATIENCE = 16  # versions that are made without a word of a reader that fetches one: then it counts as gone

_mine = threading.local()  # a job in one process has servers in threads


def _scratch(dtype: torch.dtype) -> torch.Tensor:
    """Return room for a block, the same for each call of a thread: segments are many, and often shorter."""
    kept: dict[torch.dtype, torch.Tensor] = _mine.__dict__.setdefault("kept", {})
    if dtype not in kept:
        kept[dtype] = torch.empty(BLOCK, dtype=dtype, device="cpu")
    return kept[dtype]


class _Replaced(NamedTuple):
    """What was replaced in a block since ``previous``: old bits and marks, at ``positions`` of the block, or all.

    ``by`` is what replaced it first, if there are positions: a later version may have replaced that.
    """

    start: int
    positions: Array | None
    bits: Array
    marks: Array
    by: Array


class PublishedValues:
    """The published copy of a segment of ``size`` elements.

    Args:
        source_dtype: of the values that are given.
        dtype: in which they are published, rounded to nearest even if it is narrower.

    Attributes:
        newest: the number of the newest version; None before the first.
        previous: the number of the other version that is kept; None if there is none.
        until: that of the version after it.
    """

    def __init__(self, size: int, source_dtype: str, dtype: str) -> None:
        self.size = size
        self.dtype = dtype
        self.newest: int | None = None
        self.previous: int | None = None
        self.until = 0
        self._bits: Array = np.zeros(size, f"u{ITEMSIZE[dtype]}")
        self._marks: Array = np.zeros(size, np.uint8)
        self._changes: list[int] = []  # by mark: the version that made this change
        self._replaced: list[_Replaced] = []  # in the order of versions; of an element, the first is the oldest
        self._whole_blocks: set[int] = set()  # where all of a block is in ``_replaced``
        self._sums: dict[int, int] = {}
        self._answers: dict[int, list[Buffer]] = {}  # what the last change alone makes, by version
        self._nan = _NAN.get(dtype) if dtype != source_dtype else None
        self._published_dtype = as_dtype(dtype)

    @property
    def nbytes(self) -> int:
        """The memory of the published copy, of the marks, and of what has been replaced since ``previous``."""
        replaced = sum(each.bits.nbytes + each.marks.nbytes + each.by.nbytes for each in self._replaced)
        positions = sum(each.positions.nbytes for each in self._replaced if each.positions is not None)
        return self._bits.nbytes + self._marks.nbytes + replaced + positions

    def publish(self, values: torch.Tensor, version: int, keep: int | None = None) -> int:
        """Make ``values``, 1-d on the CPU, the newest version; return how many of its elements have changed.

        Args:
            values: of all elements.
            version: its number.
            keep: the version that stays, if it is here; by default that before this one.

        Raises:
            UsageError: the numbers of versions do not rise.
        """
        if self.newest is not None and version <= self.newest:
            raise UsageError(f"version {version} cannot be published after version {self.newest}: numbers must rise")
        changed = 0
        self._renew_marks()
        if not self._stays(keep):
            self.previous, self.until, self._replaced, self._whole_blocks = self.newest, version, [], set()
        if self.newest is None:
            for start in range(0, self.size, BLOCK):
                part = self._bits[start : start + BLOCK]
                part[:] = self._round(values[start : start + BLOCK])
                self._make_canonical(part)
            self._changes = [version]
            changed = self.size
        else:
            since = self._changes_by(self.previous or 0)
            for start in range(0, self.size, BLOCK):
                changed += self._replace(start, self._round(values[start : start + BLOCK]), since)
            if changed:
                self._changes.append(version)
        self.newest = version
        self._sums = {at: total for at, total in self._sums.items() if at == self.previous}
        self._answers.clear()
        return changed

    def changes(self, since: int | None, at: int, few: Callable[[], _Few | None] | None = None) -> list[Buffer] | None:
        """Return what makes version ``since`` into version ``at``, see ``encode_changes``; None if ``at`` is gone.

        Args:
            since: what the reader has; None for nothing. A number that was not published stands for the one before it.
            at: the newest version, or the previous one.
            few: ``few_replaced``, if that may be known.
        """
        if at not in (self.newest, self.previous):
            return None
        reached, known = self._changes_by(at), -1
        if since is not None and since <= (self.newest or 0):
            known = self._changes_by(since)
        if known == reached:
            return []
        bits = self._bits_at(at)
        if known < 0:
            return encode_changes(None, bits)
        # A reader that has the newest version, and is asked to be at the one before like all others, goes back.
        marks = self._marks
        if at != self.newest and known < reached:
            marks = self._with([(each, each.marks) for each in self._replaced], marks)
        oldest = min(known, reached)
        if oldest == len(self._changes) - 2 and self._replaced_once:
            if at in self._answers:  # another reader has had it
                return self._answers[at]
            replaced = (few or self.few_replaced)()
            if replaced is not None:  # the last change alone: without a pass over the marks
                positions, before, after = replaced
                self._answers[at] = encode_changes(positions, bits, after if at == self.newest else before)
                return self._answers[at]
        changed = marks > oldest
        if not may_be_shorter(int(np.count_nonzero(changed)), self.size, bits.itemsize):
            return encode_changes(None, bits)
        return encode_changes(np.flatnonzero(changed), bits)

    def checksum(self, at: int, few: Callable[[], _Few | None] | None = None) -> int | None:
        """Return the checksum of the bytes of version ``at``; None if that is gone. ``few``: see ``changes``."""
        if at not in (self.newest, self.previous):
            return None
        if at not in self._sums:
            self._sums[at] = self._sum_by_the_other(at, few or self.few_replaced)
        return self._sums[at]

    def _sum_by_the_other(self, at: int, few: Callable[[], _Few | None]) -> int:
        """Return the checksum of version ``at``: from that of the other one and what differs, if these are known."""
        other = self._sums.get((self.newest if at == self.previous else self.previous) or 0)
        replaced = None if other is None else few()
        if other is None or replaced is None:
            return checksum(self._bits_at(at))
        grown = checksum_change(*replaced)
        return (other + (grown if at == self.newest else -grown)) % 2**64

    @property
    def _replaced_once(self) -> bool:
        """Whether one version alone has changed anything since ``previous``."""
        return self._changes_by(self.previous or 0) == len(self._changes) - 2

    def few_replaced(self) -> _Few | None:
        """Return where the newest version may differ from ``previous``, and the bits in both; None if that is much."""
        few = [
            (each.start + each.positions.astype(np.int64), each.bits, each.by)
            for each in self._replaced
            if each.positions is not None
        ]
        if len(few) < len(self._replaced):
            return None
        if not few:
            return np.empty(0, np.int64), self._bits[:0], self._bits[:0]
        positions, before, after = (np.concatenate(parts) for parts in zip(*few, strict=True))
        # What was kept lies together; what it has become does not.
        return positions, before, after if self._replaced_once else self._bits.take(positions)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return tensors, which share this object's memory until the next version, and plain data.

        With both, ``restore`` makes an object that gives the same bytes for the newest version. It lacks the previous
        one.
        """
        tensors = {"bits": torch.from_numpy(self._bits.view(np.uint8)), "marks": torch.from_numpy(self._marks)}
        return tensors, {"newest": self.newest, "changes": list(self._changes)}

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """Replace everything by what ``state`` returned.

        Raises:
            WireError: it is not the state of such a segment; nothing has changed then.
        """
        bits, marks = tensors.get("bits"), tensors.get("marks")
        newest, changes = plain.get("newest"), plain.get("changes")
        if bits is None or marks is None or bits.shape != (self._bits.nbytes,) or marks.shape != (self.size,):
            raise WireError(f"the state of published values does not fit {self.size} elements of {self.dtype}")
        if bits.dtype != torch.uint8 or marks.dtype != torch.uint8:
            raise WireError(f"the state of published values has {bits.dtype} and {marks.dtype}, not bytes")
        numbers = changes if isinstance(changes, list) and all(type(number) is int for number in changes) else None
        ends = [newest] if type(newest) is int else []
        if (
            numbers is None
            or len(numbers) > _MARKS
            or bool(numbers) != bool(ends)
            or any(later <= number for number, later in itertools.pairwise(numbers))
            or numbers[-1:] > ends
            or (self.size and int(marks.max()) >= max(1, len(numbers)))
        ):
            raise WireError("the state of published values has marks or versions that cannot be")
        self._bits.view(np.uint8)[:] = bits.numpy()
        self._marks[:] = marks.numpy()
        self.newest, self.previous, self._changes = newest, None, list(numbers)
        self._replaced, self._whole_blocks, self._sums, self._answers = [], set(), {}, {}

    def _stays(self, keep: int | None) -> bool:
        """Return whether version ``keep`` is ``previous``, and is to stay that."""
        if keep is None or self.previous is None:
            return False
        return self.previous <= keep < self.until and self._changes_by(self.previous) >= 0

    def _changes_by(self, version: int) -> int:
        """Return the place in ``_changes`` of the last change that ``version`` has; below 0 if none is known."""
        return bisect_right(self._changes, version) - 1

    def _round(self, values: torch.Tensor) -> Array:
        """Return the bits of ``values``, a block at most, in the published dtype; valid until the next call."""
        if values.dtype != self._published_dtype:
            values = _scratch(self._published_dtype)[: len(values)].copy_(values)
        bits: Array = values.view(_SIGNED[values.itemsize]).numpy().view(self._bits.dtype)
        return bits

    def _make_canonical(self, bits: Array) -> bool:
        """Give all NaNs the published bits; return whether there are any."""
        if self._nan is None or not len(bits):
            return False
        without_sign, infinity, published = self._nan
        magnitudes = bits & without_sign
        if magnitudes.max() <= infinity:
            return False
        bits[magnitudes > infinity] = published
        return True

    def _replace(self, start: int, new: Array, since: int) -> int:
        """Publish ``new`` bits of the block at ``start``; return how many have changed.

        What has a mark above ``since`` has changed since the previous version, and has been kept then.
        """
        bits, marks = self._bits[start : start + len(new)], self._marks[start : start + len(new)]
        mark = len(self._changes)
        # From so many on, all elements take less than some with positions.
        most = -(-len(bits) * (bits.itemsize + 1) // (bits.itemsize + 5))
        positions = _differing(bits, new, most)
        if positions is None:
            self._make_canonical(new)
            differs = np.not_equal(bits, new, out=_scratch(torch.bool).numpy()[: len(new)])
            count = int(np.count_nonzero(differs))
            if count:
                if start not in self._whole_blocks:
                    self._replaced.append(_Replaced(start, None, bits.copy(), marks.copy(), bits[:0]))
                    self._whole_blocks.add(start)
                bits[:] = new
                # This mark is the highest. Where each second element differs, copyto(where=) takes ten times as long.
                np.maximum(marks, differs.view(np.uint8) * np.uint8(mark), out=marks)
            return count
        chosen = new.take(positions)
        if self._make_canonical(chosen):  # what is published is canonical, so each NaN that is not is among these
            really = chosen != bits.take(positions)
            positions, chosen = positions[really], chosen[really]
        if len(positions):
            if start not in self._whole_blocks:
                old = marks.take(positions)
                first = slice(None) if since == mark - 1 else old <= max(0, since)
                few = positions[first].astype(np.uint32)
                self._replaced.append(_Replaced(start, few, bits.take(few), old[first], chosen[first]))
            bits[positions] = chosen
            marks[positions] = mark
        return len(positions)

    def _renew_marks(self) -> None:
        if len(self._changes) < _MARKS:
            return
        for start in range(0, self.size, BLOCK):
            _forget(self._marks[start : start + BLOCK])
        for each in self._replaced:
            _forget(each.marks)
        del self._changes[:_FORGOTTEN]

    def _bits_at(self, at: int) -> Array:
        if at == self.newest or not self._replaced:
            return self._bits
        return self._with([(each, each.bits) for each in self._replaced], self._bits)

    @staticmethod
    def _with(replaced: list[tuple[_Replaced, Array]], now: Array) -> Array:
        """Return a copy of ``now`` with what was replaced."""
        before: Array = now.copy()
        for (start, positions, *_), old in reversed(replaced):  # the oldest last
            before[start : start + BLOCK][slice(None) if positions is None else positions] = old
        return before


def _differing(old: Array, new: Array, most: int) -> Array | None:
    """Return where two blocks of bits differ, int64; None if at ``most`` positions or more.

    Looking for a word of 8 bytes that differs takes as long as for an element that does, and there are fewer words.
    """
    each = 8 // old.itemsize
    if len(old) % each or (old.ctypes.data | new.ctypes.data) % 8:
        each = 1  # no whole words
    ours, theirs = (old.view(np.uint64), new.view(np.uint64)) if each > 1 else (old, new)
    differs = np.not_equal(ours, theirs, out=_scratch(torch.bool).numpy()[: len(ours)])
    if np.count_nonzero(differs) >= most:
        return None
    positions: Array = np.flatnonzero(differs)
    if each > 1:
        within = np.flatnonzero(ours.take(positions).view(old.dtype) != theirs.take(positions).view(old.dtype))
        shift = each.bit_length() - 1
        positions = (positions.take(within >> shift) << shift) + (within & (each - 1))
    return positions if len(positions) < most else None


def _forget(marks: Array) -> None:
    np.maximum(marks, _FORGOTTEN, out=marks)
    np.subtract(marks, _FORGOTTEN, out=marks)


@dataclass(slots=True)
class _Pending:
    """A version that is not whole here.

    Attributes:
        missing: the segments that it lacks, with their rounds.
        keep: the version beside which it is kept; None for the one before it.
        begun: whether some of it is made, and ``keep`` is known.
    """

    number: int
    label: str
    missing: dict[int, int]
    keep: int | None = None
    begun: bool = False


class Publishing:
    """See the module.

    Attributes:
        lineage: of the versions.
        pending: the versions that are not whole here, oldest first. Look here before anything else: it is empty at most
            times, and always where nothing is published.
        whole: the labels of the whole versions that can be read, by number: two at most.
        made: how many versions have become whole here.
        last: the number of the last version that was asked for.
    """

    def __init__(self, store: int, buckets: Buckets, recording: Recording) -> None:
        self.lineage = UNKNOWN
        self.pending: list[_Pending] = []
        self.whole: dict[int, str] = {}
        self.made = self.last = 0
        self._store = store
        self._buckets = buckets
        self._recording = recording
        self._wanted: dict[wire.Node, tuple[int, int]] = {}  # what readers fetch, and ``made`` when they last asked
        self._values: dict[int, list[PublishedValues]] = {}  # by segment, of each of its pieces
        self._rows: dict[int, PublishedRows] = {}  # by segment, of a table

    @property
    def newest(self) -> int:
        """The number of the newest whole version; 0 if there is none."""
        return max(self.whole, default=0)

    def begin(self, message: wire.Publish, succeeds: bool = False) -> None:
        """Make a version: now of what has reached its round, of the rest later.

        ``succeeds``: the worker that asks goes on for one that is lost, which may have asked for this version already.
        """
        if succeeds and self.lineage == message.lineage:
            wanted = zip(message.ids, message.clocks, strict=True)
            if message.number <= self.last or any(
                clock < pending.missing.get(number, 0) for number, clock in wanted for pending in self.pending
            ):
                return
        if message.number <= self.last or self.lineage not in (UNKNOWN, message.lineage):
            raise UsageError(f"version {message.number} of store {self._store} cannot follow version {self.last}")
        new: dict[int, list[PublishedValues]] = {}
        for number in message.ids:
            if self._buckets.is_table(number):
                continue
            bucket, place = self._buckets.find(number)
            dtype = self._published_as(number, bucket.segments.keys[place], bucket.dtype, message.rounded)
            if number not in self._values:
                new[number] = self._new(bucket.sizes[place], bucket.dtype, dtype)
        # The standby has the same buckets when it reads this record. The records of their versions come after it.
        if self._recording.on:
            self._recording.note(message)
        self._values |= new
        self.lineage, self.last = message.lineage, message.number
        missing = dict(zip(message.ids, message.clocks, strict=True))
        self.pending.append(_Pending(message.number, message.label, missing))
        self.reached(self._buckets.targets_of(message.ids))

    def reached(self, targets: Iterable[AnyTarget] | None = None) -> None:
        """Make the versions that ``targets`` have reached the rounds of; of all by default.

        Call it after each update of a target. Call it before one, too: a server that has just taken over may have its
        primary's last round, and not the version of that round.
        """
        for target in self._buckets.targets() if targets is None else targets:
            now = not isinstance(target.rounds, Rounds)
            for pending in list(self.pending):
                due = [
                    number
                    for number in target.ids
                    if number in pending.missing and (now or pending.missing[number] <= target.rounds.version)
                ]
                if due:
                    self._make(pending, due)
        self._settle()

    def follow(self, message: wire.VersionMade) -> None:
        """Make, as a primary has, a version of segments; those that are made already are as they should be."""
        for pending in list(self.pending):
            if pending.number == message.number:
                self._make(pending, [number for number in message.ids if number in pending.missing])
        self._settle()

    def fetches(self, node: wire.Node, number: int) -> None:
        """Note which version a reader fetches, 0 for none: as long as it asks for that, it is kept."""
        self._wanted.pop(node, None)
        if number:
            self._wanted[node] = number, self.made

    def _fetched(self) -> int | None:
        """Return the older one of the whole versions, if a reader fetches it."""
        if len(self.whole) < 2:
            return None
        self._wanted = {node: wanted for node, wanted in self._wanted.items() if self.made - wanted[1] < PATIENCE}
        older = min(self.whole)
        return older if any(number == older for number, _ in self._wanted.values()) else None

    def _make(self, pending: _Pending, ids: Sequence[int]) -> None:
        if self._buckets.doubt_of(ids) is not None:  # half updated: there is no such version, and no later one either
            self.pending.remove(pending)
            return
        if not pending.begun:
            pending.begun, pending.keep = True, self._fetched()
        for number in ids:
            if self._buckets.is_table(number):
                self.rows_of(number).publish(pending.number, pending.label)
            else:
                flat = self._buckets.value(number).reshape(-1)
                for (start, stop), values in zip(pieces(flat.numel()), self._values[number], strict=True):
                    values.publish(flat[start:stop], pending.number, pending.keep)
            del pending.missing[number]
        if self._recording.on:
            self._recording.note(wire.VersionMade(self._store, pending.number, list(ids)))

    def _settle(self) -> None:
        while self.pending and not self.pending[0].missing:
            done = self.pending.pop(0)
            kept = done.keep if done.keep in self.whole else self.newest
            self.whole = {number: label for number, label in self.whole.items() if number == kept}
            self.whole[done.number] = done.label
            self.made += 1

    def rows_of(self, number: int) -> PublishedRows:
        """Return what is published of the table of segment ``number``, nothing yet perhaps.

        Raises:
            UsageError: it is an array.
        """
        (target,) = self._buckets.read_tables([number])
        known = self._rows.get(number)
        if known is None or known.table is not target.table:
            known = self._rows[number] = PublishedRows(target.table)
        return known

    def _published_as(self, number: int, key: Key, source: str, dtype: str | None) -> str:
        wanted = published_as(source, dtype)
        known = self._values.get(number)
        if not known:  # none of an empty segment, either
            return wanted
        if dtype is not None and known[0].dtype != wanted:
            raise UsageError(f"key {key!r} is published as {known[0].dtype}, and cannot be published as {wanted}")
        return known[0].dtype

    # ---- for a new standby

    def snapshot(self) -> Iterator[wire.Message]:
        """Return the records of all versions. Of each piece only the newest is in them."""
        for number, values in self._values.items():
            for place, piece in enumerate(values):
                tensors, plain = piece.state()
                buffers: list[wire.Buffer] = [tensors[name].numpy().tobytes() for name in ("bits", "marks")]
                versions: list[int] = plain["changes"]  # type: ignore[assignment]
                newest = piece.newest or 0
                yield wire.PublishedState(self._store, number, place, piece.dtype, newest, versions, buffers)
        for number, label in sorted(self.whole.items()):
            yield wire.VersionState(self._store, self.lineage, number, label, [], [])
        for each in self.pending:
            ids, clocks = list(each.missing), list(each.missing.values())
            yield wire.VersionState(self._store, self.lineage, each.number, each.label, ids, clocks)

    def restore(self, message: wire.VersionState | wire.PublishedState) -> None:
        if isinstance(message, wire.VersionState):
            self.lineage, self.last = message.lineage, message.number
            if message.ids:
                missing = dict(zip(message.ids, message.clocks, strict=True))
                self.pending.append(_Pending(message.number, message.label, missing))
            else:
                self.whole[message.number] = message.label
            return
        bucket, place = self._buckets.find(message.id)
        made = self._values.setdefault(message.id, self._new(bucket.sizes[place], bucket.dtype, message.dtype))
        if len(message.buffers) != 2 or message.place >= len(made):
            raise ValueError(f"piece {message.place} of {len(made)}, with {len(message.buffers)} buffers")
        bits, marks = (torch.from_numpy(np.frombuffer(each, np.uint8).copy()) for each in message.buffers)
        if message.newest:
            plain = {"newest": message.newest, "changes": list(message.versions)}
            made[message.place].restore({"bits": bits, "marks": marks}, plain)

    @staticmethod
    def _new(size: int, source: str, dtype: str) -> list[PublishedValues]:
        return [PublishedValues(stop - start, source, dtype) for start, stop in pieces(size)]

    # ---- what readers get

    def pieces_of(self, ids: Sequence[int]) -> list[PublishedValues]:
        """Return what is published of segments ``ids``, in order.

        Raises:
            KeyNotInitialized: one of them is in no version.
        """
        for number in ids:
            if number not in self._values:
                key = self._buckets.segment(number).key
                raise KeyNotInitialized(f"key {key!r} is in no version that was published")
        return [values for number in ids for values in self._values[number]]

    def dtypes_of(self, ids: Sequence[int]) -> list[str]:
        """Return as what segments ``ids`` are published; ``pieces_of`` has found them all."""
        pieces = map(self._values.__getitem__, ids)
        return [
            each[0].dtype if each else self._buckets.holding(number).dtype  # an empty segment has no pieces
            for number, each in zip(ids, pieces, strict=True)
        ]

    def changes(self, values: PublishedValues, held: int, number: int) -> tuple[int, list[wire.Buffer]] | None:
        """Return the checksum of a piece in version ``number``, and what makes it of version ``held``, 0 for nothing.

        None: that version of it is gone.
        """
        newest, previous = values.newest, values.previous
        # A version has the newest values up to then: its own, unless the piece was published again since.
        at = newest if newest is None or number >= newest else previous
        if newest is None or at is None or number < at or (at != newest and number >= values.until):
            return None
        few = functools.cache(values.few_replaced)  # for both, and not for longer
        total = values.checksum(at, few)
        changes = values.changes(min(held, newest) or None, at, few)
        return None if total is None or changes is None else (total, changes)
