"""What one process has to know of its job, read from the environment once, by the table in ``settings``."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from kvstore.errors import ConfigError
from kvstore.job import settings
from kvstore.job.address import host_and_port, is_loopback, tcp_endpoint
from kvstore.job.curve_keys import CurveKeys, split_key, with_key
from kvstore.job.ranks import Ranks
from kvstore.job.settings import Setting
from kvstore.job.valid_values import Interval, RoundWindow

T = TypeVar("T")
_SETTING = "setting"  # of a field's metadata

FOR_EVER_S = 1e9  # thirty years; clocks and sockets take no infinity
MAX_JOB = 40  # characters of a job's name
FEW_SERVERS = 16  # with more of them, whole arrays would make the load of servers differ
MANY_SERVERS_BOUND = 1_600_000  # elements, divided by the number of servers
NETWORK_PIECE = 640 << 10  # bytes; a server answers when it has a piece from every worker, so it must not be large
LEAST_PIECE = 160 << 10  # bytes; see ``kvstore.client.plans``
FEW_WORKERS, FEW_PIECE = 2, 2 << 20  # with no more, that matters less than what each message costs
FIRST_PIECES = 2  # for each server, by all workers of a host, before any of them packs more; with one, lines are idle
WINDOW_PIECES = 4  # with fewer, lines are idle; with more, a server may fall far behind the others
HOST_PIECE = 64 << 20  # no network card is idle meanwhile: what counts is how many messages there are


def _by(setting: Setting[T], *, shown: bool = True) -> T:
    """A field of ``Config`` that is the value of a setting. ``shown`` is whether ``repr`` has it."""
    made: T = field(default=setting.default, repr=shown, metadata={_SETTING: setting})
    return made


@dataclass(frozen=True)
class Config:
    """What one process needs to know of its job: the settings, which ``settings`` explains, and what follows from them.

    Attributes:
        root: the scheduler's endpoint, ``ipc://path`` or ``tcp://host:port``, this with the scheduler's key if there
            are keys; empty outside a job.
        local_rank, local_size: which of its host's members of its role this is, and how many there are; -1 and 0 where
            nobody has said.
        bigarray_bound: arrays of at least so many elements are cut across all servers.
        piece_bytes: how many bytes go in one message, about; the same on all workers, or sums are slow.
        least_piece_bytes: in small stores messages are smaller, but not than this; 0: they are not.
        job: a name for the job that a file name can have; the same in all processes of it.
        keys: None for plain links.
        ranks: this process's rank under torchrun, mpirun or srun; None without a starter, or if ``root`` says where the
            job is.
    """

    role: str = _by(settings.ROLE)
    root: str = ""
    num_workers: int = _by(settings.NUM_WORKER)
    num_servers: int = _by(settings.NUM_SERVER)
    num_aggregators: int = _by(settings.NUM_AGGREGATORS)
    aggregator: int = _by(settings.AGGREGATOR)
    replicas: int = _by(settings.REPLICAS)
    min_workers: int = _by(settings.MIN_WORKERS)
    max_workers: int = _by(settings.MAX_WORKERS)
    start: int = _by(settings.START)
    lost: tuple[str, float] | tuple[()] = _by(settings.LOST)
    inject: tuple[tuple[str, int], ...] = _by(settings.INJECT)
    scheduler_log: str = _by(settings.SCHEDULER_LOG)
    aggregate: bool = _by(settings.AGGREGATE)
    device_sum: str = _by(settings.DEVICE_SUM)
    node_host: str = _by(settings.NODE_HOST)
    interface: str = _by(settings.INTERFACE)
    rank_hint: int = _by(settings.TASK_ID)
    root_fd: int = _by(settings.ROOT_FD)
    timeout_s: float = _by(settings.TIMEOUT_S)
    patience_s: float = _by(settings.PATIENCE_S)
    join_timeout_s: float = _by(settings.JOIN_TIMEOUT_S)
    heartbeat_s: float = _by(settings.HEARTBEAT_S)
    heartbeat_timeout_s: float = _by(settings.HEARTBEAT_TIMEOUT_S)
    pulse: bool = _by(settings.PULSE)
    transport: str = _by(settings.TRANSPORT)
    congestion: str = _by(settings.CONGESTION)
    pacing: bool = _by(settings.PACING)
    update_on_kvstore: bool = _by(settings.UPDATE_ON_KVSTORE)
    checkpoint_dir: str = _by(settings.CHECKPOINT_DIR)
    checkpoint_every: Interval = _by(settings.CHECKPOINT_EVERY)
    checkpoint_keep: int = _by(settings.CHECKPOINT_KEEP)
    checkpoint_resume: str = _by(settings.CHECKPOINT_RESUME)
    columns: int = _by(settings.COLUMNS)
    shm: bool = _by(settings.SHM)
    encryption: bool = _by(settings.ENCRYPTION)
    job_secret: str = _by(settings.JOB_SECRET, shown=False)
    readers: int = _by(settings.READERS)
    reader_share: float = _by(settings.READER_SHARE)
    publish_every: int = _by(settings.PUBLISH_EVERY)
    trace: RoundWindow = _by(settings.TRACE)
    local_rank: int = settings.LOCAL_RANK.default
    local_size: int = settings.LOCAL_SIZE.default
    bigarray_bound: int = settings.BIGARRAY_BOUND.default
    piece_bytes: int = FEW_PIECE
    least_piece_bytes: int = 0
    job: str = "none"
    keys: CurveKeys | None = field(default=None, repr=False)
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"KVSTORE_HEARTBEAT_TIMEOUT_S={self.heartbeat_timeout_s:g} must be at least twice "
                f"KVSTORE_HEARTBEAT_S={self.heartbeat_s:g}, or one late beat is a death"
            )

    @property
    def seats(self) -> int:
        """How many workers there may be at once: ranks are below this."""
        return max(self.num_workers, self.max_workers)

    @property
    def join_limit_s(self) -> float:
        return self.join_timeout_s or self.patience_s or FOR_EVER_S

    @property
    def one_host(self) -> bool:
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
        """Read ``env``, the process's environment by default; ConfigError for a value that is not valid."""
        env = os.environ if env is None else env
        # Only fields whose default is the setting's own. The others follow from several variables, and are below.
        values = {each.name: each.metadata[_SETTING].read(env) for each in fields(cls) if _SETTING in each.metadata}
        root = _root(env)
        keys = CurveKeys.from_env(env) if values["encryption"] else None
        ranks = Ranks.from_env(env) if values["role"] == "worker" and not root else None
        return cls(
            **values,
            root=with_key(root, keys.root) if keys is not None and root.startswith("tcp://") else root,
            local_rank=settings.LOCAL_RANK.read(env, ranks.local_rank if ranks else None),
            local_size=settings.LOCAL_SIZE.read(env, ranks.local_size if ranks else None),
            bigarray_bound=settings.BIGARRAY_BOUND.read(env, bound_of(values["num_servers"])),
            piece_bytes=settings.PIECE_BYTES.read(env, _piece(root, values["num_workers"])),
            least_piece_bytes=_least_piece(env, root),
            job=_job(env, root),
            keys=keys,
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
