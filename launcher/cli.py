"""The command line of launch.py, compatible with MXNet's: words go in, a job comes out. No I/O.

No error shows the value of an environment variable, which may be a secret.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import kvstore
from kvstore.errors import ConfigError, meant
from kvstore.job.settings import (
    AGGREGATE,
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CHECKPOINT_KEEP,
    CHECKPOINT_RESUME,
    GROUPS,
    MAX_WORKERS,
    MIN_WORKERS,
    OPTIMIZERS,
    PUBLISH_EVERY,
    READER_SHARE,
    REPLICAS,
    UPDATE_ON_KVSTORE,
    VERBOSE,
)
from kvstore.job.trace_target import TRACED, TraceTarget
from launcher.errors import LaunchError
from launcher.job.command import require_program
from launcher.job.description import (
    LOG_FILES,
    LOG_SIZE,
    MAX_PER_ROLE,
    PLACEMENTS,
    RESTARTS,
    Cluster,
    Job,
    OutputOptions,
    parse_ranks,
)
from launcher.kinds.registry import GROUP, KINDS, kind_of

_USAGE = f"""\
launch.py [-h] [--version] -n NUM_WORKERS [-s NUM_SERVERS] [-H HOSTFILE] [--sync-dst-dir DIR]
                 [--launcher {{{",".join(KINDS)}}}]
                 [--env-server K:V] [--env-worker K:V] [--env NAME] [--verbose] [--dry-run]
                 [other options, see -h] command ..."""

_EPILOG = """\
examples:
  launch.py -n 2 python train.py --lr 0.1
  launch.py -n 2 -s 2 --launcher local "cd examples && python train.py"
  launch.py status --stacks    # how a running job is: the same as kvstore-status

