"""``kvstore-job``: adds workers to a running job, and moves its servers and standbys."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.place import ObservingPlace, running_jobs
from kvstore.observing.choice import NoSuchJob, listed, place_named, roots_here, seconds
from launcher.supervision.control import DONE, FAILED, REFUSED, SOCKET, USAGE

GOES_ON = 3
TIMEOUT_S = 300.0


def main(args: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(args)
    if given.command == "drain-host":
        order = {"drain": given.host}
    else:
        order = {"add": "worker"} if given.command == "add-worker" else {"move": given.process}
    if given.command != "drain-host" and given.to is not None:
        order["to"] = given.to
    try:
        return _give(_directory(given.job), order, given.timeout)
    except ConfigError as error:
        print(f"kvstore-job: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, NoSuchJob) else USAGE
    except KeyboardInterrupt:
        print("kvstore-job: what was ordered goes on", file=sys.stderr)
        return GOES_ON


def _directory(wanted: str | None) -> Path:
    """Return the private directory of the job that is meant: of the only one, or of the one that is named."""
    found = [(directory, place) for directory, place in running_jobs(roots_here()) if isinstance(place, ObservingPlace)]
    places = [place for _, place in found]
    if wanted is None and len(places) != 1:
        raise NoSuchJob(f"which job? Give its pid or name with --job; running here: {listed(places)}")
    place = places[0] if wanted is None else place_named(wanted, places)
    for directory, other in found:
        if other.job == place.job:
            return directory
    raise NoSuchJob(
        f"job {place.job} does not run on this host: orders are given on the host of launch.py, by its user"
    )


def _give(directory: Path, order: dict[str, str], timeout_s: float) -> int:
    """Give an order to a job, and print what becomes of it; return the exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        try:
            link.connect(os.fspath(directory / SOCKET))
        except OSError:
            raise NoSuchJob(
                f"the job {directory.name} takes no orders: it has no launch.py that runs and starts its processes"
            ) from None
        try:
            link.sendall(json.dumps(order).encode() + b"\n")
            for line in link.makefile("r", encoding="utf-8"):
                answer = json.loads(line)
                code = answer.get("end")
                print(f"kvstore-job: {answer['say']}", file=sys.stderr if code else sys.stdout, flush=True)
                if code is not None:
                    return int(code)
        except TimeoutError:
            print(f"kvstore-job: not done within {timeout_s:g} s; what was ordered goes on", file=sys.stderr)
            return GOES_ON
        except OSError as error:
            print(f"kvstore-job: launch.py: {error.strerror}", file=sys.stderr)
            return FAILED
    print("kvstore-job: the job has ended", file=sys.stderr)
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-job",
        description="Add workers to a running job that launch.py has started on this host with --max-workers, or move "
        "servers of one with --replicas 1. All others go on.",
        epilog=f"exit codes: {DONE} done; {REFUSED} not possible, or no such job; {USAGE} wrong usage; {GOES_ON} not "
        f"done within the timeout: it goes on; {FAILED} failed",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    move = commands.add_parser("move-server", help="let a process end, and start it anew, perhaps on another host")
    move.add_argument("process", metavar="PROCESS", help="server:R or standby:R, as launch.py names them")
    move.add_argument("--to", metavar="HOST", help="a host of the job (default: the one where it runs)")
    drain = commands.add_parser("drain-host", help="move all servers and standbys of a host to others of the job")
    drain.add_argument("host", metavar="HOST", help="its name, as in the hostfile")
    add = commands.add_parser(
        "add-worker", help="start one more worker, or one of those that died, up to --max-workers"
    )
    add.add_argument("--to", metavar="HOST", help="a host of the job (default: the one with the fewest workers)")
    for command in (move, drain, add):
        command.add_argument("--job", metavar="JOB", help="launch.py's pid, or the job's name (default: the only one)")
        command.add_argument(
            "--timeout",
            type=seconds,
            default=TIMEOUT_S,
            metavar="S",
            help=f"how long to wait for the end, in seconds (default: {TIMEOUT_S:g})",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
