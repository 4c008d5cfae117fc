"""The command line of launch.py, which is that of MXNet's. Words in, a job out; nothing is started.

Values of environment variables, which may be secrets, appear in no error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from launcher.errors import LaunchError
from launcher.job import MAX_PER_ROLE, Job
from launcher.kinds import LAUNCHERS, NAMES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_USAGE = f"""\
launch.py [-h] -n NUM_WORKERS [-s NUM_SERVERS] [-H HOSTFILE] [--sync-dst-dir DIR]
                 [--launcher {{{",".join(NAMES)}}}]
                 [--env-server K:V] [--env-worker K:V] [--env NAME] command ..."""

_EPILOG = """\
examples:
  launch.py -n 2 python train.py --lr 0.1
  launch.py -n 2 -s 2 --launcher local "cd examples && python train.py"

`python` in the command is the interpreter that runs launch.py. The exit code is that of the first process to fail.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"error: {message}\n{self.format_usage().rstrip()}")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Job]:
    """The kind of launcher, and the job.

    Args:
        argv: the words behind `launch.py`.
        environ: the caller's environment, in which --env looks.

    Raises:
        LaunchError: they make no sense.
        SystemExit: -h.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # The name alone: behind it may stand somebody's secret.
        parser.error(f"no such option: {unknown[0].split('=')[0]}; options of the command go behind the command")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    for name in options.env:
        if name not in environ:
            parser.error(f"--env {name}: there is no such variable in this environment; export it first")
    try:
        job = Job(
            num_workers=options.num_workers,
            num_servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(command),
            env_server=dict(options.env_server),
            env_worker=dict(options.env_worker),
            env_names=tuple(options.env),
            hostfile=options.hostfile,
            sync_dst_dir=options.sync_dst_dir,
        )
    except LaunchError as error:
        parser.error(str(error))
    return options.launcher or ("local" if job.hostfile is None else "ssh"), job


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
    add("-n", "--num-workers", type=_count, required=True, metavar="NUM_WORKERS", help="how many workers to start")
    add("-s", "--num-servers", type=_count, metavar="NUM_SERVERS", help="how many servers; as many as workers if unset")
    add("-H", "--hostfile", metavar="HOSTFILE", help="the hosts to run on, one per line")
    add("--sync-dst-dir", metavar="DIR", help="copy the working directory to DIR on each host first (ssh)")
    add(
        "--launcher",
        choices=NAMES,
        help=f"the kind of cluster; ssh with a hostfile, else local. These work today: {', '.join(LAUNCHERS)}",
    )
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
    add("command", nargs=argparse.REMAINDER, help="what each worker runs: one quoted string, or separate words")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MAX_PER_ROLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_PER_ROLE}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError("expected NAME:VALUE, a colon between them (not shown: it may be a secret)")
    return name, value


def _name(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected the name of a variable alone (not shown: it may hold a secret); "
            "to set one, use --env-worker NAME:VALUE or --env-server NAME:VALUE"
        )
    return text
