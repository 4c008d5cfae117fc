"""Several arrays, of any dtypes, in the frames of one message. Both ends compute the same layout from the sizes.

A large array has a frame of its own, which neither end copies. Small ones share a frame, each aligned to 16 bytes, so
that a message with a thousand of them has a few frames. States of optimizers travel so, and compressed payloads.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import WireError
from kvstore.wire.frames import Buffer

LARGE = 1 << 16
SHARED = 1 << 20
ALIGN = 16


def frame_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Return the layout of arrays of ``sizes`` bytes: for each frame, the positions of the arrays in it, in order."""
    frames: list[list[int]] = []
    shared: list[int] = []  # the last frame of small arrays
    filled = 0  # bytes of it
    for position, size in enumerate(sizes):
        if size >= LARGE:
            frames.append([position])
            continue
        if not shared or filled + size > SHARED:
            shared, filled = [], 0
            frames.append(shared)
        shared.append(position)
        filled += padded(size)
    return frames


def pack_arrays(parts: Sequence[memoryview]) -> list[Buffer]:
    """Return the frames of arrays, which are given as flat views of bytes. Only small arrays are copied."""
    frames: list[Buffer] = []
    for group in frame_groups([part.nbytes for part in parts]):
        if len(group) == 1:
            frames.append(parts[group[0]])
            continue
        shared = bytearray(sum(padded(parts[position].nbytes) for position in group))
        offset = 0
        for position in group:
            shared[offset : offset + parts[position].nbytes] = parts[position]
            offset += padded(parts[position].nbytes)
        frames.append(shared)
    return frames


def unpack_arrays(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[memoryview]:
    """Return the arrays of ``sizes`` bytes that are in ``frames``, as views: nothing is copied.

    Raises:
        WireError: the frames are not those of arrays of these sizes.
    """
    layout = frame_groups(sizes)
    if len(layout) != len(frames):
        raise WireError(f"expected {len(layout)} frames for {len(sizes)} arrays, got {len(frames)}")
    parts: list[memoryview] = [memoryview(b"")] * len(sizes)
    for frame, group in zip(frames, layout, strict=True):
        view = memoryview(frame)
        wanted = sizes[group[0]] if len(group) == 1 else sum(padded(sizes[position]) for position in group)
        if view.nbytes != wanted:
            raise WireError(f"expected a frame of {wanted} bytes, got {view.nbytes}")
        offset = 0
        for position in group:
            parts[position] = view[offset : offset + sizes[position]]
            offset += padded(sizes[position])
    return parts


def padded(nbytes: int, align: int = ALIGN) -> int:
    """Return ``nbytes``, rounded up to a multiple of ``align``."""
    return -(-nbytes // align) * align
