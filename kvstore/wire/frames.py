"""Bytes to messages and back: frame 0 is a msgpack list, the frames after it are raw buffers, never copied.

Frame 0 is ``[VERSION, code, field, field, ...]`` with the fields of the message's class in order; a named tuple is a
list of its fields. ``decode`` trusts
nothing: every field passes the check its class declares before a message exists.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgpack

from kvstore.errors import UsageError, WireError
from kvstore.wire.fields import MAX_ITEMS, Check, Record, shown

VERSION = 2
MAX_HEADER = 16 << 20  # bytes: what says where MAX_SEGMENTS segments are, or names 100,000 keys, takes less
MAX_FRAMES = 1 << 16
_MANY = 1 << 18  # bytes of a header that may be so many objects that the garbage collector should not look meanwhile

Buffer: TypeAlias = "bytes | bytearray | memoryview"
T = TypeVar("T")

_BY_CODE: dict[int, type[Any]] = {}
_CODE: dict[type[Any], int] = {}
_FIELDS: dict[type[Any], tuple[tuple[str, Check], ...]] = {}
_RECORDS: dict[type[Any], tuple[tuple[int, Record[Any]], ...]] = {}  # those of the fields, by place


def message(code: int) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass whose fields are ``Annotated[type, check]`` becomes message ``code``.

    A field named ``buffers`` takes the frames after the header and is not part of it.
    """

    def register(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls, include_extras=True)
        hints.pop("buffers", None)
        fields = tuple((name, hint.__metadata__[0]) for name, hint in hints.items())
        _FIELDS[cls] = fields
        checks = enumerate(check for _, check in fields)
        _RECORDS[cls] = tuple((place, check) for place, check in checks if isinstance(check, Record))
        if code in _BY_CODE:
            raise AssertionError(f"message code {code} is taken by {_BY_CODE[code].__name__}")
        _BY_CODE[code], _CODE[cls] = cls, code
        return cls

    return register


def encode(msg: Any) -> list[Buffer]:
    """Return the frames of ``msg``; see ``require_short``."""
    cls = type(msg)
    header = [VERSION, _CODE[cls], *(getattr(msg, name) for name, _ in _FIELDS[cls])]
    return [msgpack.packb(header), *getattr(msg, "buffers", ())]


def require_short(msg: Any, frames: Sequence[Buffer]) -> None:
    """Raise ``UsageError`` if no peer would take ``msg``, whose frames these are: better now than at its deadline."""
    if len(frames) > MAX_FRAMES or len(frames[0]) > MAX_HEADER or (len(frames[0]) > MAX_ITEMS and _overlong(msg)):
        raise UsageError("so many keys, or so long names, do not fit into one message; use fewer at once")


def _overlong(msg: Any) -> bool:
    """Whether a field has more items than any may have; a header that has, has more bytes than that."""
    values = (getattr(msg, name) for name, _ in _FIELDS[type(msg)])
    return any(isinstance(value, list) and len(value) > MAX_ITEMS for value in values)


def decode(frames: Sequence[Buffer]) -> Any:
    """Return the message that ``frames`` hold; its buffers are views of theirs.

    Raises:
        WireError: they hold none: too short, too long, not msgpack, another version, an unknown code, wrong fields.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message of {len(frames)} frames")
    if len(frames[0]) > MAX_HEADER:
        raise WireError(f"a header of {len(frames[0])} bytes")
    try:
        header = _unpacked(frames[0])
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as exc:
        raise WireError(f"a header that is not msgpack: {exc}") from None
    if type(header) is not list or len(header) < 2:
        raise WireError("a header that is not a list of version, code and fields")
    if header[0] != VERSION or type(header[0]) is not int:
        raise WireError(f"protocol version {shown(header[0])}; this is version {VERSION}")
    cls = _BY_CODE.get(header[1]) if type(header[1]) is int else None
    if cls is None:
        raise WireError(f"unknown message code {shown(header[1])}")
    fields, values = _FIELDS[cls], header[2:]
    if len(values) != len(fields):
        raise WireError(f"{cls.__name__} has {len(fields)} fields, not {len(values)}")
    for (name, check), value in zip(fields, values, strict=True):
        try:
            check(value)
        except WireError as exc:
            raise WireError(f"{cls.__name__}.{name}: {exc}") from None
    for place, record in _RECORDS[cls]:
        values[place] = record.make(values[place])
    if "buffers" in cls.__dataclass_fields__:
        return cls(*values, buffers=list(frames[1:]))
    if len(frames) > 1:
        raise WireError(f"{cls.__name__} carries no buffers, but {len(frames) - 1} came")
    return cls(*values)


def _unpacked(frame: Buffer) -> Any:
    """Return what a header says; a container that is longer than any field's costs nothing."""
    pause = len(frame) >= _MANY and gc.isenabled()  # else it goes through all objects again as they become more
    if pause:
        gc.disable()
    try:
        return msgpack.unpackb(frame, ext_hook=_no_extensions, max_array_len=MAX_ITEMS, max_map_len=0, max_ext_len=0)
    finally:
        if pause:
            gc.enable()


def _no_extensions(code: int, _data: bytes) -> Any:
    raise WireError(f"a msgpack extension ({code})")
