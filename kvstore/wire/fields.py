"""Checks for the fields of messages: a value from the wire is used only after its check has passed.

A check is a function of one value that returns nothing, or raises ``WireError``. Most functions here return checks.
"""

from __future__ import annotations

import gc
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_type_hints

import msgpack

from kvstore.errors import WireError
from kvstore.job.settings import MAX_NODES
from kvstore.rule import AGGREGATE, LATE, MAX_STALENESS, MODES
from kvstore.spec import ITEMSIZE, MAX_DIMS, MAX_ELEMENTS, MAX_KEY_CHARS, kind_of
from kvstore.table import MAX_ROW

Check: TypeAlias = Callable[[Any], None]
T = TypeVar("T")

MAX_ITEMS = 1 << 20
MAX_TEXT = 1 << 16
MAX_HYPER_TEXT = 64  # characters, and numbers, of one hyper-parameter
MAX_HYPER_LIST = 8


def shown(value: Any) -> str:
    """Render ``value`` for an error message; of a list or dict, which may be deep or huge, only its type."""
    if type(value) is str:
        return f"str {value[:40]!r}"
    return f"{type(value).__name__} {value!r}" if type(value) in (int, float, bool) else type(value).__name__


def _refuse(value: Any, wanted: str) -> WireError:
    return WireError(f"expected {wanted}, got {shown(value)}")


def integer(low: int = 0, high: int = 2**63 - 1) -> Check:
    """An int (never a bool) from ``low`` to ``high``."""

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(value, f"an integer from {low} to {high}")

    return check


def text(longest: int = MAX_TEXT) -> Check:
    """A str of at most ``longest`` characters."""

    def check(value: Any) -> None:
        if type(value) is not str or len(value) > longest:
            raise _refuse(value, f"a text of at most {longest} characters")

    return check


