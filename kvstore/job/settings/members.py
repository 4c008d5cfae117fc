"""Settings: who a process is, and where the others are."""

from __future__ import annotations

from kvstore.job.settings.setting import Setting
from kvstore.job.valid_values import EarlierEnd, Integer, OneOf, RoundFaults, Text

MAX_NODES = 4096  # of each role in one job: so many workers have been simulated, see docs/scaling.md
ROLES = ("worker", "server", "standby", "aggregator", "scheduler", "observer")

ROLE = Setting("DMLC_ROLE", OneOf(ROLES), "worker", "what this process is")
ROOT_URI = Setting(
    "DMLC_PS_ROOT_URI", Text("a host name, an address or an `ipc://` endpoint"), "", "where the scheduler listens"
)
ROOT_PORT = Setting("DMLC_PS_ROOT_PORT", Integer(1, 65535), 0, "the scheduler's port; `ipc://` has none", shown="none")
NUM_WORKER = Setting("DMLC_NUM_WORKER", Integer(0, MAX_NODES), 0, "how many workers the job has; 0 outside a job")
NUM_SERVER = Setting("DMLC_NUM_SERVER", Integer(0, MAX_NODES), 0, "how many servers the job has; 0 outside a job")
REPLICAS = Setting(
    "KVSTORE_REPLICAS", Integer(0, 1), 0, "how many standbys each server has, which take over when it is lost"
)
START = Setting("KVSTORE_START", Integer(1), 1, "how often this member's process has been started")
INJECT: Setting[tuple[tuple[str, int], ...]] = Setting(
    "KVSTORE_INJECT",
    RoundFaults(),
    (),
    "what a server does to itself when it has so many rounds, in its first start (`launch.py --inject`)",
    shown="none",
)
LOST: Setting[tuple[str, float] | tuple[()]] = Setting(
    "KVSTORE_LOST",
    EarlierEnd(),
    (),
    "how this member's process before this one has ended, and when",
    shown="none",
)
SCHEDULER_LOG = Setting(
    "KVSTORE_SCHEDULER_LOG",
    Text("a file in a private directory"),
    "",
    "where the scheduler notes what its successor needs if it is killed; without it, the job ends then",
)
NUM_AGGREGATORS = Setting(
    "KVSTORE_NUM_AGGREGATORS",
    Integer(0, MAX_NODES),
    0,
    "how many aggregators the job has, one on each host that has one",
)
AGGREGATOR = Setting(
    "KVSTORE_AGGREGATOR", Integer(-1), -1, "the rank of the aggregator of this worker's host; -1 for none"
)
NODE_HOST = Setting(
    "DMLC_NODE_HOST",
    Text("a host name or an address"),
    "",
    "the address of this host by which the other hosts reach it",
    shown="the one that leads to the scheduler",
)
INTERFACE = Setting(
    "DMLC_INTERFACE", Text("a network interface"), "", "the interface whose address that is, without `DMLC_NODE_HOST`"
)
TASK_ID = Setting(
    "DMLC_TASK_ID", Integer(-1), -1, "the rank that this process asks for; -1 takes any", aliases=("DMLC_RANK",)
)
CLUSTER = Setting("DMLC_JOB_CLUSTER", Text("a kind of launcher"), "", "which one has started the job; nothing reads it")
JOB = Setting(
    "KVSTORE_JOB",
    Text("a name of at most 40 characters"),
    "",
    "the job's name, by which its processes and its memory are found",
    shown="made from the scheduler's address",
)
LOCAL_RANK = Setting("KVSTORE_LOCAL_RANK", Integer(-1), -1, "which of its host's workers (or servers) a process is")
LOCAL_SIZE = Setting("KVSTORE_LOCAL_SIZE", Integer(0), 0, "how many workers (or servers) its host has; 0 if not known")
ROOT_FD = Setting("KVSTORE_ROOT_FD", Integer(-1), -1, "a listening socket that the scheduler inherits; -1 for none")
AGENT = Setting("KVSTORE_AGENT", Text("a name"), "", "the agent that has started a process")
ENLIST = Setting(
    "KVSTORE_ENLIST", Text("four words"), "", "how an agent that a cluster manager starts finds `launch.py`"
)
EXIT_REPORT = Setting(
    "KVSTORE_EXIT_REPORT",
    Text("a device, an inode and a path, with colons"),
    "",
    "the file that tells `launch.py` why a process ends, and the pipe that it reads as standard error",
)
WORKER_PROCESS = Setting(
    "KVSTORE_WORKER_PROCESS",
    Text("a number, a time and a rank, with colons"),
    "",
    "in what a worker starts under torchrun, mpirun or srun: the worker's process, which alone makes stores",
)
