"""The command line of train_cifar10.py: the options of MXNet's image classification lab, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arguments import Parser, default_store, natural, positive

from cifar.augment import PAD
from cifar.distort import HUES, LEVELS
from cifar.resnet import CLASSES, NETWORKS
from cifar.settings import parse_setting

SIDE = 32  # pixels of a picture
LAST_BATCH = ("keep", "discard", "rollover")
# What `--d2l` stands for: the hyper-parameters of the book's script for several machines.
D2L = {
    "network": "resnet18-d2l",
    "lr": 0.1,
    "wd": 5e-4,
    "lr_period": 80,
    "random_crop": "resize",
    "last_batch": "keep",
}
DATA_DIR = Path(__file__).resolve().parents[1] / "data"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Train a residual network on CIFAR-10, or on handwritten digits where that cannot be had")
    network = parser.add_argument_group("network")
    network.add_argument("--network", choices=NETWORKS, default="resnet", help="the network")
    network.add_argument(
        "--num-layers", type=layers, default=8, help="layers of resnet, 6n + 2: 8, 20, 32, 44, 56 or 110"
    )
    network.add_argument("--num-classes", type=positive, default=CLASSES, help="number of classes")
    network.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="dtype of the computation; parameters stay float32",
    )

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", choices=["auto", "cifar10", "digits"], default="auto", help="what to train on")
    data.add_argument("--data-dir", type=Path, default=DATA_DIR, help="where CIFAR-10 is, or is downloaded to")
    data.add_argument("--num-examples", type=positive, help="number of training images; all if not given")

    data.add_argument(
        "--benchmark", type=int, choices=[0, 1], default=0, help="1: train on noise, to measure the speed"
    )
    data.add_argument(
        "--last-batch", choices=LAST_BATCH, default="discard", help="what to do with a last, smaller batch"
    )
    data.add_argument(
        "--image-shape", type=shape, default=(3, SIDE, SIDE), help="shape of the network's input, such as 3,28,28"
    )
    data.add_argument(
        "--rgb-mean", type=rgb, help="mean to subtract, such as 123.68,116.779,103.939; the data's if not given"
    )
    for name in ("--data-train", "--data-val"):  # options of the lab, for an error that says what to pass instead
        data.add_argument(name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    data.add_argument(
        "--data-nthreads",
        type=natural,
        default=0,
        help="number of processes that read data; 0: read in the training process",
    )
    data.add_argument("--test-io", type=int, choices=[0, 1], default=0, help="1: read an epoch without training")

    change = parser.add_argument_group("random changes of the training images")
    change.add_argument("--pad-size", type=natural, default=PAD, help="black pixels around a picture before cropping")
    change.add_argument(
        "--random-crop",
        choices=["1", "0", "resize"],
        default="1",
        help="1: somewhere in it; 0: the middle, of the picture alone; resize: a part of it, enlarged (d2l)",
    )
    change.add_argument(
        "--random-mirror", type=int, choices=[0, 1], default=1, help="mirror half of them, where it may be"
    )
    change.add_argument("--max-random-h", type=natural, default=0, help=f"how much hue may change, of {HUES}")
    change.add_argument("--max-random-s", type=natural, default=0, help=f"how much saturation, of {LEVELS}")
    change.add_argument("--max-random-l", type=natural, default=0, help=f"how much lightness, of {LEVELS}")
    change.add_argument("--max-random-rotate-angle", type=natural, default=0, help="degrees")
    change.add_argument("--max-random-shear-ratio", type=float, default=0.0, help="0.1 slants by a tenth")
    change.add_argument("--max-random-aspect-ratio", type=float, default=0.0, help="0.25 stretches by up to a quarter")
    change.add_argument("--max-random-scale", type=float, default=1.0, help="of the picture, at most")
    change.add_argument("--min-random-scale", type=float, default=1.0, help="of the picture, at least")

    training = parser.add_argument_group("training")
    training.add_argument("--d2l", action="store_true", help="d2l's network, options, and line after each epoch")
    training.add_argument("--batch-size", type=positive, default=128, help="pictures in a batch of each worker")
    training.add_argument("--num-epochs", type=natural, default=30, help="epochs to train, counted from the first")
    training.add_argument("--optimizer", default="sgd", help="sgd, nag, adam or any other of torch.optim")
    training.add_argument("--lr", type=float, default=0.05, help="learning rate")
    training.add_argument("--lr-factor", type=float, default=0.1, help="factor by which the learning rate falls")
    training.add_argument(
        "--lr-step-epochs",
        type=numbers,
        help='epochs after which it falls, such as "200,250"; after 2/3 and 5/6 of all epochs if not given',
    )
    training.add_argument(
        "--lr-period", type=positive, help="instead: number of epochs after which it falls again and again (d2l)"
    )
    training.add_argument("--mom", type=float, default=0.9, help="momentum of sgd and nag")
    training.add_argument("--wd", type=float, default=1e-4, help="weight decay")
    training.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")

    training.add_argument("--top-k", type=natural, default=0, help="also report the top-k accuracy; 0: do not")
    training.add_argument("--patience", type=positive, help="stop after so many epochs without improvement")

    system = parser.add_argument_group("system")
    system.add_argument("--kv-store", default=default_store(), help="local, device, dist_sync, dist_async, ...")
    system.add_argument(
        "--gc-type", type=gradient_compression, help="gradient compression, such as int8, fp16 or 2bit:threshold=0.02"
    )
    system.add_argument("--gc-threshold", type=float, help="its threshold, for 2bit and 1bit")
    system.add_argument("--gpus", nargs="?", type=numbers, help='CUDA devices, such as "0,1"; the CPU if not given')
    system.add_argument("--disp-batches", type=positive, default=20, help="number of batches between reports")
    system.add_argument(
        "--monitor", type=natural, default=0, help="number of batches between logs of the parameters; 0: none"
    )
    system.add_argument(
        "--log-to",
        metavar="PATH",
        nargs="+",
        default=[],
        help="write losses, speed and metrics to a .jsonl or .csv file, or to a folder/ for TensorBoard",
    )
    system.add_argument("--model-prefix", help="save a checkpoint under this name after each epoch")
    system.add_argument("--load-epoch", type=positive, help="continue from the checkpoint of this epoch")

    if parser.parse_known_args(argv)[0].d2l:
        parser.set_defaults(**D2L)
    args = parser.parse_args(argv)
    if hasattr(args, "data_train") or hasattr(args, "data_val"):
        parser.error(
            "--data-train and --data-val are RecordIO files, which this does not read: give --data-dir, the folder of "
            "CIFAR-10's archive or its .bin files; without it the archive is downloaded"
        )
    if args.benchmark and (args.d2l or args.patience):
        parser.error("--benchmark 1 has nothing to validate with, which --d2l and --patience need")
    if args.num_classes < CLASSES and not args.benchmark:
        parser.error(f"--num-classes {args.num_classes}: there are {CLASSES} classes in the data")
    if max(args.image_shape[1:]) > SIDE and not args.benchmark:
        parser.error(f"--image-shape {','.join(map(str, args.image_shape))}: pictures are 3,{SIDE},{SIDE}")
    if not 0 < args.min_random_scale <= args.max_random_scale:
        parser.error("--min-random-scale must be above 0, and no more than --max-random-scale")
    if args.top_k == 1:
        parser.error("--top-k 1 is the accuracy, which is always reported: give 2 or more")
    if args.lr_period and args.lr_step_epochs is not None:
        parser.error("--lr-period and --lr-step-epochs both say when the learning rate falls: give one")
    if args.gc_threshold is not None:
        if args.gc_type is None:
            parser.error("--gc-threshold belongs to a gradient compression: give --gc-type, such as 2bit")
        args.gc_type["threshold"] = args.gc_threshold
    if args.load_epoch and not args.model_prefix:
        parser.error("--load-epoch needs --model-prefix, the name under which the checkpoint was saved")
    if args.load_epoch and args.load_epoch >= args.num_epochs:
        parser.error(f"--load-epoch {args.load_epoch} leaves nothing to do: give a --num-epochs above it")
    if args.gpus and args.batch_size % len(args.gpus):
        parser.error(f"--batch-size {args.batch_size} cannot be split evenly over {len(args.gpus)} GPUs")
    if args.lr_step_epochs is None:
        args.lr_step_epochs = usual_steps(args.num_epochs)
    return args


def optimizer_params(args: argparse.Namespace) -> dict[str, float]:
    """Return the optimizer's parameters; momentum only for optimizers that take it by this name."""
    params = {"learning_rate": args.lr, "wd": args.wd}
    if args.optimizer in ("sgd", "nag"):
        params["momentum"] = args.mom
    return params