def raw(length: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not bytes or len(value) != length:
            raise _refuse(value, f"{length} bytes")

    return check


def choice(*valid: str) -> Check:
    def check(value: Any) -> None:
        if type(value) is not str or value not in valid:
            raise _refuse(value, f"one of {', '.join(valid)}")

    return check


def flag(value: Any) -> None:
    if type(value) is not bool:
        raise _refuse(value, "a bool")


def number(value: Any) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _refuse(value, "a finite number")


def weight(value: Any) -> None:
    number(value)
    if value < 0:
        raise _refuse(value, "a number of at least 0")


def key(value: Any) -> None:
    """A key of a store: a short str, or any int that msgpack can represent."""
    if type(value) is int:
        return
    if type(value) is not str or not 0 < len(value) <= MAX_KEY_CHARS:
        raise _refuse(value, f"a key: an int, or a str of 1 to {MAX_KEY_CHARS} characters")


def shape(value: Any) -> None:
    if type(value) is not list or len(value) > MAX_DIMS:
        raise _refuse(value, f"a shape of at most {MAX_DIMS} dimensions")
    if any(type(n) is not int or n < 0 for n in value) or math.prod(value) > MAX_ELEMENTS:
        raise _refuse(value, f"a shape of at most {MAX_ELEMENTS} elements")


dtype = choice(*ITEMSIZE)


def optional(check: Check) -> Check:
    """``None``, or what ``check`` allows."""

    def checked(value: Any) -> None:
        if value is not None:
            check(value)

    return checked


def list_of(check: Check, longest: int = MAX_ITEMS) -> Check:
    """A list of at most ``longest`` values, each of which passes ``check``."""

    def checked(value: Any) -> None:
        if type(value) is not list or len(value) > longest:
            raise _refuse(value, f"a list of at most {longest}")
        for item in value:
            check(item)

    return checked


def tuple_of(*checks: Check) -> Check:
    """A list of exactly ``len(checks)`` values, each of which passes its own check."""

    def checked(value: Any) -> None:
        if type(value) is not list or len(value) != len(checks):
            raise _refuse(value, f"a list of {len(checks)}")
        for item, check in zip(value, checks, strict=True):
            check(item)

    return checked


def keys(value: Any) -> None:
    """A list of keys, checked in bulk: a message may hold 100,000."""
    if type(value) is not list or len(value) > MAX_ITEMS:
        raise _refuse(value, f"a list of at most {MAX_ITEMS} keys")
    if kind_of(value) is None:
        for item in value:
            key(item)


def integers(low: int = 0, high: int = 2**63 - 1) -> Check:
    """A list of ints (never bools) from ``low`` to ``high``, checked in bulk."""

    def check(value: Any) -> None:
        if type(value) is not list or len(value) > MAX_ITEMS:
            raise _refuse(value, f"a list of at most {MAX_ITEMS} integers")
        if value and not (_are_ints(value) and low <= min(value) and max(value) <= high):
            raise _refuse(value, f"a list of integers from {low} to {high}")

    return check


def _are_ints(values: list[Any]) -> bool:
    """Return whether all of ``values``, of which there are some, are ints, and none is a bool."""
    return type(values[0]) is int if len(values) == 1 else set(map(type, values)) == _INT


_INT = {int}
clocks = integers(0, 2**62 - 1)  # the numbers of pushes
_numbers = integers(0, 2**32 - 1)


def rising(low: int, high: int) -> Check:
    """Return a check for lists of integers from ``low`` to ``high``, each higher than the one before."""
    checked = integers(low, high)

    def check(value: Any) -> None:
        plain = type(value) is list and 1 < len(value) <= MAX_ITEMS and _are_ints(value)
        if not (plain and low <= value[0] and value[-1] <= high):
            checked(value)
        if len(value) > 1 and any(map(operator.ge, value, itertools.islice(value, 1, None))):
            raise _refuse(value, "a list of integers that rise")

    return check


def ids(value: Any) -> None:
    _numbers(value)
    if len(value) > 1 and len(set(value)) != len(value):
        raise _refuse(value, "distinct segment ids")


def hyperparameter(value: Any) -> None:
    """A hyper-parameter: a number, a bool, None, a short text, or a short list of numbers."""
    if value is None or type(value) is bool:
        return
    if type(value) is str:
        text(MAX_HYPER_TEXT)(value)
    elif type(value) is list:
        list_of(optional(number), MAX_HYPER_LIST)(value)
    else:
        number(value)


class Triple(Generic[T]):
    """A list of three that stands for a named tuple whose fields are ``Annotated[type, check]``.

    Args:
        kind: the class of the named tuple. Its first field may be a ``Triple``, too.
    """

    def __init__(self, kind: type[T]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        # checks a list, and returns the named tuple
        self.read: Callable[[Any], T] = _reader(kind, tuple(hints), [hint.__metadata__[0] for hint in hints.values()])


MOST_KNOWN = 1 << 14  # named tuples of each class; of members of a job there are fewer


def _reader(kind: Any, names: tuple[str, ...], checks: Sequence[Any]) -> Callable[[Any], Any]:
    head, second, third = checks
    nested = isinstance(head, Triple)
    first = head.read if nested else head
    new = tuple.__new__
    known: dict[Any, Any] = {}  # what has been checked, where each of a few comes again and again

    def read(value: Any) -> Any:  # of each message: without loops it takes half as long
        if type(value) is not list or len(value) != 3:
            raise _refuse(value, f"a list of {', '.join(names)}")
        one, two, three = value
        exact = type(one) is str and type(two) is int and type(three) is int  # else True would be taken for 1
        if exact and (made := known.get((one, two, three))) is not None:
            return made
        name = names[0]
        try:
            made = first(one)
            name = names[1]
            second(two)
            name = names[2]
            third(three)
        except WireError as exc:
            raise WireError(f"{name}: {exc}") from None
        if nested:
            return new(kind, (made, two, three))
        made = new(kind, value)
        if exact:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[made] = made
        return made

    return read


# ---- msgpack without what could do harm: no extensions, no maps, no list that is longer than any field's

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


# ---- the types of fields that several messages have, each with its check

MAX_STORES = 256  # of one job
MAX_HOST = 255  # characters of a host's name
MAX_PID = 2**31 - 1

Role = Annotated[
    str, choice("worker", "server", "standby", "aggregator", "scheduler", "launcher", "reader", "observer")
]
Rank = Annotated[int, integer(-1, MAX_NODES)]
Ranks = Annotated[list[int], rising(0, MAX_NODES)]  # of workers
# Of rounds that members note for the job's trace, the first and the last; both 0 for none.
TracedRounds = Annotated[list[int], tuple_of(integer(0, 2**62 - 1), integer(0, 2**62 - 1))]
Seq = Annotated[int, integer()]
Host = Annotated[str, text(MAX_HOST)]
Pid = Annotated[int, integer(0, MAX_PID)]
Store = Annotated[int, integer(0, MAX_STORES - 1)]
Text = Annotated[str, text()]
Keys = Annotated[list[Any], keys]
Ids = Annotated[list[int], ids]
Clocks = Annotated[list[int], clocks]
Kinds = Annotated[list[int], integers()]  # for each array, the place of its shape in a list of shapes
Dtypes = Annotated[list[str], list_of(dtype)]
Shapes = Annotated[list[list[int]], list_of(shape)]
Lineage = Annotated[int, integer(0, 2**62)]
_at = tuple_of(integer(0, 2**62), integer(0, 2**62 - 1))
At = Annotated[Sequence[int], _at]  # a lineage and a number; see ``kvstore.lineage.Version``
MaybeAt = Annotated["Sequence[int] | None", optional(_at)]
Number = Annotated["float | None", optional(number)]
Weight = Annotated["float | None", optional(weight)]
Pairs = Annotated[list[list[Any]], list_of(tuple_of(text(64), hyperparameter), 64)]
Mults = Annotated[list[list[Any]], list_of(tuple_of(key, number))]

CodecDescription = Annotated[
    "list[Any] | None",
    optional(tuple_of(text(16), list_of(tuple_of(text(32), hyperparameter), 16))),
]  # a type of compression and its numbers; see ``kvstore.codecs``
Lengths = Annotated[list[int], integers(0, 1 << 40)]  # bytes of each payload
SegmentCounts = Annotated[list[int], integers(1, 1 << 20)]  # of how many segments each payload is; empty: of one
Owners = Annotated[list[int], integers(0, 2**32)]  # of states: the segment of each, which may have several
Names = Annotated[list[str], list_of(text(64))]

# The fields of a rule that not every value of their type suits.
Mode = Annotated[str, choice(*MODES)]
Staleness = Annotated["int | None", optional(integer(0, MAX_STALENESS))]
Quorum = Annotated["int | None", optional(integer(1, MAX_NODES))]
Late = Annotated[str, choice(*LATE)]
Aggregation = Annotated[str, choice(*AGGREGATE)]

MAX_PRIORITY = 2**31
Priority = Annotated["int | None", optional(integer(-MAX_PRIORITY, MAX_PRIORITY))]

MAX_GROUPS = 4096
Groups = Annotated[
    list[list[Any]],
    list_of(tuple_of(list_of(key), list_of(tuple_of(text(64), hyperparameter), 64)), MAX_GROUPS),
]  # keys, and their own hyper-parameters
Changes = Annotated[
    list[list[Any]],
    list_of(tuple_of(integer(0, MAX_GROUPS), text(64), hyperparameter), 1 << 16),
]  # hyper-parameters: number of the group (0: all keys), name, value

# Ranges of arrays of which a message brings some rows: how many segments each is, its first element in the array, and
# the elements of a row.
RowRuns = Annotated[list[list[int]], list_of(tuple_of(integer(1, 1 << 20), integer(0, 2**48), integer(1, 2**48)))]

MAX_ROWS = 1 << 32  # of one table in one message
Counts = Annotated[list[int], integers(0, MAX_ROWS)]
Count = Annotated[int, integer(0, MAX_ROWS)]
SegmentId = Annotated[int, integer(0, 2**32 - 1)]
Wide = Annotated[bool, flag]
Updates = Annotated[int, integer(0, 1 << 61)]  # how many a table has had
MaybeUpdates = Annotated["int | None", optional(integer(0, 1 << 61))]
Columns = Annotated[list[int], integers(0, MAX_ROW)]  # numbers that a row has of each of its parts


def same_length(*lists: Sequence[Any]) -> None:
    """Raise ``WireError`` unless all ``lists``, which describe the same things, have one length."""
    lengths = list(map(len, lists))
    if lengths and lengths.count(lengths[0]) < len(lengths):
        raise WireError(f"expected lists of one length, got different lengths: {', '.join(map(str, lengths))}")
