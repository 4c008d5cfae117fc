"""The straggler of a running job, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

from made_reports import server_report, worker_report
from rendezvous import Job, Member

from kvstore import wire
from servers.scheduler.straggling import MOST_LINES, SETTLED_S, TOGETHER_S, Reports

FETCH = ["train.py:9 in <module>", "torch/utils/data/dataloader.py:700 in __next__"]
BACKWARD = ["train.py:12 in <module>", "torch/autograd/graph.py:800 in _engine_run_backward"]
WAITS = ["train.py:14 in <module>", "kvstore/client/dist.py:200 in pushpull"]


class Run:
    """Rounds of 100 ms, of three workers, who report each second.

    Attributes:
        late: the worker that is awaited for half of each round; None for nobody.
        read: whether workers say how long they wait for data.
        slow_line: whether who is late waits as long as the others.
        frames: where workers are, when they are asked.
        asked: how often each worker has been asked.
        sharing: workers that share an aggregator: servers see them together.
        news: what has been said, each with the time since the run began.
    """

    def __init__(self, read: bool = False) -> None:
        self.job = Job(3, 1)
        self.began = self.job.now
        self.late: int | None = None
        self.read = read
        self.slow_line = False
        self.frames = dict.fromkeys(range(3), WAITS)
        self.asked = [0, 0, 0]
        self.sharing: tuple[int, ...] = ()
        self.news: list[tuple[float, str]] = []
        self._blocked, self._input, self._alone, self._last = ([0.0] * 3 for _ in range(4))
        self._rounds = 0

    def pass_s(self, seconds: int, late: int | None) -> None:
        """Let time pass, in steps of a tenth of a second."""
        for _ in range(10 * seconds):
            self._rounds += 1
            for rank in range(3):
                self._blocked[rank] += 0.0 if late is None or (rank == late and not self.slow_line) else 0.05
                self._input[rank] += 0.05 if rank == late else 0.0
            last = self._rounds % 3 if late is None else late
            for rank in self.sharing if last in self.sharing else (last,):
                self._last[rank] += 1
                self._alone[rank] += 0.0 if late is None else 0.05
            if self._rounds % 10 == 0:
                self._report()
            self.answer(self.job.tick(0.1))
            self.news += [(round(self.job.now - self.began, 1), line) for line in self.job.scheduler.take_news()]

    def _report(self) -> None:
        for rank, member in enumerate(self.job.workers):
            self.job.beat(member)
            self.job.handle(member.beats, self._worker_report(rank))
        (server,) = self.job.servers
        self.job.beat(server)
        alone = [round(1e6 * seconds) for seconds in self._alone]
        counts = {"waves": self._rounds, "came_last": list(map(int, self._last)), "alone_us": alone}
        self.job.handle(server.beats, server_report(at=self.job.now, **counts))

    def _worker_report(self, rank: int) -> wire.WorkerReport:
        blocked, read = round(1e6 * self._blocked[rank]), round(1e6 * self._input[rank]) if self.read else -1
        return worker_report(rank, at=self.job.now, rounds=self._rounds, blocked_us=blocked, input_us=read)

    def answer(self, outbox: list[tuple[Member, wire.Message]]) -> None:
        for whom, message in outbox:
            if isinstance(message, wire.Where):
                self.asked[whom.rank] += 1
                frames = self.frames[whom.rank]
                self.job.handle(whom.beats, wire.Stacks(whom.node, message.number, frames[-1], "", [["main", frames]]))


def test_even_rounds_name_nobody_and_ask_nobody():
    run = Run()
    run.pass_s(60, None)
    assert (run.news, run.asked) == ([], [0, 0, 0])


def test_a_straggler_is_named_within_ten_seconds_and_once():
    run = Run(read=True)
    run.pass_s(20, None)
    run.pass_s(60, 1)
    ((at, line),) = run.news
    assert at <= 30.0
    assert "worker 1 is slow: it came last in" in line
    assert "It reads its input for longer" in line
    assert [text for _, text in run.job.scheduler.observing.events.after(0)[1]][-1] == line


def test_workers_of_a_host_are_named_together_if_it_stays_unclear_which_one_it_is():
    clear, unclear = Run(read=True), Run(read=True)
    unclear.sharing = 1, 2
    for run in (clear, unclear):
        run.pass_s(30, 1)
    ((first, _),), ((at, line),) = clear.news, unclear.news
    assert first + TOGETHER_S <= at <= 10.0
    assert "workers 1 and 2, which share an aggregator, are slow: they" in line


def test_a_slow_line_has_to_go_on_for_a_while():
    busy, slow, unclear = Run(read=True), Run(read=True), Run(read=True)
    slow.slow_line = unclear.slow_line = True
    busy.pass_s(30, 1)
    slow.pass_s(30, 1)
    ((first, _),), ((at, line),) = busy.news, slow.news
    assert first < at <= 10.0
    assert "Its messages take long to arrive" in line
    unclear.pass_s(round(SETTLED_S), 1)  # the others' reports do not show yet what the servers' do
    unclear.slow_line = False
    unclear.pass_s(30, 1)
    assert "It reads its input for longer" in unclear.news[0][1]


def test_looks_say_what_reports_do_not():
    for frames, words in (
        (BACKWARD, "It computes for longer than the others: it waits"),
        (FETCH, "It reads its input for longer"),
    ):
        run = Run()
        run.frames[1] = frames
        run.pass_s(30, 1)
        ((at, line),) = run.news
        assert at <= 10.0
        assert words in line
        assert f"40 of 40 looks found it at {frames[-1]}" in line or "looks found it at" in line
        assert run.asked == [40, 40, 0], "it and one other, and only so often"


def test_without_answers_the_cause_is_one_of_two():
    run = Run()
    run.answer = lambda outbox: None  # type: ignore[method-assign]
    run.pass_s(30, 1)
    ((at, line),) = run.news
    assert at <= 10.0
    assert "It computes, or reads its input, for longer than the others" in line


def test_it_is_said_when_it_is_over_and_who_is_next_but_not_too_often():
    run = Run(read=True)
    run.pass_s(20, 1)
    run.pass_s(40, None)
    run.pass_s(20, 2)
    named, over, other = run.news
    assert "worker 1 is slow: it came last in" in named[1]
    assert over[1] == "worker 1 holds nobody up any more"
    assert "worker 2 is slow: it came last in" in other[1]
    run = Run(read=True)
    for _ in range(6):
        run.pass_s(10, 1)
        run.pass_s(10, 2)
    assert len(run.news) == MOST_LINES


def test_of_each_member_the_latest_report_and_one_of_some_seconds_ago():
    reports = Reports()
    for second in range(30):
        reports.take(worker_report(rank=1, rounds=second), 100.0 + second)
        reports.take(server_report(rank=1, rounds=2 * second), 100.0 + second)
    before, latest = reports.of(wire.Node("worker", 1, 1))
    assert (before.rounds, latest.rounds) == (23, 29)
    before, latest = reports.of(wire.Node("server", 1, 1))
    assert (before.rounds, latest.rounds) == (46, 58)


def test_one_report_is_one_and_another_process_begins_anew():
    reports = Reports()
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    first = worker_report(rank=0)
    reports.take(first, 1.0)
    assert reports.of(wire.Node("worker", 0, 1)) == (first,)
    successor = replace(first, node=wire.Node("worker", 0, 2))
    reports.take(successor, 2.0)
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    assert reports.of(wire.Node("worker", 0, 2)) == (successor,)


def test_many_reports_take_the_memory_of_few():
    reports = Reports()
    for beat in range(10_000):
        reports.take(worker_report(rank=0, rounds=beat), beat / 100)
    assert reports.kept == 7 + 4
    assert [report.rounds for report in reports.of(wire.Node("worker", 0, 1))] == [9300, 9999]


def test_a_member_is_believed_over_the_link_of_its_beats_alone():
    job = Job()
    w0, w1, s0 = job.everyone
    honest = worker_report(rank=0, rounds=5)
    assert job.handle(w0.beats, honest) == []
    assert job.scheduler.observing.reports.of(w0.node) == (honest,)
    forged = worker_report(rank=1, rounds=5)
    for link in (w0.beats, b"a stranger"):
        assert job.handle(link, forged) == []
    assert job.handle(w1.beats, replace(forged, node=wire.Node("worker", 1, 9))) == []
    assert job.handle(s0.beats, worker_report(role="server", rank=0)) == [], "a worker's report of a server"
    assert job.handle(w1.beats, server_report(role="worker", rank=1)) == []
    assert job.scheduler.observing.reports.of(w1.node) == job.scheduler.observing.reports.of(s0.node) == ()


def test_slow_rounds_are_compared_over_longer_times():
    reports = Reports()
    for second in range(301):
        reports.take(worker_report(rank=0, at=second, rounds=second // 10), float(second))
        reports.take(server_report(rank=0, at=second, rounds=9, waves=second // 10), float(second))
    for node in (wire.Node("worker", 0, 1), wire.Node("server", 0, 1)):
        assert [report.at for report in reports.over(node, 3.0) or ()] == [297, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=20) or ()] == [90, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=1000) or ()] == [0, 300]
    assert reports.over(wire.Node("worker", 1, 1), 3.0) is None
    for second in range(301, 2000):
        reports.take(worker_report(rank=0, at=second), float(second))
    assert [report.at for report in reports.over(wire.Node("worker", 0, 1), 3.0, fewest=1) or ()] == [1410, 1999]
