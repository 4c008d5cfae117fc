"""The checkpoints of a job, as one worker takes part in them.

Workers meet at rounds that all of them know: at the first push of the next round, or where the program says that a step
is over. A meeting is a sum over all workers, to which worker 0 contributes what it has decided. So all save what is
their own at the same step. Where workers are not in step (asynchronous stores, quorums), worker 0 decides alone, and
the checkpoint has nothing of the other workers. In a job that goes on without it, the lowest rank that is left decides.

Worker 0 asks each server to capture its segments at the rounds that worker 0 has pushed. No later round can be over
before its next push, and that comes after the servers have noted the request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvstore.checkpoint.checkpoint_reader import verify
from kvstore.checkpoint.folders import (
    NEVER,
    CheckpointSchedule,
    begin,
    folder_of,
    found,
    listed,
    part_of,
    prepare,
    promise_of,
    remove,
)
from kvstore.checkpoint.stateful import joined, packed
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.client.checkpoint_in_progress import Answers, CheckpointInProgress, ask
from kvstore.client.resuming import Resumed, TrainedStore
from kvstore.errors import CheckpointError, KVStoreError, NodeLost, UsageError
from kvstore.job.valid_values import Interval
from kvstore.member.session import Session
from kvstore.sealed_folders import MANIFEST
from kvstore.store.base import KVStore
from kvstore.values import to_buffer
from kvstore.values.any_arrays import Column

log = logging.getLogger(__name__)


KEY = "checkpoint"
MOST_TEXT = 600  # characters that say why a worker's part failed


class WorkerPart:
    """What one worker adds to checkpoints: the state of what is attached, and the residuals of its compression."""

    def __init__(self, rank: int, leads: Callable[[], bool]) -> None:
        self._rank, self._leads = rank, leads
        self._attached: dict[str, tuple[Any, bool]] = {}
        self._writer: threading.Thread | None = None
        self._failed = False  # what the last writer had to write
        self._copied: tuple[dict[str, torch.Tensor], str] | None = None

    def attach(self, name: str, thing: Any, shared: bool) -> None:
        self._attached[name] = thing, shared

    @property
    def has_shared(self) -> bool:
        return any(shared for _, shared in self._attached.values())

    def has_own(self, stores: Sequence[TrainedStore]) -> bool:
        return bool(self._attached_here()) or any(store.compresses for store in stores)

    def copy(self, folder: Path, stores: Sequence[TrainedStore], shared_only: bool = False) -> None:
        """Copy what this worker adds to a checkpoint; ``write`` follows."""
        self._copied = None
        copied = self._own(stores, shared_only)
        try:
            promise_of(folder, self._rank).touch()
        except OSError as exc:
            raise CheckpointError(f"{part_of(folder, self._rank)}: {exc.strerror}") from None
        self._copied = copied

    def write(self, folder: Path, number: int) -> None:
        if self._copied is None:
            return
        self.join()
        args = folder, *self._copied
        self._copied, self._failed = None, False
        self._writer = threading.Thread(target=self._write, args=args, name=f"kvstore-checkpoint-{number}", daemon=True)
        self._writer.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until what was last begun is written, or has failed; return whether it has not failed."""
        if self._writer is not None:
            self._writer.join(timeout)
        return not self._failed

    def _attached_here(self) -> Mapping[str, Any]:
        """Return what this worker saves: what is shared, one worker alone."""
        leads = self._leads()
        return {name: thing for name, (thing, shared) in self._attached.items() if leads or not shared}

    def _own(self, stores: Sequence[TrainedStore], shared_only: bool) -> tuple[dict[str, torch.Tensor], str]:
        states = {
            name: (thing.state_dict, f"what is attached as {name!r} cannot be saved")
            for name, thing in self._attached_here().items()
            if not shared_only or self._attached[name][1]
        }
        if not shared_only:
            residuals = "the residuals of the compression cannot be saved"
            states |= {store.residuals_name: (store.residuals, residuals) for store in stores if store.compresses}
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, str] = {}
        for name, (state_dict, failed) in states.items():
            try:
                more, texts[name] = packed(state_dict(), f"{len(texts)}.")
            except NodeLost:
                raise
            except Exception as exc:  # of the program's own classes: whatever it is, training goes on
                why = str(exc) if isinstance(exc, UsageError) else f"{type(exc).__name__}: {exc}"
                log.debug("%s", failed, exc_info=True)
                raise CheckpointError(f"{failed}: {why}") from exc
            tensors |= more
        return tensors, joined(texts)

    def _write(self, folder: Path, tensors: Mapping[str, torch.Tensor], text: str) -> None:
        path = part_of(folder, self._rank)
        try:
            headers = [TensorHeader.of(name, value) for name, value in tensors.items()]
            write_tensors(path, headers, (to_buffer(value) for value in tensors.values()), {"state": text})
        except Exception as exc:
            self._failed = True
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else f"{type(exc).__name__}: {exc}"
            log.error("%s: this worker's part of the checkpoint failed: %s", path, why)
            with suppress(OSError):
                promise_of(folder, self._rank).unlink(missing_ok=True)


