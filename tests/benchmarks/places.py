"""Two hosts that there are not."""

from __future__ import annotations

from benchmarks.jobs import Place

HOSTS = [Place(f"10.77.0.{number}", f"host{number}", f"/dev/shm/host{number}") for number in (1, 2)]
