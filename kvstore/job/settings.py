"""Every environment variable of the project: name, type, range, default and meaning.

``Config`` is read from it, the launcher reads its own few variables through it, and ``docs/settings.md`` and README are
checked against it by a test. ``python -m kvstore.job.settings`` prints the tables of ``docs/settings.md``.

The rendezvous contract is MXNet's (``DMLC_*``), so that existing job scripts and cluster operators work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvstore.errors import ConfigError
from kvstore.job.valid_values import (
    ClassReference,
    ClassReferences,
    EarlierEnd,
    Flag,
    Fraction,
    Integer,
    Interval,
    Intervals,
    OneOf,
    RoundFaults,
    RoundWindow,
    RoundWindows,
    Seconds,
    Text,
    ValidValues,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable."""

    name: str
    values: ValidValues[T]
    default: T
    meaning: str
    shown: str = ""  # the default in words, where ``default`` does not say it
    aliases: tuple[str, ...] = ()  # ``name`` goes before them

    def read(self, env: Mapping[str, str], default: T | None = None) -> T:
        """Return the value in ``env``, else ``default``, else the setting's own; ConfigError if it is not valid."""
        for name in (self.name, *self.aliases):
            text = env.get(name, "").strip()
            if text:
                try:
                    return self.values.parse(text)
                except ValueError:
                    raise ConfigError(f"{name}={text!r} is not valid; valid: {self.values.valid}") from None
        return self.default if default is None else default

    @property
    def row(self) -> str:
        """Its row of a table in Markdown."""
        names = " or ".join(f"`{name}`" for name in (self.name, *self.aliases))
        return f"| {names} | {self.values.valid} | {self.shown_default} | {self.meaning} |"

    @property
    def shown_default(self) -> str:
        if self.shown or self.default == "":
            return self.shown or "none"
        if isinstance(self.default, bool):
            return "1" if self.default else "0"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


GROUPS: dict[str, list[Setting[Any]]] = {}  # by their titles, in the order in which the documentation has them


class Group:
    """Settings that belong together. To define one is to add it to the table, so that each is written once."""

    def __init__(self, title: str) -> None:
        self._settings = GROUPS.setdefault(title, [])

    def add(
        self,
        name: str,
        values: ValidValues[T],
        default: T,
        meaning: str,
        shown: str = "",
        aliases: tuple[str, ...] = (),
    ) -> Setting[T]:
        setting = Setting(name, values, default, meaning, shown, aliases)
        self._settings.append(setting)
        return setting


MAX_NODES = 4096  # of each role in one job: so many workers have been simulated, see docs/scaling.md
ROLES = ("worker", "server", "standby", "aggregator", "scheduler", "observer")
TRANSPORTS = ("sockets", "tcp", "zeromq")
DEVICE_SUMS = ("off", "cuda", "host")

_WAITING = Group("Waiting and failure")
TIMEOUT_S = _WAITING.add(
    "KVSTORE_TIMEOUT_S",
    Seconds(),
    60.0,
    "how long a peer may take to answer, or to report what it is waiting for",
)
PATIENCE_S = _WAITING.add(
    "KVSTORE_PATIENCE_S",
    Seconds(0),
    1800.0,
    "how long a wait for workers that are late but alive goes on, with a log line a minute; 0 waits for ever",
)
JOIN_TIMEOUT_S = _WAITING.add(
    "KVSTORE_JOIN_TIMEOUT_S",
    Seconds(0),
    0.0,
    "how long a worker waits for the other members to join",
    shown="`KVSTORE_PATIENCE_S`",
)
HEARTBEAT_S = _WAITING.add("KVSTORE_HEARTBEAT_S", Seconds(0.01), 1.0, "how often a member says that it is alive")
HEARTBEAT_TIMEOUT_S = _WAITING.add(
    "KVSTORE_HEARTBEAT_TIMEOUT_S",
    Seconds(0.02),
    30.0,
    "how long a member may be silent before it is lost; at least twice `KVSTORE_HEARTBEAT_S`",
)
PULSE = _WAITING.add(
    "KVSTORE_PULSE",
    Flag(),
    True,
    "whether a small process beside each worker beats for it while its interpreter is busy in C",
)

