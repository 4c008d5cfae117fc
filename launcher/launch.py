"""Start a distributed job: `launch.py -n 2 -s 2 --launcher local "python train.py"`.

launch.py            once installed
python launcher/launch.py    from a clone
python -m launcher
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run by its path: the packages are beside this one, and the files in it must not pass for modules of their own.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _here)]

from kvstore.job.system import unsupported

if _why := unsupported("launch.py"):  # before modules are imported that are not there
    print(_why, file=sys.stderr)
    sys.exit(2)

from launcher.cli import parse
from launcher.errors import LaunchError
from launcher.job.command import module_directories, shadows
from launcher.kinds.registry import find
from launcher.output.display import prepare
from launcher.supervision.supervisor import OnFailure, report


def main(argv: Sequence[str] | None = None, on_failure: OnFailure = report) -> int:
    """Run the job of a command line; with the word ``status`` first, do what ``kvstore-status`` does.

    Args:
        argv: the words after `launch.py`; None for those of this process.
        on_failure: called with the first process that fails, and how, while the others still run. By default it tells
            the scheduler.

    Returns:
        0, the exit code of the first process to fail, 128 + N after signal N, or 2 if the command line is not valid.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["status"]:
        from kvstore.observing.status_command import main as show_status  # what a job does not need

        return show_status(words[1:])
    try:
        kind, job, dry_run, warning = parse(words, os.environ)
        launcher = find(kind, job)
        if warning:
            print(f"launch.py: warning: {warning}", file=sys.stderr)
        if dry_run:
            print(launcher.dry_run(job))
            return 0
        for shadow in shadows(module_directories(job.command, {**os.environ, **job.env_worker})):
            print(f"launch.py: warning: in the command, {shadow}", file=sys.stderr)
        prepare(job.output)
        exit_code = launcher.run(job, on_failure)
        if argv is None:  # one Ctrl-C more, by somebody impatient, would kill Python at its exit, and that code with it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return exit_code
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        print(f"launch.py: {error.strerror}: raise the limit with ulimit -n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("launch.py: Ctrl-C: nothing was started", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
