"""The script as a whole: in this process, as a process of its own, and as a job of two workers and two servers."""

from __future__ import annotations

import csv
import logging
import re
import shlex
import sys
from pathlib import Path

import pytest
import screen
import torch
import train_cifar10
from cifar import choice, options, resnet
from cifar.download import UnavailableError
from safetensors.torch import load_file
from scripts import EXAMPLES, environment, launch, launching, lines_of, start
from scripts import run as run_words

from launcher.cli import parse as parse_launch

SMALL = ("--dataset", "digits", "--num-examples", "16", "--batch-size", "4", "--disp-batches", "2")


@pytest.fixture
def run(monkeypatch, caplog):
    """Run the script in this process; returns the lines it logs."""
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)

    def run(*words):
        caplog.clear()
        monkeypatch.setattr(sys, "argv", ["train_cifar10.py", *map(str, words)])
        train_cifar10.main()
        return caplog.messages

    return run


def shapes(lines):
    """The lines with their numbers taken out."""
    return [re.sub(r"\d+\.\d+", "#", line) for line in lines]


EPOCH = [
    "Epoch[0] Batch [2]\tSpeed: # samples/sec\taccuracy=#",
    "Epoch[0] Train-accuracy=#",
    "Epoch[0] Time cost=#",
    "Epoch[0] Validation-accuracy=#",
]


@pytest.mark.parametrize("store", ["local", "device"])
def test_one_process_prints_the_labs_lines_and_a_summary(run, store, capsys):
    lines = run(*SMALL, "--num-epochs", 1, "--kv-store", store)
    assert shapes(lines) == EPOCH
    accuracy = float(lines[-1].rpartition("=")[2])
    first, reached, cost, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        f"training resnet of 8 layers for 1 epoch: 1 worker, store {store}, "
        "4 batches of 4 pictures per worker and epoch"
    )
    assert reached == f"validation accuracy {accuracy:.4f} after 1 epoch"
    assert re.fullmatch(r"[\d.]+ s for 4 rounds, [\d.]+ a second", cost)
    assert [line.strip() for line in rest[:2]] == ["To try next:", "two workers and two servers:"]
    assert "-n 2 -s 2 python train_cifar10.py --dataset digits " in rest[2]
    assert rest[2].endswith(f"--kv-store {store} --kv-store dist_sync")


def test_it_reads_cifar10_where_that_is(run, cifar10_folder):
    lines = run("--data-dir", cifar10_folder.parent, "--batch-size", 10, "--num-epochs", 1)
    assert "CIFAR-10 is not available" not in "".join(lines)
    assert re.fullmatch(r"Epoch\[0\] Validation-accuracy=0\.\d[05]0000", lines[-1])  # twentieths: there are 20 pictures


