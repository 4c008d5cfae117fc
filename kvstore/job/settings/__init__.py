"""Every environment variable of the project: name, type, range, default and meaning.

``Config`` is read from it, the launcher reads its own few variables through it, and ``docs/settings.md`` and README are
checked against it by a test. ``python -m kvstore.job.settings`` prints the tables of ``docs/settings.md``.

The rendezvous contract is MXNet's (``DMLC_*``), so that existing job scripts and cluster operators work.

setting      what one is, and how it is read
links        waits, links, encryption and readers
training     training, output, checkpoints and observing
members      who a process is, and where the others are
"""

from __future__ import annotations

from typing import Any

from kvstore.job.settings.links import (
    AGGREGATE,
    BIGARRAY_BOUND,
    CONGESTION,
    ENCRYPTION,
    HEARTBEAT_S,
    HEARTBEAT_TIMEOUT_S,
    JOB_SECRET,
    JOIN_TIMEOUT_S,
    MEMBER_KEYS,
    OBSERVER_KEY,
    PACING,
    PATIENCE_S,
    PIECE_BYTES,
    PULSE,
    READ_FROM,
    READ_KEY,
    READER_KEY,
    READER_SHARE,
    READERS,
    ROOT_KEY,
    SECRET_KEY,
    SHM,
    TIMEOUT_S,
    TRANSPORT,
    TRANSPORTS,
)
from kvstore.job.settings.members import (
    AGENT,
    AGGREGATOR,
    CLUSTER,
    ENLIST,
    EXIT_REPORT,
    INJECT,
    INTERFACE,
    JOB,
    LOCAL_RANK,
    LOCAL_SIZE,
    LOST,
    MAX_NODES,
    NODE_HOST,
    NUM_AGGREGATORS,
    NUM_SERVER,
    NUM_WORKER,
    REPLICAS,
    ROLE,
    ROLES,
    ROOT_FD,
    ROOT_PORT,
    ROOT_URI,
    SCHEDULER_LOG,
    START,
    TASK_ID,
)
from kvstore.job.settings.setting import Setting
from kvstore.job.settings.training import (
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CHECKPOINT_KEEP,
    CHECKPOINT_RESUME,
    COLUMNS,
    DASHBOARD_FD,
    DASHBOARD_PORT,
    DASHBOARD_TOKEN,
    DASHBOARD_TOKEN_FILE,
    LIFELINE,
    NO_COLOR,
    OBSERVE,
    OMP_NUM_THREADS,
    OMP_WAIT_POLICY,
    OPTIMIZERS,
    TRACE,
    TRACE_FILE,
    UPDATE_ON_KVSTORE,
    VERBOSE,
)

__all__ = [
    "AGENT",
    "AGGREGATE",
    "AGGREGATOR",
    "BIGARRAY_BOUND",
    "CHECKPOINT_DIR",
    "CHECKPOINT_EVERY",
    "CHECKPOINT_KEEP",
    "CHECKPOINT_RESUME",
    "CLUSTER",
    "COLUMNS",
    "CONGESTION",
    "DASHBOARD_FD",
    "DASHBOARD_PORT",
    "DASHBOARD_TOKEN",
    "DASHBOARD_TOKEN_FILE",
    "ENCRYPTION",
    "ENLIST",
    "EXIT_REPORT",
    "GROUPS",
    "HEARTBEAT_S",
    "HEARTBEAT_TIMEOUT_S",
    "INJECT",
    "INTERFACE",
    "JOB",
    "JOB_SECRET",
    "JOIN_TIMEOUT_S",
    "LIFELINE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOST",
    "MAX_NODES",
    "MEMBER_KEYS",
    "NODE_HOST",
    "NO_COLOR",
    "NUM_AGGREGATORS",
    "NUM_SERVER",
    "NUM_WORKER",
    "OBSERVE",
    "OBSERVER_KEY",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OPTIMIZERS",
    "PACING",
    "PATIENCE_S",
    "PIECE_BYTES",
    "PULSE",
    "READERS",
    "READER_KEY",
    "READER_SHARE",
    "READ_FROM",
    "READ_KEY",
    "REPLICAS",
    "ROLE",
    "ROLES",
    "ROOT_FD",
    "ROOT_KEY",
    "ROOT_PORT",
    "ROOT_URI",
    "SCHEDULER_LOG",
    "SECRET_KEY",
    "SETTINGS",
    "SHM",
    "START",
    "TASK_ID",
    "TIMEOUT_S",
    "TRACE",
    "TRACE_FILE",
    "TRANSPORT",
    "TRANSPORTS",
    "UPDATE_ON_KVSTORE",
    "VERBOSE",
    "Setting",
    "markdown",
]

GROUPS: dict[str, tuple[Setting[Any], ...]] = {
    "Waiting and failure": (TIMEOUT_S, PATIENCE_S, JOIN_TIMEOUT_S, HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, PULSE),
    "Links and memory": (TRANSPORT, SHM, BIGARRAY_BOUND, PIECE_BYTES, CONGESTION, PACING, AGGREGATE),
    "Encryption": (ENCRYPTION, JOB_SECRET, SECRET_KEY, ROOT_KEY, MEMBER_KEYS, OBSERVER_KEY),
    "Readers": (READERS, READER_SHARE, READ_FROM, READ_KEY, READER_KEY),
    "Training and output": (
        UPDATE_ON_KVSTORE,
        OPTIMIZERS,
        OMP_NUM_THREADS,
        OMP_WAIT_POLICY,
        VERBOSE,
        NO_COLOR,
        COLUMNS,
    ),
    "Checkpoints": (CHECKPOINT_DIR, CHECKPOINT_EVERY, CHECKPOINT_KEEP, CHECKPOINT_RESUME),
    "Observing": (
        *(TRACE, TRACE_FILE, OBSERVE, DASHBOARD_PORT, DASHBOARD_TOKEN_FILE),
        *(DASHBOARD_TOKEN, DASHBOARD_FD, LIFELINE),
    ),
    "The job, as launchers set it": (
        *(ROLE, ROOT_URI, ROOT_PORT, NUM_WORKER, NUM_SERVER, NODE_HOST, INTERFACE, TASK_ID, CLUSTER),
        *(
            JOB,
            LOCAL_RANK,
            LOCAL_SIZE,
            REPLICAS,
            START,
            LOST,
            SCHEDULER_LOG,
            INJECT,
            NUM_AGGREGATORS,
            AGGREGATOR,
            ROOT_FD,
            AGENT,
            ENLIST,
            EXIT_REPORT,
        ),
    ),
}
SETTINGS = tuple(setting for group in GROUPS.values() for setting in group)


def markdown() -> str:
    """Return all settings as tables in Markdown, one for each group."""
    head = "| variable | valid values | default | meaning |\n|---|---|---|---|"
    return "\n\n".join(
        "\n".join([f"## {title}", "", head, *(setting.row for setting in group)]) for title, group in GROUPS.items()
    )
