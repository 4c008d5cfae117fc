from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import MEASUREMENTS
from benchmarks.options import WHATS, parse


def test_everything_can_be_said():
    words = "pushpull --net vgg16 -n 4 -s 3 --rounds 7 --repeats 2 --optimizer adam --type dist_async"
    options = parse([*words.split(), "--memory", "arena", "--transport", "tcp", "--json", "a", "--plot", "b"])
    assert (options.net, options.workers, options.servers, options.rounds, options.repeats) == ("vgg16", 4, 3, 7, 2)
    assert (options.optimizer, options.kind, options.memory, options.transport) == (
        "adam",
        "dist_async",
        "arena",
        "tcp",
    )
    assert (options.json, options.plot) == (Path("a"), Path("b"))
    assert options.one_line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "pushpull --peers horovod",
            "no peer 'horovod'; choose from mxnet, gloo, openmpi, sockets, ray, torchft, or none",
        ),
        ("pushpull --net alexnet", "no network 'alexnet'"),
        ("pushpull --rounds 0", "'0' is not a number from 1"),
        ("network --mtu 100", "'100' is not a number from 576 to 65535"),
        ("network --mtu 1e4", "'1e4' is not a number from 576 to 65535"),
        ("network --hosts 2,", "'' is not a number from 1"),
        ("network --workers-per-host 2,many", "'many' is not a number from 1"),
        ("network --rate 200", "'200' is not a rate; write bits a second, as in 200mbit or 1gbit"),
        ("network --also fast", "no setting 'fast'; choose from flat, plain,"),
        ("sparse", "invalid choice: 'sparse'"),
    ],
)
def test_nonsense_is_told_what_would_work(words, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(words.split())
    assert complaint in capsys.readouterr().err


def test_the_help_describes_every_measurement(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {what} " in text for what in WHATS)
    assert set(MEASUREMENTS) == set(WHATS)
