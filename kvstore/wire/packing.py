"""msgpack without what could do harm: no extensions, no maps, and no list that is longer than any field's."""

from __future__ import annotations

import gc
from typing import Any, TypeAlias

import msgpack

from kvstore.errors import WireError
from kvstore.wire.fields import MAX_ITEMS

Buffer: TypeAlias = "bytes | bytearray | memoryview"
_MANY = 1 << 18  # bytes of so many objects that the garbage collector is paused while they are made


def unpacked(frame: Buffer) -> Any:
    """Return the object that ``frame`` has; a container that is longer than any field's is refused before it is made.

    Raises:
        WireError: it is not msgpack, or has what no message has.
    """
    pause = len(frame) >= _MANY and gc.isenabled()  # else it scans all objects again and again as they grow in number
    if pause:
        gc.disable()
    try:
        return msgpack.unpackb(frame, ext_hook=_no_extensions, max_array_len=MAX_ITEMS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as exc:
        raise WireError(f"the header is not msgpack: {exc}") from None
    finally:
        if pause:
            gc.enable()


def _no_extensions(code: int, _data: bytes) -> Any:
    raise WireError(f"the header has a msgpack extension ({code})")