_LINKS = Group("Links and memory")
TRANSPORT = _LINKS.add(
    "KVSTORE_TRANSPORT",
    OneOf(TRANSPORTS),
    "sockets",
    "what links are; the same in all processes. `sockets`: unix sockets on one host, TCP across hosts, ZeroMQ where "
    "they are encrypted. `tcp`: as `sockets`, but TCP on the loopback interface for a local job. `zeromq`: ZeroMQ "
    "everywhere: ipc on one host, TCP across hosts, CURVE where they are encrypted",
)
SHM = _LINKS.add(
    "KVSTORE_SHM",
    Flag(),
    True,
    "whether processes of one host pass arrays through shared memory; without room in /dev/shm they do not",
)
BIGARRAY_BOUND = _LINKS.add(
    "KVSTORE_BIGARRAY_BOUND",
    Integer(1),
    1_000_000,
    "how many elements an array must have to be cut across all servers",
    shown="1000000; with more than 16 servers, 1600000 ÷ their number",
    aliases=("MXNET_KVSTORE_BIGARRAY_BOUND",),
)
PIECE_BYTES = _LINKS.add(
    "KVSTORE_PIECE_BYTES",
    Integer(1024),
    0,
    "about how many bytes go in one message; the same on all workers. Networks beyond 10 Gbit/s want 1 or 2 MiB",
    shown="64 MiB on one host; across hosts 640 KiB, or 2 MiB with one or two workers, and down to 160 KiB where a "
    "store is small",
)
CONGESTION = _LINKS.add(
    "KVSTORE_CONGESTION",
    Text("an algorithm that Linux has, such as `cubic`"),
    "",
    "the congestion control of links over TCP",
    shown="the system's, but `cubic` or `reno` where that is BBR",
)
PACING = _LINKS.add(
    "KVSTORE_PACING",
    Flag(),
    True,
    "limit each unencrypted TCP link to three times the recent rate of the fastest one; 0 removes the limit",
)
AGGREGATE = _LINKS.add(
    "KVSTORE_AGGREGATE",
    Flag(),
    True,
    "whether, in a job on several hosts, each host with two workers or more has an aggregator, which sums its workers' "
    "gradients; 0 has none (`--no-host-aggregation`)",
)
DEVICE_SUM = _LINKS.add(
    "KVSTORE_DEVICE_SUM",
    OneOf(DEVICE_SUMS),
    "off",
    "where an aggregator sums what workers push to a `dist_device_sync` store. `off`: in shared memory. `cuda`: on one "
    "of their GPUs, which reads the memory of the others by CUDA IPC, where that is possible; it has never run on a "
    "GPU yet. `host`: the same way with arrays on the CPU, for tests",
)

_ENCRYPT = Group("Encryption")
ENCRYPTION = _ENCRYPT.add(
    "KVSTORE_ENCRYPTION",
    Flag(),
    True,
    "0 ignores keys: links over TCP are plain, and any process that reaches a port can join (`--no-encryption`)",
)
JOB_SECRET = _ENCRYPT.add(
    "KVSTORE_JOB_SECRET",
    Text("a text of at least 32 characters, the same for all ranks"),
    "",
    "what ranks of torchrun, mpirun or srun on several hosts make their keys from, and pods (`kvstore-pod`)",
)
SECRET_KEY = _ENCRYPT.add("KVSTORE_SECRET_KEY", Text("a CURVE key in Z85"), "", "this process's own secret key")
ROOT_KEY = _ENCRYPT.add("KVSTORE_ROOT_KEY", Text("a CURVE key in Z85"), "", "the scheduler's public key")
MEMBER_KEYS = _ENCRYPT.add(
    "KVSTORE_MEMBER_KEYS", Text("CURVE keys in Z85, with commas"), "", "the public keys of all members"
)
OBSERVER_KEY = _ENCRYPT.add(
    "KVSTORE_OBSERVER_KEY",
    Text("a CURVE key in Z85"),
    "",
    "the public key of observers, such as `kvstore-status`, for the scheduler",
)

