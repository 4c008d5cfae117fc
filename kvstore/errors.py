"""Every error the system raises, named by whose fault it is.

    KVStoreError
    ├── UsageError                the caller's: fix the call
    │   ├── UnknownName           no such store, optimizer, ...: the message lists those there are
    │   ├── KeyNotInitialized     a push or pull of a key that this worker has not passed to init()
    │   ├── AlreadyInitialized    a second init() of a key
    │   ├── Mismatch              shapes, dtypes or settings that do not agree
    │   ├── NotFinite             a pushed value is NaN or infinite, in a store that checks
    │   ├── Unsupported           this store cannot do that
    │   ├── CheckpointError       a file of a checkpoint is missing or damaged
    │   └── ConfigError           an environment variable is missing or wrong
    ├── PeerError                 a peer's: look at its output
    │   ├── NodeLost              a process died, fell silent or failed, and the job with it
    │   ├── ServerError           an exception on a server, with its text
    │   └── WireError             bytes that are not a message of this protocol
    ├── WeightsInDoubt            an optimizer's: it failed in the middle of an update
    └── DeadlineExceeded          nobody's: an answer did not come in time; names who is missing

Errors cross the wire as a name from ``BY_NAME`` and a text; nothing else is rebuilt from bytes.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

# A server or scheduler ends with this exit code if the job has failed elsewhere.
JOB_FAILED_EXIT = 3
# A server ends with this one if another process serves its rank: it was given up, and was alive all the same.
REPLACED_EXIT = 4


class KVStoreError(Exception):
    """The base class of all errors that this package raises on purpose."""


class UsageError(KVStoreError):
    """The call was wrong; nothing has changed."""


class UnknownName(UsageError, ValueError):
    """A name is not valid; the message lists those that are."""


class KeyNotInitialized(UsageError, KeyError):
    """This worker has not passed the key to ``init``."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the repr


class AlreadyInitialized(UsageError):
    """The key has been passed to ``init`` before."""


class Mismatch(UsageError, ValueError):
    """A shape, dtype or setting differs from what was agreed before, or between workers; the message has both."""


class NotFinite(UsageError, ArithmeticError):
    """A pushed value is NaN or infinite. Its segment has not been updated; others of the same push may have been."""


class CheckpointError(UsageError):
    """A file of a checkpoint is missing or damaged, or there is no checkpoint."""


class Unsupported(UsageError, NotImplementedError):
    """The store cannot do this."""


class ConfigError(UsageError):
    """The environment does not describe a job that this process can join.

    The message names the variable, its value and the valid ones.
    """


class PeerError(KVStoreError):
    """Another process failed."""


class NodeLost(PeerError):
    """A member of the job has died, fallen silent or failed, and the job cannot go on.

    The message names it, and says how it ended. Look at its output for the cause. Every later call raises this, too.

    Attributes:
        cause: the process of a server or standby whose loss has ended the job: ``start 2 of server 1``. Empty if
            something else has. A member may have lost earlier processes without harm, so its name is not enough.
    """

    def __init__(self, text: str = "", cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


class ServerError(PeerError):
    """An exception on a server, while it served this worker's request. The message has its class and its text."""


class WireError(PeerError):
    """A frame that is not a valid message: the peer is of another version, or no member of the job."""


class WeightsInDoubt(KVStoreError):
    """An optimizer failed in the middle of an update: some weights may be half updated. The message names their keys.

    Every later push or pull of these keys raises this, too: no value that may be wrong is ever read. Other keys, and
    other stores, go on. There is no checkpoint of a store with such keys; go on from an earlier one.

    Attributes:
        keys: of the weights, where the optimizer runs in this process; empty otherwise.
    """

    def __init__(self, text: str = "", keys: Collection[Any] = ()) -> None:
        super().__init__(text)
        self.keys = keys


class DeadlineExceeded(KVStoreError, TimeoutError):
    """No answer came within the deadline; the message names the keys and the peers that are missing.

    It is raised earlier where workers wait for each other, so that no answer can come; the message says so, and names
    the calls.

    Attributes:
        silent: the peers that did not even say what they wait for.
    """

    def __init__(self, text: str, silent: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.silent = silent


BY_NAME: dict[str, type[KVStoreError]] = {
    cls.__name__: cls
    for cls in (
        UsageError,
        UnknownName,
        KeyNotInitialized,
        AlreadyInitialized,
        Mismatch,
        NotFinite,
        Unsupported,
        CheckpointError,
        ConfigError,
        NodeLost,
        ServerError,
        WireError,
        WeightsInDoubt,
        DeadlineExceeded,
    )
}


def rebuild(name: str, text: str) -> KVStoreError:
    """Return the error that a peer has sent as ``name`` and ``text``. Unknown names become ``ServerError``."""
    return BY_NAME.get(name, ServerError)(text)


Error = TypeVar("Error", bound=KVStoreError)


def again(error: Error) -> Error:
    """Return a copy of ``error`` to raise. An error that is raised repeatedly would keep the frames of every raise."""
    made = copy.copy(error)
    made.__cause__ = error.__cause__
    return made


def choices(valid: object) -> str:
    """Return valid names for a message: sorted, separated by commas."""
    return ", ".join(sorted(map(str, valid)))  # type: ignore[call-overload]


MOST_GUESSED = 2000  # names among which a similar one is looked for; among more it would take seconds


def nearest(given: object, valid: Collection[object]) -> str | None:
    """Return the valid name that ``given``, which is none, may have been meant as; None if none is like it."""
    names = [each for each in valid if isinstance(each, str)] if len(valid) <= MOST_GUESSED else []
    close = difflib.get_close_matches(given, names) if isinstance(given, str) else []
    # Of "adma" difflib finds "adamax" closer than "adam".
    return max(close, key=lambda each: sorted(each) == sorted(given), default=None)  # type: ignore[call-overload]


def meant(given: object, valid: Collection[object]) -> str:
    """Return the end of a message that lists valid names: which of them may have been meant, if any."""
    close = nearest(given, valid)
    return f"; did you mean {close!r}?" if close else ""


def renamed(module: str, old_names: Mapping[str, tuple[str, Any]], stacklevel: int = 3) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that still gives ``old_names``, with a ``DeprecationWarning``.

    Args:
        module: its name, for messages.
        old_names: the new name and the thing itself, by old name.
        stacklevel: of the warning: 3 if Python calls what is returned, 4 if a function of the module does.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in old_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new_name, value = old_names[name]
        warn_renamed(f"{module}.{name}", f"{module}.{new_name}", stacklevel)
        return value

    return __getattr__


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is a former name of ``new``.

    Args:
        old, new: as a user writes them: ``name=`` for a keyword.
        stacklevel: which frame uses the old name; 3 is the caller of the function that calls this.
    """
    message = f"{old} is now {new}; the old name will be removed in the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


OLD_NAMES: Mapping[str, tuple[str, Any]] = {
    "AlreadyInitialised": ("AlreadyInitialized", AlreadyInitialized),
    "KeyNotInitialised": ("KeyNotInitialized", KeyNotInitialized),
}

if not TYPE_CHECKING:  # type checkers would take every name for one of the module's
    __getattr__ = renamed(__name__, OLD_NAMES)