def usual_steps(num_epochs: int) -> list[int]:
    """Return the epochs after which the learning rate falls by default: two thirds and five sixths of all."""
    return sorted({num_epochs * 2 // 3, num_epochs * 5 // 6} - {0})


def learning_rate(args: argparse.Namespace, epoch: int) -> float:
    """Return the learning rate of an epoch; it depends on the epoch alone, also after a checkpoint."""
    steps = epoch // args.lr_period if args.lr_period else sum(epoch >= step for step in args.lr_step_epochs)
    return float(args.lr * args.lr_factor**steps)


def numbers(text: str) -> list[int]:
    """Parse integers separated by commas; an empty text is an empty list."""
    return [natural(part.strip()) for part in text.split(",")] if text else []


def shape(text: str) -> tuple[int, int, int]:
    """Parse channels, height and width separated by commas, such as 3,28,28."""
    parts = numbers(text)
    if len(parts) != 3 or parts[0] != 3 or 0 in parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not three channels, height and width, as 3,28,28")
    return parts[0], parts[1], parts[2]


def rgb(text: str) -> tuple[float, float, float]:
    """Parse the means of red, green and blue, 0 to 255, separated by commas."""
    try:
        red, green, blue = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers, as 123.68,116.779,103.939") from None
    return red, green, blue


def gradient_compression(text: str) -> dict[str, object] | None:
    """Parse a type of compression and its parameters, such as 2bit:threshold=0.02; `none` is none."""
    kind, parameters = parse_setting(text)
    return None if kind == "none" else {"type": kind, **parameters}


def layers(text: str) -> int:
    """Parse the number of layers of a residual network for CIFAR-10."""
    number = natural(text)
    if number < 8 or number % 6 != 2:
        raise argparse.ArgumentTypeError(f"{number} is not 6n + 2; take 8, 14, 20, 32, 44, 50, 56 or 110, for example")
    return number
