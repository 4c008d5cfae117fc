"""A reader: where its job is, its links, and the rows that it holds."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Played

import kvstore as kv
from kvstore import wire
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, Mismatch, NodeLost, UsageError, WireError
from kvstore.job.config import Config
from kvstore.job.curve_keys import pair, with_key
from kvstore.lineage import NOWHERE, Version
from kvstore.member.client import Client
from kvstore.reading import held
from kvstore.reading.held import HeldRows, HeldValue, ReadSegment, reads_of, reads_of_rows
from kvstore.reading.reader import RowPull
from kvstore.reading.reader_session import FRESH_S, ReaderSession
from kvstore.reading.readers_file import ReadingPlace, find
from kvstore.rows.ids import Ids
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec
from kvstore.values import to_buffer
from kvstore.wire.guests import NOT_HELD, aligned

# ---- place


SCHEDULER, READER = pair(), pair()
KEYED = with_key("tcp://10.0.0.1:5555", SCHEDULER[0])


def test_the_file_is_its_owners_alone_and_says_all(tmp_path: Path) -> None:
    file = tmp_path / "readers.json"
    place = ReadingPlace(KEYED, READER[1], "sockets")
    place.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ReadingPlace.read(file) == place
    assert find(file, None, {}) == place
    assert find(None, None, {"KVSTORE_READ_FROM": str(file)}) == place
    assert READER[1] not in repr(place)


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "readers.json"
    ReadingPlace(KEYED, READER[1]).write(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ReadingPlace.read(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2}', '{"version": 1, "address": 3}', "\\xff"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "readers.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="--readers"):
        ReadingPlace.read(file)


def test_a_job_that_does_not_run_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does the job run"):
        find(tmp_path / "none", None, {})


def test_the_key_may_be_in_the_environment() -> None:
    assert find(KEYED, None, {"KVSTORE_READ_KEY": READER[1]}).key == READER[1]
    assert find(KEYED, READER[1], {}).key == READER[1]


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [
        ("http://10.0.0.1", "", "ipc://path or tcp://"),
        ("tcp://10.0.0.1:5555", READER[1], "both are needed"),
        (KEYED, "", "both are needed"),
        (KEYED, "secret", "not shown"),
    ],
    ids=["no endpoint", "no public key", "no secret key", "malformed key"],
)
def test_half_a_place_is_refused(address: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        ReadingPlace(address, key)
    assert "secret" not in str(refused.value).replace("the readers' secret key", "")


def test_nowhere_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_READ_FROM"):
        find(None, None, {})


def test_a_readers_settings() -> None:
    config = ReadingPlace(KEYED, READER[1], "zeromq").config({"DMLC_ROLE": "worker", "KVSTORE_TIMEOUT_S": "7"})
    assert (config.role, config.root, config.transport, config.timeout_s) == ("reader", KEYED, "zeromq", 7.0)
    assert config.keys is not None
    assert (config.keys.public, config.keys.follows) == (READER[0], True)
    assert ReadingPlace("ipc:///x/scheduler").config({}).keys is None


def test_which_job_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_READ_FROM", raising=False)
    with pytest.raises(kv.ConfigError, match="which job"):
        kv.connect()


@pytest.mark.parametrize("store", [0, "worker", None, 1.5])
def test_stores_are_counted_from_1(tmp_path: Path, store: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"counted from 1.*'workers' is that of workers.init\(\)"):
        kv.connect(tmp_path / "readers.json", store=store)


def test_where_nobody_listens_there_is_no_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(kv.DeadlineExceeded, match="nobody listens"):
        kv.connect(f"ipc://{tmp_path}/scheduler", timeout=0.05)


# ---- a reader's links, to a scheduler and servers that are functions, with a clock that moves while nothing comes


ROOT = "tcp://10.0.0.1:5555"
READ = {"store": 0, "ids": [], "lineage": 0, "versions": [], "slack": 0}


class PlayedJob(Played):
    """A job whose members answer at once, or not at all."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.servers = ["server-0", "server-1"]
        self.scheduler: Callable[[Any], wire.Message | None] = lambda asked: wire.Connected(asked.seq, 3, self.servers)
        self.dead: set[str] = set()

    def _answer(self, peer: bytes, request: Any) -> list[wire.Message]:
        answer: wire.Message | None = None
        if isinstance(request, wire.Connect):
            answer = self.scheduler(request)
        elif isinstance(request, wire.ReadValues) and peer.decode() not in self.dead:
            answer = wire.ValuesRead(request.seq, 0, [], [])
        return [] if answer is None else [answer]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def session_of(transport: Any, listens: bool | None = True, root: str = ROOT) -> ReaderSession:
    config = dataclasses.replace(Config(), role="reader", root=root)
    clock = lambda: transport.now  # noqa: E731
    return ReaderSession(config, lambda: transport, 30.0, clock, lambda _: listens, transport.sleep)