def test_going_on_from_a_checkpoint_is_as_never_having_stopped(run, tmp_path):
    common = (*SMALL, "--lr-step-epochs", 1)
    run(*common, "--num-epochs", 2, "--model-prefix", tmp_path / "whole")
    parts = (*common, "--model-prefix", tmp_path / "parts", "--log-to", tmp_path / "run.csv")
    run(*parts, "--num-epochs", 1)
    lines = run(*parts, "--num-epochs", 2, "--load-epoch", 1)
    with (tmp_path / "run.csv").open() as file:
        logged = [
            (row["step"], bool(row["batch/loss"]), bool(row["validation/accuracy"])) for row in csv.DictReader(file)
        ]
    assert logged == [
        *[("2", True, False), ("4", True, False), ("4", False, False), ("4", False, True)],
        *[("6", True, False), ("8", True, False), ("8", False, False), ("8", False, True)],
    ]
    assert f'Saved checkpoint to "{tmp_path}/parts-0002.safetensors"' in lines
    assert not any("Epoch[0]" in line for line in lines)
    whole, parts = (load_file(tmp_path / f"{name}-0002.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)


def test_d2ls_line_and_what_else_may_be_reported(run, monkeypatch, capsys):
    small = resnet.build("resnet", 8)
    monkeypatch.setattr(resnet, "build", lambda *which: small)  # its own takes long
    lines = run(*SMALL, "--d2l", "--num-epochs", 1, "--top-k", 5)
    assert shapes(lines)[-3:] == [f"Epoch[0] Validation-{name}=#" for name in ("accuracy", "top_k_accuracy_5", "loss")]
    line = r"epoch 1, loss [\d.]+, train acc [\d.]+, test acc [\d.]+, time [\d.]+ sec, lr 0.1"
    assert sum(re.fullmatch(line, printed) is not None for printed in capsys.readouterr().out.splitlines()) == 1


def test_noise_is_trained_on_and_not_validated(run, capsys):
    lines = run("--benchmark", 1, "--num-examples", 12, "--batch-size", 4, "--num-epochs", 1, "--monitor", 2)
    assert shapes(lines) == EPOCH[1:3]
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("train accuracy ") for line in printed)
    monitored = [line.split() for line in printed if line.startswith("Batch: ")]
    assert {words[1] for words in monitored} == {"0", "2"}
    assert ["Batch:", "0", "0.weight"] in [words[:3] for words in monitored]


def test_reading_alone_trains_nothing(run, capsys):
    assert run(*SMALL, "--test-io", 1) == []
    speeds = [f"Batch [{number}]\tSpeed: # samples/sec" for number in (1, 3)]
    assert shapes(capsys.readouterr().out.splitlines()) == [*speeds, "read 4 batches of 4 pictures in # s"]


def test_the_seed_decides_the_result(run, tmp_path):
    def weights(name, seed):
        run(*SMALL, "--num-epochs", 1, "--seed", seed, "--model-prefix", tmp_path / name)
        return torch.cat([tensor.flatten() for tensor in load_file(tmp_path / f"{name}-0001.safetensors").values()])

    assert weights("a", 5).equal(weights("b", 5))
    assert not weights("a", 5).equal(weights("c", 6))


def test_what_the_user_can_mend_is_one_line(run, tmp_path, monkeypatch):
    def refuse(data_dir):
        raise UnavailableError("no network")

    monkeypatch.setattr(choice, "find_or_fetch", refuse)
    with pytest.raises(SystemExit, match=r"^train_cifar10.py: error: no network$"):
        run("--dataset", "cifar10")
    with pytest.raises(SystemExit, match=r"^train_cifar10.py: error: no store 'carrier-pigeon'; choose from "):
        run("--kv-store", "carrier-pigeon")
    with pytest.raises(SystemExit, match=r"a-0001.safetensors: missing or damaged"):
        run(*SMALL, "--model-prefix", tmp_path / "a", "--load-epoch", 1)


@pytest.mark.release
def test_as_a_program_from_its_own_folder():
    process = start("train_cifar10.py", *SMALL, "--num-epochs", 1, "--kv-store", "local", cwd=EXAMPLES)
    assert process.returncode == 0, process.stdout
    assert shapes(process.stdout.splitlines()[1 : 1 + len(EPOCH)]) == EPOCH


@pytest.mark.release
def test_two_workers_and_two_servers_print_the_lines_of_one(tmp_path):
    command = f"train_cifar10.py {' '.join(SMALL)} --num-epochs 2 --model-prefix model"
    process = launch(command, workers=2, servers=2, cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    lines = lines_of(process, 0)
    assert lines_of(process, 1) == []
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", process.stdout)  # no bar, and no colors: this is no terminal
    assert "2 workers, store dist_sync, " in lines[0]  # which a launched script takes
    assert sum("Validation-accuracy=" in line for line in lines) == 2
    assert [line for line in lines if "Saved" in line] == [
        'Saved checkpoint to "model-0001.safetensors"',
        'Saved checkpoint to "model-0002.safetensors"',
    ]
    assert re.search(r"; each worker sent [\d.]+ MB and received [\d.]+ MB$", "\n".join(lines), re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"model-000{epoch}.{kind}" for epoch in (1, 2) for kind in ("safetensors", "states", "worker.0", "worker.1")
    }


@pytest.mark.release
def test_on_a_terminal_there_is_a_bar_and_suggestions_work(tmp_path):
    words = launching(f"train_cifar10.py {' '.join(SMALL)} --num-epochs 1", workers=2, servers=1)
    code, output = screen.run(words, {**environment(), "TERM": "xterm-256color"}, tmp_path)
    assert code == 0, output
    assert re.search(r"Epoch 0 \S*━.* \S*1/2", output), output
    first, *lines = [line for line in screen.seen(output) if line]
    assert first.startswith("launch.py: starting 2 workers")
    assert all(line.startswith("[worker 0] ") for line in lines)
    assert not any("━" in line for line in lines)
    assert [re.findall(r"The (\w+) data is left as it is", line) for line in lines[1:3]] == [
        ["training"],
        ["validation"],
    ]
    assert shapes(line.removeprefix("[worker 0] ") for line in lines[3:6]) == EPOCH[1:]

    suggested = [line.removeprefix("[worker 0] ").strip() for line in lines if "train_cifar10.py" in line]
    assert [re.findall(r" -n (.) .* (\S+ \S+)$", command) for command in suggested] == [
        [("4", "--num-epochs 1")],
        [("2", "--gc-type int8")],
        [("2", "--lr 0.2")],
    ]
    for command in suggested:
        program, *words = shlex.split(command)
        assert Path(program).name == "launch.py"
        python, script, *rest = parse_launch(words, {}).job.command
        assert (python, Path(script).name) == ("python", "train_cifar10.py")
        options.parse(rest)
    process = run_words(shlex.split(suggested[-1]), tmp_path)
    assert process.returncode == 0, process.stdout
    first, *lines = lines_of(process, 0)
    assert "2 workers, store dist_async, " in first
    assert any(line.startswith("validation accuracy ") for line in lines), process.stdout
