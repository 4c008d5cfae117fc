"""Orders to move servers, without processes and sockets."""

from __future__ import annotations

import pytest

from launcher.job.tasks import Task
from launcher.supervision.moves import Moves

SEATS = ("server", 0, "a"), ("server", 1, "a"), ("standby", 0, "b"), ("standby", 1, "c")
TASKS = [Task("scheduler", 0, ("x",), {}), *(Task(role, rank, (), {}, host) for role, rank, host in SEATS)]  # type: ignore[arg-type]
SERVER_0, SERVER_1, STANDBY_0, STANDBY_1 = 1, 2, 3, 4


class Asked:
    """Somebody who has given an order, and what he was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.code: int | None = None

    def say(self, text: str) -> None:
        self.said.append(text)

    def end(self, code: int, text: str) -> None:
        assert self.code is None
        self.code = code
        self.said.append(text)


class Mover:
    def __init__(self, hosts: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.why_not = ""
        self.running = set(range(len(TASKS)))
        self.retired: list[int] = []
        self.moves = Moves(
            *(TASKS, lambda: list(hosts), lambda: self.why_not, self.running.__contains__, self.retired.append)
        )

    def order(self, **words: str) -> Asked:
        asked = Asked()
        self.moves.take(words, asked)  # type: ignore[arg-type]
        return asked


def test_a_process_is_retired_and_the_next_one_is_started_where_it_is_to_be():
    mover = Mover()
    asked = mover.order(move="server:1", to="c")
    assert mover.retired == [SERVER_1]
    assert (mover.moves.host_of(SERVER_1), mover.moves.host_of(SERVER_0)) == ("c", "")
    mover.moves.go_on()
    assert mover.retired == [SERVER_1] * 2, "the scheduler may not have heard it"
    mover.moves.ended(SERVER_0, "was killed by SIGKILL", False)
    assert asked.code is None, "another process"
    mover.moves.ended(SERVER_1, "exited with code 0", True)
    assert (asked.code, mover.moves.current) == (0, None)
    assert asked.said == ["moving server 1 on a to c", "server 1 on a has been started anew, and is brought into step"]


def test_moves_are_made_one_after_the_other():
    mover = Mover()
    first, second = mover.order(move="standby:1"), mover.order(move="server:0")
    assert second.said == ["waits for moves that were ordered before"]
    mover.moves.ended(STANDBY_1, "exited with code 0", True)
    assert (first.code, second.code, mover.retired) == (0, None, [STANDBY_1, SERVER_0])
    mover.moves.ended(SERVER_0, "was killed by SIGKILL", False)
    assert second.code == 4
    assert "was killed by SIGKILL before it could be moved" in second.said[-1]


def test_a_host_is_drained_to_where_the_fewest_are_and_no_partner_is():
    mover = Mover()
    asked = mover.order(drain="a")
    assert mover.moves.current == (SERVER_0, "c"), "b has its standby"
    mover.moves.ended(SERVER_0, "exited with code 0", True)
    assert mover.moves.current == (SERVER_1, "b")
    mover.moves.ended(SERVER_1, "exited with code 0", True)
    assert asked.code == 0
    mover.moves.take({"drain": "nobody"}, (again := Asked()))  # type: ignore[arg-type]
    assert again.code == 2


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ({"move": "server:7"}, 2, "there is no 'server:7'; valid: server:0 to server:1, standby:0 to standby:1"),
        ({"move": "worker:0"}, 2, "there is no 'worker:0'"),
        ({"move": "server:0", "to": "z"}, 2, "no host 'z' to start processes on; valid: a, b, c"),
        ({"move": "server:0", "drain": "a"}, 2, "expected move and to, or drain, got drain, move"),
        ({}, 2, "got nothing"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(words: dict[str, str], code: int, reason: str):
    mover = Mover()
    asked = mover.order(**words)
    assert asked.code == code
    assert reason in asked.said[0]
    assert mover.moves.current is None


def test_what_cannot_be_moved_now_is_refused():
    mover = Mover()
    mover.why_not = "the job is ending"
    assert mover.order(move="server:0").said == ["the job is ending"]
    mover.why_not = ""
    mover.running.discard(SERVER_0)
    assert "does not run at this moment" in mover.order(move="server:0").said[0]
    here = Mover(hosts=())
    assert "all of its processes run on one machine" in here.order(move="server:0", to="a").said[0]
    assert here.order(move="server:0").code is None
    alone = Mover(hosts=("a",))
    assert "there is no host but a" in alone.order(drain="a").said[0]