def told(store: KVStore, number: int, resumed: int) -> tuple[int, int]:
    """Return what worker 0 gives: the number of the newest checkpoint, and that of the one to continue from."""
    numbers = torch.tensor([number, resumed], dtype=torch.int64, device="cpu")
    store.init(KEY, numbers)
    store.pull(KEY, numbers)
    return int(numbers[0]), int(numbers[1])


class Decided(NamedTuple):
    """What a meeting has heard: zeros if nobody was there who decides.

    Attributes:
        number: of the checkpoint to make; 0 for none.
        following: the rounds at which the next meeting is.
        rank: whose decision it is.
        parts: the ranks that add something of their own.
    """

    number: int
    following: int
    rank: int
    parts: list[int]


class Meetings:
    """Meetings of the workers, where all hear what one has decided. Each is a sum over all workers.

    That is worker 0 or, once it is lost, the lowest rank that is left. Around its loss both may decide: each in slots
    of its own, of which all take the first.
    """

    def __init__(self, store: KVStore, rank: int, seats: int) -> None:
        self.store, self._rank, self._number = store, rank, seats
        self._slots = torch.zeros(3 * seats, dtype=torch.int64, device="cpu")
        self._failed = torch.zeros(seats, dtype=torch.int64, device="cpu")
        self._text = torch.zeros(MOST_TEXT, dtype=torch.int64, device="cpu")
        store.init([f"{KEY}s", f"{KEY}.failed", f"{KEY}.why"], [self._slots, self._failed, self._text])

    def meet(self, own: bool, number: int, following: int) -> Decided:
        """Meet the other workers.

        Args:
            own: whether this worker would add something of its own to a checkpoint.
            number: at the worker that decides, of the checkpoint to make; 0 for none, and at other workers.
            following: at the worker that decides, the rounds at which the next meeting is; 0 at other workers.
        """
        self._slots.zero_()
        of_rank = self._slots.view(self._number, 3)
        of_rank[self._rank] = torch.tensor([number, following, int(own)], dtype=torch.int64, device="cpu")
        self.store.pushpull(f"{KEY}s", self._slots)
        rows: list[list[int]] = of_rank.tolist()
        first = next((rank for rank, row in enumerate(rows) if row[1]), 0)
        return Decided(rows[first][0], rows[first][1], first, [rank for rank, row in enumerate(rows) if row[2]])

    def failure(self, why: str) -> str:
        """Hear whether all workers have what they add to a checkpoint, after a meeting that has decided on one.

        Args:
            why: what keeps this worker from it; empty for nothing.

        Returns:
            Which worker fails, the first of them, and why; empty if none does.
        """
        self._failed.zero_()
        self._failed[self._rank] = int(bool(why))
        self.store.pushpull(f"{KEY}.failed", self._failed)
        failed = self._failed.nonzero().flatten().tolist()
        if not failed:
            return ""
        self._text.zero_()
        if failed[0] == self._rank:
            self._text[: len(why)] = torch.tensor([*map(ord, why[:MOST_TEXT])], dtype=torch.int64, device="cpu")
        self.store.pushpull(f"{KEY}.why", self._text)
        return f"worker {failed[0]}: {''.join(chr(code) for code in self._text.tolist() if code)}"