_READING = Group("Readers")
READERS = _READING.add(
    "KVSTORE_READERS",
    Integer(0, MAX_NODES),
    0,
    "how many readers a job has at most at once; 0 has none. `launch.py --readers` sets it to 64 where you do not",
)
READER_SHARE = _READING.add(
    "KVSTORE_READER_SHARE",
    Fraction(),
    0.0025,
    "the part of a server's time that all readers together get, however busy its host is; followers get 0.04 if that "
    "is more (`--reader-share`, in percent)",
)
PUBLISH_EVERY = _READING.add(
    "KVSTORE_PUBLISH_EVERY",
    Integer(0),
    0,
    "after how many rounds each store whose servers update publishes a version; 0 for never (`--publish-every`)",
)
READ_FROM = _READING.add(
    "KVSTORE_READ_FROM",
    Text("a file of `launch.py --readers`, or a scheduler's address"),
    "",
    "the job that `kvstore.connect()` reads from",
)
READ_KEY = _READING.add(
    "KVSTORE_READ_KEY", Text("a CURVE key in Z85"), "", "the secret key that `kvstore.connect()` uses"
)
READER_KEY = _READING.add(
    "KVSTORE_READER_KEY", Text("a CURVE key in Z85"), "", "the public key of readers, for the scheduler and the servers"
)

_TRAINING = Group("Training and output")
UPDATE_ON_KVSTORE = _TRAINING.add(
    "MXNET_UPDATE_ON_KVSTORE",
    Flag(),
    True,
    "whether `Trainer` updates on the servers by default; 0 updates in the workers",
)
OPTIMIZERS: Setting[tuple[ClassReference, ...]] = _TRAINING.add(
    "KVSTORE_OPTIMIZERS",
    ClassReferences(),
    (),
    "other optimizers that a process may import and use, each under a name; servers and workers need the same",
    shown="none",
)
OMP_NUM_THREADS = _TRAINING.add(
    "OMP_NUM_THREADS",
    Integer(1),
    0,
    "how many threads torch uses; `launch.py` sets it where you do not",
    shown="the host's cores ÷ its processes of the same role; 1 for aggregators",
)
OMP_WAIT_POLICY = _TRAINING.add(
    "OMP_WAIT_POLICY",
    OneOf(("passive", "active")),
    "passive",
    "whether torch's threads sleep while they wait, or spin and keep their core; `launch.py` sets it where you do not, "
    "and servers do so themselves. Workers' threads spin for some 25 us first (`GOMP_SPINCOUNT=1000`)",
)
VERBOSE = _TRAINING.add(
    "KVSTORE_VERBOSE",
    Flag(),
    False,
    "whether every process of a job that fails prints its whole traceback at once (`launch.py --verbose`)",
)
NO_COLOR = _TRAINING.add("NO_COLOR", Text("any text"), "", "keeps colors out of `launch.py`'s output")
COLUMNS = _TRAINING.add(
    "KVSTORE_COLUMNS",
    Integer(0),
    0,
    "how wide the terminal is on which `launch.py` shows this process's progress bar; 0 for none; `launch.py` sets it",
)

_CHECKPOINTS = Group("Checkpoints")
CHECKPOINT_DIR = _CHECKPOINTS.add(
    "KVSTORE_CHECKPOINT_DIR",
    Text("a directory that all hosts of the job share"),
    "",
    "where checkpoints of the job go; without it there are none (`--checkpoint-dir`)",
)
CHECKPOINT_EVERY = _CHECKPOINTS.add(
    "KVSTORE_CHECKPOINT_EVERY",
    Intervals(),
    Interval(),
    "how often there is a checkpoint, in addition to the checkpoints that the program asks for (`--checkpoint-every`)",
)
CHECKPOINT_KEEP = _CHECKPOINTS.add(
    "KVSTORE_CHECKPOINT_KEEP", Integer(1), 3, "how many checkpoints are kept, the newest ones (`--checkpoint-keep`)"
)
CHECKPOINT_RESUME = _CHECKPOINTS.add(
    "KVSTORE_CHECKPOINT_RESUME",
    Text("a checkpoint, or a directory of checkpoints"),
    "",
    "the checkpoint that the job continues from; of a directory, the newest. A directory without one begins anew "
    "(`--resume`)",
)

