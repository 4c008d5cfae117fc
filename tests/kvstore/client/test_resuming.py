"""A store as checkpoints see it: what is saved, what a resumed one takes, and a checkpoint until its manifest."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for
from played_session import PlayedSession
from safetensors.torch import load_file
from threaded import ThreadedJob
from waiting import LONG
from written import write

import kvstore as kv
from kvstore import wire
from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.exported import export
from kvstore.checkpoint.folders import begin, listed, part_of, promise_of
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.client import DistStore
from kvstore.client.checkpoint_in_progress import CheckpointInProgress, SavedStore, ask
from kvstore.client.compression import Compressing
from kvstore.client.entries import Entries, PushClocks, SegmentColumns
from kvstore.client.optimizing import Optimizing, StoredStates, described
from kvstore.client.plans import Pieces, Plans
from kvstore.client.push_pull import Pushes
from kvstore.client.requests import Joining, Requests
from kvstore.client.resuming import Resumed, TrainedStore
from kvstore.client.stored_tables import StoredTables
from kvstore.codecs.options import chosen
from kvstore.errors import Mismatch, ServerError
from kvstore.job.valid_values import Interval
from kvstore.rule import Rule
from kvstore.sealed_folders import FileRecord
from kvstore.spec import Spec
from kvstore.ticket import WaitLimits

SPEC = Spec((3,), "float32")


def trained(rule: Rule | None = None) -> TrainedStore:
    """The first store of each worker, with the keys "w" and "v"; "v" has been pushed twice."""
    rule = rule or Rule()
    session: Any = PlayedSession()
    clocks = PushClocks()
    clocks.grow(2)
    clocks.note(np.array([1]), np.array([2]), push=1)
    requests = Requests(session, 1, rule, WaitLimits(1.0, 1.0))
    plans = Plans(Pieces(1 << 20))
    entries = plans.entries
    entries.add(entries_for({"w": SPEC, "v": SPEC}, 2, 100))
    tables = StoredTables(requests, entries.tables)
    states = StoredStates(tables, plans, clocks, lambda _, ids: np.empty((len(ids), 0)))
    optimizing = Optimizing(requests, states, "dist_sync")
    pushes = Pushes(requests, rule, clocks, optimizing, Joining(requests, clocks))
    return TrainedStore(1, entries, optimizing, pushes, tables)


def compressing(threshold: float) -> Compressing:
    compression = chosen({"type": "2bit", "threshold": threshold})
    assert compression is not None
    return Compressing(compression)


class Part:
    """Stands for the checkpoint that is resumed: it has residuals of a store."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked: list[str] = []

    def part(self, name: str, shared: bool) -> Any:
        assert not shared
        self.asked.append(name)
        return self.state

    def shapes(self, ordinal: int) -> dict[str, tuple[int, ...]]:
        assert ordinal == 1
        return {"w": (3,)}


def test_workers_are_in_step_where_no_round_goes_on_without_one() -> None:
    assert trained().in_step
    assert not trained(Rule("sync", quorum=1)).in_step
    assert not trained(Rule("async")).in_step


def test_what_is_saved_stays_as_it_was_at_that_moment() -> None:
    store = trained()
    saved = store.saved()
    store.clocks.note(np.array([1]), np.array([3]), push=2)
    store.entries.add(entries_for({"late": SPEC}, 2, 100))
    assert (saved.ordinal, saved.mode, list(saved.entries), saved.clocks) == (1, "sync", ["w", "v"], [0, 2])
    assert store.rounds == 3


def test_values_are_the_checkpoints_and_states_are_given_once_there_is_an_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = trained()
    states = {("w", "momentum_buffer"): torch.full((3,), 4.0)}
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(3)}, states), 0, 2)
    values = store.first_values(resumed, ["w", "v"], [SPEC] * 2, [torch.zeros(3)] * 2)
    assert [value.tolist() for value in values] == [[1] * 3, [0] * 3]
    assert f"{resumed} does not have 'v': what init was given is used" in caplog.text
    store.give_states(resumed, store.entries)
    assert list(store.restored) == ["w"]
    store.optimizing.set(described("sgd", {"learning_rate": 0.1, "momentum": 0.9}, store.entries))
    given = []
    store.optimizing.restore = lambda *args: given.append(args[:2])  # type: ignore[method-assign]
    store.give_states(resumed, store.entries)
    store.give_states(resumed, store.entries)
    ((optimizer, restored),) = given
    assert optimizer == "sgd"
    assert restored["w", "momentum_buffer"].tolist() == [4] * 3
    assert not store.restored


