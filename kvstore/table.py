"""What a table of rows is: how wide a row is, how it begins, when it is made and when it goes. Needs no numpy.

A table is a value whose rows are pushed and pulled by their ids. One with a shape has all its rows from the start. One
with only a ``dim`` grows: the first admitted push of an id makes its row.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.dynamo import outside_graphs
from kvstore.errors import UsageError, choices
from kvstore.plain import integer, scalar
from kvstore.spec import ITEMSIZE, MAX_ELEMENTS, Key, Spec, as_shape, check_key, sum_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")
INITS = ("zeros", "constant", "uniform", "normal")
CODECS = ("none", "fp16", "bf16", "int8")
CAPACITY_BY = ("age", "count")
MAX_ROW = 1 << 20  # elements
MAX_SEED = 2**63 - 1
MAX_EVICTIONS = 8
OWN = 9  # fields of a description that are of the table itself; then comes its parameter, if it has one


@outside_graphs
@dataclass(frozen=True)
class MinCount:
    """Admission: an id gets a row when it has been pushed in this many rounds (in async stores, by so many pushes).

    Args:
        count: at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", integer("MinCount(count)", self.count, 1, 1 << 31))


@outside_graphs
@dataclass(frozen=True)
class Probability:
    """Admission: each push of an id without a row makes it with this probability; the draw is a hash, not a clock.

    Args:
        probability: above 0, and at most 1.
    """

    probability: float

    def __post_init__(self) -> None:
        probability = scalar(self.probability)
        if not isinstance(probability, int | float) or not 0 < probability <= 1:
            raise UsageError(f"Probability(probability={probability!r}) must be above 0 and at most 1")
        object.__setattr__(self, "probability", probability)


@outside_graphs
@dataclass(frozen=True)
class Unseen:
    """Eviction: a row goes that no push has touched for more than this many rounds (in async stores, pushes).

    Args:
        rounds: at least 1.
    """

    rounds: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", integer("Unseen(rounds)", self.rounds, 1, 1 << 62))


@outside_graphs
@dataclass(frozen=True)
class Capacity:
    """Eviction: a table has at most this many rows; those go that were touched longest ago, or least often.

    The limit is of the whole table: each server keeps its part of it, which is a row at least.

    Args:
        rows: at least 1.
        by: ``age`` or ``count``.
    """

    rows: int
    by: str = "age"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", integer("Capacity(rows)", self.rows, 1, 1 << 48))
        if self.by not in CAPACITY_BY:
            raise UsageError(f"Capacity(by={self.by!r}) must be {choices(CAPACITY_BY)}")


Admission: TypeAlias = "MinCount | Probability"
Eviction: TypeAlias = "Unseen | Capacity"


