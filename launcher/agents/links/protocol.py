"""What launch.py and its agents say to each other. Messages as on the wire of a job, each field checked on arrival.

launch.py                              agent
                                       Hello      here I am
Survey     what will others call you?  Surveyed
Probe      do you reach these?         Probed
Start      run these tasks             Started, or Refused
                                       Output, Exited ...; Empty when nothing is left
Signal     pass it to all of them
Ping       every second                Pong
Bye        end what there is, and go   Bye
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from kvstore.errors import WireError
from kvstore.wire import Buffer, Message
from kvstore.wire import fields as f
from kvstore.wire.frames import message

MAX_TASKS = 4096
MAX_BYTES = 1 << 20


def binary(value: Any) -> None:
    """Bytes: what the system takes for paths, arguments and variables, which need not be text."""
    if type(value) is not bytes or len(value) > MAX_BYTES:
        raise WireError(f"expected at most {MAX_BYTES} bytes, got {f.shown(value)}")


Text = Annotated[str, f.text()]
Name = Annotated[str, f.text(512)]
Bytes = Annotated[bytes, binary]
Index = Annotated[int, f.integer(0, MAX_TASKS)]
Words = Annotated[list[bytes], f.list_of(binary, 1 << 16)]


@message(100)
@dataclass(frozen=True)
class Hello(Message):
    """An agent is there: its rank among those that one manager has started, -1 if that does not count them."""

    version: Name
    python: Name
    host: Name
    rank: Annotated[int, f.integer(-1, MAX_TASKS)]
    reached_at: Name


@message(101)
@dataclass(frozen=True)
class Survey(Message):
    """What is there? Choose the address by which other hosts will reach yours, and look for directory and command.

    Attributes:
        interface: whose address to choose; else of what leads to `toward`.
        toward: launch.py's own address.
        directory: where tasks will run.
        create: make that directory if it is not there, instead of complaining.
        command: the user's command; not looked for if empty.
    """

    interface: Name
    toward: Name
    directory: Bytes
    create: Annotated[bool, f.flag]
    command: Words


@message(102)
@dataclass(frozen=True)
class Surveyed(Message):
    """It is this one; `port` listens there for probes. Or there is a `problem`."""

    address: Name
    why: Text
    several: Annotated[bool, f.flag]
    port: Annotated[int, f.integer(0, 65535)]
    problem: Text


@message(103)
@dataclass(frozen=True)
class Probe(Message):
    """Connect to each of these: (name, address, port)."""

    targets: Annotated[list[list[Any]], f.list_of(f.tuple_of(f.text(512), f.text(512), f.integer(1, 65535)), MAX_TASKS)]


@message(104)
@dataclass(frozen=True)
class Probed(Message):
    """These did not answer: (name, why)."""

    failures: Annotated[list[list[str]], f.list_of(f.tuple_of(f.text(512), f.text()), MAX_TASKS)]


@message(105)
@dataclass(frozen=True)
class StartTasks(Message):
    """Run these tasks.

    Attributes:
        mark: names the job.
        directory: where to run; the agent's own working directory if empty.
        command: the user's command, as it stood on the command line.
        server_argv: what servers run, if it is not ours.
        limit_s: end all if launch.py is silent for so long.
        gpus: how many each worker gets; 0 for all that there are.
        tasks: (index, role, rank, how many of that role share the host, variables), the last as NAME, value, ...
    """

    mark: Name
    directory: Bytes
    command: Words
    server_argv: Words
    limit_s: Annotated[float, f.number]
    gpus: Annotated[int, f.integer(0, 1024)]
    tasks: Annotated[
        list[list[Any]],
        f.list_of(
            f.tuple_of(
                f.integer(0, MAX_TASKS),
                f.choice("server", "worker"),
                f.integer(0, MAX_TASKS),
                f.integer(1, MAX_TASKS),
                f.list_of(binary),
            ),
            MAX_TASKS,
        ),
    ]


@message(106)
@dataclass(frozen=True)
class Started(Message):
    """All of them run."""


@message(107)
@dataclass(frozen=True)
class Refused(Message):
    """They cannot be started, and none runs; `code` is what a shell would exit with."""

    text: Text
    code: Annotated[int, f.integer(0, 255)]


@message(108)
@dataclass(frozen=True)
class Output(Message):
    """A task has written to standard output (1) or error (2); nothing means that it will write there no more."""

    index: Index
    number: Annotated[int, f.integer(1, 2)]
    buffers: list[Buffer]


@message(109)
@dataclass(frozen=True)
class Exited(Message):
    """A task has ended, with a code or by a signal."""

    index: Index
    code: Annotated[int, f.integer(0, 255)]
    signum: Annotated[int, f.integer(0, 128)]


@message(110)
@dataclass(frozen=True)
class Empty(Message):
    """All tasks have ended, and nothing that they had started is left."""


@message(111)
@dataclass(frozen=True)
class Note(Message):
    """Something that the user should know."""

    text: Text


@message(112)
@dataclass(frozen=True)
class Signal(Message):
    """Send this signal to everything."""

    signum: Annotated[int, f.integer(1, 64)]


@message(113)
@dataclass(frozen=True)
class Ping(Message):
    """I am there."""


@message(114)
@dataclass(frozen=True)
class Pong(Message):
    """I am there too."""


@message(115)
@dataclass(frozen=True)
class Bye(Message):
    """Kill what is left, clean up, and go. From an agent: nothing is left, and I go; because of this, if unasked."""

    why: Text = ""


@message(116)
@dataclass(frozen=True)
class OutputAck(Message):
    """So many more bytes of output have been taken."""

    count: Annotated[int, f.integer()]


def pack(variables: Mapping[str, str]) -> list[bytes]:
    """An environment as `StartTasks` carries it."""
    return [os.fsencode(text) for pair in variables.items() for text in pair]


def unpack(flat: list[bytes]) -> dict[str, str]:
    """The environment that `pack` has packed.

    Raises:
        WireError: a name without a value, or one that no system takes.
    """
    texts = [os.fsdecode(item) for item in flat]
    if len(texts) % 2 or any(not name or "=" in name for name in texts[::2]) or any("\0" in text for text in texts):
        raise WireError("expected pairs of a variable and its value")
    return dict(zip(texts[::2], texts[1::2], strict=True))