def test_residuals_are_those_of_the_same_compression(caplog: pytest.LogCaptureFixture) -> None:
    store = trained()
    assert store.residuals() is None
    resumed: Any = Part(None)
    store.give_residuals(resumed)
    assert not store.has_residuals  # the compression may still be set
    store.pushes.compressing = compressing(0.5)
    assert store.compresses
    state = store.residuals()
    resumed = Part(state)
    store.give_residuals(resumed)
    assert resumed.asked == [store.residuals_name] == ["residuals.1"]
    assert store.has_residuals
    assert caplog.text == ""
    store.pushes.compressing = compressing(0.25)
    store.give_residuals(resumed)
    assert "the residuals of another compression are left out" in caplog.text


STATES = {("w", "momentum_buffer"): torch.ones(2, 3)}


def test_a_store_is_found_by_its_place_among_the_stores_of_the_job(tmp_path: Path) -> None:
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(2, 3)}, STATES), 0, 2)
    assert (resumed.number, resumed.rounds) == (3, 30)
    assert resumed.has(1, "w")
    assert not resumed.has(1, "v")
    assert not resumed.has(2, "w")
    assert resumed.shapes(1) == {"w": (2, 3)}
    assert resumed.shapes(2) == {}
    assert torch.equal(resumed.value(1, "w", Spec((2, 3), "float32")), torch.ones(2, 3))
    optimizer, states = resumed.states(1, ["w"])
    assert optimizer == "sgd"
    assert torch.equal(states["w", "momentum_buffer"], torch.ones(2, 3))
    with pytest.raises(Mismatch, match="resume with the model"):
        resumed.value(1, "w", Spec((3, 2), "float32"))


def test_with_another_number_of_workers_own_parts_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(2)}), 0, 5)
    assert "saved by 2 workers, and there are 5" in caplog.text
    assert resumed.part("sampler", shared=False) is None
    assert resumed.part("rates", shared=True) is None


KEYS = ["w", "fixed", "grows"]
IDS = {"fixed": np.arange(20), "grows": np.arange(-6, 30) * 2**40}
WIDTHS = {"fixed": 3, "grows": 2}
GROWS = kv.Table(dim=2, init="normal", admit=kv.MinCount(2), evict=kv.Unseen(rounds=2))
FIXED = kv.Table(shape=(20, 3), dtype="float64", init="uniform")


def pushed(key: str, rank: int, step: int) -> kv.RowSparse:
    noise = np.random.default_rng([rank, step, len(key)])
    ids = IDS[key][noise.random(len(IDS[key])) < 0.4]
    return kv.RowSparse(
        ids, noise.standard_normal((len(ids), WIDTHS[key])).astype(FIXED.dtype if key == "fixed" else "float32")
    )


class Steps:
    """How many have been made."""

    def __init__(self) -> None:
        self.made = 0

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


def training(steps: int, optimizer: str, late: bool = False, grows: kv.Table = GROWS, **hyper: Any) -> Any:
    """A program of ``steps`` steps in all; it sets the optimizer after ``init`` if that is to be ``late``."""

    def train(store: DistStore) -> Any:
        counter, weight = Steps(), torch.zeros(3000)
        if not late:
            store.set_optimizer(optimizer, **hyper)
        store.init(KEYS, [weight, FIXED, grows])
        if late:
            store.set_optimizer(optimizer, **hyper)
        store.attach("steps", counter)
        while counter.made < steps:
            gradients = [torch.ones(3000), *(pushed(key, store.rank, counter.made) for key in KEYS[1:])]
            store.push(KEYS, gradients)
            counter.made += 1
            store.save_checkpoint(if_due=True)
        store.barrier()
        rows = [store.row_sparse_pull(key, row_ids=IDS[key]) for key in KEYS[1:]]
        counts = store.table_statistics("grows")
        return rows, [counts[name] for name in ("rows", "made", "evicted", "refused", "version")]

    return train


def run(directory: Path, program: Any, servers: int = 2, every: int = 0, **settings: Any) -> list[Any]:
    settings |= {"checkpoint_dir": str(directory), "checkpoint_every": Interval(every)}
    with ThreadedJob(2, servers, **settings) as job:
        results: list[Any] = job.run(program)
    return results


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("optimizer", "hyper"), [("sgd", {"momentum": 0.9, "learning_rate": 0.1}), ("adam", {})])
def test_tables_go_on_with_the_same_bits_on_other_servers(
    tmp_path: Path, optimizer: str, hyper: dict[str, Any], late: bool
) -> None:
    undisturbed = run(tmp_path / "none", training(9, optimizer, late, **hyper))
    run(tmp_path, training(6, optimizer, late, **hyper), every=5)
    (folder,) = listed(tmp_path)
    assert verify(folder.path).rounds == 5
    resumed = run(tmp_path, training(9, optimizer, late, **hyper), 3, checkpoint_resume=str(tmp_path))
    for (rows, counts), (wanted, wanted_counts) in zip(resumed, undisturbed, strict=True):
        assert all(map(torch.equal, rows, wanted))
        assert counts == wanted_counts


