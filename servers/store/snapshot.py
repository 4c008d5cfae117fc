"""One store's state as records: applied to a new store, they give the same state, bit by bit. Pure.

Contributions to rounds that are open are not part of it: workers repeat them, should the primary be lost. Those that
came late and count in the next round are, for they have been answered.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvstore import wire
from kvstore.codecs.description import described, travelling
from kvstore.errors import rebuild
from kvstore.optim.state_messages import unpack_states
from kvstore.spec import HALVES, Spec
from kvstore.values import from_buffer, ranges_of, spec_of, to_buffer
from servers.requests.replies import described_error
from servers.store.compression import ReplyEncoder
from servers.store.recording import in_doubt_record, states_record
from servers.store.rounds import Rounds
from servers.store.served_store import ServedStore
from servers.store.target import Bucket, Contribution, HeldSegments


def snapshot(store: int, served: ServedStore) -> Iterator[wire.Message]:
    """Return the records of all values, their progress, and what is kept of them. The store has number ``store``.

    Take all of them before the next message is handled. They refer to the values, and have copies of the rest.
    """
    buckets = served.buckets.all()
    for error in dict.fromkeys(served.buckets.doubts.values()):
        ids = [number for number, why in served.buckets.doubts.items() if why is error]
        yield in_doubt_record(store, ids, error)
    for bucket in buckets:
        yield _bucket(store, bucket)
        if isinstance(bucket.rounds, Rounds):
            for _, _, item in bucket.rounds.kept:
                yield _late(store, bucket, item)
    if served.updates.updater is not None:
        states = served.updates.updater.states.of(sorted(served.buckets.ids))
        if states:
            yield states_record(store, states)
        return  # weights are encoded without residuals
    for compression, encoder in served.values.compressed.encoders.items():
        tensors, plain = encoder.compressor.state()
        kept = dict(sorted(encoder.kept(buckets).items()))
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


def restore(served: ServedStore, message: wire.BucketState | wire.StatesState | wire.EncoderState) -> None:
    """Take a part of another server's state.

    Raises:
        ValueError: there is no such optimizer or compression.
        WireError: the buffers do not fit.
    """
    if isinstance(message, wire.BucketState):
        _restore_bucket(served, message)
    elif isinstance(message, wire.StatesState):
        if served.updates.updater is None:
            raise ValueError("the states of an optimizer, and there is none")
        served.updates.regroup()
        served.updates.updater.states.restore({(number, name): value for number, name, value in unpack_states(message)})
    else:
        compression = described(message.back)
        if compression is None:
            raise ValueError("what is kept for compressed answers, without a compression")
        _restore_encoder(served, served.values.compressed.encoder(compression), message)


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


def _restore_bucket(served: ServedStore, message: wire.BucketState) -> None:
    kinds = [Spec(tuple(shape), message.dtype) for shape in message.shapes]
    segments = HeldSegments(message.ids, message.keys, [kinds[kind] for kind in message.kinds], message.splits)
    bucket = served.buckets.restore(segments, message.dtype)
    value, *read = message.buffers
    bucket.load(ranges_of([value], bucket.dtype, bucket.size))
    bucket.rounds.restore(message.version, {pair[0]: pair[1] for pair in message.pushed})
    bucket.changes = message.version  # readers are told these numbers, before and after a takeover
    bucket.failures = {version: rebuild(kind, text) for version, kind, text in message.failures}
    bucket.read_by = {
        rank: from_buffer(buffer, bucket.dtype).clone() for rank, buffer in zip(message.read_by, read, strict=True)
    }


def _restore_encoder(served: ServedStore, encoder: ReplyEncoder, message: wire.EncoderState) -> None:
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = wire.unpack_arrays(message.buffers, [spec.nbytes for spec in specs])
    tensors = {
        name: from_buffer(part, spec.dtype).view(spec.shape)
        for name, spec, part in zip(message.names, specs, parts, strict=True)
    }
    for place, (number, version) in enumerate(zip(message.encoded, message.versions, strict=True)):
        payload = tensors.pop(f"payload.{place}").clone()
        encoder.restore(number, served.buckets.segment(number).spec.size, version, payload)
    steps = [[key, step] for key, step in zip(message.residuals, message.steps, strict=True)]
    encoder.compressor.load_state(tensors, {"compression": encoder.compressor.compression.options(), "steps": steps})