`python` in the command is the interpreter that runs launch.py. The exit code is that of the first process to fail.
"""

# What members read, and nobody but the user sets. It is checked before anything starts.
_CHECKED = (
    *(
        setting
        for title in ("Waiting and failure", "Links and memory", "Readers", "Checkpoints")
        for setting in GROUPS[title]
    ),
    UPDATE_ON_KVSTORE,
    OPTIMIZERS,
)


_DASHBOARD = "--dashboard"
_ANY = f"{_DASHBOARD}=\0"  # no word of a command line can be it
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SMALLEST = 64 << 10
_NO_LIVE = (
    "--live does nothing any more, and will be an error in the next release: in another terminal, "
    "kvstore-status --watch shows the state of each process, and --log-dir DIR keeps what each has printed"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def memory(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]{0,9}[mMgG]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; valid: a number with m or g, such as 500m or 4g")
    return f"{text}m" if text[-1:].isdigit() else text.lower()


def number(text: str, least: int = 0) -> int:
    number = int(text.lstrip("0")[:9] or 0) if text.isascii() and text.isdigit() else -1
    if not least <= number <= MAX_PER_ROLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {MAX_PER_ROLE}")
    return number


count = partial(number, least=1)


def launcher(text: str) -> str:
    if kind_of(text) is None:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(map(repr, KINDS))})")
    return text


def variable(text: str) -> tuple[str, str]:
    variable_name, colon, value = text.partition(":")
    if not colon or not _VARIABLE.fullmatch(variable_name):
        raise argparse.ArgumentTypeError("expected NAME:VALUE (what was given is not shown: it may be a secret)")
    return variable_name, value


def name(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected a variable's name alone (what was given is not shown: it may be a secret); "
            "to set one, use --env-worker NAME:VALUE or --env-server NAME:VALUE"
        )
    return text


def add_resources(group: argparse._ArgumentGroup) -> None:
    add_argument = group.add_argument
    add_argument(
        "--job-name", default="kvstore", metavar="NAME", type=_job_name, help="name of the job in the cluster's tools"
    )
    add_argument("--queue", default="", metavar="NAME", help="queue or partition")
    add_argument("--time", default="", metavar="TIME", help="time limit in the cluster's notation, such as 2:00:00")
    for role in ("worker", "server"):
        add_argument(f"--{role}-cores", default=0, type=number, metavar="N", help=f"cores for each {role}")
        add_argument(
            f"--{role}-memory",
            default="",
            type=memory,
            metavar="SIZE",
            help=f"memory for each {role}, such as 500m or 4g",
        )
    add_argument("--mem", dest="worker_memory", type=memory, metavar="SIZE", help="same as --worker-memory")
    add_argument("--gpus-per-worker", default=0, type=number, metavar="N", help="GPUs for each worker")
    add_argument(
        "--cluster-option",
        metavar="WORD",
        action="append",
        default=[],
        help="word to pass to mpirun, srun, sbatch or qsub; may be repeated",
    )
    add_argument("--image", default="", help="container image (kubernetes)")
    add_argument("--namespace", default="", help="namespace (kubernetes)")
    add_argument(
        "--yarn-jar", default="", metavar="FILE", help="YARN's distributed shell, if it is not in Hadoop's directories"
    )


def _job_name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job name; valid: up to 40 lowercase letters, digits and -, beginning with a letter"
        )
    return text


def add_readers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--readers",
        metavar="FILE",
        type=lambda text: str(Path(text).absolute()),
        help="let other processes read the values while the job runs: kvstore.connect(FILE). FILE is made, for you "
        "alone to read, and removed at the end; it may have a key",
    )
    group.add_argument("--max-readers", metavar="N", type=count, default=64, help="readers at once (default: 64)")
    group.add_argument(
        "--reader-share",
        metavar="PERCENT",
        type=_percent,
        help="the part of each server's time that all readers together get, such as 5%% (default: 0.25%%, and 4%% for "
        "followers)",
    )
    group.add_argument(
        "--publish-every",
        metavar="ROUNDS",
        type=count,
        help="after how many rounds there is a new version for followers (default: where the program asks for it)",
    )


def _percent(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
        READER_SHARE.values.parse(str(share))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: a percentage up to 100%") from None
    return share


def add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-dir", metavar="DIR", help="write what each process prints into a file of its own in DIR, too"
    )
    group.add_argument(
        "--log-size",
        metavar="SIZE",
        type=_size,
        default=LOG_SIZE,
        help=f"begin a new file when one has this size, such as 500k, 16m or 1g (default: {LOG_SIZE >> 20}m)",
    )
    group.add_argument(
        "--log-files",
        metavar="N",
        type=count,
        default=LOG_FILES,
        help=f"how many files of each process are kept, the newest ones (default: {LOG_FILES})",
    )
    group.add_argument(
        "--show",
        metavar="RANKS",
        type=_ranks,
        default=None,
        help="show the lines of these workers only: ranks such as 0 or 0,4-7, all, or none (default: all)",
    )
    group.add_argument(
        "--live",
        action="store_true",
        help="does nothing any more, and will be an error in the next release: kvstore-status has the same",
    )


def output_options(options: argparse.Namespace) -> OutputOptions:
    """What the options say; paths are absolute from here on."""
    directory = options.log_dir and str(Path(options.log_dir).absolute())
    return OutputOptions(
        log_dir=directory or None,
        log_size=options.log_size,
        log_files=options.log_files,
        show=options.show,
    )


def _ranks(text: str) -> tuple[int, ...] | None:
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,9})([kmg])", text.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < _SMALLEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 64k on; valid: such as 500k, 16m or 1g")
    return size


def add_observing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        _DASHBOARD,
        metavar="PORT",
        nargs="?",
        type=_port,
        help="serve a page that shows the running job, at 127.0.0.1 and this port (default: a free one). Its address, "
        "with a token, is printed",
    )
    group.add_argument(
        "--dashboard-token-file",
        metavar="FILE",
        type=lambda text: str(Path(text).absolute()),
        help="the token of the page, so that it is the same for many jobs; FILE is made if it is not there",
    )
    group.add_argument(
        "--attach",
        metavar="RANK",
        type=number,
        help="give this worker the terminal, for breakpoint() in its program (local; by default with -n 1)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE[:ROUNDS]",
        type=_trace,
        help="write a trace of the whole job to FILE, for ui.perfetto.dev or chrome://tracing. ROUNDS: how many rounds "
        f"it has, or the first and the last, such as 500-600 (default: {TRACED})",
    )


def with_ports(argv: Sequence[str]) -> list[str]:
    """Say for each `--dashboard` that no port follows it, or the parser would take the command for one."""
    return [
        _ANY if word == _DASHBOARD and not (after.isascii() and after.isdigit()) else word
        for word, after in pairwise([*argv, ""])
    ]


def as_given(command: Sequence[str]) -> list[str]:
    """Return the words of a command without what `with_ports` has done to them."""
    return [_DASHBOARD if word == _ANY else word for word in command]


def _trace(text: str) -> str:
    try:
        target = TraceTarget.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{target.file}:{target.rounds}"


def _port(text: str) -> int:
    if text == "\0":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; valid: 1 to 65535")
    return int(text)


def add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-H",
        "--hostfile",
        metavar="FILE",
        help="file with the hosts, one on each line: [user@]host[:port] [slots=N], or host:N",
    )
    add(
        "--server-hosts",
        metavar="FILE",
        help="file with the hosts of the servers (default: the hosts that have workers)",
    )
    add(
        "--placement",
        choices=PLACEMENTS,
        default=PLACEMENTS[0],
        help="fill the slots of each host before the next host (default), or take the hosts in turn",
    )
    add("--sync-dst-dir", metavar="DIR", help="copy the working directory to DIR on each host first, and run there")
    add(
        "--sync-exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="do not copy files that match; may be repeated",
    )
    add("--sync-gitignore", action="store_true", help="do not copy .git, nor files that a .gitignore names")
    add("--ssh-config", metavar="FILE", help="configuration file for ssh, instead of ~/.ssh/config")
    add("--ssh-option", metavar="K=V", action="append", default=[], help="option for ssh's -o; may be repeated")
    add("--python", default="", metavar="PATH", help="interpreter on the hosts (default: the path of this one)")


def add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host-ip", default="", metavar="IP", help="address by which the hosts reach this machine")
    add("--interface", default="", metavar="NAME", help="network interface to use on every host, such as eth0")
    add(
        "--no-encryption",
        dest="encryption",
        action="store_false",
        help="plain links, for networks that you trust: anyone who reaches a port can read the data and join the job",
    )
    add(
        "--no-host-aggregation",
        dest="host_aggregation",
        action="store_false",
        help="start no aggregators, which sum the gradients of hosts with two workers or more",
    )


def add_failures(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        choices=(0, 1),
        help="standbys of each server, which take over when it dies (default: 0)",
    )
    group.add_argument(
        "--min-workers",
        type=number,
        metavar="N",
        help="go on without workers that die as long as N are left (default: the death of any worker ends the job)",
    )
    group.add_argument(
        "--max-workers",
        type=number,
        metavar="N",
        help="let kvstore-job add-worker start more workers while the job runs, up to N, and dead ones again "
        "(needs --min-workers)",
    )
    group.add_argument(
        "--restarts",
        type=number,
        metavar="N",
        help="start again what dies of the scheduler, of workers with --min-workers, and of servers and standbys with "
        "--replicas 1; N times in all "
        f"(default with --replicas 1: {RESTARTS})",
    )
    group.add_argument(
        "--inject",
        metavar="FAULT",
        action="append",
        default=[],
        help="inject a fault, such as kill:server:1@round:100 or stop:standby:0@10s; may be repeated",
    )


def add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--checkpoint-dir", metavar="DIR", help="save checkpoints in DIR, which all hosts of the job share"
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="INTERVAL",
        type=_interval,
        help=f"how often: {CHECKPOINT_EVERY.values.valid} (default: where the program asks for it)",
    )
    group.add_argument(
        "--checkpoint-keep", metavar="N", type=count, help="how many are kept, the newest ones (default: 3)"
    )
    group.add_argument(
        "--resume",
        metavar="PATH",
        help="continue from this checkpoint, or from the newest in this directory, if it has one",
    )


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options of checkpoints and readers stand for; paths are absolute from here on."""
    values = {
        READER_SHARE.name: options.reader_share,
        PUBLISH_EVERY.name: options.publish_every,
        CHECKPOINT_DIR.name: options.checkpoint_dir and str(Path(options.checkpoint_dir).absolute()),
        CHECKPOINT_EVERY.name: options.checkpoint_every,
        CHECKPOINT_KEEP.name: options.checkpoint_keep,
        CHECKPOINT_RESUME.name: options.resume and str(Path(options.resume).absolute()),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _interval(text: str) -> str:
    try:
        CHECKPOINT_EVERY.values.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: {CHECKPOINT_EVERY.values.valid}") from None
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"error: {message}\n{self.format_usage().rstrip()}")


