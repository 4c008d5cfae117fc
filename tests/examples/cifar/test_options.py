"""The command line of train_cifar10.py."""

from __future__ import annotations

import pytest
import torch
from cifar import choice, options
from cifar.devices import DeviceError, find_devices
from cifar.download import UnavailableError
from cifar.settings import parse_setting


def test_d2ls_options():
    args = options.parse(["--d2l", "--lr", "0.5"])
    assert (args.network, args.lr, args.wd, args.mom) == ("resnet18-d2l", 0.5, 5e-4, 0.9)
    assert (args.random_crop, args.last_batch) == ("resize", "keep")
    assert [options.learning_rate(args, epoch) for epoch in (0, 79, 80, 160)] == pytest.approx([0.5, 0.5, 0.05, 0.005])


def parse(line: str):
    return options.parse(line.split())


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)


def test_the_defaults_are_the_labs():
    args = parse("")
    assert (args.batch_size, args.lr, args.mom, args.wd) == (128, 0.05, 0.9, 1e-4)
    assert (args.lr_factor, args.disp_batches, args.optimizer, args.gpus) == (0.1, 20, "sgd", None)
    assert (args.network, args.num_layers, args.dataset) == ("resnet", 8, "auto")


@pytest.mark.parametrize(
    "line",
    [
        "--gpus 0,1,2,3 --network resnet --num-layers 50 --kv-store dist_device_sync --num-epoch 2",
        "--network resnet --num-layers 8 --kv-store dist_device_sync --num-epoch 2",
        "--gpus --network resnet --num-layers 50 --kv-store dist_device_sync",
        "--network resnet --num-layers 8 --kv-store dist_device_sync --num-epoch 2 --pad-size 4 --random-crop 1 "
        "--random-mirror 1 --rgb-mean 123.68,116.779,103.939 --image-shape 3,28,28 --num-classes 10 --dtype float32 "
        "--benchmark 0 --monitor 0 --test-io 0 --top-k 0 --data-nthreads 4 --num-examples 50000 --max-random-h 36 "
        "--max-random-s 50 --max-random-l 50 --max-random-rotate-angle 0 --max-random-shear-ratio 0 "
        "--max-random-aspect-ratio 0 --max-random-scale 1 --min-random-scale 1",
    ],
)
def test_the_labs_command_lines_are_understood(line):
    args = parse(line)
    assert args.kv_store == "dist_device_sync"
    assert args.num_epochs == (2 if "--num-epoch" in line else 30)


def test_launched_jobs_use_dist_sync_unless_told_otherwise(monkeypatch):
    assert parse("").kv_store == "local"
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    assert parse("").kv_store == "dist_sync"
    assert parse("--kv-store dist_async").kv_store == "dist_async"


def test_the_learning_rate_steps_down_after_the_epochs_given():
    args = parse("--lr 1 --lr-factor 0.5 --lr-step-epochs 2,4")
    assert [options.learning_rate(args, epoch) for epoch in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("epochs", "steps"), [(300, [200, 250]), (30, [20, 25]), (2, [1]), (1, []), (0, [])])
def test_the_steps_scale_with_the_epochs_if_none_are_given(epochs, steps):
    assert parse(f"--num-epochs {epochs}").lr_step_epochs == steps


