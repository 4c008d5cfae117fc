"""``python -m workers.integrations train.py ARGUMENT...``: run a script of torch.distributed in this job, as it is.

It stands where ``torchrun`` or ``accelerate launch`` stood:

    launch.py -n 2 -s 2 --launcher local "python -m workers.integrations train.py --epochs 3"
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from workers.integrations import torch_distributed


def main(words: list[str]) -> None:
    """Make the process group, then run the script ``words[0]`` with the other words as its arguments."""
    if not words or words[0].startswith("-"):
        sys.exit(__doc__)
    torch_distributed.init()
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)  # as python does
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
