"""What a process uses of its machine."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

from kvstore.job import usage


def test_memory_is_what_is_there_now():
    before = usage.memory_bytes()
    with mmap.mmap(-1, 64 << 20) as fresh:  # the heap might take pages that it has kept
        fresh.write(bytes(1 << 20) * 64)
        held = usage.memory_bytes()
    assert held - before > 60 << 20
    assert held - usage.memory_bytes() > 60 << 20


def test_without_proc_memory_is_the_most_there_has_been():
    assert (
        usage.memory_bytes(Path("/proc/no-such-file"))
        >= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 0.9
    )


def test_processor_time_grows():
    before = usage.cpu_us()
    sum(range(300_000))
    assert usage.cpu_us() > before
