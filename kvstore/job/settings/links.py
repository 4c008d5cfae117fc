"""Settings: waits, links, encryption and readers."""

from __future__ import annotations

from kvstore.job.settings.members import MAX_NODES
from kvstore.job.settings.setting import Setting
from kvstore.job.valid_values import Flag, Fraction, Integer, OneOf, Seconds, Text

TRANSPORTS = ("sockets", "tcp", "zeromq")
DEVICE_SUMS = ("off", "cuda", "host")

# ---- waiting, and failure
TIMEOUT_S = Setting(
    "KVSTORE_TIMEOUT_S",
    Seconds(),
    60.0,
    "how long a peer may take to answer, or to report what it is waiting for",
)
PATIENCE_S = Setting(
    "KVSTORE_PATIENCE_S",
    Seconds(0),
    1800.0,
    "how long a wait for workers that are late but alive goes on, with a log line a minute; 0 waits for ever",
)
JOIN_TIMEOUT_S = Setting(
    "KVSTORE_JOIN_TIMEOUT_S",
    Seconds(0),
    0.0,
    "how long a worker waits for the other members to join",
    shown="`KVSTORE_PATIENCE_S`",
)
HEARTBEAT_S = Setting("KVSTORE_HEARTBEAT_S", Seconds(0.01), 1.0, "how often a member says that it is alive")
HEARTBEAT_TIMEOUT_S = Setting(
    "KVSTORE_HEARTBEAT_TIMEOUT_S",
    Seconds(0.02),
    30.0,
    "how long a member may be silent before it is lost; at least twice `KVSTORE_HEARTBEAT_S`",
)
PULSE = Setting(
    "KVSTORE_PULSE",
    Flag(),
    True,
    "whether a small process beside each worker beats for it while its interpreter is busy in C",
)

# ---- links and memory
TRANSPORT = Setting(
    "KVSTORE_TRANSPORT",
    OneOf(TRANSPORTS),
    "sockets",
    "what links are; the same in all processes. `sockets`: unix sockets on one host, TCP across hosts, ZeroMQ where "
    "they are encrypted. `tcp`: as `sockets`, but TCP on the loopback interface for a local job. `zeromq`: ZeroMQ "
    "everywhere: ipc on one host, TCP across hosts, CURVE where they are encrypted",
)
SHM = Setting(
    "KVSTORE_SHM",
    Flag(),
    True,
    "whether processes of one host pass arrays through shared memory; without room in /dev/shm they do not",
)
BIGARRAY_BOUND = Setting(
    "KVSTORE_BIGARRAY_BOUND",
    Integer(1),
    1_000_000,
    "how many elements an array must have to be cut across all servers",
    shown="1000000; with more than 16 servers, 1600000 ÷ their number",
    aliases=("MXNET_KVSTORE_BIGARRAY_BOUND",),
)
PIECE_BYTES = Setting(
    "KVSTORE_PIECE_BYTES",
    Integer(1024),
    0,
    "about how many bytes go in one message; the same on all workers. Networks beyond 10 Gbit/s want 1 or 2 MiB",
    shown="64 MiB on one host; across hosts 640 KiB, or 2 MiB with one or two workers, and down to 160 KiB where a "
    "store is small",
)
CONGESTION = Setting(
    "KVSTORE_CONGESTION",
    Text("an algorithm that Linux has, such as `cubic`"),
    "",
    "the congestion control of links over TCP",
    shown="the system's, but `cubic` or `reno` where that is BBR",
)
PACING = Setting(
    "KVSTORE_PACING",
    Flag(),
    True,
    "whether a plain TCP link sends at most at three times the rate of the fastest one lately; 0 sets no limit",
)
AGGREGATE = Setting(
    "KVSTORE_AGGREGATE",
    Flag(),
    True,
    "whether, in a job on several hosts, each host with two workers or more has an aggregator, which sums its workers' "
    "gradients; 0 has none (`--no-host-aggregation`)",
)

DEVICE_SUM = Setting(
    "KVSTORE_DEVICE_SUM",
    OneOf(DEVICE_SUMS),
    "off",
    "where an aggregator sums what workers push to a `dist_device_sync` store. `off`: in shared memory. `cuda`: on one "
    "of their GPUs, which reads the memory of the others by CUDA IPC, where that is possible; it has never run on a "
    "GPU yet. `host`: the same way with arrays on the CPU, for tests",
)

# ---- encryption
ENCRYPTION = Setting(
    "KVSTORE_ENCRYPTION",
    Flag(),
    True,
    "0 ignores keys: links over TCP are plain, and whoever reaches a port can join (`--no-encryption`)",
)
JOB_SECRET = Setting(
    "KVSTORE_JOB_SECRET",
    Text("a text of at least 32 characters, the same for all ranks"),
    "",
    "what ranks of torchrun, mpirun or srun on several hosts make their keys from, and pods (`kvstore-pod`)",
)
SECRET_KEY = Setting("KVSTORE_SECRET_KEY", Text("a CURVE key in Z85"), "", "this process's own secret key")
ROOT_KEY = Setting("KVSTORE_ROOT_KEY", Text("a CURVE key in Z85"), "", "the scheduler's public key")
MEMBER_KEYS = Setting(
    "KVSTORE_MEMBER_KEYS", Text("CURVE keys in Z85, with commas"), "", "the public keys of all members"
)
OBSERVER_KEY = Setting(
    "KVSTORE_OBSERVER_KEY",
    Text("a CURVE key in Z85"),
    "",
    "the public key of observers, such as `kvstore-status`, for the scheduler",
)

# ---- readers
READERS = Setting(
    "KVSTORE_READERS",
    Integer(0, MAX_NODES),
    0,
    "how many readers a job has at most at once; 0 has none. `launch.py --readers` sets it to 64 where you do not",
)
READER_SHARE = Setting(
    "KVSTORE_READER_SHARE",
    Fraction(),
    0.0025,
    "the part of a server's time that all readers together get, however busy its host is",
)
READ_FROM = Setting(
    "KVSTORE_READ_FROM",
    Text("a file of `launch.py --readers`, or a scheduler's address"),
    "",
    "the job that `kvstore.connect()` reads from",
)
READ_KEY = Setting("KVSTORE_READ_KEY", Text("a CURVE key in Z85"), "", "the secret key that `kvstore.connect()` uses")
READER_KEY = Setting(
    "KVSTORE_READER_KEY", Text("a CURVE key in Z85"), "", "the public key of readers, for the scheduler and the servers"
)
