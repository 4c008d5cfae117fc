"""The time of a round over the number of workers, the number of servers, and the size of an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contenders import Work
from benchmarks.figures import curve_of
from benchmarks.networks import elements, shapes_of
from benchmarks.session import Session
from benchmarks.suites.exchange import case

COUNTS = (1, 2, 4, 8)
SIZES = ("1KB", "10KB", "100KB", "1MB", "10MB", "100MB", "1GB")


def scale(session: Session, counts: Sequence[int] = COUNTS, sizes: Sequence[str] = SIZES) -> None:
    """Measure three curves: ResNet-50's arrays over workers and servers, and one array over its size."""
    work = Work(optimizer=session.options.optimizer or "none", rounds=session.options.rounds or 10)
    _curve(session, "workers", "2 servers", [(n, replace(work, workers=n)) for n in counts])
    _curve(session, "servers", "2 workers", [(n, replace(work, servers=n)) for n in counts])
    sized = [(4 * elements(shapes_of(size)), replace(work, net=size)) for size in sizes]
    _curve(session, "bytes", "one array, 2 workers, 2 servers", sized)


def _curve(session: Session, along: str, beside: str, works: Sequence[tuple[int, Work]]) -> None:
    measured = {float(chosen): session.measure(case(work, session.peers), show=False) for chosen, work in works}
    title = f"A round against {along}, {beside}"
    session.add_curve(curve_of(f"scale-{along}", title, along, measured, logarithmic=along == "bytes"))
