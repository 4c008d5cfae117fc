"""One store's state as records: applied to a new store, they give the same state, bit by bit. Pure.

Contributions to rounds that are open are not part of it: workers repeat them, should the primary be lost. Those that
came late and count in the next round are, for they have been answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from weakref import finalize

import numpy as np
import torch

from kvstore import wire
from kvstore.codecs.options import described, travelling
from kvstore.errors import rebuild
from kvstore.optim.states import unpack_states
from kvstore.rows.frozen_rows import FrozenRows
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids
from kvstore.rows.layout import bytes_of, integers, part_bytes, write_rows
from kvstore.spec import HALVES, ITEMSIZE, Spec
from kvstore.table import Table
from kvstore.values import from_buffer, ranges_of, spec_of, to_buffer
from servers.requests.replies import described_error
from servers.store.array_updates import Updates
from servers.store.bucket import Bucket, Contribution
from servers.store.buckets import Buckets
from servers.store.recording import in_doubt_record, states_record
from servers.store.rounds import Rounds
from servers.store.row_target import RowContribution, RowTarget
from servers.store.tables.served_tables import ServedTables, rows_of_page
from servers.store.target import HeldSegments
from servers.store.value_replies import ReplyEncoder, ValueReplies


def snapshot(store: int, buckets: Buckets, updates: Updates, values: ValueReplies) -> Iterator[wire.Message]:
    """Return the records of all values, their progress, and what is kept of them.

    Take all of them before the next message is handled. They refer to the values, and have copies of the rest.
    """
    for error in dict.fromkeys(buckets.doubts.values()):
        ids = [number for number, why in buckets.doubts.items() if why is error]
        yield in_doubt_record(store, ids, error)
    for bucket in buckets.all():
        yield _bucket(store, bucket)
        if isinstance(bucket.rounds, Rounds):
            for _, _, item in bucket.rounds.kept:
                yield _late(store, bucket, item)
    if updates.updater is not None:
        states = updates.updater.states.of(sorted(buckets.ids))
        if states:
            yield states_record(store, states)
        return  # weights are encoded without residuals
    for compression, encoder in values.encoders.items():
        tensors, plain = encoder.compressor.state()
        kept = dict(sorted(encoder.kept(buckets.all()).items()))
        tensors |= {f"payload.{place}": payload for place, (_, payload) in enumerate(kept.values())}
        steps: list[list[int]] = plain["steps"]  # type: ignore[assignment]
        specs = [spec_of(tensor) for tensor in tensors.values()]
        yield wire.EncoderState(
            store,
            travelling(compression),
            [key for key, _ in steps],
            [step for _, step in steps],
            list(kept),
            [version for version, _ in kept.values()],
            list(tensors),
            [list(spec.shape) for spec in specs],
            [spec.dtype for spec in specs],
            wire.pack_arrays([to_buffer(tensor.contiguous()) for tensor in tensors.values()]),
        )


def restore(
    message: wire.BucketState | wire.StatesState | wire.EncoderState,
    buckets: Buckets,
    updates: Updates,
    values: ValueReplies,
) -> None:
    if isinstance(message, wire.BucketState):
        _restore_bucket(buckets, message)
    elif isinstance(message, wire.StatesState):
        if updates.updater is None:
            raise ValueError("the states of an optimizer, and there is none")
        updates.regroup()
        updates.updater.states.restore({(number, name): value for number, name, value in unpack_states(message)})
    else:
        compression = described(message.back)
        if compression is None:
            raise ValueError("what is kept for compressed answers, without a compression")
        _restore_encoder(buckets, values.encoder(compression), message)


def _bucket(store: int, bucket: Bucket) -> wire.BucketState:
    kinds = {spec: place for place, spec in enumerate(dict.fromkeys(bucket.segments.specs))}
    return wire.BucketState(
        store,
        ids=list(bucket.ids),
        keys=list(bucket.segments.keys),
        kinds=[kinds[spec] for spec in bucket.segments.specs],
        shapes=[list(spec.shape) for spec in kinds],
        dtype=bucket.dtype,
        splits=list(bucket.segments.splits),
        version=bucket.version,
        pushed=[list(pair) for pair in sorted(bucket.rounds.clocks.items())],
        failures=[[version, *described_error(error)] for version, error in bucket.failures.items()],
        read_by=sorted(bucket.read_by),
        buffers=[bucket.whole(), *(to_buffer(values.clone()) for _, values in sorted(bucket.read_by.items()))],
    )


def _late(store: int, bucket: Bucket, item: Contribution) -> wire.Push:
    ranks = list(item.ranks)
    values = [part.values.contiguous() for part in item.ranges]
    return wire.Push(
        wire.Sender(wire.Node("worker", ranks[0], 1), 0, 0),
        store,
        list(bucket.ids),
        [item.clock] * len(bucket.ids),
        want=False,
        lr=item.hyper.lr,
        rescale=item.hyper.rescale,
        changes=item.hyper.listed(),
        ranks=ranks,
        # Sums of hosts are in float32, and so is what was compressed.
        in_float32=bucket.dtype in HALVES and any(value.dtype == torch.float32 for value in values),
        buffers=list(map(to_buffer, values)),
    )


def _restore_bucket(buckets: Buckets, message: wire.BucketState) -> None:
    kinds = [Spec(tuple(shape), message.dtype) for shape in message.shapes]
    segments = HeldSegments(message.ids, message.keys, [kinds[kind] for kind in message.kinds], message.splits)
    bucket = buckets.restore(segments, message.dtype)
    value, *read = message.buffers
    bucket.load(ranges_of([value], bucket.dtype, bucket.size))
    bucket.rounds.restore(message.version, {pair[0]: pair[1] for pair in message.pushed})
    bucket.changes = message.version  # readers are told these numbers, before and after a takeover
    bucket.failures = {version: rebuild(kind, text) for version, kind, text in message.failures}
    bucket.read_by = {
        rank: from_buffer(buffer, bucket.dtype).clone() for rank, buffer in zip(message.read_by, read, strict=True)
    }


def _restore_encoder(buckets: Buckets, encoder: ReplyEncoder, message: wire.EncoderState) -> None:
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = wire.unpack_arrays(message.buffers, [spec.nbytes for spec in specs])
    tensors = {
        name: from_buffer(part, spec.dtype).view(spec.shape)
        for name, spec, part in zip(message.names, specs, parts, strict=True)
    }
    for place, (number, version) in enumerate(zip(message.encoded, message.versions, strict=True)):
        payload = tensors.pop(f"payload.{place}").clone()
        encoder.restore(number, buckets.segment(number).spec.size, version, payload)
    steps = [[key, step] for key, step in zip(message.residuals, message.steps, strict=True)]
    encoder.compressor.load_state(tensors, {"compression": encoder.compressor.compression.options(), "steps": steps})


PAGE_BYTES = 1 << 20  # of rows in one record: a page is gathered at once, and workers' messages wait for that


def table_snapshot(store: int, buckets: Buckets) -> Iterator[wire.Message | Iterable[wire.Message]]:
    """Return the records of all tables, some of them as iterables of records.

    Take all that this yields before the next message is handled; the records in the iterables may be taken later.
    """
    for target in buckets.tables:
        yield _stripe(store, target)
        yield FrozenPages(store, target)
        if isinstance(target.rounds, Rounds):
            for _, _, item in target.rounds.kept:
                yield _late_rows(store, target, item)


def restore_table(
    message: wire.StripeState | wire.TablePage | wire.TableRest, buckets: Buckets, tables: ServedTables
) -> None:
    if isinstance(message, wire.StripeState):
        _restore_stripe(tables, message)
        return
    target = buckets.table(message.id)
    if isinstance(message, wire.TablePage):
        target.table.put(*rows_of_page(target.description, message), None)
    else:
        target.table.restore(dict(zip(message.names, (integers(each) for each in message.buffers), strict=True)))


class FrozenPages(Iterable[wire.Message]):
    """The rows of a table as they were when this was made, and the rest of its state. Can be read once."""

    def __init__(self, store: int, target: RowTarget) -> None:
        self._store, self._target = store, target
        self._parts = dict(target.table.parts)
        self._frozen: FrozenRows = target.table.freeze()
        self._rest = target.table.rest()
        # Whoever reads this may give up, with the standby that it is for.
        self._thaw = finalize(self, self._frozen.thaw)

    def __iter__(self) -> Iterator[wire.Message]:
        number, parts = self._target.number, self._parts
        row_bytes = self._target.description.row_bytes + sum(
            max(1, part.columns) * ITEMSIZE[part.dtype] for part in parts.values()
        )
        count = max(1, PAGE_BYTES // row_bytes)
        dtypes, columns = [part.dtype for part in parts.values()], [part.columns for part in parts.values()]
        for start in range(0, self._frozen.slots, count):
            ids, rows, others = self._frozen.page(start, count)
            if len(ids):
                buffers = [bytes_of(array) for array in (ids, rows, *others.values())]
                yield wire.TablePage(self._store, number, len(ids), list(parts), dtypes, columns, buffers)
        self._thaw()
        yield wire.TableRest(self._store, number, list(self._rest), [bytes_of(array) for array in self._rest.values()])


def _stripe(store: int, target: RowTarget) -> wire.StripeState:
    changed: Mapping[int, Ids] = target.changed
    return wire.StripeState(
        store,
        target.number,
        target.key,
        target.description.described,
        target.stripe,
        target.stripes,
        version=target.rounds.version if isinstance(target.rounds, Rounds) else 0,
        updates=target.table.version,
        pushed=[list(pair) for pair in sorted(target.rounds.clocks.items())],
        failures=[[version, *described_error(error)] for version, error in target.failures.items()],
        changed=list(changed),
        counts=[len(ids) for ids in changed.values()],
        buffers=[bytes_of(ids) for ids in changed.values()],
    )


def _late_rows(store: int, target: RowTarget, item: RowContribution) -> wire.PushRows:
    table = target.description
    rows = memoryview(bytearray(part_bytes(len(item.ids), table.width, table.sum_dtype, "none")))
    write_rows(item.rows, "none", rows)
    return wire.PushRows(
        wire.Sender(wire.Node("worker", item.ranks[0], 1), 0, 0),
        store,
        [target.number],
        [item.clock],
        [len(item.ids)],
        [0],
        wide=True,
        want=False,
        union=False,
        lr=item.hyper.lr,
        rescale=item.hyper.rescale,
        changes=item.hyper.listed(),
        codecs=["none"],
        in_float32=table.sum_dtype != table.dtype,
        buffers=[bytes_of(np.ascontiguousarray(item.ids, np.int64)), rows, b""],
    )


def _restore_stripe(tables: ServedTables, message: wire.StripeState) -> None:
    table = Table.of(message.table)
    (target,) = tables.add([(message.id, message.key, table)], message.stripe, message.stripes)
    target.rounds.restore(message.version, {pair[0]: pair[1] for pair in message.pushed})
    target.failures = {version: rebuild(kind, text) for version, kind, text in message.failures}
    target.changed = {
        version: integers(buffer) for version, buffer in zip(message.changed, message.buffers, strict=True)
    }
    nobody = np.empty(0, np.int64), np.empty((0, table.width), array_dtype(table.dtype))
    target.table.put(*nobody, {}, message.updates)  # pages say what was seen