class Checkpointing:
    """What one worker process does for the checkpoints of its job; the module says how they are made.

    Raises:
        CheckpointError: the checkpoint to continue from is damaged.
    """

    def __init__(
        self,
        session: Session,
        make_store: Callable[[], KVStore],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = session.rank
        self.made = self.failed = 0  # made, failed: how many checkpoints worker 0 has completed, and how many failed
        self._session = session
        self._clock = clock
        self._stores: list[TrainedStore] = []
        self._part = WorkerPart(session.rank, lambda: session.leads)
        self._answers: Answers | None = None
        config = session.config
        # where checkpoints are written; None if this job writes none
        self.directory = Path(config.checkpoint_dir) if config.checkpoint_dir else None
        self.resumed: Resumed | None = None
        number, resumed = self._begun()
        store = make_store()
        self._number, resumed = told(store, number, resumed)  # the first is that of the newest in the directory
        if resumed and self.resumed is None:
            path = Path(config.checkpoint_resume)
            folder = path if (path / MANIFEST).exists() else folder_of(path, resumed)
            self.resumed = Resumed(folder, self.rank, session.num_workers)
        self._base = 0 if self.resumed is None else self.resumed.rounds
        self._meetings = Meetings(store, self.rank, max(session.num_workers, session.config.max_workers))
        self._schedule = CheckpointSchedule(config.checkpoint_every, self._base, clock())
        self._meets = self.directory is not None and config.checkpoint_every != Interval()
        self._next = self._schedule.first() if self._meets else NEVER

    def _begun(self) -> tuple[int, int]:
        """Open and verify the checkpoint to continue from; return the newest number there is, and that one's."""
        if not self._session.leads:
            return 0, 0
        newest = 0
        if self.directory is not None:
            prepare(self.directory)
            newest = max((folder.number for folder in listed(self.directory)), default=0)
        path = self._session.config.checkpoint_resume
        folder = found(Path(path)) if path else None
        if folder is None:
            if path:
                log.warning("%s has no checkpoint yet: the job begins anew", path)
            return newest, 0
        verify(folder)
        self.resumed = Resumed(folder, 0, self._session.num_workers)
        log.warning("continuing from %s, after %d rounds", folder, self.resumed.rounds)
        return newest, self.resumed.number

    # ---- stores, and what is attached

    def add(self, store: TrainedStore) -> None:
        self._stores.append(store)

    def remove(self, store: TrainedStore) -> None:
        """Complete the checkpoint that is under way; leave ``store`` out of later ones."""
        self.finish()
        self._stores = [each for each in self._stores if each is not store]

    def attach(self, name: str, thing: Any, shared: bool) -> bool:
        """Save ``thing`` with later checkpoints; load its state from the resumed one, and return whether it has one."""
        self._part.attach(name, thing, shared)
        state = None if self.resumed is None else self.resumed.part(name, shared)
        if state is not None:
            thing.load_state_dict(state)
        return state is not None

    # ---- moments

    def before(self, store: TrainedStore, places: Column) -> None:
        """Save if a checkpoint is due, and this push, of the keys at ``places``, begins the next round."""
        if self.resumed is not None and not store.has_residuals:
            store.give_residuals(self.resumed)
        clock = int(store.clocks.pushed[places].max(initial=0)) + 1
        if clock <= store.begun:  # a step may push its keys one by one: the first of these pushes begins the round
            return
        if clock > 1 and self.directory is not None and store.trains:
            self._passed(store, self._base + clock - 1)
        store.begun = clock

    def step_over(self, store: TrainedStore) -> int | None:
        """Save if a checkpoint is due; the program says that a step is over. Return the number of the checkpoint."""
        if self.directory is None or not store.rounds or not store.trains:
            return None
        store.begun = max(store.begun, store.rounds)
        return self._passed(store, self._base + store.rounds)

    def save(self, store: TrainedStore) -> int | None:
        """Save now; all workers call this. Return the number, or None if that failed at once."""
        self.finish()
        return self._meet(self._base + store.rounds, now=True)

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint that is under way is complete; return whether it has not failed here."""
        answers = self._answers
        if answers is not None:
            try:
                self._session.client.wait_all([answers], timeout)
            except KVStoreError as exc:
                answers.saving.fail(exc)
            answers.saving.join(timeout or self._session.config.timeout_s)
        written = self._part.join(timeout)
        return written and not (answers is not None and answers.saving.failed)

    def flush(self, timeout: float | None = None) -> None:
        """See ``finish``; before this process leaves the job. Says if there was no checkpoint at all."""
        self.finish(timeout)
        if self._session.leads and self._meets and not self.made + self.failed:
            log.warning("there was no checkpoint: none was due, or no store has an optimizer on the servers")

    # ---- join

    def begin_join(self) -> None:
        """This worker has run out of batches: others meet without it."""
        if self._meets:
            self._meetings.store.begin_join()

    def end_join(self) -> None:
        """All workers are in step again: the next round begins with a meeting, since some have missed others."""
        if self._meets:
            self._meetings.store.join()
            self._next = 0

    # ---- helpers

    def following(self) -> tuple[int, int]:
        """Return what a worker that comes later must know: when the next meeting is, and the last number."""
        return self._next, self._number

    def come(self, following: int, number: int) -> None:
        """Go on as another worker does; see ``following``."""
        self._next, self._number = following, number

    def _passed(self, store: TrainedStore, rounds: int) -> int | None:
        if rounds < self._next:
            return None
        if store.in_step:
            return self._meet(rounds)
        if not self._session.leads or any(other.in_step and other.trains for other in self._stores if other.begun):
            return None
        number = self._decided(rounds, now=False)
        self._next = self._schedule.next(rounds, self._clock())
        if number:
            own = self._part.has_shared
            why = self._copied(number, shared_only=True) if own else ""
            if why:
                self._give_up(number, f"worker {self.rank}: {why}")
                return None
            self._part.write(self._folder(number), number)
            self._capture(number, rounds, [self.rank] if own else [])
        return number or None

    def _meet(self, rounds: int, now: bool = False) -> int | None:
        """Hear whether a checkpoint is due; then save what is this worker's own."""
        own = self._part.has_own(self._stores)
        decided = following = 0
        if self._session.leads:
            decided = self._decided(rounds, now)
            following = self._schedule.next(rounds, self._clock())
        number, following, decider, parts = self._meetings.meet(own, decided, following)
        # 0: who decides is inside join, whose end is followed by a meeting; or is lost, and its successor did not know.
        self._next = following or (NEVER if not self._session.config.min_workers else rounds + 1)
        if not number:
            return None
        self._number = max(self._number, number)
        if parts:
            why = self._meetings.failure(self._copied(number) if own else "")
            if why:
                self._give_up(number, why, decider)
                return None
            self._part.write(self._folder(number), number)
        if self.rank == decider:
            self._capture(number, rounds, parts)
        return number

    def _decided(self, rounds: int, now: bool) -> int:
        """Where it is decided: return the number of the checkpoint to make, whose folder is there then; 0 for none."""
        if not now and not self._schedule.due(rounds, self._clock()):
            return 0
        answers = self._answers
        if answers is not None:
            answers.done()
            if answers.saving.open:
                number = answers.saving.number
                log.warning("no checkpoint after %d rounds: checkpoint %d is still being written", rounds, number)
                self.failed += 1
                return 0
        if now:
            self._schedule.made(rounds, self._clock())
        try:
            begin(self._folder(self._number + 1).parent, self._number + 1)
        except OSError as exc:
            self._failed(f"{self._folder(self._number + 1)} could not be made: {exc.strerror}")
            if isinstance(exc, FileExistsError):
                self._number += 1
            return 0
        self._number += 1
        return self._number

    def _folder(self, number: int) -> Path:
        return folder_of(Path(self._session.config.checkpoint_dir), number)

    def _failed(self, reason: str) -> None:
        log.error("there is no checkpoint, and training goes on: %s", reason)
        self.failed += 1

    def _give_up(self, number: int, why: str, decider: int | None = None) -> None:
        """Note, on every worker, that there is no checkpoint ``number``, of which nothing has been written yet."""
        self.failed += 1
        if decider not in (None, self.rank):
            return
        log.error("there is no checkpoint %d, and training goes on: %s", number, why)
        try:
            remove(self._folder(number))
        except OSError as exc:
            log.warning("%s could not be removed: %s", self._folder(number), exc)

    def _copied(self, number: int, shared_only: bool = False) -> str:
        """Copy what is this worker's own; return what keeps it from that, if anything."""
        try:
            self._part.copy(self._folder(number), self._stores, shared_only)
        except CheckpointError as exc:
            return str(exc)
        return ""

    def _capture(self, number: int, rounds: int, parts: Sequence[int]) -> None:
        """Have all servers capture what this worker has pushed; return when they have noted it."""
        session = self._session
        stores = [store.saved() for store in self._stores if store.entries and store.trains]
        saving = CheckpointInProgress(
            self._folder(number),
            number,
            rounds,
            session.num_workers,
            len(session.servers),
            stores,
            parts,
            session.config.checkpoint_keep,
            session.config.timeout_s,
            self._ended,
        )
        try:
            if not stores:
                raise CheckpointError("no store has an optimizer on the servers")
            self._answers = ask(session, saving, stores)
        except NodeLost:
            raise
        except KVStoreError as exc:
            saving.fail(exc)

    def _ended(self, whole: bool) -> None:
        if whole:
            self.made += 1
        else:
            self.failed += 1


_OF: WeakKeyDictionary[Session, Checkpointing] = WeakKeyDictionary()


def checkpointing(session: Session, make_store: Callable[[], KVStore]) -> Checkpointing | None:
    """Return the checkpoints of this worker process; None if the job has none, and continues from none."""
    config = session.config
    if not config.checkpoint_dir and not config.checkpoint_resume:
        return None
    made = _OF.get(session)
    if made is None:
        made = _OF[session] = Checkpointing(session, make_store)
        session.flushes.append(made.flush)
    return made
