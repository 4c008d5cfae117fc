"""One run of the benchmarks: measures contenders in turn, prints results, and keeps them for the record."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import plot
from benchmarks.contenders import Contender
from benchmarks.figures import Curve, Json, Result, Row
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.machine import facts
from benchmarks.options import Options
from benchmarks.peers import PEERS, Peers, default_cache
from benchmarks.tables import curve_table, facts_line, result_table, verdict_table
from benchmarks.targets import judge

REPEATS = 3


def keep(result: Result) -> None:
    """Do nothing with a result."""


@dataclass(frozen=True)
class Case:
    """One piece of work and its contenders.

    Attributes:
        name, title, peers: of the result.
        contenders: who does it; they take turns.
        finish: adds what follows from the figures: rows that are computed, notes.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    peers: Sequence[str] = PEERS
    finish: Callable[[Result], None] = keep


@dataclass
class Session:
    """The measurements of one run.

    Attributes:
        options: what was asked for.
        console: where tables go.
        results, curves: what has been measured.
        failures: the names of contenders that could not do their work.
    """

    options: Options
    console: Console = field(default_factory=Console)
    results: list[Result] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = facts()
        self.started = time.monotonic()
        self.console.print(facts_line(self.machine), highlight=False)

    @property
    def peers(self) -> Peers:
        """The peers to compare with."""
        return Peers(self.options.peers, default_cache())

    def with_options(self, **changed: Any) -> Session:
        """Return this session for measurements with other options; they share the record."""
        other = copy.copy(self)
        other.options = replace(self.options, **changed)
        return other

    def measure(self, case: Case, show: bool = True) -> Result:
        """Run all contenders of a case in turn, as often as the options say.

        In turn, because machines drift: what is slow for a minute is slow for all. A contender that cannot run has a
        row without samples, which says why.
        """
        rows: dict[str, Row] = {}
        absent: set[str] = set()
        repeats = self.options.repeats or REPEATS
        for turn in range(repeats):
            for contender in case.contenders:
                if contender.name in absent:
                    continue
                with self.console.status(f"{case.title}: {contender.name}, {turn + 1} of {repeats}"):
                    try:
                        measured = contender.run()
                    except (Unavailable, JobFailed) as error:
                        self._excuse(rows.setdefault(contender.name, Row(contender.name)), error)
                        absent.add(contender.name)
                        continue
                for name, samples in measured.items():
                    rows.setdefault(name, Row(name)).samples.extend(samples)
        result = Result(case.name, case.title, list(rows.values()), case.peers)
        case.finish(result)
        if show:
            self.add(result)
        return result

    def add(self, result: Result) -> None:
        """Keep and print a result."""
        self.results.append(result)
        self.console.print(result_table(result))

    def add_curve(self, curve: Curve) -> None:
        """Keep and print a curve."""
        self.curves.append(curve)
        self.console.print(curve_table(curve))

    def finish(self) -> None:
        """Print which targets are reached, and write the record and the plot."""
        verdicts = judge(self.results)
        if verdicts:
            self.console.print(verdict_table(verdicts))
        record = self.options.json or self.options.out / f"{self.options.what}.json"
        picture = self.options.plot or self.options.out / f"{self.options.what}.png"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        plot.draw(self.results, self.curves, self.machine, picture)
        minutes = (time.monotonic() - self.started) / 60
        self.console.print(f"{minutes:.1f} minutes; written: {record}, {picture}", highlight=False)

    def to_json(self) -> Json:
        """Return the whole record."""
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.options).items()}
        return {
            "machine": self.machine,
            "options": asked,
            "results": [result.to_json() for result in self.results],
            "curves": [curve.to_json() for curve in self.curves],
            "targets": [verdict.to_json() for verdict in judge(self.results)],
        }

    def fail(self, name: str, error: JobFailed) -> None:
        """Print that a job failed, and remember it."""
        self.failures.append(name)
        self.console.print(f"{name}: {error}", style="red", markup=False, highlight=False)

    def _excuse(self, row: Row, error: Unavailable | JobFailed) -> None:
        what = "failed" if isinstance(error, JobFailed) else "skipped"
        row.note = f"{what}: {str(error).splitlines()[0]}"
        if isinstance(error, JobFailed):
            self.fail(row.name, error)