def test_a_checkpoint_has_the_rows_of_its_round_though_later_ones_follow(tmp_path: Path) -> None:
    run(tmp_path, training(4, "sgd", learning_rate=1.0), every=3)
    undisturbed = run(tmp_path / "none", training(3, "sgd", learning_rate=1.0))[0][0]
    with CheckpointReader(listed(tmp_path)[-1].path) as reader:
        pages = list(reader.pages(0, "fixed"))
    ids = np.concatenate([page.ids for page in pages])
    assert torch.equal(undisturbed[0][ids], torch.from_numpy(np.concatenate([page.rows for page in pages])))


def test_an_export_has_whole_tables_and_the_rows_of_those_that_grow(tmp_path: Path) -> None:
    (rows, _), _ = run(tmp_path, training(3, "adam"), every=3)
    path = tmp_path / "model.safetensors"
    export(listed(tmp_path)[-1].path, path, states=True)
    tensors = load_file(path)
    assert torch.equal(tensors["fixed"], rows[0])
    assert tensors["fixed.exp_avg"].shape == (len(tensors["fixed.ids"]), 3)
    wanted = dict(zip(IDS["grows"].tolist(), rows[1].tolist(), strict=True))
    assert tensors["grows.ids"].tolist() == sorted(tensors["grows.ids"].tolist())
    assert tensors["grows"].tolist() == [wanted[number] for number in tensors["grows.ids"].tolist()]
    assert len(tensors["grows"]) > 0


def test_another_table_is_refused(tmp_path: Path) -> None:
    run(tmp_path, training(2, "sgd"), every=1)
    other = kv.Table(dim=2, init="normal", admit=kv.MinCount(3), evict=kv.Unseen(rounds=2))
    with pytest.raises(Mismatch, match=r"with admit=MinCount\(count=2\) there and MinCount\(count=3\) here"):
        run(tmp_path, training(3, "sgd", grows=other), checkpoint_resume=str(tmp_path))


def test_a_table_that_is_new_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, training(2, "sgd"), every=1)

    def more(store: DistStore) -> None:
        store.set_optimizer("sgd")
        store.init(
            [*KEYS, "more", "rows of w"], [torch.zeros(3000), FIXED, GROWS, FIXED, kv.Table(dim=1, parameter="w")]
        )

    run(tmp_path / "more", more, checkpoint_resume=str(tmp_path))
    assert "has no rows of 'more', 'w': what init was given is used" in caplog.text


def test_in_an_async_store_each_server_saves_the_rows_of_now(tmp_path: Path) -> None:
    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("grows", kv.Table(dim=2))
        for step in range(5 - 2 * store.rank):  # a capture does not wait for those who are slower
            store.push("grows", pushed("grows", store.rank, step), wait=True)
        store.barrier()
        assert store.save_checkpoint(wait=True)
        if store.rank == 0:
            wanted.append(store.row_sparse_pull("grows", row_ids=IDS["grows"]))

    wanted: list[torch.Tensor] = []
    with ThreadedJob(2, 2, checkpoint_dir=str(tmp_path)) as job:
        job.run(train, "async")
    verify(listed(tmp_path)[-1].path)
    with CheckpointReader(listed(tmp_path)[-1].path) as reader:
        rows = {
            number: row for page in reader.pages(0, "grows") for number, row in zip(page.ids, page.rows, strict=True)
        }
    assert np.array_equal(np.stack([rows.get(number, np.zeros(2)) for number in IDS["grows"]]), wanted[0].numpy())


class Case:
    """A checkpoint of one array of four elements, cut across two servers."""

    def __init__(self, directory: Path, parts: tuple[int, ...] = (), timeout_s: float = 0.05) -> None:
        columns = SegmentColumns(*(np.array(column, np.int64) for column in ([2], [4, 5], [0, 1], [0, 2], [2, 4])))
        entries = Entries.of(["w"], [0], [Spec((4,), "float32")], columns)
        self.folder = begin(directory, 1)
        self.outcome: bool | None = None
        self.over = threading.Event()
        store = SavedStore(3, 2, "sync", entries, [9])
        self.saving = CheckpointInProgress(self.folder, 1, 9, 2, 2, [store], parts, 3, timeout_s, self._ended)

    def _ended(self, whole: bool) -> None:
        self.outcome = whole
        self.over.set()

    def write(self, server: int) -> FileRecord:
        header = TensorHeader(f"{4 + server}/value", "float32", [2])
        return write_tensors(self.folder / f"store-3.server-{server}.safetensors", [header], [bytes(8)], {})

    def answer(self, server: int, record: FileRecord, optimizer: str = "sgd") -> None:
        captured = wire.Captured(1, record.nbytes, record.sha256, [9], optimizer, f"/there/{server}")
        self.saving.take((0, server), captured)

    def ended(self) -> bool:
        assert self.over.wait(20)
        assert self.saving.join(20)
        return bool(self.outcome)


