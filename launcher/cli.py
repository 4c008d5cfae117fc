"""The command line of launch.py, compatible with MXNet's: words go in, a job comes out. No I/O.

No error shows the value of an environment variable, which may be a secret.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import kvstore
from kvstore.errors import ConfigError
from kvstore.job.settings import (
    AGGREGATE,
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CHECKPOINT_KEEP,
    CHECKPOINT_RESUME,
    REPLICAS,
    VERBOSE,
)
from launcher.errors import LaunchError
from launcher.job.cluster import PLACEMENTS, Cluster
from launcher.job.description import MAX_PER_ROLE, RESTARTS, Job
from launcher.kinds.registry import KINDS

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_USAGE = f"""\
launch.py [-h] [--version] -n NUM_WORKERS [-s NUM_SERVERS] [-H HOSTFILE] [--sync-dst-dir DIR]
                 [--launcher {{{",".join(KINDS)}}}]
                 [--env-server K:V] [--env-worker K:V] [--env NAME] [--verbose] [--dry-run]
                 [other options, see -h] command ..."""

_EPILOG = """\
examples:
  launch.py -n 2 python train.py --lr 0.1
  launch.py -n 2 -s 2 --launcher local "cd examples && python train.py"

`python` in the command is the interpreter that runs launch.py. The exit code is that of the first process to fail.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"error: {message}\n{self.format_usage().rstrip()}")


