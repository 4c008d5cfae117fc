"""launch.py as sbatch runs it inside an allocation, with the job on its standard input."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from launcher.errors import LaunchError
from launcher.job import batch
from launcher.kinds import slurm
from launcher.supervision.report import report


def main() -> int:
    """Run the job on standard input in the allocation of this process, and return its exit code."""
    try:
        job, variables, end = batch.loads(sys.stdin.read())
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return error.exit_code
    os.environ.update(variables)
    try:
        code = slurm.run_inside(job, report)
    except LaunchError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        code = error.exit_code
    with suppress(OSError), Path(end).open("r+") as file:  # the file is gone if launch.py outside has exited
        file.write(f"{code}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
