"""How often Python's garbage collector runs in servers and the scheduler.

By default it runs whenever 700 new objects are there, and looks at all objects again when their number has grown by a
quarter. The messages of a round of thousands of workers are hundreds of thousands of objects that wait for the round's
end, and a server came to spend three quarters of its time on looking at them. What a round of 26 tables makes, it would
look at several times a round. A look at all objects takes 0.1 to 0.2 s in a process that has imported torch, and nearly
all of them are torch's modules, which stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LEAST = 10_000  # new objects
EACH = 100  # objects that a worker's messages of one round are, about


def collect_seldom(workers: int) -> None:
    """Let the collector run when there are more new objects than the messages of a round of ``workers`` make."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, LEAST, EACH * workers), *older)


@contextmanager
def importing() -> Iterator[None]:
    """Do not collect while modules are imported, and never look at their objects."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