class CommandLine(NamedTuple):
    """What the command line asks for: a launcher, a job, and whether to print only what would run."""

    kind: str
    job: Job
    dry_run: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read the command line.

    Args:
        argv: the words after `launch.py`.
        environ: the caller's environment, which must have the variables of --env.

    Raises:
        LaunchError: they are not valid.
        SystemExit: -h or --version.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # Only the name: its value may be a secret.
        parser.error(f"there is no option {unknown[0].split('=')[0]}; options of the command go after the command")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    for name in options.env:
        if name not in environ:
            parser.error(f"--env {name}: this variable is not set; export it first")
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Cluster)}
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        verbose = options.verbose or VERBOSE.read(environ)
        told = {**environ, **dict(options.env_server), **dict(options.env_worker)}
        plain["host_aggregation"] = plain["host_aggregation"] and AGGREGATE.read(told)
        if plain["replicas"] is None:
            plain["replicas"] = REPLICAS.read(environ)
    except ConfigError as error:
        parser.error(str(error))
    checkpoints = _checkpoints(options)
    try:
        job = Job(
            num_workers=options.num_workers,
            num_servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(command),
            env_server={**checkpoints, **dict(options.env_server)},
            env_worker={**checkpoints, **dict(options.env_worker)},
            env_names=tuple(options.env),
            cluster=Cluster(**plain),
            verbose=verbose,
        )
    except LaunchError as error:
        parser.error(str(error))
    return CommandLine(options.launcher or ("local" if job.cluster.hostfile is None else "ssh"), job, options.dry_run)


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
    add("-n", "--num-workers", type=_count, required=True, metavar="NUM_WORKERS", help="number of workers")
    add(
        "-s",
        "--num-servers",
        type=_count,
        metavar="NUM_SERVERS",
        help="number of servers (default: as many as workers)",
    )
    add("--launcher", choices=list(KINDS), help="how to start the processes (default: ssh with a hostfile, else local)")
    add("--verbose", action="store_true", help="if the job fails, print the whole traceback of every process")
    add("--dry-run", action="store_true", help="print what would run, without secrets, and run nothing")
    for role, who in (("server", "server, standby and aggregator"), ("worker", "worker")):
        add(
            f"--env-{role}",
            action="append",
            default=[],
            type=_pair,
            metavar="K:V",
            help=f"set an environment variable for each {who}; may be repeated",
        )
    add(
        "--env",
        action="append",
        default=[],
        type=_name,
        metavar="NAME",
        help="pass this variable of your environment to every process; may be repeated; local jobs inherit all",
    )
    _add_hosts(parser.add_argument_group("hosts (ssh, mpi)"))
    _add_network(parser.add_argument_group("network"))
    _add_faults(parser.add_argument_group("failures"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_readers(parser.add_argument_group("readers"))
    _add_resources(parser.add_argument_group("cluster managers (slurm, sge, yarn, kubernetes)"))
    add("command", nargs=argparse.REMAINDER, help="the command of each worker: one quoted string, or separate words")
    return parser


def _add_hosts(group: argparse._ArgumentGroup) -> None:
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


def _add_network(group: argparse._ArgumentGroup) -> None:
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


def _add_faults(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--replicas",
        type=int,
        choices=(0, 1),
        help="standbys of each server, which take over when it dies (default: 0)",
    )
    add(
        "--restarts",
        type=_number,
        metavar="N",
        help="start again what dies of the scheduler and, with --replicas 1, of servers and standbys; N times in all "
        f"(default with --replicas 1: {RESTARTS})",
    )
    add(
        "--inject",
        metavar="FAULT",
        action="append",
        default=[],
        help="inject a fault, such as kill:server:1@round:100 or stop:standby:0@10s; may be repeated",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--checkpoint-dir", metavar="DIR", help="save checkpoints in DIR, which all hosts of the job share")
    add(
        "--checkpoint-every",
        metavar="INTERVAL",
        type=_interval,
        help=f"how often: {CHECKPOINT_EVERY.values.valid} (default: where the program asks for it)",
    )
    add("--checkpoint-keep", metavar="N", type=_count, help="how many are kept, the newest ones (default: 3)")
    add(
        "--resume",
        metavar="PATH",
        help="continue from this checkpoint, or from the newest in this directory, if it has one",
    )


def _add_readers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--readers",
        metavar="FILE",
        type=lambda text: str(Path(text).absolute()),
        help="let other processes read the values while the job runs: kvstore.connect(FILE). FILE is made, for you "
        "alone to read, and removed at the end; it may have a key",
    )
    add("--max-readers", metavar="N", type=_count, default=64, help="readers at once (default: 64)")


def _checkpoints(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options of checkpoints stand for; paths are from here on absolute."""
    values = {
        CHECKPOINT_DIR.name: options.checkpoint_dir and str(Path(options.checkpoint_dir).absolute()),
        CHECKPOINT_EVERY.name: options.checkpoint_every,
        CHECKPOINT_KEEP.name: options.checkpoint_keep,
        CHECKPOINT_RESUME.name: options.resume and str(Path(options.resume).absolute()),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _add_resources(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--job-name", default="kvstore", metavar="NAME", type=_job_name, help="name of the job in the cluster's tools")
    add("--queue", default="", metavar="NAME", help="queue or partition")
    add("--time", default="", metavar="TIME", help="time limit in the cluster's notation, such as 2:00:00")
    for role in ("worker", "server"):
        add(f"--{role}-cores", default=0, type=_number, metavar="N", help=f"cores for each {role}")
        add(
            f"--{role}-memory",
            default="",
            type=_memory,
            metavar="SIZE",
            help=f"memory for each {role}, such as 500m or 4g",
        )
    add("--mem", dest="worker_memory", type=_memory, metavar="SIZE", help="same as --worker-memory")
    add("--gpus-per-worker", default=0, type=_number, metavar="N", help="GPUs for each worker")
    add(
        "--cluster-option",
        metavar="WORD",
        action="append",
        default=[],
        help="word to pass to mpirun, srun, sbatch or qsub; may be repeated",
    )
    add("--image", default="", help="container image (kubernetes)")
    add("--namespace", default="", help="namespace (kubernetes)")
    add("--yarn-jar", default="", metavar="FILE", help="YARN's distributed shell, if it is not in Hadoop's directories")


def _memory(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]{0,9}[mMgG]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; valid: a number with m or g, such as 500m or 4g")
    return f"{text}m" if text[-1:].isdigit() else text.lower()


def _interval(text: str) -> str:
    try:
        CHECKPOINT_EVERY.values.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: {CHECKPOINT_EVERY.values.valid}") from None
    return text


def _job_name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job name; valid: up to 40 lowercase letters, digits and -, beginning with a letter"
        )
    return text


def _number(text: str) -> int:
    return _whole(text, 0)


def _count(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    number = int(text.lstrip("0")[:9] or 0) if text.isascii() and text.isdigit() else -1
    if not least <= number <= MAX_PER_ROLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {MAX_PER_ROLE}")
    return number


def _pair(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError("expected NAME:VALUE (what was given is not shown: it may be a secret)")
    return name, value


def _name(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected a variable's name alone (what was given is not shown: it may be a secret); "
            "to set one, use --env-worker NAME:VALUE or --env-server NAME:VALUE"
        )
    return text
