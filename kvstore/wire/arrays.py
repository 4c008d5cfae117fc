"""How the states of an optimizer, arrays of any dtype, share a message's frames; both ends compute the same layout.

A large array has a frame of its own, which neither end copies to build or to read. Small ones share a frame, each
starting at a multiple of 16 bytes: a message with a thousand of them costs a few frames, not a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import WireError
from kvstore.wire.frames import Buffer

LARGE = 1 << 16
SHARED = 1 << 20
ALIGN = 16


def frame_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Return the frames for arrays of ``sizes`` bytes: for each frame, the positions of the arrays in it, in order."""
    frames: list[list[int]] = []
    shared: list[int] = []
    filled = 0
    for position, size in enumerate(sizes):
        if size >= LARGE:
            frames.append([position])
            continue
        if not shared or filled + size > SHARED:
            shared, filled = [], 0
            frames.append(shared)
        shared.append(position)
        filled += _aligned(size)
    return frames


def pack_arrays(parts: Sequence[memoryview]) -> list[Buffer]:
    """Build the frames of a payload from its arrays, as flat byte views; copies the small ones only."""
    frames: list[Buffer] = []
    for group in frame_groups([part.nbytes for part in parts]):
        if len(group) == 1:
            frames.append(parts[group[0]])
            continue
        shared = bytearray(sum(_aligned(parts[position].nbytes) for position in group))
        offset = 0
        for position in group:
            shared[offset : offset + parts[position].nbytes] = parts[position]
            offset += _aligned(parts[position].nbytes)
        frames.append(shared)
    return frames


def unpack_arrays(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[memoryview]:
    """Return the arrays of ``sizes`` bytes as views of the frames of a received payload; copies nothing.

    Raises:
        WireError: the frames are not those of such arrays.
    """
    layout = frame_groups(sizes)
    if len(layout) != len(frames):
        raise WireError(f"a payload of {len(frames)} frames for arrays that take {len(layout)}")
    parts: list[memoryview] = [memoryview(b"")] * len(sizes)
    for frame, group in zip(frames, layout, strict=True):
        view = memoryview(frame)
        wanted = sizes[group[0]] if len(group) == 1 else sum(_aligned(sizes[position]) for position in group)
        if view.nbytes != wanted:
            raise WireError(f"a payload frame of {view.nbytes} bytes where {wanted} belong")
        offset = 0
        for position in group:
            parts[position] = view[offset : offset + sizes[position]]
            offset += _aligned(sizes[position])
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
