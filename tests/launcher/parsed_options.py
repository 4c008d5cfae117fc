"""Options of one subject, read alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def given(add: Callable[[Any], None], *words: str) -> argparse.Namespace:
    """What these words say.

    Raises:
        ArgumentError: they are not valid.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add(parser.add_argument_group("options"))
    return parser.parse_args(words)