def connected(transport: Any, listens: bool | None = True, root: str = ROOT) -> ReaderSession:
    session = session_of(transport, listens, root)
    session.connect()
    session.link()
    return session


def read(session: ReaderSession, timeout: float = 30.0) -> list[Any]:
    taken: list[Any] = []
    asks: Any = [(server, wire.ReadValues, READ, taken.append) for server in range(session.num_servers)]
    session.ask("pull", ["w"], asks, session.deadline(timeout))
    return taken


def test_a_reader_finds_the_servers_and_says_who_it_is() -> None:
    transport = PlayedJob()
    assert len(read(connected(transport))) == 2
    assert [str(asked.node) for peer, asked in transport.asked if isinstance(asked, wire.Here)] == [
        "reader 3",
        "reader 3",
    ]


def test_it_waits_until_all_members_have_joined() -> None:
    transport, tries = PlayedJob(), []

    def scheduler(asked: Any) -> wire.Message:
        tries.append(asked)
        return wire.Connected(asked.seq, 0, transport.servers if len(tries) > 2 else [])

    transport.scheduler = scheduler
    assert connected(transport).num_servers == 2


def test_a_server_that_was_replaced_is_found_again() -> None:
    transport = PlayedJob()
    session = connected(transport)
    transport.dead.add("server-1")
    transport.servers = ["server-0", "standby-1"]
    assert len(read(session)) == 2
    assert transport.asked[-1][0] == b"standby-1"


def test_a_server_that_does_not_answer_is_named() -> None:
    transport = PlayedJob()
    session = connected(transport)
    transport.dead.add("server-1")
    with pytest.raises(DeadlineExceeded, match="no answer from server 1") as late:
        read(session, 5.0)
    assert late.value.silent == ("server 1",)
    assert transport.now == pytest.approx(5.0)


def test_an_answer_that_comes_after_its_call_has_given_up_is_dropped() -> None:
    transport = PlayedJob()
    session = connected(transport)
    transport.dead.add("server-1")
    taken: list[int] = []
    waits: list[float] = []
    asks: Any = [(server, wire.ReadValues, READ, lambda _, server=server: taken.append(server)) for server in range(2)]
    with pytest.raises(DeadlineExceeded):
        session.ask("pull", ["w"], asks, session.deadline(5.0), late=lambda: waits.append(transport.now))
    assert len(waits) >= 4
    (asked,) = (asked for peer, asked in transport.asked if peer == b"server-1" and isinstance(asked, wire.ReadValues))
    transport.dead.clear()
    transport.arrive(b"server-1", wire.ValuesRead(asked.seq, 0, [], []))
    assert len(read(session)) == 2
    assert taken == [0]


