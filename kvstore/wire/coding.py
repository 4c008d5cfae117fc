"""Messages to frames of bytes and back: frame 0 is a msgpack list, the others are raw buffers, never copied.

Frame 0 is ``[VERSION, code, field, field, ...]``, with the fields of the message's class in order. The first field may
be a named tuple, which is a list of its own fields. Fields that many messages have alike travel packed, as the last
field. ``decode`` trusts nothing: every field passes the check that its class declares before a message exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

import msgpack

from kvstore.errors import UsageError, WireError
from kvstore.wire.fields import MAX_ITEMS, Check, Triple, same_length, shown, unpacked
from kvstore.wire.fields import Buffer as Buffer  # for every module that has a message with buffers

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # of typing, from Python 3.11 on; it says to type checkers what the decorator makes

    def dataclass_transform(**_options):
        return lambda decorator: decorator


VERSION = 10
MAX_HEADER = 16 << 20  # bytes of frame 0; the places of MAX_SEGMENTS segments, or 100,000 names, take less
MAX_FRAMES = 1 << 16

T = TypeVar("T")
_NO_NAMES: Mapping[str, str] = MappingProxyType({})

# ---- fields that many messages have alike
#
# All contributors push the same segments, round after round, and say the same of them, to the byte. So a class may have
# such fields travel packed, as one field of bytes. When the same bytes arrive again, the receiver reuses the fields of
# the first time. All messages that brought these bytes share them: nobody may change them.

ATTRIBUTE = "_shared"  # of a message that has come: its ``SharedFields``
MOST = 1024  # packed fields that are remembered
MOST_BYTES = 1 << 20  # of all these; as objects they take some ten times as much


class SharedFields:
    """What some bytes say. Messages that have the same object have the same fields.

    Args:
        packed: the bytes.
        values: of the fields, by name.
    """

    __slots__ = ("packed", "values")

    def __init__(self, packed: bytes, values: dict[str, Any]) -> None:
        self.packed = packed
        self.values = values


class SharedGroup:
    """The fields of a message class that travel together.

    Args:
        names: of the fields, in order.
        checks: of the fields.
        values: returns these fields of a message.
    """

    def __init__(self, names: Sequence[str], checks: Sequence[Check], values: Callable[[Any], Sequence[Any]]) -> None:
        self.names = names
        self._checks = checks
        self._values = values
        self._known: dict[bytes, SharedFields] = {}
        self._nbytes = 0

    def pack(self, message: Any) -> bytes:
        """Return the fields of ``message`` as they travel; of one that has come, as it has brought them."""
        brought: SharedFields | None = message.__dict__.get(ATTRIBUTE)
        packed: bytes = msgpack.packb(self._values(message)) if brought is None else brought.packed
        return packed

    def read(self, packed: Any) -> SharedFields:
        """Return what ``packed`` says; for the same bytes the same object, as long as it is remembered."""
        if type(packed) is bytes and (known := self._known.get(packed)) is not None:
            return known
        if type(packed) is not bytes:
            raise WireError(f"expected packed fields, got {shown(packed)}")
        values = unpacked(packed)
        if type(values) is not list or len(values) != len(self.names):
            raise WireError(f"expected a list of {len(self.names)} packed fields, got {shown(values)}")
        for name, check, value in zip(self.names, self._checks, values, strict=True):
            try:
                check(value)
            except WireError as exc:
                raise WireError(f"{name}: {exc}") from None
        made = SharedFields(packed, dict(zip(self.names, values, strict=True)))
        self._remember(made)
        return made

    def forget(self) -> None:
        """Remember nothing any more. What is in use comes again at once."""
        self._known = {}
        self._nbytes = 0

    def _remember(self, made: SharedFields) -> None:
        """Remember ``made``. What is remembered is bounded: a peer may send other bytes each time."""
        nbytes = len(made.packed)
        # All go at once. To find the oldest would cost each message of the usual kind, which comes again and again.
        if len(self._known) >= MOST or self._nbytes + nbytes > MOST_BYTES:
            self.forget()
        if nbytes <= MOST_BYTES:
            self._known[made.packed] = made
            self._nbytes += nbytes


class _Layout(NamedTuple):
    """The code and the fields of a message class."""

    code: int
    names: tuple[str, ...]  # of the fields in the header, in order, without those that are shared
    values: Callable[[Any], Sequence[Any]]  # returns these fields of a message
    first: Callable[[Any], Any] | None  # reads the first field if that is a named tuple; else None
    checks: tuple[Check, ...]  # of the fields; without the first if that is a named tuple
    buffers: bool  # whether frames follow the header
    require: Callable[[Any], None] | None  # checks a message as a whole; None if its class has no such check
    shared: SharedGroup | None  # the fields that travel packed; None if there are none


class _Described(NamedTuple):
    """What the decorator ``message`` says of a class."""

    code: int
    shared: Sequence[str]
    sent: Mapping[str, str]


class _Layouts(dict[type[Any], _Layout]):
    """The layouts of message classes, each worked out when its first message comes or goes.

    Python takes a millisecond for a class with its annotations and its ``__init__``. A process needs some ten of the
    120 classes, and paid for all of them each time that one started.
    """

    def __missing__(self, cls: type[Any]) -> _Layout:
        code, shared, sent = _DESCRIBED[cls]
        hints = get_type_hints(cls, include_extras=True)
        buffers = hints.pop("buffers", None) is not None
        checks = {name: hint.__metadata__[0] for name, hint in hints.items()}
        own = tuple(name for name in checks if name not in shared)
        own_checks = [checks[name] for name in own]
        first = own_checks.pop(0).read if own_checks and isinstance(own_checks[0], Triple) else None
        require = getattr(cls, "__post_init__", None)
        group = SharedGroup(shared, [checks[name] for name in shared], _getter(shared)) if shared else None
        values = _getter([sent.get(name, name) for name in own])
        # Two threads may come here at once: both then use the layout that was there first.
        return self.setdefault(cls, _Layout(code, own, values, first, tuple(own_checks), buffers, require, group))


_BY_CODE: dict[int, type[Any]] = {}
_DESCRIBED: dict[type[Any], _Described] = {}
_LAYOUT = _Layouts()
MESSAGES: Mapping[int, type[Any]] = MappingProxyType(_BY_CODE)  # all message classes, by code


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass whose ``__init__`` is made when the first object is; its base is ``Message``."""
    made: type[T] = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    setattr(made, "__init__", _make_init_first)  # noqa: B010 # of each class: that of its base may be made already
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(
    code: int, shared: Sequence[str] = (), sent: Mapping[str, str] = _NO_NAMES, parallel: Sequence[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Class decorator: a class with ``Annotated[type, check]`` fields becomes message ``code``, a frozen dataclass.

    A field named ``buffers`` takes the frames after the header and is not part of it.

    Args:
        code: of the class.
        shared: the fields that many messages have alike; see ``kvstore.wire.coding``.
        sent: for fields that have a shorter form to travel in, the attribute that has it. The class's ``__post_init__``
            brings the long form back.
        parallel: fields that are lists of one length, which is all that must hold between the fields.
    """

    def register(cls: type[T]) -> type[T]:
        if parallel:
            lists = attrgetter(*parallel)
            setattr(cls, "__post_init__", lambda made: same_length(*lists(made)))  # noqa: B010 # which no base has
        cls = frozen(cls)
        if code in _BY_CODE:
            raise AssertionError(f"message code {code} is taken by {_BY_CODE[code].__name__}")
        _BY_CODE[code], _DESCRIBED[cls] = cls, _Described(code, shared, sent)
        return cls

    return register


def _make_init_first(self: Any, *args: Any, **fields: Any) -> None:
    cls = type(self)
    cls.__init__ = _init_of(cls)
    self.__init__(*args, **fields)


def _init_of(cls: type[Any]) -> Callable[..., None]:
    """Return an ``__init__`` that fills ``__dict__``: a frozen dataclass's own takes three times as long."""
    given: dict[str, Any] = {}
    parameters, lines = [], []
    for field in dataclasses.fields(cls):
        name = field.name
        given[f"{name}_"] = field.default
        parameters.append(name)
        if field.default_factory is not dataclasses.MISSING:
            given[f"make_{name}"] = field.default_factory
            lines.append(f"if {name} is {name}_: {name} = make_{name}()")
        if field.default_factory is not dataclasses.MISSING or field.default is not dataclasses.MISSING:
            parameters[-1] += f"={name}_"
        lines.append(f"fields[{name!r}] = {name}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n    ".join(["fields = self.__dict__", *lines])
    exec(f"def __init__(self, {', '.join(parameters)}):\n    {body}", given)  # noqa: S102 (of names in our source)
    made: Callable[..., None] = given["__init__"]
    return made


def forget_shared() -> None:
    """Forget the fields that messages had in common. A store that closes calls it: its lists need not stay."""
    for layout in list(_LAYOUT.values()):
        if layout.shared is not None:
            layout.shared.forget()


def field_names(cls: type[Any]) -> list[str]:
    """Return the names of the fields that the header of a message class has, in order; those that are shared last."""
    layout = _LAYOUT[cls]
    return [*layout.names, *(() if layout.shared is None else layout.shared.names)]


def header_of(cls: type[Any], values: Sequence[Any]) -> list[Any]:
    """Return the header of a message of class ``cls`` whose fields, in the order of ``field_names``, are ``values``."""
    layout = _LAYOUT[cls]
    own = len(layout.names)
    packed = [] if layout.shared is None else [msgpack.packb(values[own:])]
    return [VERSION, _DESCRIBED[cls].code, *values[:own], *packed]


def encode(msg: Any) -> list[Buffer]:
    """Return the frames of ``msg``. It may be too long for its receiver; see ``require_short``."""
    cls = type(msg)
    layout = _LAYOUT[cls]
    if layout.shared is None:
        header = msgpack.packb((VERSION, layout.code, *layout.values(msg)))
    else:
        header = msgpack.packb((VERSION, layout.code, *layout.values(msg), layout.shared.pack(msg)))
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
    _, names, _, first, checks, buffers, require, shared = _LAYOUT[cls]
    del header[:2]
    if len(header) != len(names) + (shared is not None):
        raise WireError(f"{cls.__name__} has {len(names) + (shared is not None)} fields, got {len(header)}")
    # The fields are read only after the checks of version and class: those of another version mean something else.
    made = object.__new__(cls)
    fields = made.__dict__
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
    if len(names) > 1:
        return attrgetter(*names)
    return lambda msg: [getattr(msg, name) for name in names]  # attrgetter takes no list of none, and unpacks one


# ---- several arrays, of any dtypes, in the frames of one message
#
# Both ends compute the same layout from the sizes.

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
