"""Federated averaging: who has which pictures, its options, and a job."""

from __future__ import annotations

import re

import federated_averaging
import pytest
import torch
from digits.pictures import read
from federated_averaging import accuracy, mine, parse, tensors
from scripts import launch, lines_of
from torch import nn


def test_each_picture_is_one_clients():
    _, labels = tensors(read()[0])
    parts = [mine(labels, rank, 3) for rank in range(3)]
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    assert [len(part) for part in parts] == pytest.approx([len(labels) * k / 6 for k in (1, 2, 3)], abs=2)
    shares = [torch.bincount(labels[part], minlength=10) / len(part) for part in parts]
    assert [float(share.max()) > 0.14 for share in shares] == [True] * 3, "a client has more of some digits"
    assert float(shares[0].max()) > 0.3, "and one with few pictures most of one or two"
    assert mine(labels, 0, 1).sort().values.tolist() == list(range(len(labels)))


def test_accuracy():
    assert accuracy(nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 0])) == 0.75


def test_alone_it_learns(capsys):
    federated_averaging.train(parse(["--rounds", "5", "--step-time", "0", "--report", "5", "--quorum", "1"]))
    found = re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)
    assert len(found) == 2
    assert min(map(float, found)) > 0.7


@pytest.mark.release
def test_clients_of_a_job_end_with_one_model():
    options = "--rounds 6 --quorum 2 --grace 0.02 --slow-factor 3 --report 6"
    process = launch(f"federated_averaging.py {options}", workers=3, servers=1)
    assert process.returncode == 0, process.stdout
    ends = {lines_of(process, rank)[-1].rpartition(" ")[2] for rank in range(3)}
    assert len(ends) == 1
    assert float(ends.pop()) > 0.7
