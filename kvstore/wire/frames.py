"""Messages to frames of bytes and back: frame 0 is a msgpack list, the others are raw buffers, never copied.

Frame 0 is ``[VERSION, code, field, field, ...]``, with the fields of the message's class in order. The first field may
be a named tuple, which is a list of its own fields. Fields that many messages have alike travel packed, as the last
field; see ``shared``. ``decode`` trusts nothing: every field passes the check that its class declares before a message
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgpack

from kvstore.errors import UsageError, WireError
from kvstore.wire.fields import MAX_ITEMS, Check, Triple, shown
from kvstore.wire.packing import Buffer as Buffer
from kvstore.wire.packing import unpacked
from kvstore.wire.shared import ATTRIBUTE, SharedGroup

VERSION = 9
MAX_HEADER = 16 << 20  # bytes of frame 0; the places of MAX_SEGMENTS segments, or 100,000 names, take less
MAX_FRAMES = 1 << 16

T = TypeVar("T")
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


class _Layout(NamedTuple):
    """The fields of a message class.

    Attributes:
        names: of the fields in the header, in order, without those that are shared.
        values: returns these fields of a message.
        first: reads the first field if that is a named tuple; else None.
        checks: of the fields; without the first if that is a named tuple.
        buffers: whether frames follow the header.
        require: checks a message as a whole; None if its class has no such check.
        shared: the fields that travel packed; None if there are none.
    """

    names: tuple[str, ...]
    values: Callable[[Any], Sequence[Any]]
    first: Callable[[Any], Any] | None
    checks: tuple[Check, ...]
    buffers: bool
    require: Callable[[Any], None] | None
    shared: SharedGroup | None


_BY_CODE: dict[int, type[Any]] = {}
_CODE: dict[type[Any], int] = {}
_LAYOUT: dict[type[Any], _Layout] = {}
MESSAGES: Mapping[int, type[Any]] = MappingProxyType(_BY_CODE)  # all message classes, by code


def message(code: int, shared: Sequence[str] = (), sent: Mapping[str, str] = _NO_NAMES) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass whose fields are ``Annotated[type, check]`` becomes message ``code``.

    A field named ``buffers`` takes the frames after the header and is not part of it.

    Args:
        code: of the class.
        shared: the fields that many messages have alike; see ``kvstore.wire.shared``.
        sent: for fields that have a shorter form to travel in, the attribute that has it. The class's ``__post_init__``
            brings the long form back.
    """

    def register(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls, include_extras=True)
        buffers = hints.pop("buffers", None) is not None
        checks = {name: hint.__metadata__[0] for name, hint in hints.items()}
        own = tuple(name for name in checks if name not in shared)
        own_checks = [checks[name] for name in own]
        first = own_checks.pop(0).read if own_checks and isinstance(own_checks[0], Triple) else None
        require = getattr(cls, "__post_init__", None)
        group = SharedGroup(shared, [checks[name] for name in shared], _getter(shared)) if shared else None
        values = _getter([sent.get(name, name) for name in own])
        _LAYOUT[cls] = _Layout(own, values, first, tuple(own_checks), buffers, require, group)
        if code in _BY_CODE:
            raise AssertionError(f"message code {code} is taken by {_BY_CODE[code].__name__}")
        _BY_CODE[code], _CODE[cls] = cls, code
        return cls

    return register


def field_names(cls: type[Any]) -> list[str]:
    """Return the names of the fields that the header of a message class has, in order; those that are shared last."""
    layout = _LAYOUT[cls]
    return [*layout.names, *(() if layout.shared is None else layout.shared.names)]


def header_of(cls: type[Any], values: Sequence[Any]) -> list[Any]:
    """Return the header of a message of class ``cls`` whose fields, in the order of ``field_names``, are ``values``.

    The values need not pass any check.
    """
    layout = _LAYOUT[cls]
    own = len(layout.names)
    packed = [] if layout.shared is None else [msgpack.packb(values[own:])]
    return [VERSION, _CODE[cls], *values[:own], *packed]


def encode(msg: Any) -> list[Buffer]:
    """Return the frames of ``msg``. It may be too long for its receiver; see ``require_short``."""
    cls = type(msg)
    layout = _LAYOUT[cls]
    if layout.shared is None:
        header = msgpack.packb((VERSION, _CODE[cls], *layout.values(msg)))
    else:
        header = msgpack.packb((VERSION, _CODE[cls], *layout.values(msg), layout.shared.pack(msg)))
    return [header, *msg.buffers] if layout.buffers else [header]


def require_short(msg: Any, frames: Sequence[Buffer]) -> None:
    """Raise ``UsageError`` if receivers would drop ``msg``, whose frames these are: sooner than at its deadline."""
    if len(frames) > MAX_FRAMES or len(frames[0]) > MAX_HEADER or (len(frames[0]) > MAX_ITEMS and _overlong(msg)):
        raise UsageError("so many keys, or such long ones, do not fit into one message; use fewer at once")


def _overlong(msg: Any) -> bool:
    """Whether a field has more items than any may have."""
    values = [getattr(msg, name) for name in field_names(type(msg))]
    return any(isinstance(value, list) and len(value) > MAX_ITEMS for value in values)


def decode(frames: Sequence[Buffer]) -> Any:
    """Return the message of ``frames``; its buffers are views of them.

    Raises:
        WireError: too few or many frames, no msgpack, another version, an unknown code, or wrong fields.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"expected 1 to {MAX_FRAMES} frames, got {len(frames)}")
    if len(frames[0]) > MAX_HEADER:
        raise WireError(f"expected a header of at most {MAX_HEADER} bytes, got {len(frames[0])}")
    header = unpacked(frames[0])
    if type(header) is not list or len(header) < 2:
        raise WireError("expected a header that is a list of version, code and fields")
    if header[0] != VERSION or type(header[0]) is not int:
        raise WireError(f"expected protocol version {VERSION}, got {shown(header[0])}")
    cls = _BY_CODE.get(header[1]) if type(header[1]) is int else None
    if cls is None:
        raise WireError(f"unknown message code {shown(header[1])}")
    names, _, first, checks, buffers, require, shared = _LAYOUT[cls]
    del header[:2]
    if len(header) != len(names) + (shared is not None):
        raise WireError(f"{cls.__name__} has {len(names) + (shared is not None)} fields, got {len(header)}")
    made = object.__new__(cls)
    fields = made.__dict__  # filled here: the __init__ of a frozen class takes three times as long
    if shared is not None:
        try:
            fields[ATTRIBUTE] = brought = shared.read(header.pop())
        except WireError as exc:
            raise WireError(f"{cls.__name__}.{exc}") from None
        fields.update(brought.values)
    values = iter(header)
    try:
        if first is not None:
            header[0] = first(next(values))
        for check, value in zip(checks, values, strict=True):
            check(value)
    except WireError as exc:
        raise WireError(f"{cls.__name__}.{names[-1 - len(list(values))]}: {exc}") from None
    if len(frames) > 1 and not buffers:
        raise WireError(f"{cls.__name__} has no buffers, got {len(frames) - 1}")
    fields.update(zip(names, header, strict=True))
    if buffers:
        fields["buffers"] = list(frames[1:])
    if require is not None:
        require(made)
    return made


def _getter(names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    """Return what reads the fields ``names`` of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda msg: [getattr(msg, name) for name in names]  # attrgetter takes no list of none, and unpacks one
