"""What a worker of `launcher.run` does: one call."""

from __future__ import annotations

import os
import pickle
import sys
from typing import NoReturn

from launcher.calls import memory, outcome
from launcher.calls.main_module import Step, take

WHERE = 'define it at the top of a module, or of the script above its `if __name__ == "__main__":`'


def work(call: int, result: int) -> None:
    """Make the call, and write its outcome.

    Args:
        call: the memory with the call: the name of the function, the function, and its arguments.
        result: the memory for the outcome.
    """
    for fd in (call, result):
        os.set_inheritable(fd, False)
    outcome.begin(result)
    with memory.view(call) as pages:
        name = pickle.load(pages)  # noqa: S301 (from our parent, by inheritance)
        try:
            unpickler = pickle.Unpickler(pages)  # noqa: S301 (likewise)
            while isinstance(loaded := unpickler.load(), Step):
                take(loaded)
            function, args, kwargs = loaded
        except Exception as error:
            _fail(result, error, f"could not load {name} or its arguments; {WHERE}")
    try:
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    except BaseException as error:
        error.__traceback__ = (
            error.__traceback__ and error.__traceback__.tb_next
        )  # the traceback begins in the user's code
        _fail(result, error)
    try:
        outcome.put_value(result, value)
    except Exception as error:
        where = outcome.culprit("result", value, pickle.dumps)
        _fail(result, error, f"returned a {type(value).__name__} that cannot be pickled: {where}")


def _fail(result: int, error: BaseException, how: str | None = None) -> NoReturn:
    outcome.put_error(result, error, how)
    sys.last_value = (
        error  # as after an exception that ends a script: at exit, the store reports it to the other members
    )
    sys.exit(1)
