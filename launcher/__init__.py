"""Starting a job: `launch.py`, and one file per kind of cluster.

What to run is pure (`job`, `command`, `tasks`), when it ends is pure (`ending`), and everything that touches processes,
pipes or directories is in the files that say so. Nothing here imports torch or zmq: launch.py must start at once.
"""

from __future__ import annotations
