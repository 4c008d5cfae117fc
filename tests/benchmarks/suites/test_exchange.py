"""Which rounds are measured."""

from __future__ import annotations

from benchmarks.suites.exchange import case_name, pushpull, small


def cases(made, measure=pushpull):
    found = []
    made.measure = found.append
    measure(made)
    return found


def test_options_ask_for_one_line(session):
    (case,) = cases(session("pushpull", "--net", "vgg16", "--type", "dist_async", "-n", "4", "--transport", "tcp"))
    assert case.name == "vgg16-none-async-tcp-4x2"
    assert [one.name for one in case.contenders] == ["kvstore, tcp", "mxnet"]
    assert "4 workers, 2 servers" in case.title


def test_without_options_the_lines_with_targets_are_measured(session):
    found = cases(session("pushpull"))
    names = ["resnet50-none", "resnet50-sgd", "vgg16-sgd", "resnet50-none-tcp", "resnet50-none-zeromq"]
    assert [case.name for case in found] == names
    assert [one.name for one in found[0].contenders] == ["kvstore", "kvstore, arena", "mxnet", "gloo"]
    assert [one.name for one in found[3].contenders] == ["kvstore, tcp", "mxnet", "gloo", "sockets"]
    assert [one.name for one in found[4].contenders] == ["kvstore, zeromq", "kvstore"]


def test_without_peers_we_are_alone(session):
    found = cases(session("pushpull", "--peers", "none"))
    assert {one.name.split(",")[0] for case in found for one in case.contenders} == {"kvstore"}


def test_names_say_what_is_unusual(session):
    work = cases(session("pushpull", "-s", "3"))[0].contenders[0].work
    assert case_name(work) == "resnet50-none-2x3"


def test_lists_of_other_arrays_are_compared_with_lists_of_tensors(session):
    sums, updates, _, many = cases(session("small", "--peers", "none"), small)
    for case in (sums, updates, many):
        assert [one.name for one in case.contenders] == ["kvstore", "kvstore, numpy", "kvstore, dlpack"]
        assert [one.words for one in case.contenders] == [(), ("--arrays", "numpy"), ("--arrays", "dlpack")]
        assert case.peers[-1] == "kvstore"