def test_an_answer_is_dropped_though_a_second_interrupt_has_ended_the_clean_up_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = PlayedJob()
    session = connected(transport)
    transport.dead.add("server-1")
    taken: list[int] = []
    asks: Any = [(server, wire.ReadValues, READ, lambda _, server=server: taken.append(server)) for server in range(2)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Client, "give_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.ask("pull", ["w"], asks, session.deadline(5.0), late=interrupt)
    (asked,) = (asked for peer, asked in transport.asked if peer == b"server-1" and isinstance(asked, wire.ReadValues))
    transport.dead.clear()
    transport.arrive(b"server-1", wire.ValuesRead(asked.seq, 0, [], []))
    assert len(read(session)) == 2
    assert taken == [0]


def test_why_the_job_is_over_is_told() -> None:
    transport = PlayedJob()
    session = connected(transport)
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda asked: wire.Failure(asked.seq, "NodeLost", "worker 1 was killed")
    with pytest.raises(NodeLost, match="worker 1 was killed"):
        read(session)


def test_a_job_whose_scheduler_is_gone_has_ended() -> None:
    transport = PlayedJob()
    session = connected(transport, listens=False)
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda _: None
    with pytest.raises(NodeLost, match="has ended"):
        read(session)
    assert 5.0 < transport.now < 10.0


def test_calls_with_short_timeouts_learn_that_the_job_has_ended() -> None:
    transport = PlayedJob()
    session = connected(transport, listens=False)
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda _: None
    errors = []
    for _ in range(100):
        with pytest.raises((DeadlineExceeded, NodeLost)) as raised:
            read(session, 0.1)
        errors.append(raised.type)
    assert errors[0] is DeadlineExceeded
    assert errors[-1] is NodeLost


def test_where_the_directory_is_gone_nobody_comes_back(tmp_path: Path) -> None:
    transport = PlayedJob()
    session = connected(transport, listens=False, root=f"ipc://{tmp_path}/gone/scheduler")
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda _: None
    with pytest.raises(NodeLost, match="has ended"):
        read(session)
    assert transport.now < 5.0


def test_a_scheduler_that_is_away_for_a_while_is_waited_for() -> None:
    transport = PlayedJob()
    session = connected(transport, listens=None)
    transport.dead.add("server-1")
    transport.scheduler = lambda _: None
    with pytest.raises(DeadlineExceeded):
        read(session)


def test_now_and_then_the_scheduler_hears_of_a_reader() -> None:
    transport = PlayedJob()
    session = connected(transport)
    read(session)
    transport.now += FRESH_S + 1
    read(session)
    assert len([asked for _, asked in transport.asked if isinstance(asked, wire.Connect)]) == 2


def test_a_refusal_is_raised_at_once() -> None:
    transport = PlayedJob()
    transport.scheduler = lambda asked: wire.Failure(asked.seq, "UsageError", "the job has its 1 readers already")
    with pytest.raises(UsageError, match="1 readers already"):
        connected(transport)
    assert transport.now == 0.0


@pytest.mark.parametrize(("listens", "why"), [(False, "nobody listens"), (True, "is the key this job's")])
def test_without_an_answer_it_is_said_what_may_be_wrong(listens: bool, why: str) -> None:
    transport = PlayedJob()
    transport.scheduler = lambda _: None
    with pytest.raises(DeadlineExceeded, match=why):
        connected(transport, listens)
    assert transport.now == pytest.approx(30.0)


def test_a_job_that_does_not_begin_is_not_waited_for_without_end() -> None:
    transport = PlayedJob()
    transport.servers = []
    with pytest.raises(DeadlineExceeded, match="not all its members have joined"):
        connected(transport)


# ---- held


def cut_value(key: str = "w") -> HeldValue:
    """Five elements, on two servers."""
    return HeldValue(key, Spec((5,), "float32"), 0, [ReadSegment(7, 0, 0, 3), ReadSegment(8, 1, 3, 5)])


def answer(*parts: torch.Tensor, versions: list[int], positions: list[int], lineage: int = 7) -> wire.ValuesRead:
    data = b"".join(bytes(to_buffer(part)).ljust(aligned(4 * part.numel()), b"\0") for part in parts)
    return wire.ValuesRead(1, lineage, versions, positions, [bytearray(data)] if data else [])


def test_each_server_is_asked_for_its_segments() -> None:
    value, other = cut_value(), cut_value("v")
    reads = list(reads_of([value, other]))
    assert [(read.server, read.fields["ids"]) for read in reads] == [(0, [7, 7]), (1, [8, 8])]
    assert reads[0].fields["versions"] == [NOT_HELD, NOT_HELD]


def test_long_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_BYTES", 100)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1] * 6


def test_an_answer_is_taken_segment_by_segment() -> None:
    value = cut_value()
    first, second = reads_of([value])
    first.take(answer(torch.ones(3), versions=[4], positions=[0]))
    assert value.versions == [Version(7, 4), NOWHERE]
    second.take(answer(torch.full((2,), 2.0), versions=[5], positions=[0]))
    assert value.flat.tolist() == [1, 1, 1, 2, 2]
    second.take(answer(versions=[6], positions=[]))  # it has not moved on by more than was allowed
    assert value.versions == [Version(7, 4), Version(7, 5)]


def test_what_is_held_of_a_servers_past_is_asked_for_as_if_it_were_not_held() -> None:
    value, other = cut_value(), cut_value("v")
    for each, lineage, version in ((value, 7, 4), (other, 9, 2)):
        next(reads_of([each])).take(answer(torch.ones(3), versions=[version], positions=[0], lineage=lineage))
    first, second = reads_of([value, other])
    assert (first.fields["lineage"], first.fields["versions"]) == (9, [NOT_HELD, 2])
    assert (second.fields["lineage"], second.fields["versions"]) == (0, [NOT_HELD, NOT_HELD])


@pytest.mark.parametrize(
    "wrong",
    [
        answer(torch.ones(3), versions=[4, 4], positions=[0]),
        answer(torch.ones(3), versions=[4], positions=[1]),
        answer(torch.ones(30), versions=[4], positions=[0]),
        answer(versions=[4], positions=[0]),
        wire.ValuesRead(1, 7, [4], [0], [bytearray(32), bytearray(32)]),
    ],
)
def test_a_wrong_answer_is_refused_and_changes_nothing(wrong: wire.ValuesRead) -> None:
    value = cut_value()
    with pytest.raises(WireError, match="an answer of"):
        next(reads_of([value])).take(wrong)
    assert value.versions == [NOWHERE, NOWHERE]


def test_many_small_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_SEGMENTS", 2)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1, 1, 2, 2]


TABLE = Table(dim=2)
AT = Version(7, 5)


def ids_of(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def answer_with_rows(
    rows: list[list[float]], positions: list[int] | None = None, count: int | None = None
) -> wire.RowsRead:
    buffers: list[wire.Buffer] = [bytearray(np.array(rows, np.float32).tobytes())]
    if positions is not None:
        buffers.append(bytearray(np.array(positions, np.int64).tobytes()))
    return wire.RowsRead(1, AT, len(rows) if count is None else count, buffers)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(-(2**62), 2**62), st.floats(width=32, allow_nan=False), max_size=9), max_size=5
    )
)
def test_the_latest_rows_are_held(notes: list[dict[int, float]]) -> None:
    held, expected = HeldRows(TABLE), {}
    for version, rows in enumerate(notes):
        ids = np.fromiter(rows, np.int64)
        values = np.repeat(np.fromiter(rows.values(), np.float32)[:, None], 2, axis=1)
        held.note(ids, values, Version(7, version))
        expected.update({number: ([7, version], value) for number, value in rows.items()})
    ids = np.fromiter(expected, np.int64)
    out = np.empty((len(ids), 2), np.float32)
    versions = held.look_up(ids, out)
    assert list(zip(versions.tolist(), out[:, 1].tolist(), strict=True)) == list(expected.values())