class CommandLine(NamedTuple):
    """What the command line asks for: a launcher, a job, and whether to print only what would run.

    `warning`: what to say of the options, if anything.
    """

    kind: str
    job: Job
    dry_run: bool
    warning: str = ""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read the words after `launch.py`. `environ`: the caller's environment, which must have the variables of --env."""
    parser = _parser()
    options, unknown = parser.parse_known_args(with_ports(argv))
    if unknown:
        # Only the name: its value may be a secret.
        name = unknown[0].split("=")[0]
        similar = meant(name, re.findall(r"(?<!\S)--?[a-z][\w-]*", parser.format_help()))
        parser.error(f"there is no option {name}; options of the command go after the command{similar}")
    command = as_given(options.command[1:] if options.command[:1] == ["--"] else options.command)
    for passed in options.env:
        if passed not in environ:
            parser.error(f"--env {passed}: this variable is not set; export it first")
    given = ((field.name, getattr(options, field.name)) for field in fields(Cluster))
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
    kind = options.launcher or ("local" if options.hostfile is None else "ssh")
    inherited = environ if kind == "local" else {name: environ[name] for name in options.env}
    try:
        for own in (options.env_server, options.env_worker):
            for setting in _CHECKED:
                setting.read({**inherited, **dict(own)})
        verbose = options.verbose or VERBOSE.read(environ)
        told = {**environ, **dict(options.env_server), **dict(options.env_worker)}
        plain["host_aggregation"] = plain["host_aggregation"] and AGGREGATE.read(told)
        if plain["replicas"] is None:
            plain["replicas"] = REPLICAS.read(environ)
        if plain["min_workers"] is None:
            plain["min_workers"] = MIN_WORKERS.read(environ)
        if plain["max_workers"] is None:
            plain["max_workers"] = MAX_WORKERS.read(environ)
    except ConfigError as error:
        parser.error(str(error))
    saved = variables(options)
    if options.checkpoint_every is not None and not CHECKPOINT_DIR.read({**told, **saved}):
        parser.error("--checkpoint-every needs a directory that all hosts share: give --checkpoint-dir DIR, too")
    try:
        require_program(command)
        job = Job(
            num_workers=options.num_workers,
            num_servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(command),
            env_server={**saved, **dict(options.env_server)},
            env_worker={**saved, **dict(options.env_worker)},
            env_names=tuple(options.env),
            cluster=Cluster(**plain),
            verbose=verbose,
            output=output_options(options),
        )
    except LaunchError as error:
        parser.error(str(error))
    return CommandLine(kind, job, options.dry_run, _NO_LIVE if options.live else "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="launch.py",
        usage=_USAGE,
        description="Start the scheduler, the servers and the workers of a distributed job, and wait for its end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--version",
        action="version",
        version=f"launch.py of torch-kvstore {kvstore.__version__}",
        help="print the version of launch.py and exit",
    )
    add("-n", "--num-workers", type=count, required=True, metavar="NUM_WORKERS", help="number of workers")
    add(
        "-s",
        "--num-servers",
        type=count,
        metavar="NUM_SERVERS",
        help="number of servers (default: as many as workers)",
    )
    add(
        "--launcher",
        type=launcher,
        metavar=f"{{{','.join(KINDS)}}}",
        help="how to start the processes (default: ssh with a hostfile, else local); or the name of an entry point of "
        f"an installed package, in the group {GROUP}",
    )
    add("--verbose", action="store_true", help="if the job fails, print the whole traceback of every process")
    add("--dry-run", action="store_true", help="print what would run, without secrets, and run nothing")
    for role, who in (("server", "server, standby and aggregator"), ("worker", "worker")):
        add(
            f"--env-{role}",
            action="append",
            default=[],
            type=variable,
            metavar="K:V",
            help=f"set an environment variable for each {who}; may be repeated",
        )
    add(
        "--env",
        action="append",
        default=[],
        type=name,
        metavar="NAME",
        help="pass this variable of your environment to every process; may be repeated; local jobs inherit all",
    )
    add_hosts(parser.add_argument_group("hosts (ssh, mpi)"))
    add_network(parser.add_argument_group("network"))
    add_output(parser.add_argument_group("output"))
    add_failures(parser.add_argument_group("failures"))
    add_checkpoints(parser.add_argument_group("checkpoints"))
    add_readers(parser.add_argument_group("readers"))
    add_observing(parser.add_argument_group("observing"))
    add_resources(parser.add_argument_group("cluster managers (slurm, sge, yarn, kubernetes)"))
    add("command", nargs=argparse.REMAINDER, help="the command of each worker: one quoted string, or separate words")
    return parser
