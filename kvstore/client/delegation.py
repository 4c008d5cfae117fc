"""Compression that this host's aggregator does: it encodes the sum of what the host's workers push.

Gradients go to the aggregator as they are, with the name of the codec, and values come back from it as they are. What
encodings leave out stays at the aggregator. One worker of each host saves it with the optimizer's states; what workers
load is added up there, so files from jobs with and without aggregators are good for either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstore import wire
from kvstore.client.compression import Compressing, finite_floats
from kvstore.client.outgoing import Contents, Load, Packer, Plain
from kvstore.client.plans.entries import Entries, Segment
from kvstore.client.plans.parcels import Parcel, parcels
from kvstore.client.plans.plan import Plan
from kvstore.client.requests import Requests
from kvstore.client.states import AT_ONCE, assemble, cut
from kvstore.codecs import Compression, Compressor
from kvstore.codecs.description import fold, travelling
from kvstore.codecs.memo import RESIDUAL, STEP, VELOCITY
from kvstore.spec import FLOATS, Key
from kvstore.transport import Peer
from kvstore.values import Arrays, Leaving

# What an aggregator cannot do for its workers: 1bit sends 1 or -1 for each worker, and powersgd needs whole matrices.
OWN = frozenset({"1bit", "powersgd"})


def compressing(
    compression: Compression, requests: Requests, entries: Entries, aggregator: Peer | None
) -> Compressing | Delegated:
    """Return what compresses a store's pushes.

    Args:
        compression: how.
        requests: the store's.
        entries: its keys, to which others are added later.
        aggregator: that sums the store's pushes; None if nobody does before they reach servers.
    """
    if aggregator is None:
        return Compressing(compression)
    if compression.type in OWN:
        return Compressing(compression, plain_back=True)
    return Delegated(compression, requests, entries, aggregator)


class Delegated:
    """Has the aggregator encode what this host's workers push. See ``Compressing``, in whose place it is, and above."""

    small = 0  # arrays share no payloads here

    def __init__(self, compression: Compression, requests: Requests, entries: Entries, aggregator: Peer) -> None:
        self.compression = compression
        self._checker = Compressor(compression)  # encodes nothing
        self._pushed = travelling(compression)
        self._pulled = travelling(compression.pull)
        self.fold = fold(self._pushed, self._pulled)
        self._requests = requests
        self._entries = entries
        self._aggregator = aggregator

    def load(self, plan: Plan, values: Arrays | Sequence[torch.Tensor], packer: Packer) -> Load:
        """Return what a push of a plan's arrays carries.

        Raises:
            UsageError: some of them have elements that are infinite or NaN.
        """
        finite_floats(plan, values, self._checker)
        return _Delegated(self._pushed, Plain(packer, Leaving(values)))

    def asked(self, parcel: Parcel) -> wire.CodecDescription:
        """How the servers are to send a parcel's values to the aggregator."""
        return self._pulled if parcel.dtype in FLOATS else None

    def decoder(self, parcel: Parcel) -> None:
        """None: the aggregator decodes what comes back."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the residuals in the form of ``Compressor.state``: one worker of the host has all, the others none."""
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
        loaded = Compressor(self.compression)
        loaded.load_state(tensors, plain, shapes)
        states: dict[tuple[Key, str], torch.Tensor] = {}
        for memo in loaded.memos:
            states[memo.key, RESIDUAL], states[memo.key, STEP] = (
                memo.residual,
                torch.tensor(memo.step, dtype=torch.int64, device="cpu"),
            )
            if memo.velocity is not None:
                states[memo.key, VELOCITY] = memo.velocity
        by_id: dict[int, dict[tuple[Segment, str], torch.Tensor]] = {}
        for (segment, name), value in cut(states, self._entries).items():
            by_id.setdefault(segment.id, {})[segment, name] = value
        for parcel in self._parcels():
            of_parcel = {which: value for number in parcel.ids for which, value in by_id.get(number, {}).items()}
            if of_parcel:
                self._requests.put_states(parcel.server, of_parcel, self._aggregator)

    def _parcels(self) -> list[Parcel]:
        keys = [key for key, entry in self._entries.items() if entry.spec.dtype in FLOATS]
        return parcels(self._entries, keys, AT_ONCE) if keys else []


class _Delegated:
    """See ``Load``: plain values, and how their sum is to be encoded."""

    def __init__(self, codec: wire.CodecDescription, values: Load) -> None:
        self._codec, self._values = codec, values

    def pack(self, parcel: Parcel, gather: bool) -> Contents:
        """See ``Load``."""
        contents = self._values.pack(parcel, gather)
        return contents._replace(encode=self._codec) if parcel.dtype in FLOATS else contents