def test_only_optimizers_with_momentum_are_given_any():
    assert options.optimizer_params(parse("--mom 0.8")) == {"learning_rate": 0.05, "wd": 1e-4, "momentum": 0.8}
    assert "momentum" in options.optimizer_params(parse("--optimizer nag"))
    assert "momentum" not in options.optimizer_params(parse("--optimizer adam"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layers 18", "18 is not 6n + 2; take 8, 14, 20"),
        ("--network vgg", "choose from"),
        ("--batch-size 0", "must be 1 or more"),
        ("--num-epochs many", "'many' is not a whole number"),
        ("--gpus 0;1", "'0;1' is not a whole number"),
        ("--data-train data/cifar10_train.rec", "RecordIO files, which this does not read: give --data-dir"),
        ("--data-val data/cifar10_val.rec", "RecordIO files, which this does not read: give --data-dir"),
        ("--image-shape 28,28", "'28,28' is not three channels, height and width, as 3,28,28"),
        ("--image-shape 3,64,64", "--image-shape 3,64,64: pictures are 3,32,32"),
        ("--rgb-mean 1,2", "'1,2' is not three numbers"),
        ("--num-classes 9", "there are 10 classes in the data"),
        ("--benchmark 1 --d2l", "nothing to validate with, which --d2l and --patience need"),
        ("--min-random-scale 2", "no more than --max-random-scale"),
        ("--dtype int8", "choose from"),
        ("--load-epoch 3", "--load-epoch needs --model-prefix"),
        ("--load-epoch 3 --model-prefix m --num-epochs 3", "leaves nothing to do"),
        ("--top-k 1", "give 2 or more"),
        ("--lr-period 3 --lr-step-epochs 2", "both say when the learning rate falls"),
        ("--batch-size 10 --gpus 0,1,2", "--batch-size 10 cannot be split evenly over 3 GPUs"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_why(line, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(line)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_noise_may_have_any_shape_and_number_of_classes():
    args = parse("--benchmark 1 --image-shape 3,64,48 --num-classes 2")
    assert (args.image_shape, args.num_classes) == ((3, 64, 48), 2)


class Job:
    """A reducer for a job in which so many other workers lack CIFAR-10."""

    def __init__(self, others_without=0):
        self.others_without = others_without

    def sum(self, values):
        return {name: value + self.others_without for name, value in values.items()}


@pytest.fixture
def offline(monkeypatch):
    def refuse(data_dir):
        raise UnavailableError("no network")

    monkeypatch.setattr(choice, "find_or_fetch", refuse)


def test_cifar10_where_every_worker_has_it(cifar10_folder):
    assert choice.load("auto", cifar10_folder, Job(), rank=0).name == "cifar10"


def test_the_digits_where_it_cannot_be_had(tmp_path, offline, caplog):
    assert choice.load("auto", tmp_path, Job(), rank=0).name == "digits"
    assert caplog.messages == ["CIFAR-10 is not available (no network); training on handwritten digits"]


def test_only_rank_0_says_so(tmp_path, offline, caplog):
    choice.load("auto", tmp_path, Job(), rank=1)
    assert not caplog.messages


def test_the_digits_on_every_worker_where_another_lacks_cifar10(cifar10_folder, caplog):
    assert choice.load("auto", cifar10_folder, Job(others_without=1), rank=0).name == "digits"
    assert "another worker does not have it" in caplog.text


def test_digits_when_asked_for(cifar10_folder):
    assert choice.load("digits", cifar10_folder, Job(), rank=0).name == "digits"


def test_cifar10_when_asked_for_is_not_replaced(tmp_path, offline):
    with pytest.raises(UnavailableError, match="no network"):
        choice.load("cifar10", tmp_path, Job(), rank=0)


def test_so_many_examples_only(dataset):
    assert len(choice.first(dataset, 10).train) == 10
    assert len(choice.first(dataset, None).train) == len(dataset.train)
    assert len(choice.first(dataset, 10).validation) == len(dataset.validation)


# ---- a setting in one word


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("fp16", ("fp16", {})),
        ("topk:ratio=0.05,k=3", ("topk", {"ratio": 0.05, "k": 3})),
        ("int8:stochastic=True,pull=bf16", ("int8", {"stochastic": True, "pull": "bf16"})),
    ],
)
def test_a_setting_is_a_name_and_what_is_set(text, parsed):
    assert parse_setting(text) == parsed


# ---- The devices that the command line asks for

CPU = torch.device("cpu")


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"--gpus 0,1: .* sees no CUDA device; without --gpus the CPU is used"):
        find_devices([0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"--gpus 2: .* only CUDA devices 0 to 1"):
        find_devices([1, 2])
    assert find_devices([0, 1]) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert find_devices(None) == find_devices([]) == [CPU]