def test_what_is_not_held_is_left_as_it_is() -> None:
    held = HeldRows(TABLE)
    held.note(ids_of(3), np.ones((1, 2), np.float32), Version(7, 4))
    out = np.full((2, 2), 9.0, np.float32)
    assert held.look_up(ids_of(7, 3), out).tolist() == [list(NOWHERE), [7, 4]]
    assert out.tolist() == [[9, 9], [1, 1]]


def test_so_many_rows_are_held_and_then_all_are_forgotten() -> None:
    held = HeldRows(TABLE, most_bytes=3 * TABLE.row_bytes)
    held.note(ids_of(1, 2), np.ones((2, 2), np.float32), Version(7, 1))
    held.note(ids_of(3, 4), np.ones((2, 2), np.float32), Version(7, 2))
    assert len(held) == 2
    assert held.look_up(ids_of(1, 3), np.empty((2, 2), np.float32)).tolist() == [list(NOWHERE), [7, 2]]
    held.note(ids_of(5, 6, 7, 8), np.ones((4, 2), np.float32), Version(7, 3))
    assert len(held) == 2


def test_each_server_is_asked_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_BYTES", 2 * TABLE.row_bytes)
    fixed = Table(shape=(10, 2))
    reads = list(reads_of_rows(fixed, ids_of(0, 1, 2, 4, 6), None, 2))
    assert [(read.server, read.ids.tolist()) for read in reads] == [(0, [0, 2]), (0, [4, 6]), (1, [1])]
    assert [len(read.fields(True)["buffers"][0]) for read in reads] == [16, 16, 8]


