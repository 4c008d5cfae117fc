"""The command line of launch.py, compatible with MXNet's: words go in, a job comes out. No I/O.

No error shows the value of an environment variable, which may be a secret.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

import kvstore
from kvstore.errors import ConfigError, meant
from kvstore.job.settings import AGGREGATE, CHECKPOINT_DIR, GROUPS, OPTIMIZERS, REPLICAS, UPDATE_ON_KVSTORE, VERBOSE
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.job.command import require_program
from launcher.job.description import Job
from launcher.kinds.registry import KINDS
from launcher.options import checkpoints, failures, hosts, observing, output, readers, resources
from launcher.options.values import count, name, variable

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
    options, unknown = parser.parse_known_args(observing.with_ports(argv))
    if unknown:
        # Only the name: its value may be a secret.
        name = unknown[0].split("=")[0]
        similar = meant(name, re.findall(r"(?<!\S)--?[a-z][\w-]*", parser.format_help()))
        parser.error(f"there is no option {name}; options of the command go after the command{similar}")
    command = observing.as_given(options.command[1:] if options.command[:1] == ["--"] else options.command)
    for passed in options.env:
        if passed not in environ:
            parser.error(f"--env {passed}: this variable is not set; export it first")
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Cluster)}
    plain: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value for field, value in given.items()
    }
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
    except ConfigError as error:
        parser.error(str(error))
    saved = checkpoints.variables(options)
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
            output=output.read(options),
        )
    except LaunchError as error:
        parser.error(str(error))
    return CommandLine(kind, job, options.dry_run)


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
    add("--launcher", choices=list(KINDS), help="how to start the processes (default: ssh with a hostfile, else local)")
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
    hosts.add_hosts(parser.add_argument_group("hosts (ssh, mpi)"))
    hosts.add_network(parser.add_argument_group("network"))
    output.add(parser.add_argument_group("output"))
    failures.add(parser.add_argument_group("failures"))
    checkpoints.add(parser.add_argument_group("checkpoints"))
    readers.add(parser.add_argument_group("readers"))
    observing.add(parser.add_argument_group("observing"))
    resources.add(parser.add_argument_group("cluster managers (slurm, sge, yarn, kubernetes)"))
    add("command", nargs=argparse.REMAINDER, help="the command of each worker: one quoted string, or separate words")
    return parser
