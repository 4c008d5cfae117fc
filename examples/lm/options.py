"""The command line of train_lm.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arguments import Parser, default_store, natural, positive


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Train a small transformer to write text, character by character")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--text", type=Path, action="append", metavar="FILE", help="a UTF-8 file; this project's own text if not given"
    )

    network = parser.add_argument_group("network")
    network.add_argument("--layers", type=positive, default=3, help="blocks of attention and network")
    network.add_argument("--heads", type=positive, default=4, help="attention heads in each block")
    network.add_argument("--width", type=positive, default=128, help="values per position")
    network.add_argument("--context", type=positive, default=128, help="largest number of characters it sees")

    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=positive, default=16, help="sequences in a batch of each worker")
    training.add_argument("--steps", type=positive, default=400, help="number of steps")
    training.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    training.add_argument("--min-lr", type=float, help="the last learning rate; a tenth of --lr if not given")
    training.add_argument("--warmup", type=natural, help="steps of warm-up; a twentieth of --steps if not given")
    training.add_argument("--wd", type=float, default=0.1, help="AdamW's weight decay, for matrices only")
    training.add_argument("--clip", type=float, default=1.0, help="largest norm of a worker's gradient; 0: no limit")
    training.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")

    line = parser.add_argument_group("a slow line")
    line.add_argument(
        "--inner-steps",
        type=natural,
        default=0,
        help="DiLoCo: steps between two exchanges; 0: exchange every step",
    )
    line.add_argument("--outer-lr", type=float, default=0.7, help="DiLoCo: learning rate of the servers")
    line.add_argument("--outer-momentum", type=float, default=0.9, help="DiLoCo: Nesterov momentum of the servers")
    line.add_argument("--fragments", type=positive, default=1, help="DiLoCo: parts of the model that take turns")
    line.add_argument("--overlap", type=natural, default=0, help="DiLoCo: steps that a part may travel for")
    line.add_argument("--compress", metavar="TYPE", help="compress what is sent: fp16, int8, ...")
    line.add_argument("--compress-back", metavar="TYPE", help="compress what comes back, too: fp16, bf16 or int8")

    system = parser.add_argument_group("system")
    system.add_argument("--kv-store", default=default_store(), help="local, dist_sync, dist_async, ...")
    system.add_argument("--eval-every", type=positive, default=100, help="steps between evaluations on held-out text")
    system.add_argument(
        "--log-to",
        metavar="PATH",
        nargs="+",
        default=[],
        help="write the loss and more to a .jsonl or .csv file, or to a folder/ for TensorBoard, at each evaluation",
    )
    system.add_argument("--sample", type=natural, default=200, help="characters to generate at the end")
    system.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="temperature of the sample; near 0, always the likeliest character",
    )

    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be divided among {args.heads} heads")
    if args.temperature <= 0:
        parser.error("--temperature must be above 0")
    if args.compress_back and not args.compress:
        parser.error("--compress-back needs --compress")
    back = {"pull": args.compress_back} if args.compress_back else {}
    args.compression = {"type": args.compress, **back} if args.compress else None
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    args.warmup = args.steps // 20 if args.warmup is None else args.warmup
    return args