_OBSERVING = Group("Observing")
TRACE: Setting[RoundWindow] = _OBSERVING.add(
    "KVSTORE_TRACE",
    RoundWindows(),
    RoundWindow(),
    "which rounds members note for the job's trace; `launch.py --trace` sets it",
    shown="none",
)
TRACE_FILE = _OBSERVING.add("KVSTORE_TRACE_FILE", Text("a file"), "", "where an observer writes the job's trace")
OBSERVE = _OBSERVING.add(
    "KVSTORE_OBSERVE",
    Text(
        "what `kvstore-status` takes: the number of the process that has started the job, its name, or its place file"
    ),
    "",
    "the job that an observer looks at (`DMLC_ROLE=observer python -m servers`)",
    shown="this user's only one on this host",
)
DASHBOARD_PORT = _OBSERVING.add(
    "KVSTORE_DASHBOARD_PORT", Integer(0, 65535), 0, "the port of an observer's page; 0 takes a free one"
)
DASHBOARD_TOKEN_FILE = _OBSERVING.add(
    "KVSTORE_DASHBOARD_TOKEN_FILE",
    Text("a file that only you can read"),
    "",
    "the token of the page, so that it is the same for many jobs; the file is made if it is not there "
    "(`--dashboard-token-file`)",
    shown="a new token for each job",
)
DASHBOARD_TOKEN = _OBSERVING.add(
    "KVSTORE_DASHBOARD_TOKEN", Text("32 to 128 letters, digits, - and _"), "", "the token itself, from `launch.py`"
)
DASHBOARD_FD = _OBSERVING.add(
    "KVSTORE_DASHBOARD_FD", Integer(-1), -1, "a listening socket that the observer inherits; -1 for none"
)
LIFELINE = _OBSERVING.add(
    "KVSTORE_LIFELINE", Flag(), False, "whether an observer ends when its standard input does; `launch.py` sets it"
)

