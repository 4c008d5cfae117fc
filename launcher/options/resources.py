"""Options of cluster managers: what a job is called there, and what it needs. No I/O."""

from __future__ import annotations

import argparse
import re

from launcher.options.values import memory, number


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
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
