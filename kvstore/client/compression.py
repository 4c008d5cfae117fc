"""A store's compression, at the worker's end: what goes out is encoded, and what comes back is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kvstore import wire
from kvstore.client.entries import Entries, Segment
from kvstore.client.pack import Contents, Load, Packer
from kvstore.client.plans import Parcel, PayloadSource, Plan, parcels
from kvstore.client.requests import AT_ONCE, Requests, assemble, cut
from kvstore.codecs import Compression, Compressor, ResumableEncodings
from kvstore.codecs.codec import RESIDUAL, STEP, VELOCITY
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described, fold, travelling
from kvstore.spec import FLOATS, Key
from kvstore.transport import Peer
from kvstore.values import Arrays, Leaving, ranges_of, sum_ranges, tensors_of, to_buffer

SMALL = 1 << 14  # elements: to copy them costs less than to encode, send and decode them on their own


def finite_floats(
    plan: Plan, values: Arrays | Sequence[torch.Tensor], compressor: Compressor
) -> dict[Key, torch.Tensor]:
    """Return those of a plan's arrays that ``compressor`` is for, by key.

    Raises:
        UsageError: some of them have elements that are infinite or NaN in float32.
    """
    floats = {
        key: value
        for key, spec, value in zip(plan.keys, plan.specs, tensors_of(values), strict=True)
        if spec.dtype in FLOATS
    }
    for key, value in floats.items():
        compressor.require_finite(key, value)
    return floats


class Compressing:
    """Encodes what one worker pushes to one store, and keeps the residuals: what the encodings have left out so far."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.fold = fold(travelling(compression), travelling(compression.pull))
        self._pushed = travelling(compression)
        self._pulled = travelling(compression.pull)
        self._compressor = Compressor(compression)
        self.small = SMALL if self._compressor.joins else 0  # whole arrays of at most so many elements share payloads

    def load(self, plan: Plan, values: Arrays | Sequence[torch.Tensor], packer: Packer) -> Load:
        """Return what a push of a plan's arrays carries."""
        floats = finite_floats(plan, values, self._compressor)
        return _Compressed(self._compressor, self._pushed, floats, packer.plain(Leaving(values)))

    def asked(self, parcel: Parcel) -> wire.CodecDescription:
        return self._pulled if parcel.dtype in FLOATS else None

    def decoder(self, parcel: Parcel) -> Callable[[wire.Values, Sequence[torch.Tensor]], None] | None:
        """Return what writes the reply for a parcel into flat float32, one after the other; None if it comes plain."""
        back = self.compression.pull
        if back is None or parcel.dtype not in FLOATS:
            return None

        def decode(reply: wire.Values, targets: Sequence[torch.Tensor]) -> None:
            payloads = check_payloads(back, reply, parcel.sizes)
            for part, (_, way) in zip(_dealt(targets, [size for size, _ in payloads]), payloads, strict=True):
                way.spread(part)

        return decode

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        return self._compressor.state()

    def load_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        plain: Mapping[str, object],
        shapes: Mapping[Key, tuple[int, ...]],
    ) -> None:
        self._compressor.load_state(tensors, plain, shapes)


class _Compressed:
    """A ``Load`` of encoded arrays. Each is encoded when its first message goes, so nothing waits for all of them."""

    def __init__(
        self, compressor: Compressor, codec: wire.CodecDescription, values: Mapping[Key, torch.Tensor], others: Load
    ) -> None:
        self._compressor, self._codec, self._others = compressor, codec, others
        self._values = values
        self._works: ResumableEncodings = {}

    def __call__(self, parcel: Parcel, gather: bool) -> Contents:
        if parcel.dtype not in FLOATS:
            return self._others(parcel, gather)
        parts = [to_buffer(self._payload(source)) for source in parcel.sources]
        lengths, spans = [part.nbytes for part in parts], [source.segments for source in parcel.sources]
        return Contents(wire.pack_arrays(parts), self._codec, lengths, spans)

    def _payload(self, source: PayloadSource) -> torch.Tensor:
        if len(source.keys) == 1:
            (key,) = source.keys
            return self._compressor.encode(key, self._values[key], self._works).payload(source.start, source.stop)
        arrays = [self._values[key].detach().reshape(-1) for key in source.keys]
        flat = torch.cat([array.to(arrays[0].device) for array in arrays])
        encoded = self._compressor.encode_joined(source.keys, [array.numel() for array in arrays], flat, self._works)
        return encoded.payload(0, encoded.size)


