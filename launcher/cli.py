"""The command line of launch.py, which is that of MXNet's. Words in, a job out; nothing is started.

Values of environment variables, which may be secrets, appear in no error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

import kvstore
from launcher.errors import LaunchError
from launcher.job.cluster import PLACEMENTS, Cluster
from launcher.job.description import MAX_PER_ROLE, Job
from launcher.kinds.registry import KINDS

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_USAGE = f"""\
launch.py [-h] [--version] -n NUM_WORKERS [-s NUM_SERVERS] [-H HOSTFILE] [--sync-dst-dir DIR]
                 [--launcher {{{",".join(KINDS)}}}]
                 [--env-server K:V] [--env-worker K:V] [--env NAME] [--dry-run]
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
    """What the command line asks for: a job, on that kind of cluster, or only to say what would be run."""

    kind: str
    job: Job
    dry_run: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read the command line.

    Args:
        argv: the words behind `launch.py`.
        environ: the caller's environment, in which --env looks.

    Raises:
        LaunchError: they make no sense.
        SystemExit: -h or --version.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # The name alone: behind it may stand somebody's secret.
        parser.error(f"there is no option {unknown[0].split('=')[0]}; options of the command go after the command")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    for name in options.env:
        if name not in environ:
            parser.error(f"--env {name}: this variable is not set; export it first")
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Cluster)}
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        job = Job(
            num_workers=options.num_workers,
            num_servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(command),
            env_server=dict(options.env_server),
            env_worker=dict(options.env_worker),
            env_names=tuple(options.env),
            cluster=Cluster(**plain),
        )
    except LaunchError as error:
        parser.error(str(error))
    return CommandLine(options.launcher or ("local" if job.cluster.hostfile is None else "ssh"), job, options.dry_run)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="launch.py",
        usage=_USAGE,
        description="Start a distributed job, watch it, and end it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--version",
        action="version",
        version=f"launch.py of kvstore {kvstore.__version__}",
        help="print the version of launch.py and exit",
    )
    add("-n", "--num-workers", type=_count, required=True, metavar="NUM_WORKERS", help="how many workers to start")
    add("-s", "--num-servers", type=_count, metavar="NUM_SERVERS", help="how many servers; as many as workers if unset")
    add("--launcher", choices=list(KINDS), help="the kind of cluster; ssh with a hostfile, else local")
    add("--dry-run", action="store_true", help="print what would be run, without secrets, and run nothing")
    for role in ("server", "worker"):
        add(
            f"--env-{role}",
            action="append",
            default=[],
            type=_pair,
            metavar="K:V",
            help=f"set an environment variable for each {role}; may be repeated",
        )
    add(
        "--env",
        action="append",
        default=[],
        type=_name,
        metavar="NAME",
        help="pass this environment variable on to every process; may be repeated (a local job inherits them all)",
    )
    _add_hosts(parser.add_argument_group("hosts (ssh, mpi)"))
    _add_network(parser.add_argument_group("network"))
    _add_resources(parser.add_argument_group("cluster managers (slurm, sge, yarn, kubernetes)"))
    add("command", nargs=argparse.REMAINDER, help="what each worker runs: one quoted string, or separate words")
    return parser


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-H",
        "--hostfile",
        metavar="FILE",
        help="the hosts to run on, one per line: [user@]host[:port] [slots=N], or host:N",
    )
    add("--server-hosts", metavar="FILE", help="the hosts of the servers, likewise; beside the workers if unset")
    add(
        "--placement",
        choices=PLACEMENTS,
        default=PLACEMENTS[0],
        help="fill each host's slots before the next's (the default), or deal to the hosts in turn",
    )
    add("--sync-dst-dir", metavar="DIR", help="copy the working directory to DIR on each host first, and run there")
    add("--sync-exclude", metavar="PATTERN", action="append", default=[], help="copy no such files; may be repeated")
    add("--sync-gitignore", action="store_true", help="copy nothing that a .gitignore names")
    add("--ssh-config", metavar="FILE", help="a configuration file for ssh, instead of ~/.ssh/config")
    add("--ssh-option", metavar="K=V", action="append", default=[], help="an option for ssh's -o; may be repeated")
    add("--python", default="", metavar="PATH", help="the interpreter on the hosts; the path of this one if unset")


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host-ip", default="", metavar="IP", help="the address of this machine by which the hosts reach it")
    add("--interface", default="", metavar="NAME", help="the network interface to use on every host, as eth0")
    add(
        "--no-encryption",
        dest="encryption",
        action="store_false",
        help="for networks you trust: whoever can reach a port of the job can read it and join it",
    )


def _add_resources(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--job-name", default="kvstore", metavar="NAME", type=_job_name, help="how the cluster's tools show the job")
    add("--queue", default="", metavar="NAME", help="the queue or partition")
    add("--time", default="", metavar="TIME", help="how long the job may take, as the cluster writes it: 2:00:00")
    for role in ("worker", "server"):
        add(f"--{role}-cores", default=0, type=_number, metavar="N", help=f"processors for each {role}")
        add(f"--{role}-memory", default="", type=_memory, metavar="SIZE", help=f"memory for each {role}: 500m, 4g")
    add("--mem", dest="worker_memory", type=_memory, metavar="SIZE", help="the same as --worker-memory")
    add("--gpus-per-worker", default=0, type=_number, metavar="N", help="GPUs for each worker")
    add("--cluster-option", metavar="WORD", action="append", default=[], help="a word for mpirun, srun, sbatch or qsub")
    add("--image", default="", help="the container image (kubernetes)")
    add("--namespace", default="", help="the namespace (kubernetes)")
    add("--yarn-jar", default="", metavar="FILE", help="YARN's distributed shell, if it is not where Hadoop has it")


def _memory(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]{0,9}[mMgG]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; valid: a number with m or g, such as 500m or 4g")
    return f"{text}m" if text[-1:].isdigit() else text.lower()


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
