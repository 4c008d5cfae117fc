"""The command line of the two scripts."""

from __future__ import annotations

import pytest
from mnist import options


def test_the_defaults_are_singas():
    args = options.parser("").parse_args([])
    assert (args.max_epoch, args.batch_size, args.learning_rate) == (10, 64, 0.005)
    assert (args.dist_option, args.spars, args.threshold) == ("plain", 0.05, 2097152)
    assert (args.dataset, args.lr_schedule, args.split_batch) == ("auto", "constant", False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-l 0", "0 is not a positive number"),
        ("-s inf", "inf is not a positive number"),
        ("-b 0", "must be 1 or more"),
        ("-m -1", "'-1' is not a whole number"),
        ("-d fastest", "choose from"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_why(line, message, capsys):
    with pytest.raises(SystemExit):
        options.parser("").parse_args(line.split())
    assert message in capsys.readouterr().err