def test_an_answer_goes_where_its_rows_belong() -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), np.array([(7, 1), NOWHERE, (7, 1)]), 1)
    held, out = HeldRows(TABLE), np.zeros((3, 2), np.float32)
    assert read.take(answer_with_rows([[1, 2], [3, 4]], [1, 2]), out, held) == [1, 5]
    assert out.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert held.look_up(ids_of(4, 5, 6), out).tolist() == [list(NOWHERE), [7, 5], [7, 5]]
    assert read.take(answer_with_rows([], []), out, held) == [0, 1]


def test_rows_that_are_held_of_a_tables_past_are_asked_for_as_if_they_were_not_held() -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), np.array([(7, 3), NOWHERE, (8, 1)]), 1)
    fields = read.fields(wide=True)
    assert fields["lineage"] == 8
    assert np.frombuffer(fields["buffers"][1], np.int64).tolist() == [NOT_HELD, NOT_HELD, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        answer_with_rows([[1, 2]]),
        answer_with_rows([[1, 2]], [3]),
        answer_with_rows([[1, 2]], [-1]),
        answer_with_rows([[1, 2]], [0, 1]),
        answer_with_rows([[1, 2], [3, 4], [5, 6]], count=2),
        wire.RowsRead(1, AT, 0, []),
    ],
)
def test_a_wrong_answer_is_refused(wrong: wire.RowsRead) -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), None, 1)
    out = np.zeros((3, 2), np.float32)
    with pytest.raises(WireError, match="where 3 were asked for"):
        read.take(wrong, out, None)
    assert not out.any()


def table() -> HeldValue:
    """Ten rows of two numbers, on two servers."""
    spec = TableSpec.of(Table(shape=(10, 2)))
    return HeldValue("t", spec, 3, [ReadSegment(7, 0, 0, 10), ReadSegment(8, 1, 10, 20)])


def answered(pull: RowPull, slack: int, version: int) -> list[dict[str, Any]]:
    """The fields of the requests, each of which is answered with rows that are their version."""
    asked = []
    for server, _, fields, take in pull.asks(slack):
        held = np.frombuffer(fields["buffers"][1], np.int64) if fields["lineage"] else np.full(fields["count"], -1)
        positions = np.flatnonzero((held < 0) | (version - held > slack))
        rows = np.full((len(positions), 2), version, np.float32)
        take(wire.RowsRead(1, Version(7, version), len(positions), [rows.tobytes(), positions.tobytes()]))
        asked.append({"server": server, **fields})
    return asked


def test_each_server_is_asked_for_its_rows_once() -> None:
    pull = RowPull(table(), [[3, 2], [2, 3]], None)
    asked = answered(pull, 0, 5)
    assert [(fields["server"], fields["id"], fields["store"], fields["count"]) for fields in asked] == [
        (0, 7, 3, 1),
        (1, 8, 3, 1),
    ]
    assert pull.result().tolist() == [[[5, 5]] * 2] * 2


def test_rows_are_held_if_they_may_be_old() -> None:
    value = table()
    first = RowPull(value, [2, 3], None)
    answered(first, 2, 5)
    first.result()
    assert value.pulled == (5, 5)
    second = RowPull(value, [3, 4], None)
    asked = answered(second, 2, 7)
    assert [fields["lineage"] for fields in asked] == [None, 7]
    assert second.result()[:, 0].tolist() == [5, 7]
    assert value.pulled == (5, 7)
    third = RowPull(value, [3, 4], None)
    assert [fields["lineage"] for fields in answered(third, 0, 9)] == [None, None]
    assert third.result()[:, 0].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("row_ids", "out", "error", "why"),
    [
        (None, None, UsageError, "row_ids is missing"),
        ([10], None, UsageError, "10"),
        ([0.5], None, UsageError, "integer"),
        ([1], torch.zeros(2, 2), Mismatch, "need an out of"),
    ],
)
def test_what_does_not_fit_is_refused(row_ids: Any, out: Any, error: type[KVStoreError], why: str) -> None:
    with pytest.raises(error, match=why):
        RowPull(table(), row_ids, out)


def test_an_array_has_no_rows_by_id() -> None:
    with pytest.raises(UsageError, match="not a table; pull it"):
        RowPull(HeldValue("w", Spec((3,), "float32"), 0, []), [0], None)
