"""The command line of train_lm.py."""

from __future__ import annotations

import pytest
from lm import options


def test_wrong_options_end_the_program(capsys):
    for words in (["--width", "10", "--heads", "3"], ["--temperature", "0"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            options.parse(words)
    assert "--width 10 cannot be divided among 3 heads" in capsys.readouterr().err
