from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator

import pytest
from waiting import LONG, until

from kvstore.job.processes import Exit
from launcher.agents.carrier import Carrier
from launcher.agents.links.protocol import Note
from launcher.errors import LaunchError
from launcher.supervision.crew import turn

ENV = {"PATH": os.defpath}


class Carriers:
    """Programs that run until the test is over."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self._made: list[Carrier] = []

    def run(self, text: str, linked: bool = False) -> Carrier:
        carrier = Carrier("ssh to node1", ("sh", "-c", text), ENV, linked=linked)
        self._made.append(carrier)
        carrier.open(self.selector)
        return carrier

    def close(self) -> None:
        for carrier in self._made:
            carrier.close()


@pytest.fixture
def carriers(selector: selectors.BaseSelector) -> Iterator[Carriers]:
    made = Carriers(selector)
    yield made
    made.close()
    assert not selector.get_map()


def test_how_it_ended_and_what_it_said(carriers: Carriers) -> None:
    carrier = carriers.run("echo no; echo '  route '; echo; echo to host >&2; exit 255")
    assert carrier.wait(LONG) == carrier.poll() == Exit(code=255)
    assert sorted(carrier.explanation.splitlines()) == ["no", "route", "to host"]


def test_of_a_traceback_only_what_it_says_in_the_end(carriers: Carriers) -> None:
    carrier = carriers.run("printf 'before\\nTraceback (most recent call last):\\n  File x\\nImportError: no\\n'")
    carrier.wait(LONG)
    assert carrier.explanation == "before\nImportError: no"


def test_only_the_last_lines_are_remembered(carriers: Carriers) -> None:
    carrier = carriers.run("seq 100")
    carrier.wait(LONG)
    assert carrier.explanation.splitlines() == [str(number) for number in range(81, 101)]


def test_lines_that_somebody_sees_explain_nothing_twice(carriers: Carriers) -> None:
    carrier = carriers.run("read line; echo one; printf half")
    seen: list[str] = []
    carrier.relay(seen.append)
    carrier.wait(LONG)
    until(lambda: turn(carriers.selector, 0.05) or len(seen) == 2, step=0)
    assert (seen, carrier.explanation) == (["one", "half"], "")


def test_an_agent_that_answers_on_its_streams_is_heard_and_errors_are_not_taken_for_it(carriers: Carriers) -> None:
    carrier = carriers.run("echo banner; echo warning >&2; cat >/dev/null", linked=True)
    assert carrier.link is not None
    ends: list[str] = []
    carrier.link.open(carriers.selector, lambda _: None, ends.append)
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    until(lambda: turn(carriers.selector, 0.05) or (carrier.link and carrier.link.preamble), step=0)
    assert (carrier.explanation, carrier.link.preamble, ends) == ("warning", "banner", [])
    carrier.link.send(Note("x"))
    carrier.link.close()  # which ends the program's input, and so the program
    assert carrier.wait(LONG) == Exit()


def test_no_agent_no_link(carriers: Carriers) -> None:
    assert carriers.run("exit 0").link is None


def test_a_signal_reaches_what_it_has_started(carriers: Carriers) -> None:
    carrier = carriers.run("sleep 600 & echo started; wait; sleep 600")
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    carrier.signal(signal.SIGTERM)
    assert carrier.wait(LONG) == Exit(signum=15)


def test_one_that_does_not_go_is_killed(carriers: Carriers) -> None:
    carrier = carriers.run("trap '' TERM; echo deaf; while :; do sleep 1; done")
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    carrier.close()
    assert carrier.poll() == Exit(signum=9)


def test_a_program_that_is_not_there(selector: selectors.BaseSelector) -> None:
    carrier = Carrier("qsub", ("/no/such/qsub",), ENV, linked=False)
    with pytest.raises(LaunchError, match="cannot start qsub: there is no command /no/such/qsub"):
        carrier.open(selector)
    carrier.close()