def test_the_manifest_is_written_when_all_servers_have_answered(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.answer(0, case.write(0))
    assert case.saving.open
    assert not listed(tmp_path)[0].whole
    case.answer(1, case.write(1))
    assert case.ended()
    manifest = load_manifest(case.folder)
    assert [(part.id, part.start, part.stop, part.clock) for part in manifest.stores[0].segments] == [
        (4, 0, 2, 9),
        (5, 2, 4, 9),
    ]
    assert manifest.stores[0].ordinal == 2


def test_files_that_worker_0_does_not_see_make_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path)
    case.answer(0, case.write(0))
    case.answer(1, FileRecord("elsewhere", 5, "ab" * 32))
    assert not case.ended()
    assert "server 1 has written /there/1, and worker 0 does not find it" in caplog.text
    assert listed(tmp_path) == []


def test_a_part_that_is_given_up_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, (1,), timeout_s=LONG)
    promise_of(case.folder, 1).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1))
    assert case.saving.open
    promise_of(case.folder, 1).unlink()
    assert not case.ended()
    assert "worker 1 could not write" in caplog.text
    assert case.saving.failed


def test_a_part_that_comes_takes_its_promise_with_it(tmp_path: Path) -> None:
    case = Case(tmp_path, (1,), timeout_s=LONG)
    promise_of(case.folder, 1).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1))
    write_tensors(part_of(case.folder, 1), [], [], {"state": "{}"})
    assert case.ended()
    assert {path.suffix for path in case.folder.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("parts", [(), (1,)])
def test_an_optimizer_that_changes_or_a_worker_that_says_nothing(tmp_path: Path, parts: tuple[int, ...]) -> None:
    case = Case(tmp_path, parts)
    for rank in parts:
        promise_of(case.folder, rank).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1), "sgd" if parts else "adam")
    assert not case.ended()
    assert listed(tmp_path) == []


def test_a_server_that_fails_gives_it_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path)
    with caplog.at_level(logging.ERROR):
        case.saving.fail(ServerError("disk full"))
        case.saving.fail(ServerError("again"))
        assert not case.ended()
    assert "no checkpoint 1, and training goes on: disk full" in caplog.text
    assert "again" not in caplog.text


class Begun:
    """A checkpoint of an array that is cut across two servers; none of them has written its file."""

    def __init__(self, directory: Path) -> None:
        self.outcomes: list[bool] = []
        self.over = threading.Event()
        self.session = PlayedSession(answer=self._answer)
        entries = entries_for({"cut": Spec((6,), "float32")}, servers=2, bound=5)
        self.stores = [SavedStore(7, 1, "sync", entries, [9])]
        self.saving = CheckpointInProgress(begin(directory, 1), 1, 9, 2, 2, self.stores, (), 3, 0.05, self._ended)

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        return wire.Ack(request.seq) if isinstance(request, wire.Capture) else None

    def _ended(self, whole: bool) -> None:
        self.outcomes.append(whole)
        self.over.set()


def test_all_servers_note_their_segments_before_any_file_is_awaited(tmp_path: Path) -> None:
    begun = Begun(tmp_path)
    answers = ask(begun.session, begun.saving, begun.stores)  # type: ignore[arg-type]
    kinds = [(peer, type(message)) for peer, message in begun.session.asked]
    both = [b"server 0", b"server 1"]
    assert kinds == [(peer, kind) for kind in (wire.Capture, wire.AwaitCapture) for peer in both]
    captures = [message for _, message in begun.session.asked[:2]]
    expected = begun.stores[0].captures()
    assert [(message.ids, message.clocks) for message in captures] == [expected[0], expected[1]]
    assert {(message.store, message.number) for _, message in begun.session.asked} == {(7, 1)}
    assert len(answers.open) == 2
    assert begun.saving.open


def test_an_error_gives_the_checkpoint_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = Begun(tmp_path)
    answers = ask(begun.session, begun.saving, begun.stores)  # type: ignore[arg-type]
    answers.fail(ServerError("disk full"))
    assert begun.over.wait(20)
    assert begun.outcomes == [False]
    assert isinstance(answers.error, ServerError)
    assert "disk full" in caplog.text
