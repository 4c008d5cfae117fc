"""The messages between launch.py and its agents, encoded as a job's messages are. Each field is checked on arrival.

launch.py                               agent
                                        Hello       its version and host
Survey      its address; what is there  Surveyed
Probe       does it reach these?        Probed
StartTasks  run these tasks             Started, or Refused
OutputAck   output was taken            Output, Reported, Exited ...; Empty when no process is left
StartAgain  start a task again
Signal      send it to all tasks
SignalTask  send it to one of them
Ping        every second                Pong
Bye         end all tasks, and exit     Bye
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.exit_report import MAX_CAUSE, MAX_DETAILS, MAX_TEXT
from kvstore.wire.coding import message

MAX_TASKS = 4096
MAX_BYTES = 1 << 20


def binary(value: Any) -> None:
    """Check bytes: paths, arguments and variables of the system need not be text."""
    if type(value) is not bytes or len(value) > MAX_BYTES:
        raise WireError(f"expected at most {MAX_BYTES} bytes, got {wire.fields.shown(value)}")


Text = Annotated[str, wire.fields.text()]
Name = Annotated[str, wire.fields.text(512)]
Bytes = Annotated[bytes, binary]
Index = Annotated[int, wire.fields.integer(0, MAX_TASKS)]
Words = Annotated[list[bytes], wire.fields.list_of(binary, 1 << 16)]


@message(100)
class Hello(wire.Message):
    """An agent has started. Its rank is that among the agents of a manager, -1 if the manager does not number them."""

    version: Name
    python: Name
    host: Name
    rank: Annotated[int, wire.fields.integer(-1, MAX_TASKS)]
    reached_at: Name


@message(101)
class Survey(wire.Message):
    """Choose the address by which other hosts will reach this one, and look for the directory and the command."""

    interface: Name  # the network interface to choose; empty for the one that leads to `toward`
    toward: Name  # launch.py's address
    directory: Bytes  # the directory where tasks will run
    create: Annotated[bool, wire.fields.flag]  # whether to make the directory if it does not exist
    command: Words  # the user's command; empty to skip the check


@message(102)
class Surveyed(wire.Message):
    """The address, where `port` listens for probes; or a `problem`."""

    address: Name
    why: Text
    several: Annotated[bool, wire.fields.flag]
    port: Annotated[int, wire.fields.integer(0, 65535)]
    problem: Text


@message(103)
class Probe(wire.Message):
    """Connect to these targets: (name, address, port) of each."""

    targets: Annotated[
        list[list[Any]],
        wire.fields.list_of(
            wire.fields.tuple_of(wire.fields.text(512), wire.fields.text(512), wire.fields.integer(1, 65535)), MAX_TASKS
        ),
    ]


@message(104)
class Probed(wire.Message):
    """The targets that did not answer: (name, reason) of each."""

    failures: Annotated[
        list[list[str]], wire.fields.list_of(wire.fields.tuple_of(wire.fields.text(512), wire.fields.text()), MAX_TASKS)
    ]


@message(105)
class StartTasks(wire.Message):
    """Run these tasks. Later messages bring more tasks, which other hosts have run until now.

    Attributes:
        tasks: (index, role, rank, number of that role on the host, variables) of each; variables as NAME, value, ...
    """

    mark: Name  # the name of the job
    directory: Bytes  # the working directory of the tasks; empty for that of the agent
    command: Words  # the user's command as given on the command line
    server_argv: Words  # the command of servers, if not `python -m servers`
    limit_s: Annotated[float, wire.fields.number]  # how long launch.py may be silent, in seconds
    gpus: Annotated[int, wire.fields.integer(0, 1024)]  # the number of GPUs for each worker; 0 for all of the host
    tasks: Annotated[
        list[list[Any]],
        wire.fields.list_of(
            wire.fields.tuple_of(
                wire.fields.integer(0, MAX_TASKS),
                wire.fields.choice("server", "standby", "aggregator", "worker"),
                wire.fields.integer(0, MAX_TASKS),
                wire.fields.integer(1, MAX_TASKS),
                wire.fields.list_of(binary),
            ),
            MAX_TASKS,
        ),
    ]


@message(106)
class Started(wire.Message):
    """All tasks run."""


@message(107)
class Refused(wire.Message):
    """The tasks cannot be started, and none runs. `code` is the exit code of a shell."""

    text: Text
    code: Annotated[int, wire.fields.integer(0, 255)]


@message(108)
class Output(wire.Message):
    """A task has written to standard output (1) or error (2). No bytes are the end of that stream."""

    index: Index
    number: Annotated[int, wire.fields.integer(1, 2)]
    buffers: list[wire.Buffer]


@message(109)
class Exited(wire.Message):
    """A task has ended, with a code or by a signal."""

    index: Index
    code: Annotated[int, wire.fields.integer(0, 255)]
    signum: Annotated[int, wire.fields.integer(0, 128)]


@message(117)
class Reported(wire.Message):
    """A task has said why it ends; see `ExitReport`."""

    index: Index
    error: Annotated[str, wire.fields.text(MAX_TEXT)]
    place: Annotated[str, wire.fields.text(MAX_TEXT)]
    details: Annotated[str, wire.fields.text(MAX_DETAILS)]
    consequence: Annotated[bool, wire.fields.flag]
    printed: Annotated[bool, wire.fields.flag]
    cause: Annotated[str, wire.fields.text(MAX_CAUSE)] = ""
    given_up: Annotated[str, wire.fields.text(MAX_DETAILS)] = ""


@message(118)
class StartAgain(wire.Message):
    """Start a task that has ended again, with these variables beside, or instead of, those that it had."""

    index: Index
    variables: Annotated[list[bytes], wire.fields.list_of(binary)]


@message(110)
class Empty(wire.Message):
    """All tasks have ended, and so have the processes that they have started."""


@message(111)
class Note(wire.Message):
    """A line for the user."""

    text: Text


@message(112)
class Signal(wire.Message):
    """Send this signal to all tasks."""

    signum: Annotated[int, wire.fields.integer(1, 64)]


@message(119)
class SignalTask(wire.Message):
    """Send this signal to one task."""

    index: Index
    signum: Annotated[int, wire.fields.integer(1, 64)]


@message(113)
class Ping(wire.Message):
    """launch.py is alive."""


@message(114)
class Pong(wire.Message):
    """The agent is alive."""


@message(115)
class Bye(wire.Message):
    """Kill all tasks, clean up, and exit. From an agent: it has done so; `why`, if nobody has told it to."""

    why: Text = ""


@message(116)
class OutputAck(wire.Message):
    """launch.py has taken so many more bytes of output."""

    count: Annotated[int, wire.fields.integer()]


def pack(variables: Mapping[str, str]) -> list[bytes]:
    return [os.fsencode(text) for pair in variables.items() for text in pair]


def unpack(flat: list[bytes]) -> dict[str, str]:
    """The environment that `pack` has packed. Raises WireError: a name has no value, or is not valid."""
    texts = [os.fsdecode(item) for item in flat]
    if len(texts) % 2 or any(not name or "=" in name for name in texts[::2]) or any("\0" in text for text in texts):
        raise WireError("expected pairs of a variable and its value")
    return dict(zip(texts[::2], texts[1::2], strict=True))
