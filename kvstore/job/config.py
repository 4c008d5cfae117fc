"""What one process has to know of its job, read from the environment once, by the table in ``settings``."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.job import settings
from kvstore.job.address import host_and_port, is_loopback, tcp_endpoint
from kvstore.job.curve_keys import CurveKeys, split_key, with_key
from kvstore.job.ranks import Ranks
from kvstore.job.valid_values import Interval, RoundWindow

FOR_EVER_S = 1e9  # thirty years; clocks and sockets take no infinity
MAX_JOB = 40  # characters of a job's name
FEW_SERVERS = 16  # with more of them, whole arrays would make the load of servers differ
MANY_SERVERS_BOUND = 1_600_000  # elements, divided by the number of servers
NETWORK_PIECE = 640 << 10  # bytes; a server answers when it has a piece from every worker, so it must not be large
LEAST_PIECE = 160 << 10  # bytes; see ``kvstore.dist.plans.pieces``
FEW_WORKERS, FEW_PIECE = 2, 2 << 20  # with no more, that matters less than what each message costs
FIRST_PIECES = 2  # for each server, by all workers of a host, before any of them packs more; with one, lines are idle
WINDOW_PIECES = 4  # with fewer, lines are idle; with more, a server may fall far behind the others
HOST_PIECE = 64 << 20  # no network card is idle meanwhile: what counts is how many messages there are


@dataclass(frozen=True)
class Config:
    """What one process needs to know of its job.

    Attributes:
        role: ``worker``, ``server``, ``standby``, ``aggregator`` or ``scheduler``.
        root: the scheduler's endpoint, ``ipc://path`` or ``tcp://host:port``, this with the scheduler's key if there
            are keys; empty outside a job.
        num_workers, num_servers: how many the job has; 0 outside a job.
        num_aggregators: how many hosts of the job have an aggregator.
        aggregator: the rank of the aggregator of this worker's host, -1 for none.
        replicas: how many standbys each server has.
        start: how often this member's process has been started.
        lost: how the process before this one has ended, and when, by this host's monotonic clock; empty for the first.
        inject: what this process does to itself, ``kill`` or ``stop``, and at which of its rounds, in their order.
        scheduler_log: the file with the scheduler's log; empty for none.
        aggregate: whether hosts with several workers are to have aggregators.
        device_sum: where aggregators sum what workers push from devices: ``off``, ``cuda`` or ``host``.
        node_host: the address that this process binds to and tells the others, for TCP; empty for the default.
        interface: the network interface whose address it is, if ``node_host`` is empty; empty for the default.
        rank_hint: the rank to ask for, -1 for any.
        local_rank, local_size: which of its host's members of its role this is, and how many there are; -1 and 0 where
            nobody has said.
        root_fd: a listening socket that was opened for the scheduler, -1 for none.
        timeout_s: how long a peer may take to answer, or to report what it is waiting for, in seconds.
        patience_s: how long a wait goes on whose peers say that; 0 for ever.
        join_timeout_s: how long a worker waits for the others to be there; 0 for ``patience_s``.
        heartbeat_s, heartbeat_timeout_s: how often a node says it is alive, and after how long a silence it is lost.
        pulse: whether a small process beside each worker says so, too.
        bigarray_bound: arrays of at least so many elements are cut across all servers.
        piece_bytes: how many bytes go in one message, about; the same on all workers, or sums are slow.
        least_piece_bytes: in small stores messages are smaller, but not than this; 0: they are not.
        transport: one of ``settings.TRANSPORTS``.
        congestion: the congestion control of links over TCP; empty for the system's, but not BBR.
        pacing: whether plain TCP links keep to a rate, so that they share lines well.
        update_on_kvstore: MXNet's switch for ``Trainer``: update on the store, or in the worker.
        checkpoint_dir: where checkpoints go; empty for none.
        checkpoint_every: how often there is one, beside those that the program asks for.
        checkpoint_keep: how many are kept.
        checkpoint_resume: the checkpoint to continue from, or a directory of them; empty to begin anew.
        columns: the width of the terminal on which ``launch.py`` shows a line that this process rewrites; 0 for none.
        job: a name for the job that a file name can have; the same in all processes of it.
        shm: whether processes of one host share memory.
        encryption: whether links over TCP are to be encrypted, which takes keys.
        keys: those of this process; None for plain links.
        job_secret: what all processes make their keys from, where nobody gives each its own.
        readers: how many readers the job has at most at once.
        reader_share: the part of a server's time that they get, however busy its host is.
        trace: which rounds this process notes for the job's trace.
        ranks: who this is among those that torchrun, mpirun or srun has started; None if nobody has said, or if
            ``root`` says where the job is.
    """

    role: str = "worker"
    root: str = ""
    num_workers: int = 0
    num_servers: int = 0
    num_aggregators: int = 0
    aggregator: int = -1
    replicas: int = 0
    start: int = 1
    lost: tuple[str, float] | tuple[()] = ()
    inject: tuple[tuple[str, int], ...] = ()
    scheduler_log: str = ""
    aggregate: bool = True
    device_sum: str = settings.DEVICE_SUM.default
    node_host: str = ""
    interface: str = ""
    rank_hint: int = -1
    local_rank: int = -1
    local_size: int = 0
    root_fd: int = -1
    timeout_s: float = settings.TIMEOUT_S.default
    patience_s: float = settings.PATIENCE_S.default
    join_timeout_s: float = settings.JOIN_TIMEOUT_S.default
    heartbeat_s: float = settings.HEARTBEAT_S.default
    heartbeat_timeout_s: float = settings.HEARTBEAT_TIMEOUT_S.default
    pulse: bool = True
    bigarray_bound: int = settings.BIGARRAY_BOUND.default
    piece_bytes: int = FEW_PIECE
    least_piece_bytes: int = 0
    transport: str = settings.TRANSPORT.default
    congestion: str = ""
    pacing: bool = True
    update_on_kvstore: bool = True
    checkpoint_dir: str = ""
    checkpoint_every: Interval = settings.CHECKPOINT_EVERY.default
    checkpoint_keep: int = settings.CHECKPOINT_KEEP.default
    checkpoint_resume: str = ""
    columns: int = 0
    job: str = "none"
    shm: bool = True
    encryption: bool = True
    keys: CurveKeys | None = field(default=None, repr=False)
    job_secret: str = field(default="", repr=False)
    readers: int = 0
    reader_share: float = settings.READER_SHARE.default
    trace: RoundWindow = settings.TRACE.default
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"KVSTORE_HEARTBEAT_TIMEOUT_S={self.heartbeat_timeout_s:g} must be at least twice "
                f"KVSTORE_HEARTBEAT_S={self.heartbeat_s:g}, or one late beat is a death"
            )

    @property
    def join_limit_s(self) -> float:
        """How long a worker waits for the others to be there."""
        return self.join_timeout_s or self.patience_s or FOR_EVER_S

    @property
    def one_host(self) -> bool:
        """Whether all members of the job are on this host."""
        return _one_host(self.root)

    @property
    def window_bytes(self) -> int:
        """How much may be on its way from one server of what goes in turn: little where a network card is shared."""
        return 1 << 40 if self.one_host else WINDOW_PIECES * self.piece_bytes

    @property
    def first_bytes(self) -> int:
        """``window_bytes`` of an aggregator's answers before its first one, for each server that it stands for."""
        return 1 << 40 if self.one_host else FIRST_PIECES * self.piece_bytes

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read ``env`` (the process's environment by default).

        Raises:
            ConfigError: a variable has a value that is not valid; the message says which would be.
        """
        env = os.environ if env is None else env
        role = settings.ROLE.read(env)
        root = _root(env)
        encryption = settings.ENCRYPTION.read(env)
        keys = CurveKeys.from_env(env) if encryption else None
        ranks = Ranks.from_env(env) if role == "worker" and not root else None
        num_workers = settings.NUM_WORKER.read(env)
        return cls(
            role=role,
            root=with_key(root, keys.root) if keys is not None and root.startswith("tcp://") else root,
            num_workers=num_workers,
            num_servers=settings.NUM_SERVER.read(env),
            num_aggregators=settings.NUM_AGGREGATORS.read(env),
            aggregator=settings.AGGREGATOR.read(env),
            replicas=settings.REPLICAS.read(env),
            start=settings.START.read(env),
            lost=settings.LOST.read(env),
            inject=settings.INJECT.read(env),
            scheduler_log=settings.SCHEDULER_LOG.read(env),
            aggregate=settings.AGGREGATE.read(env),
            device_sum=settings.DEVICE_SUM.read(env),
            node_host=settings.NODE_HOST.read(env),
            interface=settings.INTERFACE.read(env),
            rank_hint=settings.TASK_ID.read(env),
            local_rank=settings.LOCAL_RANK.read(env, ranks.local_rank if ranks else None),
            local_size=settings.LOCAL_SIZE.read(env, ranks.local_size if ranks else None),
            root_fd=settings.ROOT_FD.read(env),
            timeout_s=settings.TIMEOUT_S.read(env),
            patience_s=settings.PATIENCE_S.read(env),
            join_timeout_s=settings.JOIN_TIMEOUT_S.read(env),
            heartbeat_s=settings.HEARTBEAT_S.read(env),
            heartbeat_timeout_s=settings.HEARTBEAT_TIMEOUT_S.read(env),
            pulse=settings.PULSE.read(env),
            bigarray_bound=settings.BIGARRAY_BOUND.read(env, bound_of(settings.NUM_SERVER.read(env))),
            piece_bytes=settings.PIECE_BYTES.read(env, _piece(root, num_workers)),
            least_piece_bytes=_least_piece(env, root),
            transport=settings.TRANSPORT.read(env),
            congestion=settings.CONGESTION.read(env),
            pacing=settings.PACING.read(env),
            update_on_kvstore=settings.UPDATE_ON_KVSTORE.read(env),
            checkpoint_dir=settings.CHECKPOINT_DIR.read(env),
            checkpoint_every=settings.CHECKPOINT_EVERY.read(env),
            checkpoint_keep=settings.CHECKPOINT_KEEP.read(env),
            checkpoint_resume=settings.CHECKPOINT_RESUME.read(env),
            columns=settings.COLUMNS.read(env),
            job=_job(env, root),
            shm=settings.SHM.read(env),
            encryption=encryption,
            keys=keys,
            job_secret=settings.JOB_SECRET.read(env),
            readers=settings.READERS.read(env),
            reader_share=settings.READER_SHARE.read(env),
            trace=settings.TRACE.read(env),
            ranks=ranks,
        )

    @property
    def in_job(self) -> bool:
        """Whether this process was started as a part of a job, by whatever starts such."""
        return bool(self.root or self.num_workers or self.ranks)

    def require_job(self, role: str) -> Config:
        """Return self if it describes a job that a ``role`` can join.

        Raises:
            ConfigError: outside a job, or for another role; the message says what to set or run.
        """
        needed = {
            "DMLC_PS_ROOT_URI": self.root,
            "DMLC_NUM_WORKER": self.num_workers,
            "DMLC_NUM_SERVER": self.num_servers,
        }
        missing = [name for name, value in needed.items() if not value]
        if missing:
            raise ConfigError(
                f"this process is not part of a distributed job: not set, or 0: {', '.join(missing)}; and neither "
                "torchrun, mpirun nor srun has said which rank it is. "
                'Start it with launch.py -n 2 -s 2 "python script.py" or torchrun --nproc-per-node=2 script.py, '
                "or use a 'local' or 'device' store"
            )
        if role != self.role:
            raise ConfigError(
                f"DMLC_ROLE={self.role}, but this is what a {role} does"
                + ("; start servers and the scheduler with `python -m servers`" if role == "worker" else "")
            )
        return self


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, with these variables in it."""
    return {**os.environ, **variables}


def _one_host(root: str) -> bool:
    """Whether all members of a job that meets there are on one host: nobody else can come."""
    return root.startswith("ipc://") or is_loopback(host_and_port(split_key(root)[0])[0])


def _piece(root: str, num_workers: int) -> int:
    """The best size of a message, by what all members of the job know."""
    if _one_host(root):
        return HOST_PIECE
    return NETWORK_PIECE if num_workers > FEW_WORKERS else FEW_PIECE


def _least_piece(env: Mapping[str, str], root: str) -> int:
    """See ``Config``. Where it would gain nothing, or was never tried, small stores have the same messages as others.

    Among many servers each message costs more than it gains.
    """
    alike = settings.PIECE_BYTES.read(env, 0) or _one_host(root)
    return LEAST_PIECE if 0 < settings.NUM_SERVER.read(env) <= FEW_SERVERS and not alike else 0


def bound_of(num_servers: int) -> int:
    """Return from how many elements on an array is cut: among many servers, one whole array is more than a share."""
    usual = settings.BIGARRAY_BOUND.default
    return usual if num_servers <= FEW_SERVERS else MANY_SERVERS_BOUND // num_servers


def _root(env: Mapping[str, str]) -> str:
    uri = settings.ROOT_URI.read(env)
    if not uri or uri.startswith("ipc://"):
        return uri
    if "://" in uri:
        raise _bad_uri(uri)
    port = settings.ROOT_PORT.read(env)
    if not port:
        raise ConfigError(
            f"DMLC_PS_ROOT_PORT is not set, and DMLC_PS_ROOT_URI={uri!r} needs a port: set it, 1 to 65535"
        )
    if ":" not in uri:
        return tcp_endpoint(uri, port)
    address = uri.removeprefix("[").removesuffix("]")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise _bad_uri(uri) from None
    return tcp_endpoint(address, port)


def _bad_uri(uri: str) -> ConfigError:
    name, valid = settings.ROOT_URI.name, settings.ROOT_URI.values.valid
    return ConfigError(f"{name}={uri!r} is not valid; valid: {valid}, without a port")


def job_name(text: str) -> str:
    """Return what of ``text`` can name a job, as parts of files' names do; all of it if it was made here."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:MAX_JOB]


def _job(env: Mapping[str, str], root: str) -> str:
    """The launcher's name for the job, or one made from where its members meet."""
    given = job_name(settings.JOB.read(env))
    return given or (hashlib.sha256(root.encode()).hexdigest()[:16] if root else Config.job)
