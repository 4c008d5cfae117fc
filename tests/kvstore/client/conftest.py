"""Jobs inside this process: of a worker, and of two and three, whose small arrays are cut over as many servers."""

from __future__ import annotations

from small_jobs import BOUND
from threaded import shared_job

cluster = shared_job(workers=2, servers=2, bigarray_bound=BOUND)
three = shared_job(workers=3, servers=3, bigarray_bound=BOUND)
alone = shared_job(workers=1, servers=1)