_LAUNCHED = Group("The job, as launchers set it")
ROLE = _LAUNCHED.add("DMLC_ROLE", OneOf(ROLES), "worker", "what this process is")
ROOT_URI = _LAUNCHED.add(
    "DMLC_PS_ROOT_URI", Text("a host name, an address or an `ipc://` endpoint"), "", "where the scheduler listens"
)
ROOT_PORT = _LAUNCHED.add(
    "DMLC_PS_ROOT_PORT", Integer(1, 65535), 0, "the scheduler's port; `ipc://` has none", shown="none"
)
NUM_WORKER = _LAUNCHED.add("DMLC_NUM_WORKER", Integer(0, MAX_NODES), 0, "how many workers the job has; 0 outside a job")
NUM_SERVER = _LAUNCHED.add("DMLC_NUM_SERVER", Integer(0, MAX_NODES), 0, "how many servers the job has; 0 outside a job")
NODE_HOST = _LAUNCHED.add(
    "DMLC_NODE_HOST",
    Text("a host name or an address"),
    "",
    "the address of this host by which the other hosts reach it",
    shown="the one that leads to the scheduler",
)
INTERFACE = _LAUNCHED.add(
    "DMLC_INTERFACE", Text("a network interface"), "", "the interface whose address that is, without `DMLC_NODE_HOST`"
)
TASK_ID = _LAUNCHED.add(
    "DMLC_TASK_ID", Integer(-1), -1, "the rank that this process asks for; -1 takes any", aliases=("DMLC_RANK",)
)
CLUSTER = _LAUNCHED.add(
    "DMLC_JOB_CLUSTER", Text("a kind of launcher"), "", "which one has started the job; nothing reads it"
)
JOB = _LAUNCHED.add(
    "KVSTORE_JOB",
    Text("a name of at most 40 characters"),
    "",
    "the job's name, by which its processes and its memory are found",
    shown="made from the scheduler's address",
)
LOCAL_RANK = _LAUNCHED.add(
    "KVSTORE_LOCAL_RANK", Integer(-1), -1, "which of its host's workers (or servers) a process is"
)
LOCAL_SIZE = _LAUNCHED.add(
    "KVSTORE_LOCAL_SIZE", Integer(0), 0, "how many workers (or servers) its host has; 0 if not known"
)
REPLICAS = _LAUNCHED.add(
    "KVSTORE_REPLICAS", Integer(0, 1), 0, "how many standbys each server has, which take over when it is lost"
)
MIN_WORKERS = _LAUNCHED.add(
    "KVSTORE_MIN_WORKERS",
    Integer(0),
    0,
    "the job goes on without workers that die as long as so many are left; 0 if it ends with the first",
)
MAX_WORKERS = _LAUNCHED.add(
    "KVSTORE_MAX_WORKERS",
    Integer(0),
    0,
    "the most workers, with those that are added; 0 if none is",
)
START = _LAUNCHED.add("KVSTORE_START", Integer(1), 1, "how often this member's process has been started")
LOST: Setting[tuple[str, float] | tuple[()]] = _LAUNCHED.add(
    "KVSTORE_LOST",
    EarlierEnd(),
    (),
    "how this member's process before this one has ended, and when",
    shown="none",
)
SCHEDULER_LOG = _LAUNCHED.add(
    "KVSTORE_SCHEDULER_LOG",
    Text("a file in a private directory"),
    "",
    "where the scheduler notes what its successor needs if it is killed; without it, the job ends then",
)
INJECT: Setting[tuple[tuple[str, int], ...]] = _LAUNCHED.add(
    "KVSTORE_INJECT",
    RoundFaults(),
    (),
    "what a server does to itself when it has so many rounds, in its first start (`launch.py --inject`)",
    shown="none",
)
NUM_AGGREGATORS = _LAUNCHED.add(
    "KVSTORE_NUM_AGGREGATORS",
    Integer(0, MAX_NODES),
    0,
    "how many aggregators the job has, one on each host that has one",
)
AGGREGATOR = _LAUNCHED.add(
    "KVSTORE_AGGREGATOR", Integer(-1), -1, "the rank of the aggregator of this worker's host; -1 for none"
)
ROOT_FD = _LAUNCHED.add(
    "KVSTORE_ROOT_FD", Integer(-1), -1, "a listening socket that the scheduler inherits; -1 for none"
)
FORK = _LAUNCHED.add(
    "KVSTORE_FORK",
    Flag(),
    True,
    "whether the servers, standbys and aggregators of a host come from one process that has imported torch; else each "
    "imports it",
)
AGENT = _LAUNCHED.add("KVSTORE_AGENT", Text("a name"), "", "the agent that has started a process")
ENLIST = _LAUNCHED.add(
    "KVSTORE_ENLIST", Text("four words"), "", "how an agent that a cluster manager starts finds `launch.py`"
)
EXIT_REPORT = _LAUNCHED.add(
    "KVSTORE_EXIT_REPORT",
    Text("a device, an inode and a path, with colons"),
    "",
    "the file that tells `launch.py` why a process ends, and the pipe that it reads as standard error",
)
WORKER_PROCESS = _LAUNCHED.add(
    "KVSTORE_WORKER_PROCESS",
    Text("a number, a time and a rank, with colons"),
    "",
    "in what a worker starts under torchrun, mpirun or srun: the worker's process, which alone makes stores",
)

SETTINGS = tuple(setting for group in GROUPS.values() for setting in group)


def markdown() -> str:
    head = "| variable | valid values | default | meaning |\n|---|---|---|---|"
    return "\n\n".join(
        "\n".join([f"## {title}", "", head, *(setting.row for setting in group)]) for title, group in GROUPS.items()
    )


if __name__ == "__main__":
    print(markdown())