def _dealt(targets: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Yield, for each of ``sizes``, as many elements of ``targets``, which are cut where need be."""
    left = list(reversed(targets))
    for size in sizes:
        taken = []
        while size:
            target = left.pop()
            if target.numel() > size:
                left.append(target[size:])
                target = target[:size]
            taken.append(target)
            size -= target.numel()
        yield taken


# ---- compression by the aggregator, of the sum of what the host's workers push

# What an aggregator cannot do for its workers: 1bit sends 1 or -1 for each worker, and powersgd needs whole matrices.
OWN = frozenset({"1bit", "powersgd"})


def compressing(compression: Compression, requests: Requests, entries: Entries, aggregator: Peer | None) -> Compressing:
    """Return what compresses a store's pushes."""
    if aggregator is None or compression.type in OWN:
        return Compressing(compression)
    return Delegated(compression, requests, entries, aggregator)


def encoded_here(push: wire.Push, parcel: Parcel) -> wire.Push:
    """Return a push of ``parcel`` as a server takes it: encoded, if it asks an aggregator, which is lost, to do that.

    What the encoding leaves out is lost with the aggregator's residuals: the values may be some of an array's only.
    """
    compression = described(push.encode)
    if compression is None:
        return push
    compressor = Compressor(compression)
    flat = torch.empty(parcel.size, dtype=torch.float32, device="cpu")
    sum_ranges([ranges_of(push.buffers, push.dtype(parcel.dtype), parcel.size)], flat)
    encoded = compressor.encode_segments(parcel.ids, parcel.sizes, flat)
    return replace(push, encode=None, in_float32=False, **encoded._asdict())


class Delegated(Compressing):
    """Has the aggregator encode the sum of what this host's workers push.

    Gradients go to the aggregator as they are, with the name of the codec, and values come back as they are. The
    aggregator keeps the residuals. One worker of each host saves them with the optimizer's states; what workers load is
    added up there, so files from jobs with and without aggregators are good for either. If the aggregator is lost, its
    residuals are, too, and the workers encode what they push themselves.
    """

    def __init__(self, compression: Compression, requests: Requests, entries: Entries, aggregator: Peer) -> None:
        super().__init__(compression)
        self.small = 0  # arrays share no payloads here
        self._requests = requests
        self._entries = entries
        self._aggregator = aggregator

    def load(self, plan: Plan, values: Arrays | Sequence[torch.Tensor], packer: Packer) -> Load:
        """Return what a push of a plan's arrays carries."""
        floats = finite_floats(plan, values, self._compressor)
        plain = packer.plain(Leaving(values))
        own = _Compressed(self._compressor, self._pushed, floats, plain)  # encodes nothing while there is an aggregator

        def pack(parcel: Parcel, gather: bool) -> Contents:
            if self._alone:
                return own(parcel, gather)
            contents = plain(parcel, gather)
            return contents._replace(encode=self._pushed) if parcel.dtype in FLOATS else contents

        return pack

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the residuals in the form of ``Compressor.state``: one worker of the host has all, the others none."""
        if self._alone:
            return super().state()
        segments: dict[tuple[Segment, str], torch.Tensor] = {}
        for parcel in self._parcels():
            segments |= self._requests.get_states(parcel, self._aggregator)
        for key, name in {(segment.key, name): None for segment, name in segments if name != STEP}:
            for segment in self._entries[key].segments:
                if (segment, name) not in segments:  # not encoded yet, unlike others of an array that is cut
                    segments[segment, name] = torch.zeros(
                        segment.stop - segment.start, dtype=torch.float32, device="cpu"
                    )
        whole = assemble(segments, self._entries)
        keys = list(dict.fromkeys(key for key, _ in whole))
        tensors = {
            f"{name}.{i}": whole[key, name].reshape(-1)
            for i, key in enumerate(keys)
            for name in (RESIDUAL, VELOCITY)
            if (key, name) in whole
        }
        steps = [[key, int(whole[key, STEP])] for key in keys]
        return tensors, {"compression": self.compression.options(), "steps": steps}

    def load_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        plain: Mapping[str, object],
        shapes: Mapping[Key, tuple[int, ...]],
    ) -> None:
        """Give the aggregator what ``state`` returned, for arrays of these shapes; see ``Compressor.load_state``."""
        if self._alone:
            super().load_state(tensors, plain, shapes)
            return
        loaded = Compressor(self.compression)
        loaded.load_state(tensors, plain, shapes)
        states: dict[tuple[Key, str], torch.Tensor] = {}
        for memo in loaded.memos:
            states |= {(memo.key, name): value for name, value in memo.states.items()}
        by_id: dict[int, dict[tuple[Segment, str], torch.Tensor]] = {}
        for (segment, name), value in cut(states, self._entries).items():
            by_id.setdefault(segment.id, {})[segment, name] = value
        for parcel in self._parcels():
            of_parcel = {which: value for number in parcel.ids for which, value in by_id.get(number, {}).items()}
            if of_parcel:
                self._requests.put_states(parcel.server, of_parcel, self._aggregator)

    @property
    def _alone(self) -> bool:
        return self._requests.session.aggregator is None

    def _parcels(self) -> list[Parcel]:
        keys = [key for key, entry in self._entries.items() if entry.spec.dtype in FLOATS]
        return parcels(self._entries, keys, AT_ONCE) if keys else []
