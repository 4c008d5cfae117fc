"""What `launch.py --dry-run` shows of environments and commands. Pure, and without a secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

HIDDEN = "..."
# The values of these are computed and harmless; of no others does anybody here know what they hold.
_SHOWN = (
    "DMLC_JOB_CLUSTER",
    "DMLC_NODE_HOST",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
    "DMLC_PS_ROOT_PORT",
    "DMLC_PS_ROOT_URI",
    "DMLC_ROLE",
    "DMLC_TASK_ID",
    "KVSTORE_JOB",
)


def variables(env: Mapping[str, str]) -> str:
    """An environment as a shell would be given it, with every value hidden that may be a secret."""
    return " ".join(f"{name}={shlex.quote(value) if name in _SHOWN else HIDDEN}" for name, value in sorted(env.items()))


def command(argv: Iterable[str]) -> str:
    """A command as one would type it."""
    return shlex.join(argv)