@outside_graphs
@dataclass(frozen=True, init=False)
class Table:
    """A table of rows, for ``init``: all its rows are there from the start, or pushes make them.

    Args:
        shape: of a table whose rows are all there: the number of rows, then the shape of one row.
        dim: of a table that grows: the length of a row, or its shape.

    Attributes:
        rows: how many rows there are; None if the table grows.
        row: the shape of one row.
        dtype: of all rows: ``float16``, ``bfloat16``, ``float32`` or ``float64``. Those of half precision are summed in
            float32, and an optimizer keeps and updates a float32 copy of each row.
        init: how a row begins: ``zeros``, ``constant`` (``scale``), ``uniform`` (from ``-scale`` to ``scale``) or
            ``normal`` (of standard deviation ``scale``). It is a pure function of seed, id and column.
        scale: see ``init``.
        seed: of random values, and of chance in admission.
        admit: which ids of a growing table get rows; None for all.
        evict: which rows of a growing table go, and when.
        codec: how rows and gradients travel: ``none``, ``fp16``, ``bf16``, or ``int8`` with a scale for each row.
        parameter: the key of an array of the same store whose rows these are from now on. What is said by key of that
            array is said of the table: multipliers, groups, exports, messages. ``Trainer`` makes such tables of
            parameters with sparse gradients. None: the table is itself what its key says.
    """

    rows: int | None
    row: tuple[int, ...]
    dtype: str
    init: str
    scale: float
    seed: int
    admit: Admission | None
    evict: tuple[Eviction, ...]
    codec: str
    parameter: Key | None

    def __init__(
        self,
        shape: Any = None,
        dim: Any = None,
        dtype: Any = "float32",
        init: str = "zeros",
        scale: float = 1.0,
        seed: int = 0,
        admit: Admission | None = None,
        evict: Eviction | Iterable[Eviction] = (),
        codec: str | None = None,
        parameter: Key | None = None,
    ) -> None:
        """Describe a table; see the class for the arguments.

        Raises:
            UsageError: there can be no such table. The message says what is valid.
        """
        if (shape is None) == (dim is None):
            raise UsageError("a table has a shape, (rows, columns), or grows and has a dim alone: give one of them")
        rows: int | None = None
        if shape is None:
            row = as_shape(dim)
        else:
            whole = as_shape(shape)
            if len(whole) < 2:
                raise UsageError(f"the shape of a table is (rows, columns) at least, not {whole}")
            rows, row = whole[0], whole[1:]
        if not row or not 0 < math.prod(row) <= MAX_ROW:
            raise UsageError(f"a row of shape {row} cannot be stored: it must have 1 to {MAX_ROW} elements")
        dtype = str(dtype).rpartition(".")[2] if not isinstance(dtype, type) else dtype.__name__
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype} of a table must be {choices(DTYPES)}")
        if init not in INITS:
            raise UsageError(f"init={init!r} of a table must be one of {choices(INITS)}")
        scale = scalar(scale)
        # Compared, for isfinite raises OverflowError for an integer that no float is as large as.
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= sys.float_info.max:
            raise UsageError(f"scale={scale!r:.40} of a table must be a finite number")
        evictions = (evict,) if isinstance(evict, Unseen | Capacity) else tuple(evict)
        if not all(isinstance(each, Unseen | Capacity) for each in evictions) or len(evictions) > MAX_EVICTIONS:
            raise UsageError(f"evict={evict!r} must be Unseen(rounds), Capacity(rows, by), or a short list of these")
        if admit is not None and not isinstance(admit, MinCount | Probability):
            raise UsageError(f"admit={admit!r} must be MinCount(count), Probability(probability) or None")
        if rows is not None and (admit is not None or evictions):
            raise UsageError("a table with a shape keeps all its rows: admit and evict are for one with a dim alone")
        codec = "none" if codec is None else codec
        if codec not in CODECS:
            raise UsageError(f"codec={codec!r} of a table must be one of {choices(CODECS)}")
        try:
            seed = operator.index(seed)
        except TypeError:
            raise UsageError(f"seed={seed!r} of a table must be an integer") from None
        seed = integer("seed", seed, 0, MAX_SEED)
        for name, value in (
            ("rows", rows),
            ("row", row),
            ("dtype", dtype),
            ("init", init),
            ("scale", float(scale)),
            ("seed", seed),
            ("admit", admit),
            ("evict", evictions),
            ("codec", codec),
            ("parameter", None if parameter is None else check_key(parameter)),
        ):
            object.__setattr__(self, name, value)

    @property
    def grows(self) -> bool:
        """Whether pushes make rows."""
        return self.rows is None

    def name(self, key: Key) -> Key:
        """Return the name by which users know the table ``key``: what settings and messages call it."""
        return key if self.parameter is None else self.parameter

    @property
    def alone(self) -> Table:
        """The table as a save of it has it: without the array that its rows belong to."""
        return self if self.parameter is None else Table.of(self.described[:OWN])

    @property
    def width(self) -> int:
        """How many elements a row has."""
        return math.prod(self.row)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * ITEMSIZE[self.dtype]

    @property
    def sum_dtype(self) -> str:
        """The dtype in which rows are summed, and updated."""
        return sum_dtype(self.dtype)

    def rows_of(self, stripe: int, stripes: int) -> int:
        """Return how many rows server ``stripe`` of ``stripes`` has from the start."""
        return 0 if self.rows is None else max(0, -(-(self.rows - stripe) // stripes))

    @property
    def described(self) -> list[Any]:
        """The table as messages carry it; see ``of``."""
        admit: list[Any] = []
        if isinstance(self.admit, MinCount):
            admit = ["count", self.admit.count]
        elif isinstance(self.admit, Probability):
            admit = ["probability", float(self.admit.probability)]
        evict = [
            ["unseen", each.rounds, ""] if isinstance(each, Unseen) else ["capacity", each.rows, each.by]
            for each in self.evict
        ]
        own = [self.rows, list(self.row), self.dtype, self.init, self.scale, self.seed, admit, evict, self.codec]
        return own if self.parameter is None else [*own, self.parameter]  # without one it is as ever, also in old files

    @classmethod
    def of(cls, described: Sequence[Any]) -> Table:
        """Return the table that a message describes.

        Raises:
            UsageError: there can be no such table.
        """
        rows, row, dtype, init, scale, seed, admit, evict, codec = described[:OWN]
        admission: Admission | None = None
        if admit:
            admission = MinCount(admit[1]) if admit[0] == "count" else Probability(admit[1])
        evictions = [Unseen(number) if kind == "unseen" else Capacity(number, by) for kind, number, by in evict]
        size = {"dim": tuple(row)} if rows is None else {"shape": (rows, *row)}
        return cls(
            **size,
            dtype=dtype,
            init=init,
            scale=scale,
            seed=seed,
            admit=admission,
            evict=evictions,
            codec=codec,
            parameter=described[OWN] if len(described) > OWN else None,
        )

    def __str__(self) -> str:
        rows = "*" if self.rows is None else str(self.rows)
        return f"a table of {self.dtype}[{', '.join([rows, *map(str, self.row)])}]"


@dataclass(frozen=True)
class TableSpec(Spec):
    """What a key is whose value is a table; see ``Spec``. The shape of one that grows has 0 rows."""

    table: Table

    @classmethod
    def of(cls, table: Table) -> TableSpec:
        """Return the spec of ``table``.

        Raises:
            UsageError: it has more elements than can be stored.
        """
        if (table.rows or 0) * table.width > MAX_ELEMENTS:
            raise UsageError(f"{table} cannot be stored: it has more than 2^48 elements")
        return cls((table.rows or 0, *table.row), table.dtype, table)

    def __str__(self) -> str:
        return str(self.table)
