from __future__ import annotations

import pytest
from cifar import choice
from cifar.download import UnavailableError


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
