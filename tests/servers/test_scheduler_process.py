"""A scheduler that is killed has a successor, and nobody else notices. In virtual time."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rendezvous import Member
from simulation.job import Outcome, SimulatedJob
from simulation.network import Weather

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import KVStoreError
from kvstore.job.config import Config
from kvstore.job.valid_values import RoundWindow
from kvstore.wire.tracing import read_records
from servers import scheduler_process
from servers.scheduler import Scheduler
from servers.scheduler.logged import Came, Record, Succession, Ticked
from servers.scheduler_process import InputLog, SchedulerTracing


def program(store: DistStore) -> list[float]:
    """A bit of all that concerns the scheduler, and rounds."""
    out = torch.empty(3)
    for number in range(2):
        store.init(number, torch.full((3,), float(number)))
        store.barrier()
        for _ in range(2):
            store.push(number, torch.full((3,), 1.0 + store.rank))
            store.pull(number, out=out)
    store.barrier()
    return [float(value) for value in out]


def outcome(*kills: int, seed: int = 1, restarts: int = 1, work: Any = program) -> Outcome:
    """How a job ends whose scheduler is killed after these deliveries."""
    job = SimulatedJob(seed, Weather(repeat=0.05), servers=1, restarts=restarts, start_s=0.4)

    def happen() -> None:
        if job.network.deliveries in kills:
            job.world.after(0.0, lambda: job.kill("scheduler"))

    job.network.on_delivery = happen
    return job.run(work)


UNDISTURBED = outcome()
LAST = UNDISTURBED.deliveries - 3  # of a worker; for what follows, the end of the server, nobody is started again


def require_as_undisturbed(*kills: int) -> None:
    ended = outcome(*kills, restarts=len(kills))
    assert (ended.hanging, ended.errors) == ([], {}), f"{kills}\n{ended.trace()}"
    assert ended.results == UNDISTURBED.results
    assert ended.exit_codes["server 0"] == 0, kills
    assert ended.took_s < UNDISTURBED.took_s + 6.0, kills  # a successor takes 0.4 s on average, and up to 3 s


def test_a_scheduler_that_is_killed_changes_nothing() -> None:
    for at in range(2, LAST, 6):
        require_as_undisturbed(at)


@pytest.mark.faults
def test_a_scheduler_that_is_killed_after_any_message_changes_nothing() -> None:
    for at in range(1, LAST):
        require_as_undisturbed(at)


def test_a_successor_has_a_successor() -> None:
    require_as_undisturbed(UNDISTURBED.deliveries // 3, UNDISTURBED.deliveries // 2, UNDISTURBED.deliveries - 20)


FETCH = wire.FetchTrace(wire.Sender(wire.Node("observer", 0, 5), 1, 1), 0)


def made(now: float = 50.0) -> tuple[Scheduler, SchedulerTracing]:
    scheduler = Scheduler(1, 1, 10.0)
    return scheduler, SchedulerTracing(scheduler, Config(trace=RoundWindow(1, 2), start=3), lambda: now)


def test_events_become_a_chunk_at_the_next_tick() -> None:
    scheduler, tracing = made()
    scheduler.observing.events.add(49.0, "worker 1 was lost")
    tracing.tick()
    assert scheduler.observing.traces is not None
    assert tracing.awaited()
    (chunk,) = scheduler.observing.traces.fetch(FETCH, 50.0).chunks
    assert chunk.node == ("scheduler", 0, 3)
    assert chunk.offsets == [[3, 0.0, 0.0]]
    assert [record[2:] for record in read_records(chunk)] == [[49.0, "worker 1 was lost"]]
    tracing.tick()
    assert len(scheduler.observing.traces.fetch(FETCH, 50.0).chunks) == 1


def test_it_stops_with_the_workers() -> None:
    scheduler, tracing = made()
    assert scheduler.observing.traces is not None
    scheduler.observing.traces.take(wire.TraceChunk(wire.Node("worker", 0, 1), [], [], True, 1, 0, [b"\x92\x90\x90"]))
    tracing.tick()
    tracing.requests.note(50.0, 50.0, [], b"a", FETCH)
    tracing.tick()
    assert [chunk.node.role for chunk in scheduler.observing.traces.fetch(FETCH, 50.0).chunks] == ["worker"]


W0 = Member("worker", 1, 0)


def barrier(number: int) -> Came:
    return Came(1.0, b"link", "", replace(W0.barrier(number), sender=wire.Sender(W0.node, number, number)))


def test_a_log_has_what_was_written_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written: list[Record] = [barrier(1), Succession(), Came(2.0, b"x", "key", W0.declare("a")), Ticked(3.0, [])]
    first = InputLog(path, 2, 1)
    assert first.earlier == []
    for record in written[:3]:
        first.write(record)
    first.close()
    second = InputLog(path, 2, 1)
    second.write(written[3])
    assert [*second.earlier, written[3]] == InputLog(path, 2, 1).earlier == written


def test_it_is_this_users_alone(tmp_path: Path) -> None:
    InputLog(tmp_path / "log", 1).close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_last_record_that_was_cut_short_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = InputLog(path, 2)
    log.write(barrier(1))
    log.write(barrier(2))
    log.close()
    os.truncate(path, path.stat().st_size - 1)
    again = InputLog(path, 2)
    assert again.earlier == [barrier(1)]
    again.write(barrier(3))
    assert InputLog(path, 2).earlier == [barrier(1), barrier(3)]


def test_what_is_not_a_log_of_this_job_is_an_error(tmp_path: Path) -> None:
    InputLog(tmp_path / "log", 2, 1).close()
    with pytest.raises(KVStoreError, match="of another job"):
        InputLog(tmp_path / "log", 2, 2)
    with pytest.raises(KVStoreError, match=r"missing/log: No such file"):
        InputLog(tmp_path / "missing" / "log", 2, 1)


def test_barriers_that_are_over_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_process, "TRIM_BYTES", 1000)
    path = tmp_path / "log"
    log = InputLog(path, 1)
    longest = 0
    for number in range(1, 200):
        log.write(barrier(number))
        longest = max(longest, path.stat().st_size)
    log.write(Came(1.0, b"link", "", W0.declare("a")))
    assert longest < 1200
    *barriers, declared = InputLog(path, 1).earlier
    assert isinstance(declared, Came)
    assert barriers[-1] == barrier(199)


def test_a_log_that_cannot_be_written_is_given_up_and_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log = InputLog(path, 2)
    log.write(barrier(1))

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write(barrier(2))
    log.write(barrier(3))
    (message,) = caplog.messages
    assert "cannot be written: No space left on device. The job goes on, but will end if the scheduler dies" in message
    with pytest.raises(KVStoreError, match="could not write its log to the end"):
        InputLog(path, 2)
